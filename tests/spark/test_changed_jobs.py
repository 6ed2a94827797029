"""A job that is declared otherwise at its next start: no row is lost, none is there twice.

Every job reads files of numbers and keeps a table of those that came through. The oracle are the files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

import spark_abs
from spark_abs.cli.main import main
from spark_abs.errors import AbsError, Refused, UsageError
from spark_abs.job import Job
from spark_abs.model import AttemptId, CheckpointId, StageId, Version, owner_of, run_app_id
from spark_abs.plan.specs import Existing, Output
from spark_abs.protocol.control import OutsideSink
from spark_abs.protocol.outside import Mark
from spark_abs.store.control import Control
from spark_abs.store.failpoint import Failpoint, no_failpoint
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Table
from tests.job_support import Feed, manifests, read_table
from tests.spark.conftest import Start

Declare = Callable[["Numbers", Job], None]


def union(*frames: DataFrame) -> DataFrame:
    first, *rest = frames
    for frame in rest:
        first = first.union(frame)
    return first


def backwards(*frames: DataFrame) -> DataFrame:
    return union(*reversed(frames))


@dataclass
class Numbers:
    """Two feeds, `a` and `b`, whose numbers do not overlap, and a root."""

    spark: SparkSession
    tmp: Path
    start: Start
    feeds: dict[str, Feed] = field(init=False)
    written: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = str(self.tmp / "root")
        self.feeds = {name: Feed(self.spark, self.tmp / name, "id long") for name in "ab"}
        self.written = {name: [] for name in "ab"}

    def write(self, feed: str, files: int = 1) -> None:
        for _ in range(files):
            number = len(self.written[feed]) + (1000 if feed == "b" else 0)
            self.written[feed].append(number)
            self.feeds[feed].write({"id": number})

    def source(self, job: Job, name: str, **options: Any) -> Output:
        return job.source(name, self.feeds[name].stream(), **options)

    def sink(
        self,
        job: Job,
        name: str,
        source: Output,
        table: str | None = None,
        existing: Existing | None = None,
    ) -> None:
        job.sink(name, source, table=str(self.tmp / "tables" / (table or name)), existing=existing)

    def job(self, declare: Declare, failpoint: Failpoint = no_failpoint, **settings: Any) -> Job:
        job = Job("numbers", root=self.root, spark=self.spark, **{"interval": "1h", "keep": 10, **settings})
        job.failpoint = failpoint
        declare(self, job)
        return job

    def run(self, declare: Declare, **options: Any) -> None:
        """Check a job, then start it: the start must do what the check says."""
        job, leave = self.job(declare), bool(options.get("allow_non_restored_state"))
        found = job.check(allow_non_restored_state=leave)
        try:
            run = self.start(job, available_now=True, **options)
        except Refused:
            assert not found.ok, found
            raise
        assert found.ok, found
        run.await_termination()

    def rows(self, table: str) -> list[int]:
        found: list[int] = sorted(read_table(self.tmp / "tables" / table)["id"].to_pylist())
        return found

    def lost_and_twice(self, table: str, want: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return what is missing in a table, and what it has too often or should not have."""
        have, wanted = Counter(self.rows(table)), Counter(want)
        return sorted((wanted - have).elements()), sorted((have - wanted).elements())

    def exact(self, table: str, feeds: str = "ab") -> None:
        want = [number for feed in feeds for number in self.written[feed]]
        assert self.lost_and_twice(table, want) == ([], [])


@pytest.fixture
def numbers(spark: SparkSession, tmp_path: Path, start: Start) -> Numbers:
    return Numbers(spark, tmp_path, start)


def both(function: Callable[..., DataFrame], order: str = "ab") -> Declare:
    """Two sources, and a stage that reads both."""

    def declare(numbers: Numbers, job: Job) -> None:
        sources = {name: numbers.source(job, name) for name in "ab"}
        out = job.stage("u", [sources[name] for name in order], function)
        numbers.sink(job, "u", out)

    return declare


def line(
    *names: str, feed: str = "a", source: str | None = None, existing: Existing | None = None
) -> Declare:
    """A source and stages after each other, the last one with the table `out`."""

    def declare(numbers: Numbers, job: Job) -> None:
        last: Output = job.source(source or feed, numbers.feeds[feed].stream())
        for name in names:
            last = job.stage(name, [last], lambda frame: frame)
        numbers.sink(job, "out", last, existing=existing)

    return declare


