"""What becomes of stages that fail, without Spark: who is started again, when, and what is told (P18)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.errors import DamageError, Fenced, StageFailed
from spark_abs.model import AttemptId, BatchId, RunId, StageId
from spark_abs.protocol.control import begin_run
from spark_abs.protocol.restarts import RestartPolicy
from spark_abs.run import recovery as module
from spark_abs.run.recovery import Recovery, StageEnd
from spark_abs.settings import RestartStrategy
from spark_abs.store.control import Control
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.history import History, HistoryEvent
from spark_abs.store.root import Root

PAIR, TAIL = StageId("pair"), StageId("tail")


class Watched:
    """A recovery with a clock that is set by hand."""

    def __init__(self, path: Path, policy: RestartPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.started, self.errors = 1_000, list[StageId](), list[Exception]()
        self.root = Root(str(path))
        self.control = Control.create(self.root, "job", now_ms=0)
        self.begin_run()
        monkeypatch.setattr(module, "steady_ms", lambda: self.now)
        ctx: Any = SimpleNamespace(
            root=self.root,
            attempt=AttemptId(1),
            run=RunId(1),
            failpoint=no_failpoint,
            native=lambda stage: self.root.place(f"native/1/{stage}"),
        )
        restart = {name: (lambda name=name: self._start(name)) for name in (PAIR, TAIL)}
        self.recovery, self.ctx = Recovery(ctx, policy, restart), ctx

    def begin_run(self) -> None:
        self.control.update(lambda state: begin_run(state, "host", 1, now_ms=0))

    def _start(self, stage: StageId) -> None:
        if self.errors:
            raise self.errors.pop()
        self.started.append(stage)

    def fail(self, error: Exception, stage: StageId = PAIR, batch: int = 7) -> None:
        self.recovery.take(StageEnd(stage, BatchId(batch), error))

    def after(self, ms: int) -> list[StageId]:
        """Let time go by; return who has been started again so far."""
        self.now += ms
        self.recovery.start_due()
        return self.started


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, RestartPolicy(RestartStrategy.FIXED_DELAY, 100, attempts=2), monkeypatch)


def test_a_failed_stage_waits_for_its_time_and_is_told_of_in_history(watched: Watched) -> None:
    watched.fail(OSError("no route"))
    assert watched.recovery.waits(PAIR)
    said = "stage 'pair' failed in batch 7: OSError: no route, and is started again after 100 ms"
    assert watched.recovery.failing == said
    assert not watched.recovery.waits(TAIL)
    assert watched.after(99) == []
    assert watched.after(1) == [PAIR]
    assert watched.recovery.failing == ""
    assert not watched.recovery.waits(PAIR)
    (row,) = History(watched.root).read().to_pylist()
    assert (row["event"], row["stage"], row["batch"]) == (HistoryEvent.STAGE_RESTARTED, "pair", 7)
    assert (row["restarts"], row["duration_ms"], row["detail"]) == (1, 100, "OSError: no route")


class TornFile(Exception):
    """Spark's error about a file that it cannot read."""

    def __init__(self, file: str) -> None:
        super().__init__("Job aborted")
        self._stackTrace = (
            f": org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading "
            f"file {file}.  SQLSTATE: KD001\n\tat org.apache.spark\nCaused by: java.io.EOFException: it ends"
        )


@pytest.mark.parametrize("stage", [PAIR, TAIL])
def test_the_command_that_skips_a_file_is_named_if_the_stage_reads_it_as_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: StageId
) -> None:
    """No file of a table, or of a channel, is skipped."""
    watched = Watched(tmp_path, RestartPolicy(), monkeypatch)
    entry = b'v1\n{"path":"file:///in/a&b.json","timestamp":1,"batchId":0}'
    watched.ctx.native(PAIR).write("sources/0/0", entry)
    with pytest.raises(StageFailed) as failed:
        watched.fail(TornFile("file:///in/a&b.json"), stage)
    said = f"stage '{stage}' failed in batch 7: EOFException: it ends; while reading file file:///in/a&b.json"
    command = f"`spark-abs skip-file {watched.root.uri} pair 'file:///in/a&b.json'`"
    way = f"; to read the rest of the batch without the file: {command}" if stage == PAIR else ""
    assert str(failed.value) == said + way


