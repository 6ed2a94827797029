"""Several queries of one root: a checkpoint has a part of each, whether it runs or not."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import spark_abs
from spark_abs.diagnosis.diagnoses import diagnoses
from spark_abs.diagnosis.gather import gather
from spark_abs.diagnosis.health import read_health
from spark_abs.errors import Refused, UsageError
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.plan.specs import JobSpec
from spark_abs.protocol.attempt import Attempt
from spark_abs.run import registration
from spark_abs.run_context import RunContext
from spark_abs.stages.snapshotter import Snapshotter
from spark_abs.store.clock import now_ms
from spark_abs.store.root import Root
from spark_abs.wrapped import foreach_batch
from tests.job_support import Feed
from tests.wrapped_support import SCHEMA, begin, command, covers, holds, ids, newest, running, stop, wait


class Pair:
    """Two queries of one root, each with an input and a table of its own."""

    def __init__(self, spark: SparkSession, base: Path) -> None:
        self.root = str(base / "root")
        self.feeds = {name: Feed(spark, base / f"in-{name}", SCHEMA) for name in ("a", "b")}
        self.tables = {name: str(base / f"out-{name}") for name in ("a", "b")}


def test_a_query_that_has_not_started_yet_is_part_of_a_savepoint(spark: SparkSession, tmp_path: Path) -> None:
    """It takes its recorded part along, so that a way back leaves its table with every row once."""
    pair = Pair(spark, tmp_path)
    for feed in pair.feeds.values():
        feed.write_all([[{"id": 1}], [{"id": 2}]])
    both = [begin(pair.feeds["a"].stream(), pair.root, "a", pair.tables["a"])]
    wait(partial(covers, pair.root, "a"), "a checkpoint of the first", both[0])
    assert command(pair.root, "before", both[0]).ok
    both += [begin(pair.feeds["b"].stream(), pair.root, "b", pair.tables["b"])]
    for name, query in zip(("a", "b"), both, strict=True):
        wait(partial(holds, pair.tables[name], [1, 2]), "what is there", query)
    wait(partial(covers, pair.root, "a", "b"), "a checkpoint of both", both[0])
    stop(pair.root, *both)

    a = begin(pair.feeds["a"].stream(), pair.root, "a", pair.tables["a"])
    pair.feeds["a"].write({"id": 3})
    wait(partial(holds, pair.tables["a"], [1, 2, 3]), "the first query is alone", a)
    answer = command(pair.root, "alone", a)
    assert answer.ok
    assert "'b' did not run and is as of checkpoint" in answer.message
    pair.feeds["b"].write({"id": 3})
    b = begin(pair.feeds["b"].stream(), pair.root, "b", pair.tables["b"])
    wait(partial(holds, pair.tables["b"], [1, 2, 3]), "the other one has come", b)
    stop(pair.root, a, b)

    spark_abs.open(pair.root).restore("alone")
    assert all(row <= 3 for row in ids(pair.tables["b"]))
    both = [begin(pair.feeds[n].stream(), pair.root, n, pair.tables[n]) for n in ("a", "b")]
    pair.feeds["b"].write({"id": 4})
    wait(lambda: 4 in ids(pair.tables["b"]), "the other one goes on", both[1])
    stop(pair.root, *both)
    assert (ids(pair.tables["a"]), ids(pair.tables["b"])) == ([1, 2, 3], [1, 2, 3, 4])

    spark_abs.open(pair.root).restore("before")  # the other one had not come, its table was not there
    assert ids(pair.tables["b"]) == []
    b = begin(pair.feeds["b"].stream(), pair.root, "b", pair.tables["b"])
    wait(partial(holds, pair.tables["b"], [1, 2, 3, 4]), "every row once", b)
    stop(pair.root, b)


def test_a_query_that_has_failed_keeps_no_savepoint_back(spark: SparkSession, tmp_path: Path) -> None:
    """It ended within a batch and makes no cut: a savepoint carries its recorded part on."""
    pair = Pair(spark, tmp_path)
    for feed in pair.feeds.values():
        feed.write({"id": 1})
    failing = pair.feeds["b"].stream().selectExpr("IF(id = 9, CAST(raise_error('nine') AS BIGINT), id) AS id")
    a = begin(pair.feeds["a"].stream(), pair.root, "a", pair.tables["a"])
    b = begin(failing, pair.root, "b", pair.tables["b"])
    wait(partial(covers, pair.root, "a", "b"), "a checkpoint of both", a)
    pair.feeds["b"].write({"id": 9})
    wait(lambda: not b.isActive, "the batch cannot be written")
    root = Root(pair.root)
    said = "unhealthy: query b does not run"
    wait(lambda: read_health(root, now_ms(), None, None).line == said, "health says so", a)
    found = {one.kind: one.said for one in diagnoses(gather(root, now_ms(), 30_000))}
    assert "Query b does not run, and others at this root do" in found["query-does-not-run"]
    answer = command(pair.root, "one", a)
    assert answer.ok
    assert "'b' did not run and is as of checkpoint" in answer.message
    stop(pair.root, a, b)


def test_a_query_that_runs_and_waits_for_rows_takes_part(spark: SparkSession, tmp_path: Path) -> None:
    """It wrote after its newest checkpoint, and another one has read that: only its own cut fits."""
    root, tables = (
        str(tmp_path / "root"),
        {name: str(tmp_path / f"out-{name}") for name in ("a", "b", "both")},
    )
    feeds = {name: Feed(spark, tmp_path / f"in-{name}", SCHEMA) for name in ("a", "b")}

    def start(name: str, interval: str) -> StreamingQuery:
        if name in feeds:
            return begin(feeds[name].stream(), root, name, tables[name], interval=interval)
        one, other = (spark.readStream.format("delta").load(tables[feed]) for feed in feeds)
        return begin(one.union(other), root, name, tables[name], interval=interval)

    def started(interval: str = "300ms") -> list[StreamingQuery]:
        queries = []
        for name, table in tables.items():
            queries.append(start(name, interval))
            wait(partial(DeltaTable.is_deltatable, table), "a table", queries[-1])
        return queries

    def feed(name: str, *rows: int, expected: list[int]) -> None:
        feeds[name].write(*({"id": row} for row in rows))
        wait(partial(holds, tables["both"], expected), "the rows of both")

    def all_run() -> bool:
        return read_health(Root(root), now_ms(), None, None).healthy

    for name, row in (("a", 1), ("b", 11)):
        feeds[name].write({"id": row})
    queries = started()
    feed("a", 2, expected=[1, 2, 11])
    feed("b", 12, expected=[1, 2, 11, 12])
    assert command(root, "first", queries[0]).ok
    stop(root, *queries)
    queries = started("1h")
    feed("b", 13, expected=[1, 2, 11, 12, 13])
    stop(root, *queries)

    queries = started()
    feed("a", 3, expected=[1, 2, 3, 11, 12, 13])
    wait(all_run, "all run", queries[0])
    answer = command(root, "second", queries[0])
    assert (answer.ok, answer.message) == (True, "completed")
    feed("b", 14, expected=[1, 2, 3, 11, 12, 13, 14])
    stop(root, *queries)
    spark_abs.open(root).restore("second")
    assert ids(tables["b"]) == [11, 12, 13]
    queries = started()
    wait(partial(holds, tables["both"], [1, 2, 3, 11, 12, 13, 14]), "every row once")
    assert command(root, "third", queries[0]).ok
    stop(root, *queries)

    spark_abs.open(root).restore("third")
    queries = started()
    feed("a", 4, expected=[1, 2, 3, 4, 11, 12, 13, 14])
    wait(all_run, "those with nothing to read since the restore run, too", queries[0])
    answer = command(root, "fourth", queries[0])
    assert (answer.ok, answer.message) == (True, "completed")
    stop(root, *queries)


def test_one_table_has_one_query_until_that_is_forgotten(spark: SparkSession, tmp_path: Path) -> None:
    """A symbolic link is no way round, nor that the other query does not run."""
    feed, root, table = Feed(spark, tmp_path / "in", SCHEMA), str(tmp_path / "root"), str(tmp_path / "out")
    link = tmp_path / "link"
    link.symlink_to(table)
    feed.write({"id": 1})
    with running(feed.stream(), root, "first", table) as first:
        wait(partial(holds, table, [1]), "its row", first)
        wait(partial(covers, root, "first"), "a checkpoint", first)
        second = begin(feed.stream(), root, "second", str(link))
        wait(lambda: not second.isActive, "the second is refused", first)
        assert "so does query 'first' of the same root" in str(second.exception())
        with pytest.raises(Refused, match="query 'first' runs"):
            spark_abs.open(root).forget("first")
        assert first.isActive
    alone = begin(feed.stream(), root, "second", str(link))
    wait(lambda: not alone.isActive, "the second is refused, though the first does not run")
    assert "spark-abs forget ROOT first" in str(alone.exception())
    stop(root)

    spark_abs.open(root).forget("first")
    with pytest.raises(UsageError, match="no query 'first'"):
        spark_abs.open(root).forget("first")
    with running(feed.stream(), root, "second", str(link)) as query:
        wait(partial(holds, table, [1, 1]), "its row", query)
        wait(partial(covers, root, "second"), "a checkpoint", query)
    found = newest(root)
    assert found is not None
    assert [s.stage for s in found.stages] == ["second"]


def test_a_query_that_starts_while_a_run_ends_begins_the_next_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failure: the query stops, and is started again before its run has ended."""
    waits, close, await_end = threading.Event(), Snapshotter.close, foreach_batch._Host.await_end

    def closed_late(self: Snapshotter) -> None:
        assert waits.wait(60), "the second start waits for the run"
        close(self)

    def awaited(self: foreach_batch._Host) -> None:
        waits.set()
        await_end(self)

    pair = Pair(spark, tmp_path)
    pair.feeds["a"].write({"id": 1})
    query = begin(pair.feeds["a"].stream(), pair.root, "a", pair.tables["a"])
    wait(partial(covers, pair.root, "a"), "a checkpoint", query)
    monkeypatch.setattr(Snapshotter, "close", closed_late)
    monkeypatch.setattr(foreach_batch._Host, "await_end", awaited)
    host = foreach_batch._hosts[pair.root]
    query.stop()
    wait(lambda: host._left, "no query is left")
    pair.feeds["a"].write({"id": 2})
    query = begin(pair.feeds["a"].stream(), pair.root, "a", pair.tables["a"])
    wait(partial(holds, pair.tables["a"], [1, 2]), "its row", query)
    assert not host.alive
    stop(pair.root, query)
    wait(lambda: pair.root not in foreach_batch._hosts, "the process forgets the run")