@pytest.mark.parametrize(("function", "order"), [(backwards, "ab"), (union, "ba")])
def test_inputs_in_another_order_keep_their_positions(
    numbers: Numbers, function: Callable[..., DataFrame], order: str
) -> None:
    numbers.write("a", 4)
    numbers.write("b")
    numbers.run(both(union))
    numbers.write("a", 2)
    numbers.write("b", 3)
    numbers.run(both(function, order))
    numbers.exact("u")
    spark_abs.open(numbers.root).restore(1)
    numbers.run(both(function, order))
    numbers.exact("u")
    spark_abs.open(numbers.root).restore(1)
    numbers.run(both(union))
    numbers.exact("u")


def test_a_stage_that_reads_another_output_begins_there(numbers: Numbers) -> None:
    def rewired(output: str) -> Declare:
        def declare(numbers: Numbers, job: Job) -> None:
            outputs = {"valid": lambda frame: frame.where("id % 2 = 0")}
            source = numbers.source(job, "a", outputs=outputs)
            taken = source if output == "main" else source[output]  # type: ignore[index]
            numbers.sink(job, "u", job.stage("u", [taken], lambda frame: frame))

        return declare

    numbers.write("a", 4)
    numbers.run(rewired("main"))
    numbers.write("a", 4)
    numbers.run(rewired("valid"))
    want = [n for n in numbers.written["a"] if n < 4 or n % 2 == 0]
    assert numbers.lost_and_twice("u", want) == ([], [])
    spark_abs.open(numbers.root).restore(1)
    numbers.run(rewired("main"))
    numbers.exact("u", "a")


def test_new_readers_of_two_outputs_begin_behind_one_batch(numbers: Numbers) -> None:
    def read(*readers: str) -> Declare:
        def declare(numbers: Numbers, job: Job) -> None:
            source = numbers.source(job, "a", outputs={"same": lambda frame: frame})
            outputs = {"main": source, "same": source["same"]}  # type: ignore[index]
            for name in ("main", "same", *readers):
                output = outputs[name.removeprefix("new-")]
                numbers.sink(job, name, job.stage(name, [output], lambda frame: frame))

        return declare

    def kill(point: str) -> None:
        if point == "batch.a.commit-main.after":
            raise RuntimeError(point)

    numbers.write("a", 2)
    numbers.run(read())
    numbers.write("a", 2)
    with pytest.raises(AbsError, match="commit-main"):
        numbers.start(numbers.job(read(), failpoint=kill), available_now=True).await_termination()
    numbers.run(read("new-main", "new-same"))
    for table in ("main", "same"):
        numbers.exact(table, "a")
        assert numbers.rows(f"new-{table}") == numbers.written["a"][3:]


def test_stages_are_put_between_and_taken_out(numbers: Numbers) -> None:
    numbers.write("a", 3)
    numbers.run(line("last"))
    numbers.write("a", 3)
    numbers.run(line("between", "last"))
    numbers.exact("out", "a")
    numbers.write("a", 2)
    numbers.run(line("last"))
    numbers.exact("out", "a")
    with pytest.raises(Refused, match="an earlier start removed this stage"):
        numbers.run(line("between", "last"))
    numbers.run(line("other", "last"))
    numbers.exact("out", "a")
    spark_abs.open(numbers.root).restore(1)
    numbers.run(line("between", "last"))
    numbers.exact("out", "a")


def test_a_new_reader_begins_at_the_cut_or_with_what_is_kept(numbers: Numbers) -> None:
    def with_reader(begin: Any) -> Declare:
        def declare(numbers: Numbers, job: Job) -> None:
            source = numbers.source(job, "a")
            numbers.sink(job, "old", job.stage("old", [source], lambda frame: frame))
            if begin is not None:
                new = job.stage("new", [source], lambda frame: frame, begin=begin)
                numbers.sink(job, "new", new, table=f"new-{begin}")

        return declare

    numbers.write("a", 3)
    numbers.run(with_reader(None))
    numbers.write("a", 2)
    numbers.run(with_reader("cut"))
    numbers.exact("old", "a")
    assert numbers.rows("new-cut") == numbers.written["a"][3:]
    spark_abs.open(numbers.root).restore(1)
    numbers.run(with_reader("earliest"))
    numbers.exact("old", "a")
    assert set(numbers.rows("new-earliest")) >= set(numbers.written["a"][3:])
    assert max(Counter(numbers.rows("new-earliest")).values()) == 1


