"""Data files of an Iceberg table, written in a task of Spark or in the driver before a commit names them.

A task gets the metadata of the table, which say where files go; it asks no catalog. Each call uses its own
file names: if a task ran twice, the commit has the files of one call.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.io.pyarrow import _dataframe_to_data_files, _get_field_from_arrow_table
from pyiceberg.manifest import DataFile
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.types import DoubleType, FloatType

from spark_abs.errors import AbsError, SinkFailed, SinkUnreachable
from spark_abs.sinks.iceberg.catalog import REFUSED
from spark_abs.sinks.two_phase import Rows

_PIECE = 64 * 2**20
"""Bytes of rows that are held at once; a piece is at least one file for each partition in it."""
_OF_STORAGE = ("s3.", "gcs.", "adls.", "hdfs.", "hf.", "client.", "pyarrow.")
"""What properties of a file system begin with; all else is the catalog's, its password and token too."""

_OF_ROWS = (
    ArithmeticError,
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    NotImplementedError,
    pa.ArrowException,
)
"""Errors of rows that the table can never take, such as a date after the year 9999."""
_OF_STORE = (OSError, MemoryError, pa.ArrowCancelled, json.JSONDecodeError, ValidationError)
"""Errors that are subclasses of these, but may not occur again: a broken connection, half a reply."""


@dataclass(frozen=True, slots=True)
class Wrote:
    """The result for a part of the rows."""

    files: tuple[DataFile, ...] = ()
    error: AbsError | None = None
    """Why there are no files. Returned, not raised, as Spark logs the errors of tasks with their text."""


@dataclass(frozen=True, slots=True)
class DataFileWriter:
    """Writes rows as data files, with the table's partitions and metrics. Picklable."""

    metadata: str
    """Of the table, as JSON."""
    properties: Mapping[str, str] = field(repr=False)
    """How its storage is reached."""

    @classmethod
    def of(cls, metadata: TableMetadata, io: FileIO) -> DataFileWriter:
        """Return a writer for a table, without the snapshots of the table, which may be many."""
        without = metadata.model_copy(
            update={
                "snapshots": [],
                "snapshot_log": [],
                "metadata_log": [],
                "refs": {},
                "current_snapshot_id": None,
                "statistics": [],
                "partition_statistics": [],
            }
        )
        storage = {name: text for name, text in io.properties.items() if name.startswith(_OF_STORAGE)}
        return cls(without.model_dump_json(), storage)

    def __call__(self, rows: Rows) -> Wrote:
        """Write all rows of a part, or return the error; files from before the error are deleted."""
        metadata = TableMetadataUtil.parse_raw(self.metadata)
        return write(metadata, load_file_io(dict(self.properties), metadata.location), rows)


def write(metadata: TableMetadata, io: FileIO, rows: Rows) -> Wrote:
    """Write rows as data files; see `DataFileWriter`."""
    name, number = uuid.uuid4(), count()
    written: list[DataFile] = []
    try:
        for piece in _pieces(rows):
            for part in _with_one_zero(piece, metadata):
                files = list(_dataframe_to_data_files(metadata, part, io, name, number))
                written.extend(files)
                _require_all(part, files)
    except Exception as error:  # noqa: BLE001 - the edge of a task: raised in the driver
        delete(io, written)
        return Wrote(error=_meaning(error))
    return Wrote(tuple(written))


def _with_one_zero(piece: pa.Table, metadata: TableMetadata) -> Iterator[pa.Table]:
    """Cut rows so that 0.0 and -0.0 are apart in each column by whose values the table is partitioned.

    pyiceberg makes a partition of each, and puts into both the rows that equal the one or the other.
    """
    schema, parts = metadata.schema(), [piece]
    for partition in metadata.spec().fields:
        source = schema.find_column_name(partition.source_id)
        kind = schema.find_field(partition.source_id).field_type
        if source is None or not isinstance(kind, (FloatType, DoubleType)):
            continue
        cut = []
        for part in parts:
            values = _get_field_from_arrow_table(part, source)
            negative = pc.fill_null(pc.equal(pc.divide(1.0, values), float("-inf")), False)
            cut += [part.filter(pc.invert(negative)), part.filter(negative)]
        parts = [part for part in cut if part.num_rows]
    yield from parts


def _require_all(rows: pa.Table, files: list[DataFile]) -> None:
    """Require that files hold each row once.

    Raises:
        SinkFailed: they do not.
    """
    wrote = sum(file.record_count for file in files)
    if wrote != rows.num_rows:
        raise SinkFailed(
            f"pyiceberg has written {wrote:,} rows of {rows.num_rows:,}: a value of a "
            "partition column does not equal itself, or equals another one; partition by another column"
        )


def delete(io: FileIO, files: list[DataFile]) -> None:
    """Delete files that no snapshot names, as far as that is possible: nobody reads them."""
    for file in files:
        with suppress(Exception):
            io.delete(file.file_path)


def elsewhere(io: FileIO) -> bool:
    """Say whether files may be written in other processes.

    Not where the catalog signs every request, nor by a class that only the driver may have.
    """
    return type(io).__module__.startswith("pyiceberg.") and "s3.signer" not in io.properties


def _meaning(error: Exception) -> AbsError:
    if isinstance(error, AbsError):
        return error
    again = isinstance(error, _OF_STORE) or not isinstance(error, (*REFUSED, *_OF_ROWS))
    return (SinkUnreachable if again else SinkFailed)(f"{type(error).__name__}: {error}")


def _pieces(rows: Rows) -> Iterator[pa.Table]:
    """Iterate the rows in tables of a limited size."""
    batches: list[pa.RecordBatch] = []
    size = 0
    for batch in rows:
        batches.append(batch)
        size += batch.nbytes
        if size >= _PIECE:
            yield pa.Table.from_batches(batches, rows.schema)
            batches, size = [], 0
    if sum(batch.num_rows for batch in batches):
        yield pa.Table.from_batches(batches, rows.schema)
