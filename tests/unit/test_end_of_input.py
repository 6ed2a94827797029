"""When a stage of a bounded run has come to its end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.model import BatchId, StageId
from spark_abs.run.end_of_input import EndOfInput
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