def test_two_roots_write_one_table_and_each_goes_back_alone(numbers: Numbers) -> None:
    first, second = numbers.root, str(numbers.tmp / "second-root")
    numbers.write("a", 2)
    numbers.run(line("last"))
    numbers.root = second
    numbers.run(line("last", feed="b", source="a", existing="append"))
    numbers.write("b", 2)
    numbers.run(line("last", feed="b", source="a"))
    numbers.exact("out")
    numbers.root = first
    numbers.write("a")
    numbers.run(line("last"))
    spark_abs.open(first).restore(1)
    assert numbers.lost_and_twice("out", [*numbers.written["a"][:2], *numbers.written["b"]]) == ([], [])
    numbers.run(line("last"))
    numbers.exact("out")


def test_a_sink_under_another_name_or_of_another_stage_goes_back_with_its_table(numbers: Numbers) -> None:
    def sink(name: str, of: str) -> Declare:
        def declare(numbers: Numbers, job: Job) -> None:
            source = numbers.source(job, "a")
            stages = {"a": source, "next": job.stage("next", [source], lambda frame: frame)}
            numbers.sink(job, name, stages[of], table="out")
            if of == "a":
                numbers.sink(job, "rest", stages["next"])

        return declare

    numbers.write("a", 2)
    numbers.run(sink("zeta", "a"))
    numbers.write("a")
    numbers.run(sink("alpha", "a"))
    numbers.exact("out", "a")
    spark_abs.open(numbers.root).restore(1)
    assert numbers.rows("out") == numbers.written["a"][:2]
    numbers.run(sink("alpha", "a"))
    numbers.exact("out", "a")
    numbers.write("a")
    numbers.run(sink("alpha", "next"))
    numbers.exact("out", "a")
    spark_abs.open(numbers.root).restore(1)
    assert numbers.rows("out") == numbers.written["a"][:2]
    numbers.run(sink("alpha", "a"))
    numbers.exact("out", "a")


def test_the_table_of_a_sink_that_leaves_is_fenced_unless_all_runs_have_ended_in_order(
    numbers: Numbers, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that hung may wake up after the change; a table that cannot be fenced stops no start."""

    def three(n: Numbers, job: Job) -> None:
        rows = n.source(job, "a")
        for name in ("kept", "left", "torn"):
            n.sink(job, name, rows)

    def one(n: Numbers, job: Job) -> None:
        n.sink(job, "kept", n.source(job, "a"))

    numbers.write("a")
    numbers.run(three)
    control = Control.open(Root(numbers.root))
    fence = run_app_id(owner_of("numbers", control.state.root))
    tables = {name: numbers.tmp / "tables" / name for name in ("kept", "left", "torn")}

    def fenced(name: str) -> int | None:
        return Table.open(Place(str(tables[name]))).transaction(fence)

    assert fenced("left") == 1
    numbers.run(one)
    assert fenced("left") == 1, "run 1 has ended"
    numbers.run(three)
    control.update(lambda state: replace(state, runs=(*state.runs[:-1], replace(state.runs[-1], ended=None))))
    for commit in (tables["torn"] / "_delta_log").iterdir():
        commit.write_bytes(b"torn")
    numbers.write("a")
    numbers.run(one)
    assert fenced("left") == 4
    assert "of sink torn, which the job has no more, could not be fenced" in caplog.text
    assert numbers.lost_and_twice("kept", numbers.written["a"]) == ([], [])


def test_the_root_is_new_and_the_tables_are_old(numbers: Numbers) -> None:
    numbers.write("a", 3)
    numbers.run(line("last"))
    numbers.root = str(numbers.tmp / "other-root")
    with pytest.raises(Refused, match="existing='append'"):
        numbers.run(line("last"))
    numbers.exact("out")
    numbers.run(line("last", existing="append"))
    assert Counter(numbers.rows("out")) == Counter(numbers.written["a"] * 2)


def test_a_source_that_moved_is_refused_with_both_places(numbers: Numbers) -> None:
    numbers.write("a", 2)
    numbers.run(line("last"))
    with pytest.raises(Refused, match=r"json source .*/a was removed"):
        numbers.run(_moved)
    numbers.exact("out", "a")


def _moved(numbers: Numbers, job: Job) -> None:
    source = job.source("a", numbers.feeds["b"].stream())
    numbers.sink(job, "out", job.stage("last", [source], lambda frame: frame))


def test_the_command_says_what_a_start_would_do(numbers: Numbers) -> None:
    numbers.write("a", 2)
    numbers.run(line("last"))
    script = numbers.tmp / "job.py"
    script.write_text(
        f"""
import sys
import spark_abs
from pyspark.sql import SparkSession
spark = SparkSession.getActiveSession()
job = spark_abs.Job("numbers", root="/nowhere", spark=spark)
files = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).json({str(numbers.tmp)!r} + "/a")
last = job.source("a", files)
for name in sys.argv[1:]:
    last = job.stage(name, [last], lambda frame: frame)
