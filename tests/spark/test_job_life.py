"""The life of a job: it ends, is stopped, fails, is started twice, and loses a native checkpoint."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

import spark_abs
from spark_abs.errors import (
    AbortReason,
    CheckpointsFailed,
    DamageError,
    Fenced,
    Refused,
    RunAlive,
    StageFailed,
    UsageError,
)
from spark_abs.job import Job
from spark_abs.model import CheckpointKind
from spark_abs.store.control import Control
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.history import HistoryEvent
from spark_abs.store.root import Root
from tests.job_support import (
    Feed,
    assert_tables_at_every_cut,
    events,
    eventually,
    files_read,
    hold_until,
    manifests,
    newest_data,
    read_table,
)
from tests.spark.conftest import Start

FILE = 3
"""Rows in a file."""


@dataclass
class Line:
    """A source and a stage after it, each with a table: `numbers` -> `twice`."""

    spark: SparkSession
    tmp: Path
    twice: str = "2 * id"
    failpoint: Callable[[str], None] = lambda _: None
    feed: Feed = field(init=False)

    def __post_init__(self) -> None:
        self.root = str(self.tmp / "root")
        self.tables = self.tmp / "tables"
        self.feed = Feed(self.spark, self.tmp / "in", "id long")

    def write(self, files: int) -> None:
        for _ in range(files):
            first = len(self.feed.files) * FILE
            self.feed.write(*({"id": first + n} for n in range(FILE)))

    def job(self, name: str = "line", **settings: Any) -> Job:
        job = Job(name, root=self.root, spark=self.spark, **{"interval": "1h", **settings})
        job.failpoint = self.failpoint
        numbers = job.source("numbers", self.feed.stream())
        twice = job.stage("twice", [numbers], lambda frame: frame.selectExpr("id", f"{self.twice} AS twice"))
        job.sink("numbers", numbers, table=str(self.tables / "numbers"))
        job.sink("twice", twice, table=str(self.tables / "twice"))
        return job

    def rows(self, table: str) -> list[int]:
        return sorted(read_table(self.tables / table)["id"].to_pylist())

    def has_all(self) -> bool:
        return len(self.rows("twice")) >= len(self.feed.files) * FILE

    def assert_all_once(self) -> None:
        expected = list(range(len(self.feed.files) * FILE))
        assert (self.rows("numbers"), self.rows("twice")) == (expected, expected)

    def assert_cuts(self) -> None:
        assert_tables_at_every_cut(
            self.spark,
            self.root,
            {"numbers": self.feed},
            {
                "numbers": "SELECT checkpoint, id FROM numbers",
                "twice": "SELECT checkpoint, id, 2 * id AS twice FROM numbers",
            },
            self.tables,
        )

    def claimed(self) -> bool:
        return bool(Control.open(Root(self.root)).state.claims)

    def aborted(self) -> dict[int, AbortReason | str]:
        return {int(a.id): a.reason for a in Control.open(Root(self.root)).state.aborted}


@pytest.fixture
def line(spark: SparkSession, tmp_path: Path) -> Line:
    return Line(spark, tmp_path)


@pytest.fixture
def recording(spark: SparkSession) -> Iterator[None]:
    """A profile of the JVM, as Java's flight recorder makes it, with every read from a socket in it."""
    jvm = spark._jvm
    assert jvm is not None
    made = jvm.jdk.jfr.Recording()
    made.enable("jdk.SocketRead").withoutThreshold()
    made.start()
    yield
    made.close()


def test_a_bounded_run_in_a_jvm_that_is_profiled_ends_in_order(
    line: Line, start: Start, recording: None
) -> None:
    """A query that is stopped while its gate waits then ends with an error that Spark does not expect."""
    for _ in range(3):
        line.write(2)
        assert start(line.job(), available_now=True).await_termination(120)
    line.assert_all_once()


