"""Rebuilding one stage on a root that was written by hand: what it begins with, repeats, and where (P18)."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_abs.channels.files import read_written
from spark_abs.channels.staged import Files
from spark_abs.compatibility.inspection import Drafted
from spark_abs.errors import Refused
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.model import NO_EPOCH, BatchId, CheckpointId, StageId, Version
from spark_abs.plan.frames import Frames
from spark_abs.plan.graph import JobGraph, SinkDecl, StageDecl
from spark_abs.protocol.attempt import NATIVES
from spark_abs.protocol.attempt_changes import begin_attempt, finish_attempt
from spark_abs.protocol.control import ControlState, end_run
from spark_abs.run.rebuild import Rebuilder
from spark_abs.run.start import _rebuild as rebuild
from spark_abs.run_context import RunContext
from spark_abs.settings import Settings
from spark_abs.sinks.delta.commit_metadata import PlannedBatch
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.stages.native import NativeLog
from spark_abs.stages.outputs import newest_output
from spark_abs.store.control import Control
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.storage import Place
from tests.channel_support import JOB, numbers
from tests.root_support import CHANNEL, SmallJob, offsets_of

A, B = StageId("a"), StageId("b")


class Lossy:
    """The small job, one checkpoint and two batches after it; then a stage loses its native checkpoint."""

    def __init__(self, path: Path) -> None:
        self.job = SmallJob(path)
        self.functions = False
        self.tables: dict[str, int] = {}

    def batch(self, number: int, *values: int, offsets: str = "") -> None:
        """Run a batch of both stages; the sink gets no commit without rows."""
        job, batch = self.job, BatchId(number)
        job.batch = number
        text = offsets or offsets_of("a", number)
        job.writer.commit_batch(numbers(job.root, CHANNEL, values), batch, offsets=text)
        if not values:
            return
        place = f"data/1-1-{number}-{uuid.uuid4().hex[:12]}"
        os.makedirs(f"{job.table}/{place}")
        pq.write_table(pa.table({"n": pa.array(values, pa.int64())}), f"{job.table}/{place}/part-0.parquet")
        before = range(job.sink.log.last_batch() + 1, number + 1)
        plans = tuple(PlannedBatch(BatchId(n), offsets_of("b", n)) for n in before)
        files = Files(Place(job.table), read_written(job.root.fs, job.table, place))
        job.sink.commit_batch(files, batch, plans=plans)

    @property
    def ctx(self) -> RunContext:
        job, attempt = self.job, self.job.state.attempt
        settings = Settings.resolve(None, {}, {}, {})
        control = Control.open(job.root).version
        names = attempt.directories
        return RunContext(
            job.root,
            JOB,
            attempt.id,
            NATIVES,
            job.run,
            NO_EPOCH,
            control,
            settings,
            100,
            False,
            no_failpoint,
            names,
            identity=self.job.state.attempt.root,
        )

    @property
    def graph(self) -> JobGraph:
        sinks = [SinkDecl("totals", B, "main", self.job.table)]
        if self.functions:
            sinks.append(SinkDecl("mail", B, "main", None))
        return JobGraph((StageDecl(A, (), has_native=True), StageDecl(B, (CHANNEL,))), tuple(sinks))

    def rebuilder(self) -> Rebuilder:
        plans = {
            A: PlanFacts(("files",), (), (), False, True, {}),
            B: PlanFacts((), (CHANNEL,), (), False, True, self.tables),
        }
        return Rebuilder(self.ctx, self.graph, plans, Control.open(self.job.root))

    def repeated(self, stage: StageId) -> Sequence[tuple[int, str]]:
        return [(r.batch, r.plan) for r in self.rebuilder().plan(stage).repeats]


@pytest.fixture
def lossy(tmp_path: Path) -> Lossy:
    return Lossy(tmp_path)


def test_a_stage_repeats_what_its_channel_says(lossy: Lossy) -> None:
    lossy.job.checkpoint(1, 2)
    lossy.batch(1)
    lossy.batch(2, 3)
    assert newest_output(lossy.ctx, lossy.graph, A) == 2
    assert lossy.repeated(A) == [(1, offsets_of("a", 1)), (2, offsets_of("a", 2))]


def test_a_stage_without_channels_repeats_what_its_sinks_say_also_of_batches_without_rows(
    lossy: Lossy,
) -> None:
    """Batches after the last one with rows left nothing: the stage plans them anew."""
    lossy.job.checkpoint(1, 2)
    lossy.batch(1)
    lossy.batch(2, 3)
    lossy.batch(3)
    assert lossy.repeated(B) == [(1, offsets_of("b", 1)), (2, offsets_of("b", 2))]


def test_a_batch_that_took_files_is_not_repeated_without_their_names(lossy: Lossy) -> None:
    lossy.job.checkpoint(1, 2)
    head = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {}})
    lossy.batch(1, 3, offsets=f'v1\n{head}\n{{"logOffset":7}}')
    with pytest.raises(Refused, match="batch 1 has read files, and only the lost checkpoint had their names"):
        lossy.repeated(A)


def test_a_stage_that_calls_a_function_is_not_rebuilt(lossy: Lossy) -> None:
    lossy.functions = True
    lossy.job.checkpoint(1, 2)
    with pytest.raises(Refused, match="a function"):
        lossy.repeated(B)


def test_the_newest_checkpoint_that_is_intact_is_taken(lossy: Lossy) -> None:
    first = lossy.job.checkpoint(1, 2)
    before = set(Path(lossy.job.root.path("state")).glob("*.parquet"))
    lossy.job.checkpoint(3)
    for pack in set(Path(lossy.job.root.path("state")).glob("*.parquet")) - before:
        pack.unlink()
    # The batch of the second one does not say what it read: it was written by another helper.
    with pytest.raises(Refused, match="the input of batch 1"):
        lossy.repeated(B)
    lossy.batch(2, 4)
    for pack in before:
        pack.unlink()
    with pytest.raises(Refused, match="no retained checkpoint has its state intact"):
        lossy.repeated(B)
    assert first == 1


def test_a_rebuilding_goes_on_in_its_own_directory_and_never_in_a_lost_one(lossy: Lossy) -> None:
    lossy.job.checkpoint(1, 2)
    lossy.batch(1, 3)
    natives = Path(lossy.job.root.path("native/1"))
    shutil.rmtree(natives / "b")

    first = lossy.rebuilder()
    ctx = first.prepare([first.plan(B)])
    assert ctx.native(B).path == str(natives / "b.2")
    assert NativeLog(ctx.native(B)).newest_committed() == 0
    assert not (natives / "b").exists()

    again = lossy.rebuilder().plan(B)  # killed: the next start finds it whole
    assert (again.goes_on, again.record.number, [r.batch for r in again.repeats]) == (True, 2, [1])
    (natives / "b.2/commits/1").write_text('v1\n{"nextBatchWatermarkMs":0}')
    (natives / "b.2/offsets/1").write_text(offsets_of("b", 1))
    assert lossy.rebuilder().plan(B).repeats == ()

    shutil.rmtree(natives / "b.2")  # lost, too
    second = lossy.rebuilder()
    plan = second.plan(B)
    assert (plan.goes_on, plan.record.number, [r.batch for r in plan.repeats]) == (False, 3, [1])
    assert second.prepare([plan]).native(B).path == str(natives / "b.3")


def test_a_rebuilding_goes_on_if_what_it_reads_is_as_at_its_checkpoint(
    lossy: Lossy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A static table, and a file source, which took no files in the batches that are repeated."""
    lossy.tables = {"file:/lake/items": 4}
    head = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {}})
    files = f'v1\n{head}\n{{"logOffset":7}}'
    monkeypatch.setattr("tests.unit.test_rebuilder.offsets_of", lambda *_: files)
    stage = Manifest.stage

    def with_inputs(manifest: Manifest, name: StageId) -> StageSnapshot | None:
        found = stage(manifest, name)
        tables = {"file:/lake/items": Version(4)}
        return None if found is None else replace(found, offsets=files, static_tables=tables)

    monkeypatch.setattr(Manifest, "stage", with_inputs)
    lossy.job.checkpoint(1, 2)
    lossy.batch(1, 3)
    first = lossy.rebuilder()
    first.prepare([first.plan(B)])
    assert [r.batch for r in lossy.rebuilder().plan(B).repeats] == [1]
    lossy.tables = {"file:/lake/items": 5}
    with pytest.raises(Refused, match="static tables whose versions"):
        lossy.rebuilder().plan(B)


