"""The Parquet files of a micro-batch: Spark writes them, their footers give the statistics."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from spark_abs.errors import DamageError
from spark_abs.model import AttemptId, BatchId, DataFile, RunId
from spark_abs.store.row_batches import uncompressed_size
from spark_abs.store.storage import Place
from spark_abs.store.table import AddFile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_WRITER_CONF = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.writeLegacyFormat": "false",
}
"""Settings of the file format, so that Delta and Arrow read the same values that Spark wrote."""

_WRITER = {
    # The other one leaves out what a value shares with the one before: nothing says how large rows are.
    "parquet.writer.version": "v1",
    # A task's files come into the directory when the whole job is committed, not while tasks still fail and
    # are repeated: Hadoop's own default is 2, and it is a common setting.
    "mapreduce.fileoutputcommitter.algorithm.version": "1",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}
"""Settings of Parquet's writer and Hadoop's committer: files of a task are invisible before the batch is
written."""

_INDEXED_COLUMNS = 32
_INDEXED_CHARACTERS = 32
_DIRECTORY = re.compile(r"(\d+)-(\d+)-(-?\d+)-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Written:
    """Files that are written and not committed, so no reader sees them."""

    files: tuple[AddFile, ...] = ()
    entry_files: tuple[DataFile, ...] = ()
    """The same files as an entry names them."""
    schema: pa.Schema | None = None
    """The columns in them; None without any."""

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.entry_files)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.entry_files)

    @property
    def uncompressed(self) -> int:
        """Bytes of all files before compression."""
        return sum(file.uncompressed for file in self.entry_files)


class Evaluation(NamedTuple):
    """An evaluation of a batch, by attempt and run. Later ones compare greater."""

    attempt: AttemptId
    run: RunId
    batch: BatchId


def directory_name(attempt: AttemptId, run: RunId, batch: BatchId) -> str:
    """Return a new name for the directory of one evaluation of a batch; a repeat gets another."""
    return f"{int(attempt)}-{int(run)}-{int(batch)}-{uuid.uuid4().hex[:12]}"


def evaluation_of(name: str) -> Evaluation | None:
    """Return the evaluation of a directory, None if its name is not from `directory_name`."""
    found = _DIRECTORY.fullmatch(name)
    if found is None:
        return None
    return Evaluation(AttemptId(int(found[1])), RunId(int(found[2])), BatchId(int(found[3])))


def write_parquet(frame: DataFrame, table: Place, relative: str) -> Written:
    """Evaluate `frame` once and write it to the directory `relative` of a table.

    Sets the writer's settings on the frame's own session, which in a batch function is the query's copy.
    Files without rows are deleted. A failed or killed call leaves files that no table names.

    Raises:
        DamageError: a file that Spark has just written cannot be read.
    """
    for key, value in _WRITER_CONF.items():
        frame.sparkSession.conf.set(key, value)
    frame.write.options(**_WRITER).parquet(f"{table}/{relative}")
    return read_written(table.fs, table.path, relative)


def read_written(filesystem: fs.FileSystem, table_path: str, relative: str) -> Written:
    """List the files in a directory, reading each footer once. Files without rows are deleted.

    In the order in which a partition wrote them: names with more digits come later.
    """
    files, entry_files = [], []
    schema: pa.Schema | None = None
    directory = f"{table_path}/{relative}"
    selector = fs.FileSelector(directory, allow_not_found=True)
    listed = filesystem.get_file_info(selector)
    for info in sorted(listed, key=lambda info: (len(info.base_name), str(info.base_name))):
        if info.base_name.startswith(("_", ".")) or info.type is not fs.FileType.File:
            continue
        try:
            with filesystem.open_input_file(info.path) as source:
                footer = pq.read_metadata(source)
        except (OSError, pa.ArrowException) as error:
            raise DamageError(f"{info.path}, just written, cannot be read: {error}") from error
        if footer.num_rows == 0:
            filesystem.delete_file(info.path)
            continue
        path = f"{relative}/{info.base_name}"
        schema = schema or footer.schema.to_arrow_schema().remove_metadata()
        files.append(AddFile(path, info.size, json.dumps(statistics(footer))))
        entry_files.append(DataFile(path, info.size, footer.num_rows, uncompressed_size(footer)))
    if not files and filesystem.get_file_info(directory).type is fs.FileType.Directory:
        filesystem.delete_dir(directory)
    return Written(tuple(files), tuple(entry_files), schema)


def statistics(footer: pq.FileMetaData) -> dict[str, Any]:
    """Return Delta's statistics of a file: row count, and bounds of those columns whose bounds are certain.

    Bounds are given for top-level integers, dates, timestamps and short strings. They are left out for
    floats (Parquet's ignore NaN, Delta's do not), decimals (JSON numbers may round) and nested columns.
    """
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    rebased = any(key.startswith(b"org.apache.spark.legacy") for key in footer.metadata or {})
    for leaf, field in _top_level_leaves(footer.schema.to_arrow_schema()):
        chunks = [footer.row_group(group).column(leaf) for group in range(footer.num_row_groups)]
        found = [chunk.statistics for chunk in chunks]
        if any(one is None or not one.has_null_count for one in found):
            continue
        nulls[field.name] = sum(one.null_count for one in found)
        if rebased and pa.types.is_temporal(field.type):
            continue
        # A row group with nulls only has no bounds and needs none.
        bounded = [one for one, chunk in zip(found, chunks, strict=True) if one.null_count < chunk.num_values]
        bounds = _bounds(field.type, bounded)
        if bounds is not None:
            least[field.name], greatest[field.name] = bounds
    return {"numRecords": footer.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}


def _top_level_leaves(schema: pa.Schema) -> Iterator[tuple[int, pa.Field]]:
    leaf = 0
    for field in list(schema)[:_INDEXED_COLUMNS]:
        if not pa.types.is_nested(field.type):
            yield leaf, field
        leaf += _leaves(field.type)


def _leaves(kind: pa.DataType) -> int:
    if not pa.types.is_nested(kind):
        return 1
    return sum(_leaves(kind.field(i).type) for i in range(kind.num_fields))


def _bounds(kind: pa.DataType, chunks: Sequence[pq.Statistics]) -> tuple[Any, Any] | None:
    if not chunks or not all(chunk.has_min_max for chunk in chunks):
        return None
    try:
        least, greatest = min(chunk.min for chunk in chunks), max(chunk.max for chunk in chunks)
        if pa.types.is_timestamp(kind) and kind.tz == "UTC":
            return _milliseconds(least, up=False), _milliseconds(greatest, up=True)
    except (ValueError, OverflowError):
        return None  # what Python cannot hold: a year above 9999, a string that is not UTF-8
    if pa.types.is_integer(kind):
        return least, greatest
    if pa.types.is_date32(kind):
        return least.isoformat(), greatest.isoformat()
    if pa.types.is_string(kind) and max(len(least), len(greatest)) <= _INDEXED_CHARACTERS:
        return least, greatest
    return None


def _milliseconds(moment: datetime, up: bool) -> str:
    """Write a timestamp as Delta does, in whole milliseconds, outwards."""
    rest = moment.microsecond % 1000
    whole = moment - timedelta(microseconds=rest)
    if up and rest:
        whole += timedelta(milliseconds=1)
    return f"{whole.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