def test_a_bounded_run_ends_by_itself_behind_a_last_checkpoint(line: Line, start: Start) -> None:
    """Stages end with their input, producers first (P10); the next bounded run goes on after it."""
    for number in (1, 2):
        line.write(2)
        run = start(line.job(), available_now=True)
        assert run.await_termination(120)
        assert run.id == number
        line.assert_all_once()
        assert [files_read(m, "numbers") for m in manifests(line.root)] == [2, 4][:number]
    line.assert_cuts()


def test_the_last_stage_gets_cores_first_and_queries_of_the_user_before_it(line: Line, start: Start) -> None:
    """Of the pools that have no running task Spark serves the first one by name."""
    line.write(1)
    assert start(line.job("ranked"), available_now=True).await_termination()
    context = line.spark.sparkContext
    assert str(context._jsc.sc().getSchedulingMode()) == "FAIR"
    pools = context._jsc.sc().getAllPools()
    names = sorted(pools.apply(number).name() for number in range(pools.size()))
    mine = [name.split()[-1] for name in names if name == "default" or "ranked/" in name]
    assert mine == ["default", "ranked/twice", "ranked/numbers"]


def count_visits(
    key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState
) -> Iterator[tuple[int, int]]:
    """Count the rows of a key; its timeout comes in a day."""
    total = (state.get[0] if state.exists else 0) + sum(1 for _ in rows)
    state.update((total,))
    state.setTimeoutDuration(86_400_000)
    yield key[0], total


def test_a_bounded_run_ends_also_where_timers_of_processing_time_never_rest(line: Line, start: Start) -> None:
    """Spark runs batches for them without end, in a stage after a channel as in one that reads files."""

    def counted(frame: DataFrame) -> DataFrame:
        return spark_abs.flat_map_groups_with_state(
            frame, "id", count_visits, "n long", "id long, n long", timeout="processing-time", key_groups=2
        )

    def job() -> Job:
        job = Job("timed", root=line.root, spark=line.spark, interval="1h")
        first = job.stage("first", [line.feed.stream()], counted, state_provider="rocksdb")
        second = job.stage("second", [first], counted, state_provider="rocksdb")
        job.sink("numbers", second, table=str(line.tables / "numbers"))
        return job

    for files in (2, 1):
        line.write(files)
        assert start(job(), available_now=True).await_termination(180)
        assert line.rows("numbers") == list(range(len(line.feed.files) * FILE))


def test_a_stopped_job_goes_on_where_it_was(line: Line, start: Start) -> None:
    """A checkpoint under way at the stop is aborted. The next run takes its own; another job may not."""
    line.failpoint = hold_until("capture.twice.copy.before", lambda: 1 in line.aborted())
    line.write(3)
    run = start(line.job())
    with ThreadPoolExecutor(1) as pool:
        checkpoint = pool.submit(run.checkpoint)
        eventually(run, lambda: Control.open(Root(line.root)).state.claims, "checkpoint 1 is under way")
        eventually(run, line.has_all, "all rows through")
        run.stop()
        with pytest.raises(Refused, match=r"job-stopping|ended before it answered"):
            checkpoint.result()
    assert line.aborted() == {1: AbortReason.JOB_STOPPING}

    with pytest.raises(Refused, match="belongs to job 'line'"):
        start(line.job("other"))

    line.write(2)
    again = start(line.job())
    assert (again.id, again.attempt) == (2, 1)
    eventually(again, line.has_all, "the new rows through")
    assert again.checkpoint() == 2
    again.stop()
    line.assert_all_once()
    line.assert_cuts()


