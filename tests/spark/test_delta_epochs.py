"""Delta tables that show whole checkpoints only: every epoch in one commit, once, and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as t

import spark_abs
from spark_abs.errors import (
    CommitConflict,
    CommitStateUnknown,
    DamageError,
    Fenced,
    GraphError,
    Refused,
    TakenOver,
    UsageError,
)
from spark_abs.model import AttemptId, CheckpointId, RunId, SinkWriter, StageId, Version, channel_id
from spark_abs.plan.specs import Existing
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.delta import epoch_files
from spark_abs.sinks.delta import epoch_sink as delta_epochs
from spark_abs.sinks.delta import marks as delta_marks
from spark_abs.sinks.delta import rollback as delta_back
from spark_abs.sinks.delta.create import ensure_sink
from spark_abs.sinks.delta.epoch_sink import DeltaEpochSink
from spark_abs.sinks.delta.kind import EpochVersions
from spark_abs.sinks.delta.options import Delta, EpochTable
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.sinks.sending.bounds import cuts_of
from spark_abs.sinks.two_phase import Rows
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Commit, Table
from spark_abs.testing import two_phase
from tests.job_support import Feed, eventually, manifests
from tests.spark.conftest import Start

SCHEMA = t.StructType([t.StructField("id", t.LongType()), t.StructField("text", t.StringType())])
CODE = [module.__file__ or "" for module in (delta_epochs, delta_back, delta_marks, epoch_files)]
JOB = "job"
UNSAID = "the log of the table no longer says which version belongs to that checkpoint"
BY_DELTA = os.environ.get("CONTRACT") == "1"
"""Whether tables that Delta's own writer writes are checked: a step takes it ten seconds. `make soak`
does; `tests/crash/test_delta.py` kills at their commits each time."""
Make = Callable[..., DeltaEpochSink]
LAYOUTS = {
    "plain": Delta("t"),
    "merged": Delta("t", key="id"),
    "partitions": Delta("t", partition_by="text"),
    "clusters, merged": Delta("t", cluster_by="id", key="id"),
}


def layouts(*long: str) -> list[object]:
    """Return the names of all layouts, of which some are for long runs."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in LAYOUTS]


class Some(Rows):
    """Rows with these ids and one text."""

    def __init__(self, text: str, *ids: int) -> None:
        texts = pa.array([text] * len(ids), pa.string())
        self._batch = pa.record_batch({"id": pa.array(ids, pa.int64()), "text": texts})
        self.schema, self.count = self._batch.schema, self._batch.num_rows

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for start in range(0, self.count, 2):
            yield self._batch.slice(start, 2)


def mark(number: int) -> Mark:
    """Checkpoint `number`, whose cut is the entry of ten times that."""
    return Mark(AttemptId(1), CheckpointId(number), Version(10 * number))


class Sending:
    """A sink of a root, as a run uses it: epochs in a row."""

    def __init__(self, sink: DeltaEpochSink, run: int = 1, root: str = "a", name: str = "out") -> None:
        self.sink, self.owner = sink, Owner(root, JOB, name, RunId(run))
        found = sink.recover(self.owner)
        self.first, self.number = found is None, found.checkpoint if found is not None else 0

    def send(self, rows: Rows) -> None:
        after, self.number = mark(self.number), CheckpointId(self.number + 1)
        self.sink.commit(Epoch(self.owner, after, mark(self.number), first=self.first), rows)
        self.first = False

    def back(self, number: int, keep: bool = False) -> None:
        self.sink.abort(self.owner, mark(number), keep=keep)
        self.number = CheckpointId(number)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "table")


@pytest.fixture
def make(spark: SparkSession, tmp_path: Path, uri: str) -> Make:
    def made(delta: Delta = LAYOUTS["plain"], root: str = "a", take_over: bool = False) -> DeltaEpochSink:
        ensure_sink(Place(uri), SCHEMA, delta, spark)
        config = EpochTable(uri, tuple(delta.key), take_over)
        return DeltaEpochSink(config, Root(str(tmp_path / root)), lambda: spark)

    return made


