"""What a kept cut of plain queries costs the watcher: CPU, and bytes beside those of the state. No Spark.

The queries are files: a chain with state of RocksDB's kind of change, small beside the whole, and Spark's
hundred batches of logs. CPU is that of this process, so other work on the machine does not count.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from rich.console import Console

from bench.figures import Figure, figure
from spark_abs.keep import keep_words
from spark_abs.model import PROVIDER_KEY, Provider
from spark_abs.rewind.prepare import checkpoints_at, tables_at
from spark_abs.store.root import Root
from spark_abs.store.storage import DEFAULTS, Place
from spark_abs.watch.watcher import look, watching

_RETAINED, _PARTITIONS, _BETWEEN = 100, 4, 10
"""Batches that Spark keeps, partitions of the state, batches between two looks."""
_SNAPSHOT, _CHANGE = 4 * 2**20, 2**14
"""Bytes of a partition's snapshot, and of the changes of a batch."""
_CONF = {PROVIDER_KEY: Provider.HDFS.value, "spark.sql.shuffle.partitions": str(_PARTITIONS)}
_OPERATOR = {
    "operatorInfo": {"operatorId": 0, "operatorName": "dedupe"},
    "stateStoreInfo": [{"storeName": "default", "numColsPrefixKey": 0, "numPartitions": _PARTITIONS}],
}


class _Query:
    """A query of the chain: it reads a table, or counts by itself, and writes a table."""

    def __init__(self, base: Path, name: str, source: str) -> None:
        self.checkpoint, self.sink = base / "c" / name, base / "t" / name
        self.source = base / "t" / source if source else None
        self.id, self.batch = str(uuid.uuid4()), -1
        DeltaTable.create(str(self.sink), pa.schema([("id", pa.int64())]))
        for directory in ("offsets", "commits", "state/0/_metadata"):
            (self.checkpoint / directory).mkdir(parents=True)
        (self.checkpoint / "metadata").write_text(json.dumps({"id": self.id}))
        (self.checkpoint / "state/0/_metadata/metadata").write_text(f"v1\n{json.dumps(_OPERATOR)}")
        for partition in range(_PARTITIONS):
            store = self.checkpoint / f"state/0/{partition}"
            store.mkdir()
            (store / "1.snapshot").write_bytes(os.urandom(_SNAPSHOT))

    def step(self) -> None:
        """Run a batch, and delete what is older than Spark keeps; the snapshot stays."""
        self.batch += 1
        head = {"batchWatermarkMs": 0, "batchTimestampMs": time.time_ns() // 10**6, "conf": _CONF}
        text = f"v1\n{json.dumps(head)}\n{self._offset()}"
        (self.checkpoint / "offsets" / str(self.batch)).write_text(text)
        ids = pa.table({"id": pa.array([self.batch], pa.int64())})
        said = CommitProperties(app_transactions=[Transaction(self.id, self.batch)])
        write_deltalake(str(self.sink), ids, mode="append", commit_properties=said)
        for partition in range(_PARTITIONS if self.batch else 0):
            path = self.checkpoint / f"state/0/{partition}/{self.batch + 1}.delta"
            path.write_bytes(os.urandom(_CHANGE))
        (self.checkpoint / "commits" / str(self.batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')
        for log in ("offsets", "commits"):
            (self.checkpoint / log / str(self.batch - _RETAINED)).unlink(missing_ok=True)

    def _offset(self) -> str:
        if self.source is None:
            return json.dumps({"n": self.batch})
        table = DeltaTable(str(self.source))
        plain = {"sourceVersion": 1, "reservoirId": str(table.metadata().id), "index": -1}
        return json.dumps({**plain, "reservoirVersion": table.version() + 1, "isStartingVersion": False})


def figures(base: Path, console: Console, cuts: int = 20, warm_up: int = _RETAINED) -> Iterator[Figure]:
    """Run the chain and keep a cut after every ten batches."""
    top = base / "watching"
    queries = [_Query(top, "bronze", ""), _Query(top, "silver", "bronze"), _Query(top, "gold", "silver")]
    for _ in range(warm_up):
        for query in queries:
            query.step()
    root, cpu_s, new, state = Root(str(top / "kept")), list[float](), list[float](), 0

    def places() -> tuple[tuple[Place, ...], tuple[Place, ...]]:
        return checkpoints_at([f"{top}/c/*"], DEFAULTS), tables_at([f"{top}/t/*"], DEFAULTS)

    with watching(root, *places(), keep_words("24h:all")) as watcher:
        for number in range(cuts + 1):
            for _ in range(_BETWEEN):
                for query in queries:
                    query.step()
            began = time.process_time()
            found = look(*places(), watcher.newest)
            assert found is not None
            done = watcher.round(found)
            assert done.kept is not None
            if number:  # the first one copies everything
                cpu_s.append(time.process_time() - began)
                new.append(done.size_new / 2**10)
            state = done.size_full
    console.print(f"three queries, a cut of {state / 2**20:.0f} MB: {cpu_s[-1]:.2f} s of CPU")
    shutil.rmtree(top)
    yield figure("watch_cpu_seconds_per_cut", cpu_s, "s")
    yield figure("watch_new_kb_per_cut", new, "kB")
    yield figure("watch_new_vs_state", [kb * 2**10 / state for kb in new])