def test_an_exact_savepoint_is_the_last_thing_that_a_job_does(line: Line, start: Start) -> None:
    """After `stop(savepoint=...)` nothing has been processed, though there was much more to read (P21)."""
    line.write(12)
    batches, hold = count(1), hold_until("batch.numbers.read.before", line.claimed)
    line.failpoint = lambda at: hold(at) if at == "batch.numbers.read.before" and next(batches) > 3 else None
    run = start(line.job())
    eventually(run, lambda: (line.tables / "twice/data").exists(), "a first batch through")
    taken = run.stop(savepoint="exact")
    (found,) = manifests(line.root)
    assert (found.id, found.kind, found.name) == (taken, CheckpointKind.SYNC_SAVEPOINT, "exact")
    assert 0 < files_read(found, "numbers") < 12
    outputs = [o for stage in found.stages for o in stage.outputs]
    versions = {o.output: o.version for o in outputs}
    # The barrier stands after the rows of a batch, or alone if it came between two.
    assert newest_data(Path(line.root, "channels/numbers.main")) <= (versions.pop("main") or 0)
    assert versions == {name: newest_data(line.tables / name) for name in ("numbers", "twice")}

    line.failpoint = no_failpoint
    again = start(line.job())
    eventually(again, line.has_all, "the rest through")
    with pytest.raises(UsageError, match="already"):
        again.savepoint("exact")
    again.stop()
    line.assert_all_once()
    line.assert_cuts()


def test_an_exact_savepoint_that_expires_lets_the_job_go_on(line: Line, start: Start) -> None:
    """It is aborted while a stage writes the batch of the cut: the stage must not stand still after it."""
    has_rows = hold_until("batch.numbers.read.before", line.claimed)
    expires = hold_until("batch.twice.handover.before", lambda: 1 in line.aborted() or not line.claimed())
    through, began = threading.Event(), threading.Event()

    def failpoint(at: str) -> None:
        """Let the barrier come with rows: without any the stage would take it where it stands."""
        if through.is_set() and at == "batch.numbers.read.before":
            began.set()
            has_rows(at)
        expires(at)

    line.failpoint = failpoint
    line.write(2)
    run = start(line.job(timeout="1s"))
    eventually(run, line.has_all, "the first rows through")
    through.set()
    line.write(1)
    assert began.wait(60)
    with pytest.raises(Refused, match="sync_savepoint late was not taken: aborted: expired"):
        run.stop(savepoint="late")
    through.clear()
    line.write(2)
    eventually(run, line.has_all, "rows after the savepoint through")
    run.stop()
    line.assert_all_once()


def test_a_failing_stage_stops_the_job_with_one_error(line: Line, start: Start) -> None:
    """The error names stage, batch and cause; the other stage ends in order; mended, the job goes on."""
    line.twice = "IF(id = 13, raise_error('unlucky number'), 2 * id)"
    line.write(4)
    run = start(line.job())
    eventually(run, line.has_all, "the first rows through")
    run.checkpoint()
    namesake = line.job()
    namesake.root = Root(f"{line.root}-other")
    with pytest.raises(UsageError, match="the session already runs line/numbers, line/twice of another job"):
        start(namesake)
    line.write(2)
    with pytest.raises(StageFailed, match=r"\Astage 'twice' failed in batch \d+: .*unlucky number") as told:
        run.await_termination(120)
    first = str(told.value).splitlines()[0]
    assert "numbers" not in first
    (ended,) = events(line.root, HistoryEvent.RUN_ENDED)
    said = str(ended["detail"]).splitlines()
    assert said[0] == f"failed: {first}"
    assert any("org.apache.spark" in text for text in said), "the JVM's stack is in history/"
    assert not any(run.query(stage).isActive for stage in ("numbers", "twice"))
    assert run.query("numbers").exception() is None
    assert repr(run) == "Run(1 of job 'line', attempt 1, failed)"
    with pytest.raises(StageFailed):
        run.stop()

    line.twice = "2 * id"
    again = start(line.job())
    eventually(again, line.has_all, "the rest through")
    again.checkpoint()
    again.stop()
    line.assert_all_once()
    line.assert_cuts()


def test_a_query_that_somebody_stops_while_it_waits_ends_the_job_with_an_error(
    line: Line, start: Start
) -> None:
    """As a notebook does with all that run in its session; the next start goes on."""
    line.write(1)
    run = start(line.job())
    eventually(run, line.has_all, "all rows through")
    run.query("twice").processAllAvailable()
    run.query("twice").stop()
    with pytest.raises(
        StageFailed, match=r"query of stage 'twice' was stopped from outside the job; .*stop\(\)"
    ):
        run.await_termination(60)
    line.write(1)
    again = start(line.job())
    eventually(again, line.has_all, "the rest through")
    again.stop()
    line.assert_all_once()


