"""The lookups of a stage: its function, applied to each batch of its stream at recorded versions."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyarrow import fs

from spark_abs.codec import from_plain, parsed, to_plain
from spark_abs.errors import AbsError, DamageError
from spark_abs.model import BatchId, LookupVersion, Version, is_number
from spark_abs.plan.lookups import LookupTable, OpenedLookup, as_planned
from spark_abs.plan.specs import StageSpec
from spark_abs.protocol.lookups import following, is_due, version_of
from spark_abs.run_context import RunContext
from spark_abs.spark.causes import text_of
from spark_abs.store.clock import now_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

_DIRECTORY = "lookups"
"""Within the native checkpoint, where no commit names the versions before a function sees rows."""
_LACKS_FILE = re.compile(r"not[_ ]?(exist|found)|no such (file|key)|NoSuch(File|Key)", re.IGNORECASE)
"""Pieces of errors about missing files: only after one of these is each file of a table looked for."""


class StageLookups:
    """Chooses the versions of a batch, and applies the stage's function at them. For the batch thread alone.

    A batch that an output holds reads the versions in its commit. In a stage without channels, rows may reach
    a function before any commit: then the versions are first stored beside Spark's plan of the batch.
    """

    def __init__(
        self,
        ctx: RunContext,
        spec: StageSpec,
        *,
        opened: Mapping[str, OpenedLookup],
        spark: SparkSession,
        stream: Callable[[DataFrame], DataFrame],
        written_down: bool,
        checkpointed: tuple[LookupVersion, ...] = (),
    ) -> None:
        """Open the tables.

        Args:
            ctx: the run.
            spec: the stage.
            opened: its lookups as the start has found them.
            spark: the job's session.
            stream: gives a batch the columns with which the stage was planned.
            written_down: whether a function may see rows of a batch before any commit of it.
            checkpointed: the versions in the newest checkpoint of the attempt; earlier records may be
            trimmed.
        """
        self._spec, self._stream = spec, stream
        self._opened = {lookup.name: opened[lookup.name] for lookup in spec.lookups}
        self._tables = {
            name: LookupTable(o.lookup, ctx.root.storage.place(o.lookup.table), spark)
            for name, o in self._opened.items()
        }
        self._written_down = written_down
        self._native = ctx.native(spec.name)
        self._frames: dict[str, tuple[Version, DataFrame]] = {}
        self.last = checkpointed
        """The versions that the newest batch reads or has read."""

    def begin_after(self, newest: Iterable[LookupVersion]) -> None:
        """Take the versions of the newest committed batch: no later batch reads older ones."""
        self.last = (*newest,) or self._newest_written() or self.last

    def choose(self, batch: BatchId, recorded: Sequence[LookupVersion]) -> tuple[LookupVersion, ...]:
        """Return the versions that a batch reads; recorded versions decide.

        Raises:
            DamageError: a table is gone, was replaced, or is older than the version that was read.
        """
        known = recorded or self._written(batch)
        found = tuple(self._choose(name, known) for name in self._opened)
        if self._written_down and found != tuple(known):
            self._write(batch, found)
        self.last = found
        return found

    def _choose(self, name: str, known: Sequence[LookupVersion]) -> LookupVersion:
        opened = self._opened[name]
        stands = version_of(name, opened.at.table, known)
        if stands is not None:
            return stands
        age = opened.lookup.max_age_ms
        last = version_of(name, opened.at.table, self.last)
        if age is None:
            return opened.at
        if last is not None and not is_due(last, age, now_ms()):
            return last
        newest = following(last, self._tables[name].newest())
        if last is None or newest.version != last.version:
            log.info("stage %s reads %s at version %s", self._spec.name, newest.table, newest.version)
        return newest

    def applied(self, batch: DataFrame, versions: Sequence[LookupVersion]) -> DataFrame:
        """Return the stage's frame of a batch.

        Raises:
            DamageError: a version cannot be read any more.
            Refused: the table has other columns now.
        """
        frames = {v.lookup: self._frame(v) for v in versions}
        return self._spec.frame(self._stream(batch), frames)

    def _frame(self, at: LookupVersion) -> DataFrame:
        kept = self._frames.get(at.lookup)
        if kept is None or kept[0] != at.version:
            frame, _ = self._tables[at.lookup].frame(at)
            kept = at.version, as_planned(frame, self._opened[at.lookup], at.version)
            self._frames[at.lookup] = kept
        return kept[1]

    @contextmanager
    def explaining(self, versions: Sequence[LookupVersion]) -> Iterator[None]:
        """Refuse a batch that failed for a missing file if files of its lookups are gone.

        Raises:
            DamageError: they are.
        """
        try:
            yield
        except Exception as error:
            lacks = not isinstance(error, AbsError) and _LACKS_FILE.search(text_of(error))
            for at in versions if lacks else ():
                gone = self._tables[at.lookup].lacks_file(at.version)
                if gone is not None:
                    raise DamageError(
                        f"lookup {at.lookup!r}: version {at.version} of {at.table} has lost {gone}: was the "
                        f"table vacuumed? {self._tables[at.lookup].way_on}; and keep old versions for longer"
                    ) from error
            raise

    def _written(self, batch: BatchId) -> tuple[LookupVersion, ...]:
        data = self._native.read(f"{_DIRECTORY}/{int(batch)}") if self._written_down else None
        if data is None:
            return ()
        plain = parsed(data, list, f"{self._native}/{_DIRECTORY}/{batch}")
        return tuple(from_plain(LookupVersion, one) for one in plain)

    def _newest_written(self) -> tuple[LookupVersion, ...]:
        names = self._batches() if self._written_down else []
        return self._written(max(names)) if names else ()

    def _batches(self) -> list[BatchId]:
        selector = fs.FileSelector(f"{self._native.path}/{_DIRECTORY}", allow_not_found=True)
        names = (info.base_name for info in self._native.fs.get_file_info(selector))
        return [BatchId(int(name)) for name in names if is_number(name)]

    def _write(self, batch: BatchId, versions: Sequence[LookupVersion]) -> None:
        """Store the versions of a batch in place of those of older batches."""
        old = [b for b in self._batches() if b < batch]
        text = json.dumps([to_plain(v) for v in versions])
        self._native.write(f"{_DIRECTORY}/{int(batch)}", text.encode())
        for number in old:
            self._native.fs.delete_file(f"{self._native.path}/{_DIRECTORY}/{int(number)}")