def test_restarts_that_do_not_finish_a_batch_are_counted_in_what_is_said(watched: Watched) -> None:
    watched.fail(OSError("no route"))
    watched.after(100)
    watched.fail(OSError("no route"))
    assert watched.recovery.failing.endswith("after 100 ms; 2 restarts have not finished the batch")
    watched.after(100)
    assert History(watched.root).of_run(RunId(1)).restarts == [(PAIR, BatchId(7), "OSError: no route")] * 2
    assert History(watched.root).of_run(RunId(2)).restarts == []


def test_an_error_of_spark_that_cannot_go_away_is_not_waited_for(watched: Watched) -> None:
    with pytest.raises(StageFailed, match=r"'pair' failed in batch 7: RuntimeError: \[STREAMING_OUTPUT_MODE"):
        watched.fail(RuntimeError("[STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION] Invalid output mode"))


MOVED = RuntimeError("[DELTA_SCHEMA_CHANGED_WITH_VERSION] Detected schema change in version 1")


def test_a_source_that_has_other_columns_is_final_where_no_frame_is_made_anew(watched: Watched) -> None:
    with pytest.raises(StageFailed, match="start the job again from its script"):
        watched.fail(MOVED)


def test_a_frame_that_is_made_anew_gets_one_restart_for_each_batch(watched: Watched) -> None:
    policy = RestartPolicy(RestartStrategy.FIXED_DELAY, 100, attempts=None)
    restart = {PAIR: lambda: watched.started.append(PAIR)}
    watched.recovery = Recovery(watched.ctx, policy, restart, [PAIR])
    watched.fail(MOVED, batch=7)
    watched.after(100)
    watched.fail(MOVED, batch=9)
    assert watched.after(100) == [PAIR, PAIR]
    with pytest.raises(StageFailed, match="in batch 9: "):
        watched.fail(MOVED, batch=9)
    with pytest.raises(StageFailed, match="in batch 3: "):
        watched.fail(MOVED, TAIL, batch=3)


def test_a_process_that_came_up_too_slowly_is_no_failure_that_a_strategy_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, RestartPolicy(), monkeypatch)
    watched.fail(OSError("Timed out while waiting for the Python worker to connect back"))
    assert watched.after(0) == [PAIR]
    with pytest.raises(StageFailed, match="no route"):
        watched.fail(OSError("no route"))


def test_a_restart_that_does_not_succeed_is_a_failure_like_others(watched: Watched) -> None:
    watched.fail(OSError("no route"))
    watched.errors = [OSError("still none")]
    assert watched.after(100) == []
    assert watched.recovery.waits(PAIR)
    assert watched.after(100) == [PAIR]


def test_who_gives_up_tells_all(watched: Watched) -> None:
    watched.fail(OSError("first"))
    watched.fail(OSError("second"), TAIL, 3)
    assert watched.after(100) == [PAIR, TAIL]
    with pytest.raises(StageFailed) as told:
        watched.fail(OSError("third"))
    assert str(told.value).splitlines() == [
        "stage 'pair' failed in batch 7: OSError: third",
        "2 restarts were allowed; failures before it that counted:",
        "  stage 'pair' in batch 7: OSError: first",
        "  stage 'tail' in batch 3: OSError: second",
    ]


def test_a_lost_native_checkpoint_is_not_waited_for(watched: Watched) -> None:
    watched.fail(OSError("no route"))
    watched.errors = [DamageError("native/1/pair is missing")]
    with pytest.raises(StageFailed, match="DamageError: native/1/pair is missing"):
        watched.after(100)


def test_a_run_that_was_replaced_ends_as_such(watched: Watched) -> None:
    with pytest.raises(Fenced, match="replaced by run 5"):
        watched.fail(Fenced("replaced by run 5"))


def test_a_stage_that_fails_because_its_run_was_replaced_is_not_started_again(watched: Watched) -> None:
    watched.begin_run()
    with pytest.raises(Fenced, match="run 1 of job 'job' was replaced by run 2"):
        watched.fail(RuntimeError("another query has written commits/7"))
    assert not watched.recovery.waits(PAIR)


def test_a_stage_that_fails_while_control_cannot_be_read_fails_with_its_own_error(
    watched: Watched, tmp_path: Path
) -> None:
    (tmp_path / "control").rename(tmp_path / "elsewhere")
    watched.recovery = Recovery(watched.ctx, RestartPolicy(), {})
    with pytest.raises(StageFailed, match="OSError: no route"):
        watched.fail(OSError("no route"))