job.sink("out", last, table={str(numbers.tmp)!r} + "/tables/out")
job.start(available_now=True).await_termination()
raise AssertionError("it was started")
"""
    )

    def check(*names: str, exits: int) -> Any:
        command = ["check", str(script), "--root", numbers.root, "--output", "json", "--", *names]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == exits, (result.output, result.exception)
        return {s["stage"]: s["verdict"] for s in json.loads(result.stdout)["stages"]}

    assert check("last", exits=0) == {"a": "kept", "last": "kept"}
    assert check("first", "last", exits=0) == {"a": "kept", "first": "new", "last": "kept"}
    assert not Path("/nowhere").exists()
    numbers.write("a")
    numbers.run(line("last"))
    numbers.exact("out", "a")


def test_a_recorded_sink_with_prepared_transactions_is_refused_before_anything_is_changed(
    numbers: Numbers,
) -> None:
    """By `check`, and by every start, whether the job still has the sink or not."""
    numbers.write("a")
    numbers.run(line("last"))
    begin = Mark(AttemptId(1), CheckpointId(0), Version(0))
    settings = '{"table":"orders","prepared":true}'
    record = OutsideSink("sent", StageId("last"), "main", "postgres", settings, begin, begun=True)
    control = Control.open(Root(numbers.root))
    control.update(lambda state: replace(state, outside=(record,)))

    way = "once with the earlier version and prepared=False"
    job = numbers.job(line("last"))
    assert way in "\n".join(job.check().obstacles)
    with pytest.raises(UsageError, match=way):
        numbers.start(job)
    with pytest.raises(Refused, match=way):
        numbers.start(job, restart="checkpoint")
    assert Control.open(Root(numbers.root)).version == control.version


def loop(closed: bool) -> Declare:
    """Stage `m` reads `a` and what `again` makes of `b`; closed, `again` reads from `m`, too, what is new."""

    def declare(numbers: Numbers, job: Job) -> None:
        a, b = numbers.source(job, "a"), numbers.source(job, "b")
        if closed:
            back = job.feedback("back", "id long")
            m = job.stage("m", [a, back], union)
            again = job.stage("again", [b, m], lambda f, g: f.union(g.where("id < 0")))
            back.close(again)
        else:
            again = job.stage("again", [b], lambda frame: frame)
            m = job.stage("m", [a, again], union)
        numbers.sink(job, "m", m)

    return declare


def test_a_loop_is_closed_and_opened_again(numbers: Numbers) -> None:
    """The channel that goes back was a plain one, and is one again; a checkpoint is taken each time."""
    for number, closed in enumerate((False, True, False), start=1):
        numbers.write("a", 2)
        numbers.write("b", 2)
        numbers.run(loop(closed))
        numbers.exact("m")
        assert len(manifests(numbers.root)) == number
    spark_abs.open(numbers.root, numbers.spark).restore(2)
    numbers.run(loop(True))
    numbers.exact("m")


def test_an_aggregate_by_another_key_is_refused(numbers: Numbers) -> None:
    def counted(key: str) -> Declare:
        def declare(numbers: Numbers, job: Job) -> None:
            source = numbers.source(job, "a")
            count = job.stage(
                "count",
                [source],
                lambda f: f.groupBy(f.id % 2 if key == "two" else f.id % 3).count(),
                output_mode="update",
                shuffle_partitions=1,
            )
            job.sink("n", count, foreach_batch=lambda frame, _: frame.foreach(lambda row: None))

        return declare

    numbers.write("a", 2)
    numbers.run(counted("two"))
    with pytest.raises(Refused, match="stateful operators have changed"):
        numbers.run(counted("three"))
    numbers.run(counted("two"))


PARTS = {"even": "id % 2 = 0", "odd": "id % 2 = 1"}


def joined(left: str, right: str) -> Declare:
    """Even and odd numbers of one channel, an even one with the odd one after it, with the table `pairs`."""

    def pair(frame: DataFrame) -> DataFrame:
        one, two = (frame.where(PARTS[part]).selectExpr("id", "id div 2 AS half") for part in (left, right))
        paired = one.alias("one").join(two.alias("two"), F.expr("one.half = two.half"))
        return paired.selectExpr("one.id", "two.id AS next")

    def declare(numbers: Numbers, job: Job) -> None:
        pairs = job.stage("pairs", [numbers.source(job, "a")], pair, shuffle_partitions=1)
        numbers.sink(job, "pairs", pairs)

    return declare


def test_the_parts_of_a_channel_that_are_joined_do_not_change_sides(numbers: Numbers) -> None:
    """Number 2 waits on the side of the even ones."""
    numbers.write("a", 3)
    numbers.run(joined("even", "odd"))
    numbers.write("a")
    with pytest.raises(Refused, match=r"was: InnerJoin.*left: .*= .*0.*right: .*= .*1"):
        numbers.run(joined("odd", "even"))
    numbers.run(joined("even", "odd"))
    pairs = read_table(numbers.tmp / "tables" / "pairs").to_pylist()
    assert sorted((row["id"], row["next"]) for row in pairs) == [(0, 1), (2, 3)]


def count_of(key: tuple[int], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Say how many rows a key has had."""
    n = (state.get[0] if state.exists else 0) + sum(map(len, frames))
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