def rows(uri: str, version: int | None = None) -> list[tuple[int, str | None]]:
    table = DeltaTable(uri, version=version).to_pyarrow_table()
    return sorted(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True), key=repr)


def ids(uri: str, version: int | None = None) -> list[int]:
    return [number for number, _ in rows(uri, version)]


if BY_DELTA:

    @pytest.mark.timeout(7200)
    @pytest.mark.parametrize("layout", ["clusters, merged", "partitions"])
    def test_it_keeps_the_contract_of_two_phase_sinks(make: Make, uri: str, layout: str) -> None:
        make(LAYOUTS[layout])
        two_phase.check(lambda: make(LAYOUTS[layout]), lambda: rows(uri), modules=CODE, every=31)


@pytest.mark.parametrize("layout", layouts("partitions"))
def test_each_checkpoint_is_a_version_and_the_table_goes_back_to_it(
    make: Make, uri: str, tmp_path: Path, layout: str
) -> None:
    """Of rows of one key the last one of an epoch counts, if there is a key."""
    delta = LAYOUTS[layout]
    merged = bool(delta.key)
    sending = Sending(make(delta))
    sending.send(Some("a", 1, 2, 1))
    sending.send(Some("b"))
    sending.send(Some("c", 2, 3))
    first = [(1, "a"), (2, "a")] if merged else [(1, "a"), (1, "a"), (2, "a")]
    third = [(1, "a"), (2, "c"), (3, "c")] if merged else [*first, (2, "c"), (3, "c")]
    assert rows(uri) == third

    def at(number: int) -> list[tuple[int, str | None]] | None:
        versions = EpochVersions(EpochTable(uri, tuple(delta.key)), Root(str(tmp_path / "a")).storage)
        version = versions.version_at(sending.owner, mark(number), ahead=True)
        return None if version is None else rows(uri, version)

    assert [at(number) for number in (1, 2, 3, 4)] == [first, first, third, None]
    newer = Sending(make(delta), run=2)
    with pytest.raises((Fenced, CommitConflict)):
        sending.send(Some("late", 9))
    newer.back(1)
    assert rows(uri) == first
    newer.send(Some("d", 2))
    again = [(1, "a"), (2, "d")] if merged else sorted([*first, (2, "d")])
    assert rows(uri) == again
    assert (at(1), at(2)) == (first, again)
    newer.back(0)
    assert rows(uri) == []
    assert not list((tmp_path / "a").rglob("*.parquet"))


