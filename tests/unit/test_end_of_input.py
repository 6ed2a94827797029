"""When a stage of a bounded run has come to its end."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.model import BatchId, StageId
from spark_abs.run.end_of_input import EndOfInput
from spark_abs.stages.batch_lock import BatchLock
from spark_abs.stages.native import NativeLog
from spark_abs.store.storage import Place

STAGE = StageId("timed")


class Query:
    """The logs of a query; it never says that it has nothing to do."""

    def __init__(self, path: Path) -> None:
        self.path, self.batch = path, -1
        for log in ("offsets", "commits"):
            (path / log).mkdir()

    def plan(self, read: int, watermark: int) -> None:
        self.batch += 1
        metadata = json.dumps({"batchWatermarkMs": watermark, "batchTimestampMs": self.batch, "conf": {}})
        (self.path / "offsets" / str(self.batch)).write_text(f'v1\n{metadata}\n{{"logOffset":{read}}}')

    def run(self, read: int, watermark: int = 0) -> None:
        self.plan(read, watermark)
        (self.path / "commits" / str(self.batch)).write_text("v1\n{}")


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


def looking(query: Query) -> tuple[EndOfInput, Any]:
    runner: Any = SimpleNamespace(name=STAGE, native=NativeLog(Place(str(query.path))), reads_channels=False)
    stage: Any = SimpleNamespace(runner=runner, query=SimpleNamespace(isActive=True), halted=False)
    ends = EndOfInput(SimpleNamespace(failpoint=lambda _: None), {STAGE: stage}, SimpleNamespace())  # type: ignore[arg-type]
    ends.finish_stages()
    return ends, runner


def test_a_batch_for_timers_alone_is_the_end_of_a_stage(query: Query) -> None:
    query.run(0)
    ends, runner = looking(query)
    query.run(1)
    assert not ends._rests(runner)
    query.run(1, watermark=5)
    assert not ends._rests(runner)
    query.run(1, watermark=5)
    assert ends._rests(runner)


def test_what_an_earlier_run_had_read_is_not_the_end_of_this_one(query: Query) -> None:
    query.run(1)
    query.run(1)
    ends, runner = looking(query)
    assert not ends._rests(runner)
    query.run(1)
    assert ends._rests(runner)


def test_a_batch_for_timers_that_is_under_way_does_not_hold_up_the_end(query: Query) -> None:
    query.run(1)
    ends, runner = looking(query)
    query.run(1)
    query.plan(1, 0)
    assert ends._done(runner) == BatchId(1)
    query.run(2)
    query.plan(3, 0)
    assert ends._done(runner) is None


class Looped:
    """A stage of a loop that is idle; Spark says so when it is let."""

    def __init__(self, name: str, path: Path, head: bool) -> None:
        path.mkdir()
        Query(path).run(1)
        self.asked, self.may = 0, threading.Event()
        self.closed = head
        self.isActive, self.halted, self.query = True, False, self
        self.runner: Any = SimpleNamespace(
            name=StageId(name),
            native=NativeLog(Place(str(path))),
            reads_channels=True,
            heads_loop=head,
            inputs_closed=lambda _: self.closed,
            batch_lock=BatchLock(),
            failure=None,
            end=lambda: None,
        )

    def processAllAvailable(self) -> None:  # noqa: N802 - as in Spark
        self.asked += 1
        assert self.may.wait(60)

    def halt(self) -> None:
        self.isActive = False


@pytest.mark.parametrize("order", [("head", "behind"), ("behind", "head")])
def test_a_loop_ends_when_spark_says_of_each_of_its_stages_that_it_has_nothing_to_do(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    """Which takes a second where a gate waits for news, and is asked once, however often it is looked at."""
    stages: Any = {StageId(name): Looped(name, tmp_path / name, name == "head") for name in order}
    around = {"head": [stage.runner for stage in stages.values()], "behind": [stages["behind"].runner]}
    loops: Any = SimpleNamespace(around=lambda runner: around[runner.name], has_ended=lambda *_: True)
    ends = EndOfInput(SimpleNamespace(failpoint=lambda _: None), stages, loops)  # type: ignore[arg-type]
    for _ in range(5):
        assert not ends.finish_stages()
    assert [stage.asked for stage in stages.values()] == [1, 1]
    for stage in stages.values():
        stage.may.set()
    for asking in ends._processed[StageId("head")].values():
        asking.join(60)
    ends.finish_stages()
    assert (stages["head"].halted, stages["behind"].halted) == (True, False)