def counted_by(key: str) -> Declare:
    """A count of rows by a function of Spark's, by one of two columns of one type."""

    def count(frame: DataFrame) -> DataFrame:
        grouped = frame.selectExpr("id", "id % 2 AS two", "id % 3 AS three").groupBy(key)
        no_timeout = GroupStateTimeout.NoTimeout
        return grouped.applyInPandasWithState(count_of, "key long, n long", "n long", "append", no_timeout)

    def declare(numbers: Numbers, job: Job) -> None:
        counts = job.stage("counts", [numbers.source(job, "a")], count, shuffle_partitions=1)
        numbers.sink(job, "counts", counts)

    return declare


def test_a_function_of_sparks_does_not_use_the_state_of_another_key(numbers: Numbers) -> None:
    numbers.write("a", 3)
    numbers.run(counted_by("two"))
    numbers.write("a")
    with pytest.raises(Refused, match=r"was: .*by two bigint.*\n.*now: .*by three bigint"):
        numbers.run(counted_by("three"))
    numbers.run(counted_by("two"))
    counts = read_table(numbers.tmp / "tables" / "counts").to_pylist()
    assert {key: max(r["n"] for r in counts if r["key"] == key) for key in (0, 1)} == {0: 2, 1: 2}


def summed(first: str, last: str) -> Declare:
    """Sums of two columns, of which either may come first, with the table `sums`."""

    def declare(numbers: Numbers, job: Job) -> None:
        small, large = F.sum("id").alias("small"), F.sum(F.col("id") + 1000).alias("large")
        sums = {"small": small, "large": large}
        total = job.stage(
            "total",
            [numbers.source(job, "a")],
            lambda f: f.groupBy().agg(sums[first], sums[last]),
            output_mode="complete",
            shuffle_partitions=1,
        )
        job.sink("sums", total, foreach_batch=partial(keep, str(numbers.tmp / "sums")))

    return declare


def keep(path: str, frame: DataFrame, _: int) -> None:
    frame.write.mode("overwrite").parquet(path)


def test_sums_do_not_go_on_under_each_others_names(numbers: Numbers) -> None:
    """Spark keeps them by their place."""
    numbers.write("a", 3)
    numbers.run(summed("small", "large"))
    numbers.write("a")
    with pytest.raises(Refused, match=r"was: sum\(id\), sum\(.*\)\n.* now: sum\(.*\), sum\(id\)\n"):
        numbers.run(summed("large", "small"))
    numbers.run(summed("small", "large"))
    (row,) = numbers.spark.read.parquet(str(numbers.tmp / "sums")).collect()
    assert row.asDict() == {"small": 0 + 1 + 2 + 3, "large": 4006}
