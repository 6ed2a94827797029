"""The rows of an epoch as Parquet files that nobody sees yet, written without Spark."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from spark_abs.channels.files import Written, read_written
from spark_abs.sinks.two_phase import Rows
from spark_abs.store.storage import Place

ORDER = "spark_abs order"
"""The column with the place of a row among those that arrived together."""
_FILE = 256 * 2**20
"""Bytes of rows after which another file begins; only one batch of rows is in memory."""


def write_rows(rows: Rows, place: Place, directory: str, *, numbered: bool = False) -> Written:
    """Write rows as files of a new directory. Killed in between, it leaves files that no commit names.

    Args:
        rows: of the epoch.
        place: a table, or a root.
        directory: its path below the place.
        numbered: whether a column `ORDER` says the order of the rows.
    """
    if place.local:
        place.fs.create_dir(f"{place.path}/{directory}", recursive=True)
    schema = pa.schema([*rows.schema, *([pa.field(ORDER, pa.int64())] if numbered else [])])
    writer: pq.ParquetWriter | None = None
    held = files = done = 0
    try:
        for batch in rows:
            if batch.num_rows == 0:
                continue
            if writer is None:
                path = f"{place.path}/{directory}/part-{files:05}.parquet"
                writer, held, files = pq.ParquetWriter(path, schema, filesystem=place.fs), 0, files + 1
            columns = list(batch.columns)
            if numbered:
                columns.append(pa.array(range(done, done + batch.num_rows), pa.int64()))
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
            done, held = done + batch.num_rows, held + batch.nbytes
            if held >= _FILE:
                writer.close()
                writer = None
    finally:
        if writer is not None:
            writer.close()
    return read_written(place.fs, place.path, directory)


def delete_rows(place: Place, directory: str) -> None:
    """Delete a directory of such files, if it is still there."""
    try:
        place.fs.delete_dir(f"{place.path}/{directory}")
    except FileNotFoundError:
        return
