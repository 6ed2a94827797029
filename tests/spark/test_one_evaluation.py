"""Each output of a batch is evaluated once for all who take it, also behind a crash between two commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_abs.errors import AbsError, StageFailed
from spark_abs.job import Job
from spark_abs.run.run import Run
from spark_abs.spark.plans import plan_facts
from tests.job_support import Feed, eventually, read_table
from tests.spark.conftest import Start

ROWS = 6


def keyed(frame: DataFrame) -> DataFrame:
    return frame.withColumn("k", F.expr("uuid()"))


@dataclass
class Drawn:
    """A job in which every output is random, or reads a table that moves on.

    numbers ─┬─ keyed ─┬─ after ── table after
             │         ├─ tables keyed, parted
             │         └─ function handed
             ├─ priced: table priced, function quoted
             └─ alone, sure: a function each
    drawn ───┬─ main: table drawn
             └─ even: table even, function called
    """

    spark: SparkSession
    base: Path
    handed: dict[str, dict[int, list[tuple[object, ...]]]] = field(default_factory=dict)
    """What functions were given, by sink and batch: of a batch that is repeated, the last time."""
    fails_at: str = ""

    def __post_init__(self) -> None:
        self.feed = Feed(self.spark, self.base / "feed", "id long")
        self.prices(1)
        parted = f"delta.`{self.base / 'parted'}` (id bigint, k string) USING delta PARTITIONED BY (id)"
        self.spark.sql(f"CREATE TABLE {parted}")

    def prices(self, price: int) -> None:
        frame = self.spark.createDataFrame([(price,)], "price long")
        frame.write.format("delta").mode("overwrite").save(str(self.base / "prices"))

    def write(self) -> None:
        first = ROWS * len(self.feed.files)
        self.feed.write(*({"id": first + i} for i in range(ROWS)))

    def failpoint(self, point: str) -> None:
        if point == self.fails_at:
            self.fails_at = ""
            raise OSError(f"no luck at {point}")

    def declare(self) -> Job:
        job = Job("drawn", root=str(self.base / "root"), spark=self.spark, interval="1h")
        job.failpoint = self.failpoint
        priced = self.spark.read.format("delta").load(str(self.base / "prices"))
        numbers = job.source(
            "numbers",
            self.feed.stream(),
            outputs={
                "keyed": keyed,
                "priced": lambda frame: frame.crossJoin(F.broadcast(priced)),
                "alone": keyed,
                "sure": lambda frame: frame.where("id >= 0"),
            },
        )
        after = job.stage("after", [numbers["keyed"]], lambda frame: frame)
        drawn = job.source(
            "drawn",
            keyed(self.feed.stream()),
            outputs={"even": lambda frame: frame.where("id % 2 = 0")},
        )
        for name, source in {
            "after": after,
            "keyed": numbers["keyed"],
            "parted": numbers["keyed"],
            "priced": numbers["priced"],
            "drawn": drawn,
            "even": drawn["even"],
        }.items():
            job.sink(name, source, table=str(self.base / name))
        for name, source in {
            "handed": numbers["keyed"],
            "quoted": numbers["priced"],
            "called": drawn["even"],
            "alone": numbers["alone"],
            "sure": numbers["sure"],
        }.items():
            job.sink(name, source, foreach_batch=self._function(name))
        return job

    def _function(self, name: str) -> Callable[[DataFrame, int], None]:
        def take(frame: DataFrame, batch: int) -> None:
            self.handed.setdefault(name, {})[batch] = [tuple(row) for row in frame.collect()]

        return take

    def rows(self, sink: str) -> list[tuple[object, ...]]:
        if sink == "parted":
            read = self.spark.read.format("delta").load(str(self.base / sink)).collect()
            return sorted((row.id, row.k) for row in read)
        if sink in self.handed:
            return sorted(row for rows in self.handed[sink].values() for row in rows)
        return sorted(tuple(row.values()) for row in read_table(self.base / sink).to_pylist())

    def assert_alike(self) -> None:
        keys = self.rows("keyed")
        assert [row[0] for row in keys] == list(range(ROWS * len(self.feed.files)))
        for other in ("after", "parted", "handed"):
            assert self.rows(other) == keys, other
        assert self.rows("quoted") == self.rows("priced")
        drawn = self.rows("drawn")
        assert len(drawn) == len(keys)
        assert self.rows("even") == self.rows("called") == [row for row in drawn if row[0] % 2 == 0]  # type: ignore[operator]


@pytest.fixture
def drawn(spark: SparkSession, tmp_path: Path) -> Drawn:
    return Drawn(spark, tmp_path)


def run(drawn: Drawn, start: Start) -> None:
    assert start(drawn.declare(), available_now=True).await_termination(120)


def fail(drawn: Drawn, start: Start, point: str) -> None:
    drawn.fails_at = point
    with pytest.raises((StageFailed, OSError)):
        run(drawn, start)
    assert not drawn.fails_at, f"it did not come to {point}"


def test_all_who_take_an_output_get_the_same_rows(drawn: Drawn, start: Start) -> None:
    """Tables of every kind, a stage, functions; two outputs of a frame that is random.

    Killed after its last commit, a batch gives functions the rows again that all have.
    """
    drawn.write()
    fail(drawn, start, "batch.numbers.handover.before")
    before = {sink: sorted(drawn.handed[sink][0]) for sink in ("handed", "alone", "sure")}
    assert [path.name for path in (drawn.base / "root/staging").iterdir()] == ["numbers.alone"]
    drawn.write()
    run(drawn, start)
    drawn.assert_alike()
    assert {sink: sorted(drawn.handed[sink][0]) for sink in before} == before


def test_what_one_output_has_committed_decides_the_others(drawn: Drawn, start: Start) -> None:
    """Killed between the commits of a batch, by a channel and by a table; what an output reads moves on."""
    drawn.write()
    fail(drawn, start, "batch.numbers.commit-keyed.after")
    drawn.prices(2)
    run(drawn, start)
    drawn.assert_alike()
    assert {price for _, price in drawn.rows("priced")} == {1}

    drawn.write()
    fail(drawn, start, "batch.drawn.commit-drawn.after")
    run(drawn, start)
    drawn.assert_alike()


def price_of(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([(1, 2)], "value long, price long")


def ticks(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("rate").load()


ROW_BY_ROW: dict[str, Callable[[DataFrame], DataFrame]] = {
    "as it is": lambda f: f,
    "columns, also random ones": lambda f: f.where("value > 1").withColumn("k", F.expr("uuid()")),
    "a function of Python": lambda f: f.select(F.udf(lambda v: v + 1, "long")("value").alias("v")),
    "a watermark": lambda f: f.withWatermark("timestamp", "1 second").repartition(3),
    "a union": lambda f: f.unionByName(ticks(f.sparkSession)),
    "explode": lambda f: f.select(F.explode(F.array("value", "value"))),
    "a join with a table": lambda f: f.join(price_of(f.sparkSession), "value", "left"),
}
MORE: dict[str, Callable[[DataFrame], DataFrame]] = {
    "counts": lambda f: f.groupBy("value").count(),
    "distinct": lambda f: f.distinct(),
    "without duplicates": lambda f: f.dropDuplicates(["value"]),
    "the first ones": lambda f: f.limit(3),
    "a join of streams": lambda f: f.join(ticks(f.sparkSession).select("value"), "value"),
    "a function over partitions": lambda f: f.mapInPandas(lambda parts: parts, f.schema),
    "another one": lambda f: f.mapInArrow(lambda parts: parts, f.schema),
    "an observation": lambda f: f.observe("seen", F.count("*")),
}


@pytest.mark.parametrize(
    ("made", "expected"),
    [*((made, True) for made in ROW_BY_ROW.values()), *((made, False) for made in MORE.values())],
    ids=[*ROW_BY_ROW, *MORE],
)
def test_the_plan_says_whether_a_stage_works_row_by_row(
    spark: SparkSession, made: Callable[[DataFrame], DataFrame], expected: bool
) -> None:
    assert plan_facts(made(ticks(spark))).row_by_row == expected


@dataclass
class Quiet:
    """A job of which one stage works row by row, and another keeps state; each has a function.

    The first also reads a source in which nothing comes: a stage that reads channels alone takes a barrier
    without rows where it stands.

    numbers ─┬─ even ─┬─ after ── table after
             │        ├─ table even
             │        └─ function told
             └─ counts ── function counted
    """

    spark: SparkSession
    base: Path
    given: dict[str, list[int]] = field(default_factory=lambda: {"told": [], "counted": []})
    """The rows that each function was given, call by call."""
    fails_at: str = ""

    def __post_init__(self) -> None:
        self.feed = Feed(self.spark, self.base / "feed", "id long")
        self.silent = Feed(self.spark, self.base / "silent", "id long")

    def failpoint(self, point: str) -> None:
        if point == self.fails_at:
            raise OSError(f"no luck at {point}")

    def declare(self) -> Job:
        job = Job("quiet", root=str(self.base / "root"), spark=self.spark, interval="1h")
        job.failpoint = self.failpoint
        numbers = job.source("numbers", self.feed.stream())
        beside = self.silent.stream()
        even = job.stage("even", [numbers, beside], lambda one, two: one.union(two).where("id % 2 = 0"))
        counts = job.stage("counts", [numbers], lambda f: f.groupBy("id").count(), output_mode="update")
        job.sink("after", job.stage("after", [even], lambda frame: frame), table=str(self.base / "after"))
        job.sink("even", even, table=str(self.base / "even"))
        for name, source in (("told", even), ("counted", counts)):
            job.sink(name, source, foreach_batch=self._function(name))
        return job

    def _function(self, name: str) -> Callable[[DataFrame, int], None]:
        return lambda frame, _: self.given[name].append(frame.count())

    def write(self, *ids: int) -> None:
        self.feed.write(*({"id": number} for number in ids))

    def assert_even(self, *ids: int) -> None:
        for table in ("even", "after"):
            assert sorted(read_table(self.base / table)["id"].to_pylist()) == list(ids), table
        assert sum(self.given["told"]) == len(ids)

    def spark_jobs(self, run: Run, stage: str) -> int:
        group = str(run.query(stage).runId)
        return len(self.spark.sparkContext.statusTracker().getJobIdsForGroup(group))


def test_a_barrier_without_rows_evaluates_nothing_and_calls_no_function(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """Neither where a batch carries it, nor where the stage has none for it."""
    quiet = Quiet(spark, tmp_path)
    quiet.write(1, 2, 4)
    run = start(quiet.declare())
    eventually(run, lambda: [sum(rows) for rows in quiet.given.values()] == [2, 3], "all rows")
    run.checkpoint()
    told, counted = (tuple(rows) for rows in quiet.given.values())
    jobs, batches = quiet.spark_jobs(run, "even"), newest_batch(quiet, "even")
    without = newest_batch(quiet, "counts")
    for _ in range(2):
        run.checkpoint()
    assert quiet.given == {"told": [*told], "counted": [*counted]}
    assert quiet.spark_jobs(run, "even") == jobs
    assert newest_batch(quiet, "even") == batches + 2
    assert newest_batch(quiet, "counts") == without
    quiet.write(6, 7)
    eventually(run, lambda: sum(quiet.given["told"]) == 3, "the row that is new")
    run.checkpoint()
    quiet.assert_even(2, 4, 6)
    run.stop()


def test_killed_between_the_commits_of_a_barrier_without_rows(
    spark: SparkSession, tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """The first commit says that no output has rows: the others do not evaluate it again."""
    quiet = Quiet(spark, tmp_path)
    quiet.write(2)
    run = start(quiet.declare())
    eventually(run, lambda: sum(quiet.given["told"]) == 1, "the row")
    run.checkpoint()
    quiet.fails_at = "batch.even.commit-main.after"
    with pytest.raises(AbsError):
        run.checkpoint()
    with pytest.raises(StageFailed, match="no luck"):
        run.await_termination(60)
    quiet.fails_at = ""
    quiet.write(4)
    assert start(quiet.declare(), available_now=True).await_termination(120)
    quiet.assert_even(2, 4)
    assert "is evaluated again" not in caplog.text


def newest_batch(quiet: Quiet, stage: str) -> int:
    commits = quiet.base / "root" / "native" / "1" / stage / "commits"
    return max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