def test_a_stage_that_left_the_job_while_it_was_rebuilt_is_not_in_the_way(lossy: Lossy) -> None:
    lossy.job.checkpoint(1, 2)
    first = lossy.rebuilder()
    first.prepare([first.plan(B)])
    without = JobGraph(lossy.graph.stages[:1], ())
    ctx, drafted = lossy.ctx, Drafted(without, Frames({}, {}, {}), {})
    assert rebuild(ctx, drafted, Control.open(lossy.job.root), {}) == (ctx, ())


def test_state_that_a_restore_has_divided_anew_is_rebuilt_from_later_checkpoints_only(lossy: Lossy) -> None:
    """Spark's own batch in between has a number of which no output tells."""
    job = lossy.job
    origin = job.checkpoint(1, 2)

    def begin(state: ControlState) -> ControlState:
        begun = begin_attempt(
            state,
            job.attempt,
            checkpoint=CheckpointId(origin),
            plan="{}",
            host="here",
            pid=1,
            now_ms=0,
            natives=None,
            partitions={"b": 5},
        )
        return end_run(finish_attempt(begun, begun.attempt.id), begun.runs[-1].id, "restored")

    Control.open(job.root).update(begin)
    job.start()
    with pytest.raises(Refused, match="the restore gave its state 5 partitions, and no checkpoint has been"):
        lossy.repeated(B)
    job.batch = 1
    job.checkpoint(3)
    assert lossy.repeated(B) == []
