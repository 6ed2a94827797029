"""State on another number of shuffle partitions: nobody sees it in the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

import spark_abs
from spark_abs.errors import Refused, UsageError
from spark_abs.job import Job
from spark_abs.manifest import Manifest
from spark_abs.model import ProviderName, StageId
from spark_abs.plan.specs import Output, Stage
from spark_abs.restore.steps import Rescale
from spark_abs.spark import session as session_module
from tests.job_support import Feed, assert_tables_at_every_cut, manifests
from tests.root_support import with_failpoint
from tests.spark.conftest import Start, killed_at
from tests.spark.shapes import (
    DISTINCT,
    OUTER,
    SCHEMA,
    VISITS,
    Shape,
    behind,
    clicks_of,
    in_time,
    orders_of,
    windows,
)

STATEFUL = ("windows_rocksdb", "calls")


def follow(
    key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState
) -> Iterator[tuple[Any, ...]]:
    """Count the rows of a visit, and let it out 40 seconds of event time after its last row."""
    if state.hasTimedOut:
        yield key[0], *state.get[:2]
        state.remove()
        return
    n, v, last = state.get if state.exists else (0, 0, 0)
    for row in rows:
        n, v, last = n + 1, v + row.v, max(last, round(row.ts.timestamp() * 1000))
    state.update((n, v, last))
    state.setTimeoutTimestamp(last + 40_000)


def _calls(job: Job, clicks: Stage, orders: Stage) -> Mapping[str, Output]:
    def count(frame: DataFrame) -> DataFrame:
        return spark_abs.flat_map_groups_with_state(
            in_time(frame),
            "visit",
            follow,
            "n long, v long, last long",
            "visit long, n long, v long",
            timeout="event-time",
            key_groups=5,
        )

    return {"calls": job.stage("calls", [clicks], count)}


CALLS = Shape(
    _calls,
    {
        "calls": f"""
            SELECT checkpoint, visit, count(*) AS n, sum(v) AS v FROM {behind("calls", "clicks")}
            GROUP BY checkpoint, visit, watermark HAVING max(ts) + INTERVAL 40 SECONDS < watermark"""
    },
)


def partitions(manifest: Manifest) -> list[int]:
    snapshots = [manifest.stage(StageId(stage)) for stage in STATEFUL]
    assert all(
        s is not None and {o.partitions for o in s.operators} == {s.shuffle_partitions} for s in snapshots
    )
    return [s.shuffle_partitions for s in snapshots if s is not None]


def test_two_partitions_become_five_and_three_and_all_tables_are_what_they_must_be(
    spark: SparkSession, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aggregation, and a function with timeouts; a restore lacks a jar, and one is killed."""
    root, tables = str(tmp_path / "root"), tmp_path / "tables"
    feed, shapes = Feed(spark, tmp_path / "clicks", SCHEMA), (windows("rocksdb"), CALLS)

    def declare() -> Job:
        job = Job("spread", root=root, spark=spark, interval="1h", keep=1000)
        clicks = job.source("clicks", feed.stream())
        for shape in shapes:
            shape.add(job, clicks, clicks, tables)
        return job

    def read_files(number: int, savepoint: str) -> None:
        for _ in range(number):
            feed.write(*clicks_of(len(feed.files)))
        run = start(declare())
        for stage in ("clicks", *STATEFUL):
            run.query(stage).processAllAvailable()
        run.stop(savepoint=savepoint)

    read_files(3, "two")
    plan = spark_abs.open(root).restore("two", shuffle_partitions=5, dry_run=True).plan
    spread = {
        step.stage: f"restore.{number}.Rescale"
        for number, step in enumerate(plan.steps, 1)
        if isinstance(step, Rescale)
    }
    assert (set(spread), plan.needs_spark) == (set(STATEFUL), True)
    first, second = spread

    files = sorted(Path(root).rglob("*"))
    with monkeypatch.context() as far:
        far.setattr(session_module, "connectors", lambda uris: ["org.example:store:1.0"])
        with pytest.raises(UsageError, match=r"lacks org\.example:store:1\.0"):
            spark_abs.open(root, spark).restore("two", shuffle_partitions=5)
    assert sorted(Path(root).rglob("*")) == files

    killed_at(
        f"{spread[second]}.after",
        lambda kill: with_failpoint(root, kill, spark).restore("two", shuffle_partitions=5),
    )
    # As if Spark had been killed in the first before it recorded what it did: its half is thrown away.
    (step,) = [s for s in plan.steps if isinstance(s, Rescale) and s.stage == first]
    for name in (f"{step.batch}", f".{step.batch}.crc"):
        Path(root, step.directory, "commits", name).unlink()
    finished = {path: path.stat().st_ctime_ns for path in Path(root, "native/2", second).rglob("*")}
    spark_abs.open(root, spark).restore("two", shuffle_partitions=5)
    assert {path: path.stat().st_ctime_ns for path in finished} == finished
    read_files(3, "five")
    spark_abs.open(root, spark).restore("five", shuffle_partitions=dict.fromkeys(STATEFUL, 3))
    read_files(2, "three")

    queries = {sink: query for shape in shapes for sink, query in shape.queries.items()}
    found = assert_tables_at_every_cut(spark, root, {"clicks": feed}, queries, tables)
    named = {m.name: partitions(m) for m in manifests(root)}
    assert named == {"two": [2, 2], "five": [5, 5], "three": [3, 3]}
    assert sum(stage.dropped_late for manifest in found for stage in manifest.stages) == 0


@pytest.mark.long
def test_state_of_sparks_own_operators_is_spread_also_where_it_was_in_another_provider(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """Deduplication, an outer join, transformWithState; windows go from the HDFS-backed store first."""
    root, tables = str(tmp_path / "root"), tmp_path / "tables"
    clicks, orders = Feed(spark, tmp_path / "clicks", SCHEMA), Feed(spark, tmp_path / "orders", SCHEMA)
    stages = ("windows", "distinct", "outer_join", "visits")

    def run(provider: ProviderName, files: int, savepoint: str) -> dict[str, str]:
        for _ in range(files):
            clicks.write(*clicks_of(len(clicks.files)))
            orders.write(*orders_of(len(orders.files)))
        shapes = (windows(provider, "windows"), DISTINCT, OUTER, VISITS)
        job = Job("spread", root=root, spark=spark, interval="1h", keep=1000)
        sources = (job.source("clicks", clicks.stream()), job.source("orders", orders.stream()))
        for shape in shapes:
            shape.add(job, *sources, tables)
        running = start(job)
        for stage in ("clicks", "orders", *stages):
            running.query(stage).processAllAvailable()
        running.stop(savepoint=savepoint)
        return {sink: query for shape in shapes for sink, query in shape.queries.items()}

    run("hdfs", 3, "two")
    with pytest.raises(
        Refused, match=r"stage 'windows' cannot go .* in RocksDB only: .*keep_in\('windows', 'r"
    ):
        spark_abs.open(root, spark).restore("two", shuffle_partitions=3)
    spark_abs.open(root, spark).edit("two").keep_in("windows", "rocksdb").write("moved")
    spark_abs.open(root, spark).restore("moved", shuffle_partitions=3)
    queries = run("rocksdb", 3, "three")
    assert_tables_at_every_cut(spark, root, {"clicks": clicks, "orders": orders}, queries, tables)
    (last,) = [m for m in manifests(root) if m.name == "three"]
    found = [last.stage(StageId(stage)) for stage in stages]
    assert {o.partitions for s in found if s is not None for o in s.operators} == {3}