def test_a_job_fails_when_more_checkpoints_fail_in_a_row_than_it_tolerates(line: Line, start: Start) -> None:
    """Rows go on until then, and the next run has them all (P3)."""

    def no_room(at: str) -> None:
        if at == "capture.twice.copy.before":
            raise OSError("no room")

    line.failpoint = no_room
    line.write(2)
    run = start(line.job(interval="100ms", tolerable_failures=2))
    with pytest.raises(
        CheckpointsFailed, match="3 checkpoints have failed in a row, 2 are tolerated"
    ) as failure:
        run.await_termination(120)
    each = str(failure.value).splitlines()[1:]
    assert [line.partition(": ")[2] for line in each] == ["declined, stage twice: OSError: no room"] * 3

    line.failpoint = no_failpoint
    again = start(line.job(tolerable_failures=0))
    eventually(again, line.has_all, "all rows through")
    again.checkpoint()
    again.stop()
    line.assert_all_once()


def test_a_second_start_is_refused_or_fences_the_first(line: Line, start: Start) -> None:
    """What the first run had under way is aborted by the run that replaces it."""
    line.failpoint = hold_until(
        "capture.twice.copy.before", lambda: Control.open(Root(line.root)).state.runs[1:]
    )
    line.write(3)
    first = start(line.job())
    with ThreadPoolExecutor(1) as pool:
        checkpoint = pool.submit(first.checkpoint)
        eventually(first, lambda: Control.open(Root(line.root)).state.claims, "checkpoint 1 is under way")
        with pytest.raises(RunAlive, match=r"run 1, process \d+ on .*takeover"):
            start(line.job())
        assert len(Control.open(Root(line.root)).state.runs) == 1

        second = start(line.job(), takeover=True)
        with pytest.raises(Fenced, match="replaced by run 2"):
            first.await_termination(60)
        with pytest.raises((Fenced, Refused)):
            checkpoint.result()
    assert line.aborted() == {1: AbortReason.RUN_ENDED}
    line.write(1)
    eventually(second, line.has_all, "all rows through")
    assert second.checkpoint() == 2
    second.stop()
    line.assert_all_once()
    line.assert_cuts()


def test_a_lost_native_checkpoint_is_said_and_a_checkpoint_brings_it_back(line: Line, start: Start) -> None:
    """The job does not begin again in silence; restart='checkpoint' takes the newest one, sinks included."""
    line.write(2)
    lost = Path(line.root, "native/1/numbers")
    run = start(line.job())
    eventually(run, line.has_all, "the first rows through")
    run.stop()
    lost.rename(line.tmp / "kept")
    with pytest.raises(
        DamageError, match=r"(?s)stage 'numbers': \S+native/1/numbers is missing.*start over on a new"
    ):
        start(line.job())
    (line.tmp / "kept").rename(lost)

    run = start(line.job())
    run.checkpoint()
    line.write(2)
    eventually(run, line.has_all, "rows after the checkpoint through")
    run.stop()
    # Moved away first: a snapshot that Spark still uploads to the old place must not stop the removal.
    shutil.rmtree(lost.rename(line.tmp / "lost"), ignore_errors=True)
    said = r"(?s)stage 'numbers': \S+native/1/numbers is missing.*only the lost.*restart='checkpoint'"
    with pytest.raises(DamageError, match=said):
        start(line.job())

    again = start(line.job(), restart="checkpoint")
    assert again.attempt == 2
    eventually(again, line.has_all, "all rows through")
    again.checkpoint()
    again.stop()
    line.assert_all_once()
    line.assert_cuts()


