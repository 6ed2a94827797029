"""Credit of a stage that runs: what is in the log before it begins, what it writes, what consumers finish."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.model import AttemptId, ChannelId, DataFile, Entry, StageId, Version, dumps_position
from spark_abs.stages.consumers import Consumers
from spark_abs.stages.credit import Credit
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.channel_support import JOB, Log, position

CHANNEL = ChannelId("a.main")


class Running:
    """A channel with room for two entries, written by `a`, read by `b` and `c`."""

    def __init__(self, tmp: Path) -> None:
        self.root = Root(str(tmp))
        Control.create(self.root, JOB, 0)
        self.log = Log(self.root)
        settings = SimpleNamespace(capacity_entries=2, capacity_bytes=None)
        ctx: Any = SimpleNamespace(root=self.root, settings=settings, native=self.native, starts={})
        self.consumers = Consumers(ctx, {StageId("b"): (CHANNEL,), StageId("c"): (CHANNEL, CHANNEL)})
        self.credit = Credit(ctx, [CHANNEL], self.consumers, Version(0), poll_ms=0)

    def native(self, stage: str) -> Any:
        return self.root.place(f"native/1/{stage}")

    def finish(self, stage: str, batch: int, *versions: int) -> None:
        """Let a stage plan and finish a batch that takes its inputs so far."""
        lines = (json.dumps(dumps_position(position(CHANNEL, version))) for version in versions)
        head = {"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {}}
        self.native(stage).write(f"offsets/{batch}", "\n".join(["v1", json.dumps(head), *lines]).encode())
        self.native(stage).write(f"commits/{batch}", b"v1\n{}")

    def write(self, *values: int) -> int:
        """Commit a batch and tell credit, as the stage does."""
        version = self.log.batch(*values)
        files = (DataFile("part.parquet", 10, len(values)),) if values else ()
        self.credit.wrote({CHANNEL: Entry(Version(version), AttemptId(1), files=files)})
        return version


@pytest.fixture
def running(tmp_path: Path) -> Running:
    return Running(tmp_path)


def test_entries_with_rows_use_credit_up_until_every_consumer_has_finished_one(running: Running) -> None:
    first = running.log.batch(1)  # before the stage runs: read from the log
    running.log.batch()
    running.log.batch(barrier_id=1)
    assert running.credit.full() == ()
    running.write()  # no rows, no room
    assert running.credit.full() == ()
    running.write(2)
    assert running.credit.full() == (CHANNEL,)

    running.finish("b", 0, first)
    assert running.credit.full() == (CHANNEL,)  # c has read nothing
    running.finish("c", 0, first + 2, 0)
    assert running.credit.full() == (CHANNEL,)  # one of its two inputs has not
    running.finish("c", 1, first + 2, first)
    assert running.credit.full() == ()


def test_a_batch_that_was_there_before_is_not_counted_twice(running: Running) -> None:
    """A repeat after a crash: the log, read at the first question, holds it already."""
    version = running.log.batch(1)
    assert running.credit.full() == ()
    entry = Entry(Version(version), AttemptId(1), files=(DataFile("part.parquet", 10, 1),))
    running.credit.wrote({CHANNEL: entry})
    assert running.credit.full() == ()


def test_waiting_is_counted_and_ends_when_the_batch_goes_or_is_given_up(running: Running) -> None:
    running.log.batch(1)
    running.log.batch(2)
    assert running.credit.full() == (CHANNEL,)
    assert running.credit.waited_ms == 0  # to ask is not to wait
    while running.credit.waited_ms < 2:
        running.credit.waits_for(running.credit.full())
        assert running.credit.waiting == (CHANNEL,)
    running.credit.waits_for(())
    waited = running.credit.waited_ms
    assert waited == running.credit.waited_ms >= 2
    assert not running.credit.waiting


def test_consumers_stand_where_their_last_finished_batch_ended(running: Running) -> None:
    """A batch that is only planned may be lost with the driver's disk (invariant 6)."""
    running.finish("b", 0, 3)
    running.native("b").write("offsets/1", b"v1\n{}\n")
    assert running.consumers.consumed(CHANNEL) == (3, None)
