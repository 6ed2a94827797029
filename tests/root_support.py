"""A small job without Spark: a channel, a Delta sink and native files, written by hand; the rest is real.

Stage `a` sends numbers into the channel `a.main`; stage `b` puts them into the sink `totals`.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql import SparkSession

import spark_abs
from spark_abs.channels.files import read_written
from spark_abs.channels.staged import Files
from spark_abs.manifest import Manifest, OutputVersion, StageShape, StageSnapshot
from spark_abs.manifests.manifest_table import Checkpoints, abort_open
from spark_abs.model import (
    Barrier,
    BatchId,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    Position,
    StageId,
    Version,
)
from spark_abs.protocol import control as ledger
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.snapshots.capture import CapturedFile
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.store.control import Control
from spark_abs.store.failpoint import Failpoint
from spark_abs.store.history import History, HistoryEvent, HistoryRow
from spark_abs.store.lease import own_lease, write_lease
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Table
from tests.channel_support import JOB, make_writer, numbers

CHANNEL = ChannelId("a.main")
SCHEMA = pa.schema([("n", pa.int64())])


def no_session() -> SparkSession:
    raise AssertionError("a Spark session was asked for")


def with_failpoint(root: str, failpoint: Failpoint, spark: SparkSession | None = None) -> spark_abs.JobRoot:
    """Return a handle on a root that calls a failpoint at named points."""
    return replace(spark_abs.open(root, spark), failpoint=failpoint)


def write_rows(table: Place, relative: str, rows: pa.Table) -> None:
    """Write a file of rows into a directory of a table."""
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink)
    table.write(f"{relative}/part-0.parquet", sink.getvalue().to_pybytes())


def offsets_of(stage: str, batch: int) -> str:
    """Return an offset file as Spark writes it."""
    head = {"batchWatermarkMs": 0, "batchTimestampMs": batch, "conf": {}}
    return f"v1\n{json.dumps(head)}\n{json.dumps({'stage': stage, 'batch': batch})}"


class SmallJob:
    """The job on one root: `start` begins a run, `step` is a batch of both stages, `checkpoint` a cut."""

    def __init__(
        self,
        path: Path | Place,
        session: Callable[[], SparkSession] = no_session,
        table_properties: Mapping[str, str] | None = None,
        table: str = "",
    ) -> None:
        self.session = session
        top = path if isinstance(path, Place) else Place(str(path))
        self.root = Root(top.below("root").uri, top.storage)
        self.table = table or top.below("lake/totals").uri
        Control.create(self.root, JOB, 1_000)
        Table.ensure(self.place, SCHEMA, table_properties or {})
        self.clock_ms = 10_000
        self.start()

    @property
    def place(self) -> Place:
        """The table's place."""
        return self.root.storage.place(self.table)

    @property
    def state(self) -> ledger.ControlState:
        return Control.open(self.root).state

    def start(self) -> None:
        """Begin a run as the runtime does, dead as soon as anybody looks."""
        control = Control.open(self.root)
        host, pid = socket.gethostname(), os.getpid()
        state = control.update(lambda s: ledger.begin_run(s, host, pid, self._tick()))
        self.attempt, self.run = state.attempt.id, state.runs[-1].id
        self.checkpoints = Checkpoints.open(self.root, JOB)
        self.checkpoints.fence(self.run)
        abort_open(control, self.checkpoints, self.run)
        self.kept = StateStorage.open(self.root, JOB, self.run)
        self.writer = make_writer(self.root, "a", attempt=self.attempt, run=self.run)
        self.writer.begin()
        self.sink = DeltaSink(
            self.root,
            self.table,
            writer=state.writer(state.attempt, StageId("b"), "totals"),
            run=self.run,
            session=self.session,
        )
        self.sink.begin()
        self.batch = -1

    def come_alive(self) -> None:
        """Take the lease, as a run that is at work."""
        write_lease(self.root, own_lease(self.run, self._tick()))

    def step(self, *values: int, barrier: Barrier | None = None) -> int:
        """Send numbers through the channel into the sink; return the channel's version."""
        self.batch += 1
        batch = BatchId(self.batch)
        standing = self.writer.commit_batch(numbers(self.root, CHANNEL, values), batch, barrier=barrier)
        relative, table = f"data/{self.attempt}-{self.run}-{batch}-{uuid.uuid4().hex[:12]}", self.place
        write_rows(table, relative, pa.table({"n": pa.array(values, pa.int64())}))
        files = Files(table, read_written(table.fs, table.path, relative))
        self.sink.commit_batch(files, batch)
        return int(standing.entry.version)

    def claim(self, name: str | None = None) -> Barrier:
        kind = CheckpointKind.SAVEPOINT if name else CheckpointKind.CHECKPOINT
        taken: list[Barrier] = []

        def change(state: ledger.ControlState) -> ledger.ControlState:
            state, barrier = ledger.claim(state, self.run, kind=kind, name=name, now_ms=self._tick())
            taken[:] = [barrier]
            return state

        Control.open(self.root).update(change)
        return taken[0]

    def checkpoint(self, *values: int, name: str | None = None) -> int:
        """Send numbers, with a barrier after them, and complete the checkpoint."""
        barrier = self.claim(name)
        version = Version(self.step(*values, barrier=barrier))
        manifest = self.manifest(barrier, version)
        assert self.checkpoints.complete(manifest)
        Control.open(self.root).update(lambda s: ledger.settle(s, completed=(barrier.id,)))
        row = HistoryRow(self._tick(), HistoryEvent.COMPLETED, self.attempt, self.run, barrier.id)
        History(self.root).append([row])
        return int(barrier.id)

    def manifest(self, barrier: Barrier, version: Version) -> Manifest:
        cut = BatchId(self.batch)
        channel = OutputVersion("main", "channel", self.root.channel(CHANNEL), self.writer.table_id, version)
        table = OutputVersion("totals", "delta", self.table, self.sink.table_id, self.sink.version_at(cut))
        mail = OutputVersion("mail", "function", "mail", "", None)
        position = Position(CHANNEL, self.attempt, version, barrier.id, True)
        stages = (
            self._snapshot("a", barrier.id, cut, (), (channel,)),
            self._snapshot("b", barrier.id, cut, (position,), (table, mail)),
        )
        graph = (
            StageShape(StageId("a"), (), {"main": "{}"}, {"main": self.writer.table_id}, {}),
            StageShape(StageId("b"), (CHANNEL,), {"main": "{}"}, {}, {"totals": "main", "mail": "main"}),
        )
        took, now = barrier.timestamp_ms, self._tick()
        return Manifest(
            barrier.id, self.attempt, self.run, JOB, barrier.kind, barrier.name, took, now, now, graph, stages
        )

    def native_files(self, stage: str, cut: BatchId) -> dict[str, str]:
        """Return the files of a stage's native checkpoint at a cut."""
        return {
            "metadata": json.dumps({"id": f"query of {stage}"}),
            f"offsets/{cut}": offsets_of(stage, cut),
            f"commits/{cut}": 'v1\n{"nextBatchWatermarkMs":0}',
        }

    def _snapshot(
        self,
        stage: str,
        checkpoint: CheckpointId,
        cut: BatchId,
        positions: tuple[Position, ...],
        outputs: tuple[OutputVersion, ...],
    ) -> StageSnapshot:
        native = self.root.native("native", self.attempt, StageId(stage))
        content = self.native_files(stage, cut)
        captured = []
        for relative, text in content.items():
            native.write(relative, text.encode())
            info = native.fs.get_file_info(f"{native.path}/{relative}")
            captured.append(CapturedFile(relative, info.size, info.mtime_ns))
        stored = self.kept.store(checkpoint, native.fs, native.path, captured)
        return StageSnapshot(
            StageId(stage),
            cut,
            positions=positions,
            outputs=outputs,
            files=stored.files,
            size_new=stored.size_new,
        )

    def stop(self) -> None:
        """Let the run end in order."""
        Control.open(self.root).update(lambda state: ledger.end_run(state, self.run, "stopped"))

    def rows(self) -> list[int]:
        """Return what the sink holds."""
        return sorted(Table.open(self.place).read()["n"].to_pylist())

    def native(self, attempt: int, stage: str) -> dict[str, str]:
        """Return the files of a stage's native directory."""
        place = self.root.place(f"native/{attempt}/{stage}")
        infos = place.fs.get_file_info(fs.FileSelector(place.path, allow_not_found=True, recursive=True))
        names = [str(info.path).removeprefix(f"{place.path}/") for info in infos if info.is_file]
        return {name: (place.read(name) or b"").decode() for name in names}

    def _tick(self) -> int:
        self.clock_ms += 10
        return self.clock_ms