def test_what_a_stage_has_is_left_behind_only_when_asked_for(line: Line, start: Start) -> None:
    line.write(2)
    assert start(line.job(), available_now=True).await_termination(120)

    def renamed() -> Job:
        job = Job("line", root=line.root, spark=line.spark, interval="1h")
        job.sink("numbers", job.source("figures", line.feed.stream()), table=str(line.tables / "numbers"))
        return job

    with pytest.raises(
        Refused, match=r"stage 'numbers': the job no longer declares .* its positions in its sources"
    ):
        renamed().start(available_now=True)
    assert start(renamed(), available_now=True, allow_non_restored_state=True).await_termination(120)
    everything = [n for n in range(2 * FILE) for _ in range(2)]  # the new source has read it all again
    assert line.rows("numbers") == everything


def test_old_checkpoints_and_entries_go_while_the_job_runs(line: Line, start: Start) -> None:
    """What is left is the newest checkpoint, the savepoint, and all that is needed to go back to either."""
    channel = Path(line.root, "channels/numbers.main")
    first_entries = channel / "_delta_log/00000000000000000001.json"
    run = start(line.job(interval="100ms", keep=1, skip_unchanged=False))
    while first_entries.exists() or not manifests(line.root):
        line.write(1)
        eventually(run, line.has_all, "one more file through")
    kept = run.savepoint("kept")
    line.write(2)
    eventually(run, line.has_all, "rows after the savepoint through")
    eventually(run, lambda: manifests(line.root)[-1].id > kept + 2, "checkpoints after the savepoint")
    run.stop()
    found = manifests(line.root)
    assert found[0].id == kept
    assert len(found) <= 3
    assert not list(channel.glob("data/1-1-0-*"))
    line.assert_cuts()

    for target in ("latest", "kept"):
        spark_abs.open(line.root, line.spark).restore(target)
        assert start(line.job(), available_now=True).await_termination(120)
        line.assert_all_once()
    line.assert_cuts()


@pytest.mark.parametrize("synchronous", [True, False])
def test_the_next_batch_waits_for_the_copy_only_in_the_synchronous_arm(
    line: Line, start: Start, synchronous: bool
) -> None:
    """Asynchronously, a batch begins while the copy of a cut is held back (P11)."""
    seen: list[str] = []

    def next_batch_began() -> bool:
        return synchronous or "batch.twice.read.before" in seen[seen.index("capture.twice.copy.before") :]

    hold = hold_until("capture.twice.copy.before", next_batch_began)

    def failpoint(point: str) -> None:
        seen.append(point)
        hold(point)

    line.failpoint = failpoint
    line.write(12)
    run = start(line.job(synchronous=synchronous, max_entries_per_batch=1))
    eventually(run, lambda: "batch.twice.handover.before" in seen, "a first batch")
    run.checkpoint()
    eventually(run, line.has_all, "all rows through")
    run.stop()
    copying = seen[seen.index("capture.twice.copy.before") : seen.index("ack.twice.before")]
    assert ("batch.twice.read.before" in copying) is not synchronous
    (found,) = manifests(line.root)
    timings = [stage.timings for stage in found.stages if stage.stage == "twice"]
    assert [(t.async_ms == 0) for t in timings] == [synchronous]
    line.assert_all_once()
    line.assert_cuts()


def test_a_job_runs_on_a_session_beside_the_active_one(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """Spark registers a Python data source in one session and looks for its name in the active one."""
    other = spark.newSession()
    for number, session in enumerate((spark, other)):
        spark.createDataFrame([(0,)], "id long")  # makes its session the active one
        feed = Feed(session, tmp_path / f"in{number}", "id long")
        feed.write({"id": number})
        job = Job(f"beside{number}", root=str(tmp_path / f"root{number}"), spark=session)
        rows = job.source("rows", feed.stream())
        job.sink("copied", job.stage("copy", [rows], lambda f: f), table=str(tmp_path / f"copied{number}"))
        start(job, available_now=True).await_termination()
        assert read_table(tmp_path / f"copied{number}")["id"].to_pylist() == [number]
