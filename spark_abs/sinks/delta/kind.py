"""Delta tables that get their rows after checkpoints, in the registry of kinds."""

from __future__ import annotations

from contextlib import suppress

from spark_abs.errors import Fenced
from spark_abs.model import RunId, Version
from spark_abs.protocol.outside import Mark, Owner
from spark_abs.sinks.delta.epoch_marks import newest, version_of, was_absent
from spark_abs.sinks.delta.options import EpochTable
from spark_abs.sinks.kind import Kind, Session, SinkTable
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage
from spark_abs.store.table import Table


def _sink(config: EpochTable, root: Root, session: Session) -> TwoPhaseSink:
    from spark_abs.sinks.delta.epoch_sink import DeltaEpochSink

    return DeltaEpochSink(config, root, session)


class EpochVersions(SinkTable):
    """The versions of a table, as the commits of its sink say what they hold."""

    def __init__(self, config: EpochTable, storage: Storage) -> None:
        self.path, self.name = config.path, config.name
        self._storage = storage

    def version_at(self, owner: Owner, cut: Mark, ahead: bool) -> Version | None:
        """Return the version with exactly the rows up to a cut, None if there is none."""
        table = self._open()
        with suppress(Fenced):
            found = newest(table, owner)
            if found is None or found.mark is None or (ahead and found.mark.version < cut.version):
                return None
        return version_of(table, owner, cut)

    def had_left(self, owner: Owner, run: RunId) -> bool:
        """Say whether the log has no commit of a run, and has one of an older run."""
        return was_absent(self._open(), owner, run)

    def _open(self) -> Table:
        return Table.open(self._storage.place(self.path))


KIND = Kind("Delta", EpochTable, _sink, table=EpochVersions)