def test_killed_between_restore_and_its_mark_the_same_call_ends_it(
    make: Make, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is not plain has two commits there: the rows are back, and the mark is not yet."""
    delta = LAYOUTS["partitions"]
    sending = Sending(make(delta))
    sending.send(Some("a", 1))
    sending.send(Some("b", 2))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(delta_back, "commit_mark", killed)
        with pytest.raises(KeyboardInterrupt):
            sending.back(1)
    assert (ids(uri), make(delta).mark(sending.owner)) == ([1], mark(2))
    again = Sending(make(delta), run=2)
    again.back(1)
    assert (ids(uri), make(delta).mark(again.owner)) == ([1], mark(1))
    again.send(Some("c", 3))
    assert ids(uri) == [1, 3]


def older(version: int, attempt: int = 1) -> Mark:
    return Mark(AttemptId(attempt), CheckpointId(0), Version(version))


@pytest.mark.parametrize("layout", layouts("partitions", "clusters, merged"))
def test_before_its_first_epoch_a_sink_has_nothing(make: Make, uri: str, layout: str) -> None:
    """Epochs begin with the entry after 10: a mark of any attempt at or before that is before them all."""
    delta = LAYOUTS[layout]
    ensure_sink(Place(uri), SCHEMA, delta, SparkSession.active())
    SparkSession.active().sql(f"INSERT INTO delta.`{uri}` VALUES (99, 'theirs')")
    sending = Sending(make(delta))
    sending.first, sending.number = True, CheckpointId(1)
    sending.send(Some("a", 1))
    sending.send(Some("b", 2))
    assert make(delta).why_not(sending.owner, older(15)) == UNSAID
    sending.sink.abort(sending.owner, older(5), keep=False)
    assert ids(uri) == [99]
    sending.sink.commit(Epoch(sending.owner, older(5), mark(4)), Some("c", 3))
    assert make(delta).why_not(sending.owner, older(8)) == UNSAID
    sending.sink.abort(sending.owner, older(5), keep=True)
    sending.sink.commit(Epoch(sending.owner, older(5), mark(5)), Some("c", 4))
    assert ids(uri) == [3, 4, 99]
    again = Sending(make(delta), run=2)
    again.sink.abort(again.owner, older(0, attempt=2), keep=False)
    assert (ids(uri), make(delta).mark(again.owner)) == ([99], older(0, attempt=2))


def test_the_beginning_is_not_known_if_the_log_is_short_or_another_sink_has_written(
    make: Make, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another name, which earlier versions took, the root may have written what a restore undoes."""
    sending = Sending(make())
    sending.first, sending.number = True, CheckpointId(1)
    sending.send(Some("a", 1))
    began = DeltaTable(uri).version()
    assert make().why_not(sending.owner, older(5)) == ""
    with monkeypatch.context() as patched:
        patched.setattr(delta_epochs, "notes_of_root", lambda *_: ())
        named = Sending(make(), name="other")
    named.first = True
    named.send(Some("b", 2))
    assert make().why_not(sending.owner, older(5)) == UNSAID
    DeltaTable(uri).create_checkpoint()
    for version in range(began):
        (Path(uri) / "_delta_log" / f"{version:020}.json").unlink()
    assert make().why_not(sending.owner, older(5)) == UNSAID


def test_rows_of_another_root_stay(make: Make, uri: str) -> None:
    one, other = Sending(make()), Sending(make(root="b"), root="b")
    one.send(Some("a", 1))
    other.send(Some("b", 10))
    one.send(Some("a", 2))
    other.send(Some("b", 11))
    assert make().mark(one.owner) == mark(2)
    one.back(1)
    assert ids(uri) == [1, 10, 11]
    one.send(Some("a", 3))
    other.send(Some("b", 12))
    assert ids(uri) == [1, 10, 11, 12, 3]


def test_a_root_that_takes_over_fences_the_other(make: Make, uri: str) -> None:
    lost = Sending(make())
    lost.send(Some("a", 1))
    new = Sending(make(root="b", take_over=True), root="b")
    with pytest.raises(TakenOver):
        lost.send(Some("a", 2))
    with pytest.raises(TakenOver):
        Sending(make(), run=2)
    new.send(Some("b", 10))
    assert ids(uri) == [1, 10]


def test_a_store_that_fails_right_after_a_commit_costs_no_rows(
    make: Make, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending = Sending(make())
    sending.send(Some("a", 1))
    refresh, commit = Table.refresh, Table.commit_next

    def committing(table: Table, what: Commit) -> Version:
        def away(_: Table) -> None:
            raise OSError("503")

        with monkeypatch.context() as patched:
            patched.setattr(Table, "refresh", away)
            return commit(table, what)

    with monkeypatch.context() as patched:
        patched.setattr(Table, "commit_next", committing)
        with pytest.raises(CommitStateUnknown):
            sending.send(Some("a", 2))
    assert Table.refresh is refresh
    again = Sending(make(), run=2)
    assert (again.number, ids(uri)) == (2, [1, 2])


def test_what_others_have_changed_is_not_undone(make: Make, uri: str) -> None:
    sending = Sending(make())
    sending.send(Some("a", 1))
    sending.send(Some("a", 2))
    write_deltalake(uri, pa.table({"id": [99], "text": ["theirs"]}), mode="append")
    with pytest.raises(Refused, match="others have changed rows of the table since"):
        sending.back(1)
    sending = Sending(make(), run=2)
    sending.back(1, keep=True)
    assert ids(uri) == [1, 2, 99]
    sending.send(Some("a", 2))
    assert ids(uri) == [1, 2, 2, 99]


def test_a_compaction_stands_in_no_way_and_a_vacuum_is_said(make: Make, uri: str) -> None:
    sending = Sending(make())
    for number in (1, 2, 3):
        sending.send(Some("a", number))
    DeltaTable(uri).optimize.compact()
    sending.send(Some("a", 4))
    sending.back(2)
    assert ids(uri) == [1, 2]
    sending.send(Some("a", 5))
    DeltaTable(uri).optimize.compact()
    DeltaTable(uri).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert "are gone" in make().why_not(sending.owner, mark(1))
    with pytest.raises(Refused, match="are gone"):
        sending.back(1)
    Sending(make(), run=2).send(Some("a", 6))
    assert ids(uri) == [1, 2, 5, 6]


def test_a_table_is_not_written_both_ways(spark: SparkSession, make: Make, uri: str, tmp_path: Path) -> None:
    sending = Sending(make())
    sending.send(Some("a", 1))
    writer = SinkWriter(JOB, "a", StageId("s"), "out", AttemptId(1))
    batches = DeltaSink(Root(str(tmp_path / "a")), uri, writer=writer, run=RunId(2), session=lambda: spark)
    with pytest.raises(Refused, match="visible='checkpoint' again"):
        batches.begin()
    other = SinkWriter(JOB, "b", StageId("s"), "out", AttemptId(1))
    DeltaSink(Root(str(tmp_path / "b")), uri, writer=other, run=RunId(1), session=lambda: spark).begin()
    with pytest.raises(Refused, match="visible='batch' again"):
        Sending(make(root="b"), root="b", run=2)


def test_a_table_keeps_the_name_of_its_sink(
    spark: SparkSession, make: Make, uri: str, tmp_path: Path
) -> None:
    """What the old name had not sent yet would be lost."""
    Sending(make()).send(Some("a", 1))
    with pytest.raises(Refused, match=r"sink 'out' has written .*under that name again"):
        Sending(make(), run=2, name="renamed")
    writer = SinkWriter(JOB, "a", StageId("s"), "renamed", AttemptId(1))
    batches = DeltaSink(Root(str(tmp_path / "a")), uri, writer=writer, run=RunId(2), session=lambda: spark)
    with pytest.raises(Refused, match=r"sink 'out' wrote .*visible='checkpoint' again"):
        batches.begin()
    Sending(make(root="b"), root="b", name="renamed").send(Some("b", 2))
    assert ids(uri) == [1, 2]


def test_a_log_that_does_not_go_back_to_the_mark_is_said(make: Make, uri: str) -> None:
    sending = Sending(make())
    sending.send(Some("a", 1))
    last = DeltaTable(uri).version()
    write_deltalake(uri, pa.table({"id": [99], "text": ["theirs"]}), mode="append")
    DeltaTable(uri).create_checkpoint()
    for version in range(last + 1):
        (Path(uri) / "_delta_log" / f"{version:020}.json").unlink()
    with pytest.raises(DamageError, match="does not go back to the last commit of sink 'out'"):
        Sending(make(), run=2)


def declare(spark: SparkSession, root: str, feed: Feed, base: Path) -> spark_abs.Job:
    def count(frame: DataFrame) -> DataFrame:
        return frame.groupBy((F.col("id") % 3).alias("key")).agg(F.count("*").alias("n"))

    job = spark_abs.Job("shown", root=root, spark=spark, interval="300ms")
    numbers = job.source("numbers", feed.stream())
    counts = job.stage("counts", [numbers], count, output_mode="update", shuffle_partitions=1)
    job.sink("each", numbers, table=str(base / "each"))
    job.sink("rows", numbers, table=spark_abs.Delta(str(base / "rows"), visible="checkpoint"))
    merged = spark_abs.Delta(str(base / "merged"), key="key", cluster_by="key", visible="checkpoint")
    job.sink("merged", counts, table=merged)
    return job


def shown(base: Path, versions: dict[str, int] | None = None) -> tuple[list[int], dict[int, int]]:
    at = versions or {}
    numbers = DeltaTable(str(base / "rows"), version=at.get("rows")).to_pyarrow_table()["id"].to_pylist()
    table = DeltaTable(str(base / "merged"), version=at.get("merged")).to_pyarrow_table()
    found: Sequence[tuple[int, int]] = [(row["key"], row["n"]) for row in table.to_pylist()]
    assert len(dict(found)) == len(found)
    return sorted(numbers), dict(found)


def expected(upto: int) -> tuple[list[int], dict[int, int]]:
    return list(range(upto)), {key: n for key in range(3) if (n := len(range(key, upto, 3)))}


def test_tables_of_a_job_show_checkpoints_and_go_back_together(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    feed, root, base = Feed(spark, tmp_path / "in", "id long"), str(tmp_path / "root"), tmp_path
    feed.write(*({"id": number} for number in range(4)))
    run = start(declare(spark, root, feed, base))
    eventually(run, lambda: shown(base) == expected(4), "the first file in both tables")
    run.stop(savepoint="early")
    feed.write(*({"id": number} for number in range(4, 9)))
    start(declare(spark, root, feed, base), available_now=True).await_termination()
    assert shown(base) == expected(9)

    handle = spark_abs.open(root, spark)
    tables = handle.tables("early").to_pylist()
    assert [row["sink"] for row in tables] == ["each", "merged", "rows"]
    assert shown(base, {row["sink"]: row["version"] for row in tables}) == expected(4)
    assert handle.read("merged", "early").count() == 3
    handle.views("early", prefix="early_")
    assert spark.sql("SELECT count(*) AS n FROM early_rows").head()["n"] == 4  # type: ignore[index]

    said = "\n".join(str(step) for step in spark_abs.open(root, spark).restore("early").plan.steps)
    assert "ReturnOutside(sink='rows'" in said
    assert shown(base) == expected(4)
    start(declare(spark, root, feed, base), available_now=True).await_termination()
    assert shown(base) == expected(9)
    spark_abs.open(root, spark).restore("latest")
    assert shown(base) == expected(9)
    assert "after each checkpoint" in str(declare(spark, root, feed, base).explain())


def declare_copies(
    spark: SparkSession,
    root: str,
    feed: Feed,
    base: Path,
    *names: str,
    retained: int = 1,
    existing: Existing | None = None,
) -> spark_abs.Job:
    """Declare sinks of one output: of each batch, and of each checkpoint."""
    job = spark_abs.Job("copies", root=root, spark=spark, keep=retained)
    numbers = job.source("numbers", feed.stream())
    job.sink("each", numbers, table=str(base / "each"))
    for name in names:
        table = spark_abs.Delta(str(base / name), visible="checkpoint")
        job.sink(name, numbers, table=table, existing=existing)
    return job


def test_a_sink_that_has_left_the_job_is_not_waited_for(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """Its output stays, as another sink takes it."""
    feed, root, base = Feed(spark, tmp_path / "in", "id long"), str(tmp_path / "root"), tmp_path

    def run(*names: str) -> None:
        feed.write({"id": len(feed.files)})
        job = declare_copies(spark, root, feed, base, *names, retained=10)
        start(job, available_now=True).await_termination()

    def named(checkpoint: str | int = "latest") -> list[str]:
        found: list[str] = spark_abs.open(root, spark).tables(checkpoint)["sink"].to_pylist()
        return found

    run("gone", "stays")
    both = manifests(root)[-1]
    assert named() == ["each", "gone", "stays"]
    run("stays")
    assert (named(), named(both.id)) == (["each", "stays"], ["each", "gone", "stays"])
    handle = spark_abs.open(root, spark)
    assert handle.views(prefix="left_")["view"].to_pylist() == ["left_each", "left_stays"]
    with pytest.raises(UsageError, match=r"has no sink 'gone': it has each, stays$"):
        handle.read("gone")
    spark_abs.open(root, spark).restore("latest")  # it comes to every sink, also to those that have left
    assert named() == ["each", "stays"]

    # One that is still to come to it is waited for.
    run("gone", "stays")
    state = Control.open(Root(root)).state
    assert state.newest_run == manifests(root)[-1].run
    owner = Owner(state.root, state.job, "gone", state.newest_run)
    sink = DeltaEpochSink(EpochTable(str(base / "gone")), Root(root), lambda: spark)
    (cut,) = cuts_of([both], channel_id(StageId("numbers"), "main"))
    sink.abort(owner, cut, keep=True)
    with pytest.raises(Refused, match=r"sink 'gone' writes the rows .* ask again"):
        named()


def test_a_sink_for_which_rows_were_not_kept_is_refused_at_the_start(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """It was away for longer than checkpoints are kept, and its output stayed a channel."""
    feed, root, base = Feed(spark, tmp_path / "in", "id long"), str(tmp_path / "root"), tmp_path

    def run(*names: str) -> None:
        feed.write({"id": len(feed.files)})
        start(declare_copies(spark, root, feed, base, *names), available_now=True).await_termination()

    run("away", "stays")
    run("stays")
    run("stays")
    with pytest.raises(Refused, match=r"sink 'away' has sent rows up to checkpoint .* Give it another name"):
        run("away", "stays")
    run("another", "stays")
    found = {name: DeltaTable(str(base / name)).to_pyarrow_table()["id"] for name in ("another", "stays")}
    assert {name: sorted(column.to_pylist()) for name, column in found.items()} == {
        "another": [3, 4],
        "stays": [0, 1, 2, 3, 4],
    }


@pytest.mark.parametrize("before", [(), ("old",)], ids=str)
def test_a_restore_to_before_a_sink_came_takes_back_all_that_it_has_sent(
    spark: SparkSession, tmp_path: Path, start: Start, before: tuple[str, ...]
) -> None:
    """Its output was no channel then, or one in which the sink has begun later."""
    feed, root, base = Feed(spark, tmp_path / "in", "id long"), str(tmp_path / "root"), tmp_path
    write_deltalake(str(base / "new"), pa.table({"id": [99]}))

    def run(*names: str) -> None:
        job = declare_copies(spark, root, feed, base, *names, existing="append")
        start(job, available_now=True).await_termination()

    def numbers() -> list[int]:
        found: list[int] = DeltaTable(str(base / "new")).to_pyarrow_table()["id"].to_pylist()
        return sorted(found)

    feed.write({"id": 0})
    first = start(declare_copies(spark, root, feed, base, *before))
    first.query("numbers").processAllAvailable()
    first.savepoint("release")
    first.stop()
    feed.write({"id": 1})
    run(*before)
    for number in (2, 3):
        feed.write({"id": number})
        run(*before, "new")
    assert numbers() == [2, 3, 99]
    for _ in range(2):
        spark_abs.open(root, spark).restore("release")
        assert numbers() == [99]
        run(*before, "new")
        assert numbers() == [1, 2, 3, 99]


def test_rows_of_a_stage_that_replaces_them_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(spark, tmp_path / "in", "id long")
    job = spark_abs.Job("all", root=str(tmp_path / "root"), spark=spark)
    every = job.stage("every", [feed.stream()], lambda f: f.groupBy("id").count(), output_mode="complete")
    job.sink("all", every, table=spark_abs.Delta(str(tmp_path / "all"), visible="checkpoint"))
    with pytest.raises(GraphError, match="a table with visible='batch'"):
        job.graph()
