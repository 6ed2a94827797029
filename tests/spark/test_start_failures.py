"""A start that fails, is interrupted or meets another one leaves nothing in the way of the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from spark_abs.errors import Fenced, RunAlive
from spark_abs.job import Job
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import Command, CommandKind
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.stages import queries
from spark_abs.store.control import Control
from spark_abs.store.failpoint import Failpoint, no_failpoint
from spark_abs.store.root import Root
from tests.job_support import Feed, eventually, hold_until, read_table
from tests.spark.conftest import Start
from tests.wrapped_support import SCHEMA, begin, ids, running, wait


class Pair:
    """A source and a stage that only passes on, with a table."""

    def __init__(self, spark: SparkSession, tmp: Path) -> None:
        self.spark, self.root, self.table = spark, str(tmp / "root"), tmp / "table"
        self.feed = Feed(spark, tmp / "in", "id long")
        self.failpoint: Failpoint = no_failpoint

    def write(self) -> None:
        self.feed.write({"id": len(self.feed.files)})

    def job(self) -> Job:
        job = Job("pair", root=self.root, spark=self.spark, interval="1h")
        job.failpoint = self.failpoint
        last = job.stage("last", [job.source("first", self.feed.stream())], lambda frame: frame)
        job.sink("out", last, table=str(self.table))
        return job

    def all_once(self) -> bool:
        return sorted(read_table(self.table)["id"].to_pylist()) == list(range(len(self.feed.files)))

    def goes_on(self, start: Start) -> None:
        """Start again, without asking for a takeover, and see all rows once."""
        self.failpoint = no_failpoint
        self.write()
        start(self.job(), available_now=True).await_termination()
        assert self.all_once()
        assert not self.spark.streams.active


@pytest.fixture
def pair(spark: SparkSession, tmp_path: Path) -> Pair:
    made = Pair(spark, tmp_path)
    made.write()
    return made


def raising(error: BaseException, point: str) -> Callable[[str], None]:
    """Return a failpoint that raises at a point."""

    def failpoint(at: str) -> None:
        if at == point:
            raise error

    return failpoint


@pytest.mark.parametrize("error", [OSError("no route"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    "point", ["start.abort.before", "start.abort.after", "start.natives.after", "start.state.after"]
)
def test_a_start_that_does_not_come_to_its_end_gives_the_lease_back(
    pair: Pair, start: Start, error: BaseException, point: str
) -> None:
    pair.failpoint = raising(error, point)
    with pytest.raises(type(error)):
        start(pair.job())
    pair.goes_on(start)


def test_queries_that_have_begun_end_if_the_start_is_interrupted(
    pair: Pair, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        while not pair.spark.streams.active:
            time.sleep(0.02)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(queries, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(pair.job())
    pair.goes_on(start)


def test_of_two_starts_at_once_the_later_one_is_refused(pair: Pair, start: Start) -> None:
    """Both have seen that no run is alive."""
    job, runs = pair.job(), []

    def other(at: str) -> None:
        if at == "start.run.before":
            runs.append(start(Pair.job(pair)))

    job.failpoint = other
    with pytest.raises(RunAlive, match="run 1 of job 'pair' has begun meanwhile: stop it, or start with"):
        start(job)
    (first,) = runs
    eventually(first, pair.all_once, "the first one goes on")
    first.stop()
    pair.goes_on(start)


def test_a_job_is_taken_over_at_its_newest_checkpoint_while_a_batch_is_under_way(
    pair: Pair, start: Start
) -> None:
    """In the same session, where each query name is there once."""
    first = start(pair.job())
    eventually(first, pair.all_once, "the first rows through")
    first.checkpoint()
    first.stop()
    pair.failpoint = hold_until("batch.last.find.before", lambda: len(runs_of(pair)) > 3)
    pair.write()
    first = start(pair.job())
    pair.failpoint = no_failpoint
    second = start(pair.job(), takeover=True, restart="checkpoint")
    with pytest.raises(Fenced):
        first.await_termination(60)
    eventually(second, pair.all_once, "all rows through")
    second.stop()


def runs_of(pair: Pair) -> tuple[ledger.Run, ...]:
    return Control.open(Root(pair.root)).state.runs


def test_what_an_earlier_run_was_asked_is_answered_and_not_carried_out(pair: Pair, start: Start) -> None:
    """The run died before it read the command, and whoever asked was told so."""
    run = start(pair.job())
    eventually(run, pair.all_once, "the first rows through")
    run.stop()
    control = Control.open(Root(pair.root))
    control.update(lambda s: ledger.ask(s, Command("late", CommandKind.STOP, None, 0)))
    again = start(pair.job())
    pair.write()
    eventually(again, pair.all_once, "the next run goes on")
    assert again.is_active
    again.stop()
    (command,) = Control.open(Root(pair.root)).state.commands
    assert (command.answered, command.ok) == (True, False)
    assert (
        command.message == "the run that was asked ended before it answered, and run 2 has begun: "
        "repeat the request if it is still needed"
    )


def test_wrapped_queries_can_be_started_after_a_start_that_failed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, root, table = Feed(spark, tmp_path / "in", SCHEMA), str(tmp_path / "root"), str(tmp_path / "out")
    feed.write({"id": 0})

    def unreadable(*_: object, **__: object) -> None:
        raise OSError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(StateStorage, "open", unreadable)
        query = begin(feed.stream(), root, "only", table)
        with pytest.raises(StreamingQueryException, match="no route"):
            query.awaitTermination(60)
    with running(feed.stream(), root, "only", table) as query:
        wait(lambda: ids(table) == [0], "the row", query)
