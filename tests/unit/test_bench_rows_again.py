"""The rows that a kill makes queries read again, by their logs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from bench.rows_again import rows_again
from deltalake import write_deltalake


def test_a_killed_query_reads_the_batch_again_that_was_planned_and_not_finished(tmp_path: Path) -> None:
    """Files by the log of the source, also where it was compacted; rows of a table by versions and files."""
    files = [tmp_path / f"{number}.parquet" for number in range(12)]
    for number, file in enumerate(files):
        pq.write_table(pa.table({"n": range(number + 1)}), file)
    first = tmp_path / "c1"
    _log(first, planned=["v1", "{}", '{"logOffset":8}'], committed=["v1", "{}", '{"logOffset":7}'])
    (first / "sources/0").mkdir(parents=True)
    lines = [json.dumps({"path": f"file://{file}", "batchId": n}) for n, file in enumerate(files)]
    (first / "sources/0/8").write_text("v1\n" + lines[8])
    for rows in (100, 10):
        write_deltalake(tmp_path / "rows", pa.table({"n": range(rows)}), mode="append")
    offset = '{"reservoirVersion":%d,"index":%d}'
    _log(tmp_path / "c2", planned=["v1", "{}", offset % (2, -1)], committed=["v1", "{}", offset % (1, -1)])
    assert rows_again("plain", tmp_path) == 9 + 10
    # The next batch takes two files; the log of the second one repeats all before it.
    _log(first, planned=["v1", "{}", '{"logOffset":10}'], committed=["v1", "{}", '{"logOffset":8}'])
    (first / "sources/0/9.compact").write_text("\n".join(["v1", *lines[:10]]))
    (first / "sources/0/10").write_text("v1\n" + lines[10])
    assert rows_again("plain", tmp_path) == 10 + 11 + 10


def _log(checkpoint: Path, planned: Sequence[str], committed: Sequence[str]) -> None:
    """Write a query's logs: batch 3 has ended, batch 4 is planned."""
    for log in ("offsets", "commits"):
        (checkpoint / log).mkdir(parents=True, exist_ok=True)
    (checkpoint / "offsets/3").write_text("\n".join(committed))
    (checkpoint / "offsets/4").write_text("\n".join(planned))
    (checkpoint / "commits/3").write_text("v1\n{}")
