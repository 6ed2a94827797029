"""A kind of sinks that only tests have: a Delta table that each epoch writes anew, under a lock."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake

from spark_abs.codec import from_json, to_json
from spark_abs.model import RunId, Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.kind import Kind, SinkTable
from spark_abs.sinks.marked import MarkedSink, refuse_replaced, require_unchanged
from spark_abs.sinks.two_phase import Rows, TwoPhaseSink
from spark_abs.store.storage import Storage


@dataclass(frozen=True, slots=True)
class Toy:
    """What a job says of such a table, which must be there."""

    path: str


@dataclass(frozen=True, slots=True)
class ToyMark:
    """What every commit says."""

    run: int
    mark: Mark | None


class ToySink(MarkedSink[ToyMark]):
    """The sink behind `Toy`."""

    def __init__(self, config: Toy) -> None:
        self._path = config.path

    def why_not(self, owner: Owner, back: Mark) -> str:
        """Say that nothing does: every version stays."""
        del owner, back
        return ""

    def _read_mark(self, owner: Owner) -> ToyMark | None:
        del owner
        return next((said for _, said in _commits(self._path)), None)

    def _fence(self, owner: Owner) -> ToyMark:
        with self._locked() as table:
            stored = self._read_mark(owner)
            refuse_replaced(owner, stored)
            mark = None if stored is None else stored.mark
            return self._write(table.to_pyarrow_table(), ToyMark(int(owner.run), mark))

    def _add(self, epoch: Epoch, known: ToyMark, rows: Rows) -> ToyMark:
        with self._locked() as table:
            require_unchanged(epoch.owner, known, self._read_mark(epoch.owner))
            there = table.to_pyarrow_table()
            new = pa.Table.from_batches(rows, rows.schema).cast(there.schema)
            return self._write(pa.concat_tables([there, new]), ToyMark(known.run, epoch.mark))

    def _go_back(self, owner: Owner, known: ToyMark, back: Mark, *, keep: bool) -> ToyMark:
        with self._locked() as table:
            require_unchanged(owner, known, self._read_mark(owner))
            if not keep:
                commits = [(version, said.mark) for version, said in _commits(self._path)]
                begun = next(version for version, mark in commits if mark is None)
                table.load_as_version(next((version for version, mark in commits if mark == back), begun))
            return self._write(table.to_pyarrow_table(), ToyMark(known.run, back))

    def _write(self, rows: pa.Table, mark: ToyMark) -> ToyMark:
        said = CommitProperties(custom_metadata={"mark": to_json(mark)})
        write_deltalake(self._path, rows, mode="overwrite", commit_properties=said)
        return mark

    @contextmanager
    def _locked(self) -> Iterator[DeltaTable]:
        with Path(f"{self._path}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield DeltaTable(self._path)


class ToyVersions(SinkTable):
    """The versions of such a table."""

    def __init__(self, config: Toy, storage: Storage) -> None:
        del storage
        self.path, self.name = config.path, ""

    def version_at(self, owner: Owner, cut: Mark, ahead: bool) -> Version | None:
        """Return the newest version whose mark is the cut."""
        del owner, ahead
        found = (version for version, said in _commits(self.path) if said.mark == cut)
        return next(found, None)

    def had_left(self, owner: Owner, run: RunId) -> bool:
        """Say no: it never does."""
        del owner, run
        return False


def _commits(path: str) -> Sequence[tuple[Version, ToyMark]]:
    """Return the commits of a table, newest first."""
    said = [commit for commit in DeltaTable(path).history() if "mark" in commit]
    return [(Version(commit["version"]), from_json(ToyMark, commit["mark"])) for commit in said]


def _sink(config: Toy, *_: object) -> TwoPhaseSink:
    return ToySink(config)


KIND = Kind("Toy", Toy, _sink, table=ToyVersions)
