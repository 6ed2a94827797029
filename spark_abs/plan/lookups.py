"""The tables of lookups: their newest version, and the frame of a version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.errors import PySparkException
from pyspark.sql import types as t

from spark_abs.errors import DamageError, GraphError, Refused
from spark_abs.model import LookupVersion, Version
from spark_abs.plan.specs import JobSpec, Lookup
from spark_abs.protocol.lookups import following, is_due, version_of
from spark_abs.spark.plans import ReadTable, read_tables
from spark_abs.spark.session import read_version
from spark_abs.store.clock import now_ms
from spark_abs.store.log import log_file
from spark_abs.store.storage import Place
from spark_abs.store.table import Table
from spark_abs.store.version_files import lacks_vectors, place_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BACK = "start with restart='checkpoint', or restore a checkpoint: later batches then read the newest version"
_ANEW = (
    "with refresh='never' every run reads this version: declare the lookup under a new name, it then begins "
    "at the newest version"
)


class LookupTable:
    """The table of a lookup, with an open handle: asking for the newest version reads only new commits."""

    def __init__(self, lookup: Lookup, place: Place, spark: SparkSession) -> None:
        """Open the table.

        Raises:
            FileNotFoundError: there is no table.
        """
        self.lookup, self._place, self._spark = lookup, place, spark
        self._open()

    @property
    def way_on(self) -> str:
        """Advice if a version cannot be read any more. With `never`, a restore keeps a lookup's version."""
        return _ANEW if self.lookup.max_age_ms is None else _BACK

    def _open(self) -> None:
        self._table = Table.open(self._place)
        self._seen = self._commit_file()

    def _commit_file(self) -> tuple[object, ...]:
        """Return the identity of the newest commit file: it differs if the table was created anew."""
        info = self._place.fs.get_file_info(f"{self._place.path}/{log_file(self._table.version)}")
        return info.type, info.size, info.mtime_ns

    def newest(self) -> LookupVersion:
        """Return the newest version of the table.

        Raises:
            DamageError: the table is gone.
            OSError: the store cannot be read now.
        """
        at_ms = now_ms()
        try:
            if self._commit_file() != self._seen:
                self._open()
            before = self._table.version
            self._table.refresh()
            if self._table.version != before:
                self._seen = self._commit_file()
        except FileNotFoundError as error:
            raise DamageError(
                f"lookup {self.lookup.name!r}: the table at {self._place} is gone: restore the table, or "
                "declare the job without the lookup"
            ) from error
        return LookupVersion(self.lookup.name, self._place.uri, self._table.id, self._table.version, at_ms)

    def frame(self, at: LookupVersion) -> tuple[DataFrame, ReadTable]:
        """Return the table at a version, and the frame that Spark reads.

        Raises:
            DamageError: the log lacks that version, or the version belongs to a different table.
        """
        try:
            frame = read_version(self._spark, self._place.uri, at.version)
        except PySparkException as error:
            raise DamageError(
                f"lookup {at.lookup!r}: a batch needs version {at.version} of {at.table}, and this version "
                f"cannot be read any more: {self.way_on} ({str(error).splitlines()[0]})"
            ) from error
        (found,) = read_tables(frame)
        if found.id != at.table_id:
            raise DamageError(
                f"lookup {at.lookup!r}: a batch needs version {at.version} of the table with id "
                f"{at.table_id}, but {at.table} is now a different table, with id {found.id}: put the old "
                "table back, or declare the new table as a lookup of another name"
            )
        return frame, found

    def lacks_file(self, version: Version) -> str | None:
        """Return a missing data file of a version, None if all exist. Costs a request for each file."""
        place = self._place
        try:
            then = DeltaTable(place.uri, version=int(version), storage_options=place.options)
            gone = next((u for u in then.file_uris() if not place_of(then, place, u).exists()), None)
            return gone or lacks_vectors(then) or None
        except (DeltaError, OSError):
            return None  # that is not known


@dataclass(frozen=True, slots=True)
class OpenedLookup:
    """A lookup at the version with which a start plans the stages."""

    lookup: Lookup
    at: LookupVersion
    frame: DataFrame
    path: str
    """The name of the table in Spark's plans."""

    @property
    def schema(self) -> t.StructType:
        """The columns with which stages are planned."""
        return self.frame.schema


def open_lookups(job: JobSpec, pinned: Sequence[LookupVersion]) -> Mapping[str, OpenedLookup]:
    """Open the lookups of all stages, each at its newest version or, with `never`, at the recorded one.

    Raises:
        GraphError: a table does not exist, or two lookups have one name.
        DamageError: a recorded table was replaced by a different table.
    """
    opened: dict[str, OpenedLookup] = {}
    for lookup in (i for stage in job.stages.values() for i in stage.lookups):
        if lookup.name in opened:
            if opened[lookup.name].lookup is not lookup:
                raise GraphError(f"lookup {lookup.name!r} is declared twice: choose a different name")
            continue
        place = job.root.storage.place(lookup.table)
        try:
            table = LookupTable(lookup, place, job.spark)
        except FileNotFoundError:
            raise GraphError(
                f"lookup {lookup.name!r}: there is no Delta table at {place}: create it before the start"
            ) from None
        last = version_of(lookup.name, place.uri, pinned) if lookup.max_age_ms is None else None
        at = following(last, table.newest())
        at = at if last is None or is_due(last, lookup.max_age_ms, at.at_ms) else last
        frame, read = table.frame(at)
        opened[lookup.name] = OpenedLookup(lookup, at, frame, read.path)
    return opened


def as_planned(frame: DataFrame, opened: OpenedLookup, version: Version) -> DataFrame:
    """Return the frame of a version, with the columns and fields of the stage's plan.

    Newer columns are left out. Columns that an older version lacks are null.

    Raises:
        Refused: a column is missing or has a different type; the message shows both schemas.
    """
    have, want = frame.schema, opened.schema
    if not _has(have, want, version < opened.at.version):
        raise Refused(
            f"lookup {opened.lookup.name!r}: the schema of {opened.at.table} has changed from "
            f"{want.simpleString()} at the start of the job to {have.simpleString()} at version {version}: "
            "start the job again, with a function that fits the table"
        )
    same = [(f.name, f.dataType) for f in have] == [(f.name, f.dataType) for f in want]
    return frame if same else frame.to(want.toNullable())


def _has(have: t.DataType, want: t.DataType, older: bool) -> bool:
    """Say whether a type has all fields of another; if `older`, fields may be missing."""
    match have, want:
        case t.StructType(), t.StructType():
            fields = {field.name: field.dataType for field in have}
            return all(_has(fields[f.name], f.dataType, older) if f.name in fields else older for f in want)
        case t.ArrayType(), t.ArrayType():
            return _has(have.elementType, want.elementType, older)
        case t.MapType(), t.MapType():
            return have.keyType == want.keyType and _has(have.valueType, want.valueType, older)
    return have == want
