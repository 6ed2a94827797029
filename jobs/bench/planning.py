"""What it costs to read ten plain queries of a thousand batches each, and to plan a rewind of them. No Spark.

Checkpoints and logs of tables are written as Spark and Delta write them, a file for each batch and each
commit. One query reads files, the others tables; eight write with Delta's sink, one with a function under an
application id of its own, one with a function that names no batch, so that times must tell. Each run plans in
a process of its own: CPU is that of reading and planning, memory the most that the process ever had.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from deltalake import DeltaTable
from rich.console import Console

from bench.figures import Figure, figure
from spark_abs.cuts.cut import newest_cut
from spark_abs.rewind.plan import RewindPlan, plan_rewind
from spark_abs.rewind.prepare import checkpoints_at, tables_at
from spark_abs.rewind.survey import survey
from spark_abs.store.storage import DEFAULTS

SOURCES = {
    "bronze": "",
    "silver": "bronze",
    "gold": "silver",
    **{f"of-bronze-{n}": "bronze" for n in range(3)},
    **{f"of-silver-{n}": "silver" for n in range(4)},
}
"""Query, which is also its table, to the table that it reads."""
_OWN_ID, _NO_ID = "of-bronze-0", "of-silver-3"
_INTERVAL_MS, _STAGGER_MS = 10_000, 1_000
"""Between two batches of a query, and between those of two queries: times tell functions apart."""
_WRITE_MS, _END_MS = 200, 300
"""From the plan of a batch to its commit in the table, and to its end."""
_PLAIN = {"sourceVersion": 1, "index": -1, "isStartingVersion": False}
_SCHEMA = {
    "type": "struct",
    "fields": [{"name": "id", "type": "long", "nullable": True, "metadata": {}}],
}


def write_queries(base: Path, batches: int) -> int:
    """Write queries that have run so many batches until now; return the moment in the middle, in ms."""
    first_ms = time.time_ns() // 10**6 - batches * _INTERVAL_MS
    tables = {name: str(uuid.uuid4()) for name in SOURCES}
    for place, (name, source) in enumerate(SOURCES.items()):
        query, began_ms = str(uuid.uuid4()), first_ms + place * _STAGGER_MS
        _write_checkpoint(base / "c" / name, query, tables.get(source, ""), batches, began_ms)
        app = {_OWN_ID: name, _NO_ID: ""}.get(name, query)
        _write_table(base / "t" / name, tables[name], app, batches, began_ms)
    return first_ms + batches // 2 * _INTERVAL_MS + _INTERVAL_MS // 4


def _write_checkpoint(directory: Path, query: str, source: str, batches: int, began_ms: int) -> None:
    """Write a checkpoint; batch b of a reader has read the versions up to b + 1, those of its source's b."""
    for log in ("offsets", "commits", *([] if source else ["sources/0"])):
        (directory / log).mkdir(parents=True)
    (directory / "metadata").write_text(json.dumps({"id": query}))
    conf = {"spark.sql.shuffle.partitions": "4"}
    for batch in range(batches):
        at_ms = began_ms + batch * _INTERVAL_MS
        head = {"batchWatermarkMs": 0, "batchTimestampMs": at_ms, "conf": conf}
        read = {**_PLAIN, "reservoirId": source, "reservoirVersion": batch + 2}
        offset = read if source else {"logOffset": batch}
        text = f"v1\n{json.dumps(head)}\n{json.dumps(offset)}"
        (directory / "offsets" / str(batch)).write_text(text)
        commit, ended_s = directory / "commits" / str(batch), (at_ms + _END_MS) / 1000
        commit.write_text('v1\n{"nextBatchWatermarkMs":0}')
        os.utime(commit, (ended_s, ended_s))
        if not source:
            entry = {"path": f"file:///in/{batch}.json", "timestamp": at_ms, "batchId": batch}
            (directory / "sources/0" / str(batch)).write_text(f"v1\n{json.dumps(entry)}")


def _write_table(directory: Path, table: str, app: str, batches: int, began_ms: int) -> None:
    """Write a table whose version b + 1 is of batch b, and a checkpoint of its newest version."""
    log = directory / "_delta_log"
    log.mkdir(parents=True)
    metadata = {
        "id": table,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(_SCHEMA),
        "partitionColumns": [],
        "configuration": {},
        "createdTime": began_ms,
    }
    made: list[dict[str, object]] = [
        {"commitInfo": {"timestamp": began_ms - _INTERVAL_MS, "operation": "CREATE TABLE"}},
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {"metaData": metadata},
    ]
    _commit(log, 0, made)
    for batch in range(batches):
        at_ms = began_ms + batch * _INTERVAL_MS + _WRITE_MS
        stats = {"numRecords": 1, "minValues": {"id": batch}, "maxValues": {"id": batch}}
        add = {
            "path": f"part-00000-{uuid.uuid4()}-c000.snappy.parquet",
            "partitionValues": {},
            "size": 500,
            "modificationTime": at_ms,
            "dataChange": True,
            "stats": json.dumps(stats),
        }
        info = {"timestamp": at_ms, "operation": "STREAMING UPDATE" if app else "WRITE"}
        made = [{"commitInfo": info}, {"add": add}]
        if app:
            made.append({"txn": {"appId": app, "version": batch, "lastUpdated": at_ms}})
        _commit(log, batch + 1, made)
    DeltaTable(str(directory)).create_checkpoint()


def _commit(log: Path, version: int, actions: list[dict[str, object]]) -> None:
    (log / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))


def plan(base: Path, before_ms: int) -> RewindPlan:
    """Read what is below a directory, and plan the way back to the newest cut before a moment."""
    found = survey(checkpoints_at([f"{base}/c/*"], DEFAULTS), tables_at([f"{base}/t/*"], DEFAULTS))
    cut = newest_cut(found.pipeline, found.pipeline.before(before_ms))
    return plan_rewind(found, cut, rewind="bench", now_ms=before_ms)


def figures(base: Path, runs: int, console: Console, batches: int = 1_000) -> Iterator[Figure]:
    """Write the queries once, and plan in a new process for each run."""
    top = base / "planning"
    moment_ms = write_queries(top, batches)
    found, environment = [], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(runs):
        command = [sys.executable, "-m", "bench.planning", str(top), str(moment_ms)]
        said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        cpu_s, megabytes, queries = json.loads(said)
        console.print(f"{queries} queries go back: {cpu_s:.2f} s of CPU, {megabytes:.0f} MB")
        found.append((cpu_s, megabytes))
    shutil.rmtree(top)
    yield figure("rewind_plan_cpu_seconds", [cpu_s for cpu_s, _ in found], "s")
    yield figure("rewind_plan_memory_mb", [megabytes for _, megabytes in found], "MB")


def _peak_megabytes() -> float:
    """Return the most memory that this process has had; `getrusage` would count its parent's, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    began_s = time.process_time()
    made = plan(Path(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps([time.process_time() - began_s, _peak_megabytes(), len(made.journal.queries)]))
