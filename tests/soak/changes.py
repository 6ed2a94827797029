"""Every kind of change between two starts, from a plain stop, after a kill, and from a savepoint.

    python -m tests.soak.changes [NAME …]

prints a table: what `check` says, what a start does, rows lost, rows twice. A killed run ends at a fault
point between the commits of a batch, in this process. A change that is refused is taken back: the job goes on
as it was, and nothing may be lost either. The oracle are the files.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Literal

import click
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.errors import AbsError, Refused, UsageError
from spark_abs.job import Job
from spark_abs.model import OutputMode, ProviderName
from spark_abs.plan.specs import Output
from spark_abs.protocol.changes import Begin
from tests.job_support import Feed

HOW = ("stop", "kill", "savepoint")
FILES = 3
_POINT = "batch.u.commit-main.after"


class Killed(Exception):
    """A fault point was reached."""


@dataclass(frozen=True)
class Variant:
    """One way to declare the job: two sources, a union, a count after it; tables `out` and `counts`."""

    order: str = "ab"
    """In which the union reads the sources."""
    backwards: bool = False
    """Whether its function takes its inputs in the other order."""
    front: bool = False
    between: bool = False
    behind: bool = False
    reader: Begin | None = None
    split: bool = False
    third: bool = False
    rewired: bool = False
    union: str = "u"
    sink: str = "out"
    sink_of: str = "u"
    table: str = "out"
    with_sink: bool = True
    with_count: bool = True
    key: str = "id % 3"
    value: str = "count(*)"
    deduplicated: bool = False
    stateless: bool = False
    watermark: str = "10 seconds"
    mode: OutputMode = "update"
    partitions: int = 1
    provider: ProviderName | None = None
    column: bool = False
    wider: bool = False
    path: str = "a"
    files: int = 1
    trigger: str | None = None
    checkpoint_mode: Literal["aligned", "unaligned"] = "aligned"

    def declare(self, world: World, job: Job) -> None:
        sources: dict[str, Output] = {n: self._source(world, job, n) for n in "ab"}
        read = dict(sources)
        if self.front or self.between:
            read["a"] = job.stage("between", [sources["a"]], lambda f: f)
        if self.rewired:
            read["a"] = sources["a"]["all"]  # type: ignore[index]
        if self.split:
            left = job.stage("left", [read["a"]], lambda f: f)
            read["a"] = left
        given = [read[n] for n in self.order]
        if self.third:
            given.append(job.source("c", world.feeds["c"].stream()))
        out: Output = job.stage(self.union, given, self._united)
        ends = {"u": out}
        if self.behind or self.sink_of == "after":
            ends["after"] = job.stage("after", [out], lambda f: f)
        if self.with_sink:
            job.sink(self.sink, ends[self.sink_of], table=str(world.tables / self.table))
        if self.reader is not None:
            new = job.stage("reader", [sources["a"]], lambda f: f, begin=self.reader)
            job.sink("read", new, table=str(world.tables / "read"))
        if self.with_count:
            counted = job.stage(
                "count",
                [ends.get("after", out) if self.behind else out],
                self._counted,
                output_mode=self.mode if not self.stateless else "append",
                shuffle_partitions=self.partitions,
                state_provider=self.provider,
                trigger=self.trigger,
            )
            job.sink("counts", counted, table=str(world.tables / "counts"))

    def _source(self, world: World, job: Job, name: str) -> Output:
        feed = world.feeds[self.path if name == "a" else name]
        columns = {"id": "int" if self.wider else "long", "ts": "long"}
        schema = ", ".join(f"{c} {kind}" for c, kind in columns.items())
        stream = (
            world.spark.readStream.schema(schema)
            .option("maxFilesPerTrigger", self.files)
            .json(str(feed.directory))
            .selectExpr("id", "timestamp_seconds(ts) AS ts", *(["'x' AS more"] if self.column else []))
        )
        return job.source(name, stream, outputs={"all": lambda f: f} if name == "a" else None)

    def _united(self, *frames: DataFrame) -> DataFrame:
        first, *rest = reversed(frames) if self.backwards else frames
        for frame in rest:
            first = first.unionByName(frame, allowMissingColumns=True)
        return first.select("id", "ts")

    def _counted(self, frame: DataFrame) -> DataFrame:
        late = frame.withWatermark("ts", self.watermark)
        if self.stateless:
            return late.selectExpr("id % 3 AS k", "1L AS n")
        if self.deduplicated:
            late = late.dropDuplicates(["id"])
        return late.groupBy(F.expr(self.key).alias("k")).agg(F.expr(self.value).alias("n"))


BASE = Variant()
CHANGES: Mapping[str, Variant] = {
    "inputs declared in another order": replace(BASE, order="ba"),
    "inputs in another order inside the function": replace(BASE, backwards=True),
    "both at once": replace(BASE, order="ba", backwards=True),
    "an input added": replace(BASE, third=True),
    "an input removed": replace(BASE, order="a"),
    "a stage added between two": replace(BASE, between=True),
    "a stage added after": replace(BASE, behind=True),
    "a stage added beside, at the cut": replace(BASE, reader="cut"),
    "a stage added beside, from the earliest": replace(BASE, reader="earliest"),
    "a stage in front that splits the path": replace(BASE, split=True),
    "an output rewired": replace(BASE, rewired=True),
    "a stage renamed": replace(BASE, union="v", sink_of="u"),
    "a sink renamed": replace(BASE, sink="rows"),
    "a sink moved to a stage after": replace(BASE, behind=True, sink_of="after"),
    "a sink dropped": replace(BASE, with_sink=False),
    "a sink with another table": replace(BASE, table="other"),
    "the stage with state left out": replace(BASE, with_count=False),
    "an aggregate by another key": replace(BASE, key="id % 2"),
    "another aggregate": replace(BASE, value="sum(id)"),
    "an operator with state added": replace(BASE, deduplicated=True),
    "the state taken out": replace(BASE, stateless=True),
    "the delay of the watermark": replace(BASE, watermark="1 minute"),
    "the output mode": replace(BASE, mode="append"),
    "the number of partitions": replace(BASE, partitions=3),
    "the state provider": replace(BASE, provider="rocksdb"),
    "a column added to a source": replace(BASE, column=True),
    "the type of a column of a source": replace(BASE, wider=True),
    "the path of a source": replace(BASE, path="c"),
    "an option of a source": replace(BASE, files=2),
    "the trigger of a stage": replace(BASE, trigger="1 second"),
    "the checkpoint mode": replace(BASE, checkpoint_mode="unaligned"),
    "nothing": BASE,
}


@dataclass
class World:
    """A root, its inputs and its tables."""

    spark: SparkSession
    base: Path
    feeds: dict[str, Feed] = field(init=False)
    written: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.tables = self.base / "tables"
        self.feeds = {n: Feed(self.spark, self.base / n, "id long, ts long") for n in "abc"}
        self.written = {n: [] for n in "abc"}

    def write(self, name: str, files: int) -> None:
        for _ in range(files):
            number = 1000 * "abc".index(name) + len(self.written[name])
            self.written[name].append(number)
            self.feeds[name].write({"id": number, "ts": number % 1000})

    def job(self, variant: Variant, failpoint: Callable[[str], None] = lambda _: None) -> Job:
        job = Job(
            "changes",
            root=str(self.base / "root"),
            spark=self.spark,
            interval="1h",
            keep=10,
            mode=variant.checkpoint_mode,
        )
        job.failpoint = failpoint
        variant.declare(self, job)
        return job

    def before(self, how: str) -> None:
        """Run the job as it is at first, and end it."""
        self.write("a", FILES)
        self.write("b", 1)
        self.job(BASE).start(available_now=True).await_termination()
        self.write("a", FILES)
        self.write("b", 2)
        if how == "savepoint":
            run = self.job(BASE).start()
            run.stop(savepoint="before")
            return
        reached = Event()

        def failpoint(point: str) -> None:
            if point == _POINT:
                reached.set()
                if how == "kill":
                    raise Killed(point)

        run = self.job(BASE, failpoint).start()
        assert reached.wait(300), "no batch within five minutes"
        try:
            run.stop()
        except AbsError:
            assert how == "kill"

    def lost_and_twice(self, variant: Variant) -> tuple[int, int]:
        want = [n for name, ids in self.written.items() if name in self._read(variant) for n in ids]
        lost = twice = 0
        if variant.with_sink and variant.table == "out":
            have = Counter(self._rows("out", "id"))
            want += [n for n in self.written["b"] if "b" not in variant.order and n in have]  # read before
            wanted = Counter(want)
            lost, twice = (wanted - have).total(), (have - wanted).total()
        if variant.with_count and variant.value == BASE.value and not variant.stateless:
            newest: dict[int, int] = {}
            for k, n in zip(self._rows("counts", "k"), self._rows("counts", "n"), strict=True):
                newest[k] = max(n, newest.get(k, 0))
            for k, n in Counter(i % 3 for i in want).items():
                lost += max(0, n - newest.get(k, 0))
                twice += max(0, newest.get(k, 0) - n)
        if variant.reader is not None:
            read = self._rows("read", "id")
            twice += len(read) - len(set(read))
            if read:
                tail = [n for n in self.written["a"] if n >= min(read)]
                lost += len(set(tail) - set(read))
        return lost, twice

    def _read(self, variant: Variant) -> str:
        return "".join(variant.order) + ("c" if variant.third else "")

    def _rows(self, table: str, column: str) -> list[int]:
        path = self.tables / table
        found: list[int] = DeltaTable(str(path)).to_pyarrow_table()[column].to_pylist()
        return found


def run(spark: SparkSession, base: Path, variant: Variant, how: str) -> tuple[str, str, int, int]:
    """Return what check says, what a start does, and rows lost and twice."""
    world = World(spark, base)
    world.before(how)
    said, final = "", variant
    told = "starts" if world.job(variant).check().ok else "refused"
    world.write("a", 2)
    if variant.third:
        world.write("c", 2)
    try:
        world.job(variant).start(available_now=True).await_termination()
        said = "starts"
    except (Refused, UsageError):
        said = "refused"
        final = BASE
        world.written["c"] = []
        world.job(BASE).start(available_now=True).await_termination()
    return (told, said, *world.lost_and_twice(final))


def session(scratch: Path) -> SparkSession:
    return spark_abs.spark_session(
        "changes",
        "local[2]",
        **{
            "spark.local.dir": str(scratch / "local"),
            "spark.sql.warehouse.dir": str(scratch / "warehouse"),
            "spark.sql.session.timeZone": "UTC",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        },
    )


def results(names: list[str]) -> Iterator[tuple[str, str, tuple[str, str, int, int]]]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        spark = session(Path(scratch))
        spark.sparkContext.setLogLevel("OFF")
        for number, name in enumerate(names or CHANGES):
            for how in HOW:
                yield name, how, run(spark, Path(scratch) / f"{number}-{how}", CHANGES[name], how)
        spark.stop()


def main(names: list[str]) -> None:
    bad = 0
    click.echo("| change | after a | `check` | start | lost | twice |\n|---|---|---|---|---|---|")
    for name, how, (told, said, lost, twice) in results(names):
        bad += bool(lost or twice or told != said)
        click.echo(f"| {name} | {how} | {told} | {said} | {lost} | {twice} |")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main(sys.argv[1:])