def test_queries_that_join_a_run_do_not_share_a_handle_on_its_checkpoints(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They join in threads of their own, at the same time, and a handle is for one thread."""
    threads: dict[Checkpoints, set[int]] = {}
    newest_on = Checkpoints.newest_on

    def noted(self: Checkpoints, attempt: Attempt) -> Manifest | None:
        threads.setdefault(self, set()).add(threading.get_ident())
        return newest_on(self, attempt)

    monkeypatch.setattr(Checkpoints, "newest_on", noted)
    pair = Pair(spark, tmp_path)
    for feed in pair.feeds.values():
        feed.write({"id": 1})
    queries = [begin(pair.feeds[n].stream(), pair.root, n, pair.tables[n]) for n in ("a", "b")]
    for name, query in zip(("a", "b"), queries, strict=True):
        wait(partial(holds, pair.tables[name], [1]), "its row", query)
    stop(pair.root, *queries)
    assert len(set.union(*threads.values())) >= 2
    assert [used for used in threads.values() if len(used) > 1] == []


def test_a_run_that_begins_slowly_keeps_no_query_of_another_root_back(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = Pair(spark, tmp_path / "slow"), Pair(spark, tmp_path / "other")
    began, may = threading.Event(), threading.Event()

    def begun(job: JobSpec, *args: Any, **options: Any) -> RunContext:
        if job.root.uri == slow.root:
            began.set()
            assert may.wait(60), "the other root waits for this one"
        return registration.begin(job, *args, **options)

    monkeypatch.setattr(foreach_batch, "begin", begun)
    queries = []
    for pair in (slow, other):
        pair.feeds["a"].write({"id": 1})
        queries.append(begin(pair.feeds["a"].stream(), pair.root, "a", pair.tables["a"]))
        wait(began.is_set, "the slow run begins", queries[0])
    wait(partial(holds, other.tables["a"], [1]), "its row", queries[0])
    assert ids(slow.tables["a"]) == []
    may.set()
    wait(partial(holds, slow.tables["a"], [1]), "its row, too", queries[0])
    for pair, query in zip((slow, other), queries, strict=True):
        stop(pair.root, query)
