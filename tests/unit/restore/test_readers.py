"""Stages that read a table which a restore takes back: where they continue, and when that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from spark_abs.errors import Refused
from spark_abs.manifest import Manifest, OutputVersion, StageSnapshot
from spark_abs.model import (
    AttemptId,
    BatchId,
    CheckpointId,
    CheckpointKind,
    RunId,
    SinkWriter,
    StageId,
    Version,
)
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import WRAPPED_JOB, AttachedSink
from spark_abs.restore.facts import gather
from spark_abs.restore.plan import Facts, plan_restore
from spark_abs.restore.refusals import Force
from spark_abs.restore.restoring import RestorePlan
from spark_abs.restore.steps import RestoreSink, TableReader
from spark_abs.sinks.delta.changes import Changes
from spark_abs.snapshots.materialise import continue_at
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.storage import Place

W, R = StageId("writes"), StageId("reads")


class Line:
    """A root of a query that writes a table, three versions long, and of one that reads it."""

    def __init__(self, base: Path) -> None:
        self.root, self.table = Root(str(base / "root")), str(base / "between")
        self.control = Control.create(self.root, WRAPPED_JOB, 1_000)
        self.control.update(lambda s: ledger.begin_run(s, "here", 1, 2_000))
        for _ in range(3):
            self.append()
        self.id = str(DeltaTable(self.table).metadata().id)

    def append(self, **transactions: int) -> None:
        applied = [Transaction(app, number) for app, number in transactions.items()]
        properties = CommitProperties(app_transactions=applied)
        rows = pa.table({"id": pa.array([1], pa.int64())})
        write_deltalake(self.table, rows, mode="append", commit_properties=properties)

    def offsets(self, version: int) -> str:
        plain = {
            "sourceVersion": 3,
            "reservoirId": self.id,
            "reservoirVersion": version,
            "index": -100,
            "isStartingVersion": False,
        }
        return f"v1\n{{}}\n-\n{json.dumps(plain)}"

    def manifest(self, written: int, read: int, batch: int = 3) -> Manifest:
        output = OutputVersion(W, "table", self.table, self.id, Version(written))
        parts = (
            StageSnapshot(R, BatchId(batch), offsets=self.offsets(read)),
            StageSnapshot(W, BatchId(4), outputs=(output,)),
        )
        ids = CheckpointId(1), AttemptId(1), RunId(1), WRAPPED_JOB
        return Manifest(*ids, CheckpointKind.CHECKPOINT, None, 0, 0, 0, (), parts)

    def facts(self, manifest: Manifest) -> Facts:
        attempt, state = AttemptId(2), self.control.state
        return gather(self.root, manifest, known=(manifest,), completed=(), attempt=attempt, state=state)

    def plan(self, manifest: Manifest, facts: Facts, *force: Force) -> RestorePlan:
        return plan_restore(
            self.control.state,
            manifest,
            facts,
            attempt=AttemptId(2),
            natives="native",
            fresh_id=lambda: "q",
            force=force,
        )

    def step(self, manifest: Manifest) -> RestoreSink:
        plan = self.plan(manifest, self.facts(manifest))
        (step,) = [step for step in plan.steps if isinstance(step, RestoreSink)]
        return step


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def test_the_step_of_the_table_moves_its_reader(line: Line) -> None:
    step = line.step(line.manifest(written=1, read=2))
    assert step.readers == (TableReader(R, "native/2/reads", ("1",)),)
    assert step.sentence().endswith("; stage reads continues to read it behind that")


def test_a_repeat_moves_it_also_if_the_table_is_back_already(line: Line) -> None:
    """Killed between the two: the mark of the attempt is there."""
    manifest = line.manifest(written=1, read=2)
    state = line.control.state
    mark = SinkWriter(state.job, state.root, W, W, AttemptId(2)).restore_app
    assert line.step(manifest).changes
    line.append(**{mark: 1})
    step = line.step(manifest)
    assert not step.changes
    assert [reader.stage for reader in step.readers] == [R]


def test_a_position_that_does_not_fit_is_refused_whatever_is_forced(line: Line) -> None:
    for manifest, said in (
        (line.manifest(written=1, read=1), "until the beginning of version 1"),
        (line.manifest(written=0, read=2), "until the beginning of version 2"),
        (line.manifest(written=1, read=2, batch=0), "first batch only"),
    ):
        with pytest.raises(Refused, match=said):
            line.plan(manifest, line.facts(manifest), *Force)


def test_a_checkpoint_of_before_the_writer_is_refused_if_the_reader_had_not_read_just_as_much(
    line: Line,
) -> None:
    """The table goes back to where the writer came; the reader had read less then."""
    attached = AttachedSink(W, W, line.table, line.id, Version(1), attempt=AttemptId(1))
    line.control.update(lambda state: ledger.attach(state, [attached]))
    for read, refused in ((1, True), (2, False)):
        both = line.manifest(written=2, read=read)
        alone = replace(both, stages=both.stages[:1])
        if refused:
            with pytest.raises(Refused, match="Choose a checkpoint that has both"):
                line.plan(alone, line.facts(alone))
        else:
            assert line.step(alone).version == 1


def test_a_table_that_was_replaced_does_not_stay_if_a_query_reads_it(line: Line) -> None:
    manifest = line.manifest(written=1, read=2)
    facts = line.facts(manifest)
    (sink,) = facts.sinks
    for other, said in (
        (replace(sink, current=Version(0)), "older than version 1"),
        (replace(sink, table_id="another"), "is not the table that the job wrote"),
        (replace(sink, changes=Changes(of_roots=(Version(2),))), "would not read them"),
    ):
        with pytest.raises(Refused, match=said):
            line.plan(manifest, replace(facts, sinks=(other,)), *Force)


def test_all_offset_files_get_the_position_and_nothing_else_changes(line: Line, tmp_path: Path) -> None:
    """Twice, as a repeat does."""
    place = Place(str(tmp_path / "native"))
    for batch in (3, 4):
        place.write(f"offsets/{batch}", line.offsets(batch).encode())
    place.write("commits/4", b"v1\n{}")
    for _ in range(2):
        continue_at(place, ["1"], 9)
    for batch in (3, 4):
        head, metadata, other, moved = (place.read_text(f"offsets/{batch}") or "").split("\n")
        assert (head, metadata, other) == ("v1", "{}", "-")
        assert json.loads(moved) == json.loads(line.offsets(9).split("\n")[-1])
    assert sorted(path.name for path in (tmp_path / "native" / "offsets").iterdir()) == ["3", "4"]
    assert place.read_text("commits/4") == "v1\n{}"
