"""The writing end: exact commits, repeats, races with the agent, fences."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import types as t

from spark_abs.channels.files import Written
from spark_abs.channels.writer import ChannelWriter, check_channel, create_channel
from spark_abs.errors import CommitConflict, DamageError, Fenced, UsageError
from spark_abs.model import (
    NO_BATCH,
    AttemptId,
    BatchId,
    ChannelId,
    CheckpointId,
    RunId,
    StageId,
    run_app_id,
)
from spark_abs.store.fence import fence_attempt
from spark_abs.store.root import Root
from spark_abs.store.table import Table
from tests.channel_support import JOB, NUMBERS, barrier, make_writer, numbers

NOTHING = Written()


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(str(tmp_path))


def batch(number: int) -> BatchId:
    return BatchId(number)


def test_a_batch_is_one_entry_rows_or_not(root: Root) -> None:
    writer = make_writer(root)
    full = writer.commit_batch(numbers(root, "a.main", [1, 2]), batch(0), watermark_ms=5, offsets="v1\n")
    empty = writer.commit_batch(NOTHING, batch(1), cancel=CheckpointId(3))
    assert (full.entry.rows, full.entry.watermark_ms, full.fresh) == (2, 5, True)
    assert (empty.entry.rows, empty.entry.cancel, empty.entry.version) == (0, 3, full.entry.version + 1)
    # as built on commit, and as read from the log
    assert writer.log.find(lambda entry: entry.batch == 0) == full.entry
    found = writer.log.commit_of(batch(1))
    assert found is not None
    assert (found[0], found[1].cancel) == (empty.entry.version, 3)
    assert writer.log.commit_of(batch(2)) is None


def test_a_repeated_batch_is_told_what_stands(root: Root) -> None:
    """Killed after its commit, a batch runs again with other files and perhaps another barrier at hand."""
    before = make_writer(root).commit_batch(numbers(root, "a.main", [1]), batch(0), barrier=barrier(1))
    again = make_writer(root).commit_batch(numbers(root, "a.main", [1]), batch(0), barrier=barrier(2))
    assert (again.fresh, again.entry) == (False, before.entry)
    assert DeltaTable(root.at("channels/a.main")).count() == 1


def test_the_agent_wins_and_the_batch_sees_its_barrier_first(root: Root) -> None:
    """Batch and agent decide by the same version; the loser looks again and completes the other's barrier."""
    first, second = make_writer(root, output="main"), make_writer(root, output="late")
    agent = make_writer(root, output="main")
    at = first.refresh()
    seen = agent.refresh()
    agent.commit_barrier(barrier(1), at=seen)  # killed here: the barrier is on one output of two
    with pytest.raises(CommitConflict):
        first.commit_batch(NOTHING, batch(0), barrier=barrier(2), at=at)
    (between,) = first.log.after(at)
    assert between.barrier == barrier(1)
    assert between.batch == NO_BATCH
    completed = second.commit_barrier(barrier(1))
    repeated = second.commit_barrier(barrier(1))
    assert (completed.fresh, repeated.fresh) == (True, False)
    assert first.commit_batch(NOTHING, batch(0), barrier=barrier(2), at=first.refresh()).fresh
    for writer in (first, second):
        writer.commit_batch(NOTHING, batch(0), barrier=barrier(2))
        assert [e.barrier for e in writer.log.after(at)] == [barrier(1), barrier(2)]


def test_the_batch_wins_and_the_barrier_is_void(root: Root) -> None:
    batches, agent = make_writer(root), make_writer(root)
    seen = agent.refresh()
    batches.commit_batch(NOTHING, batch(0), at=batches.refresh())
    with pytest.raises(CommitConflict):
        agent.commit_barrier(barrier(1), at=seen)
    assert batches.newest().marker is None


def test_commits_of_others_do_not_stop_a_batch_that_was_decided(root: Root) -> None:
    """OPTIMIZE between two batches moves the version on; without `at` the commit takes the next one."""
    writer = make_writer(root)
    writer.commit_batch(numbers(root, "a.main", [1]), batch(0))
    writer.commit_batch(numbers(root, "a.main", [2]), batch(1))
    DeltaTable(root.at("channels/a.main")).optimize.compact()
    standing = writer.commit_batch(numbers(root, "a.main", [3]), batch(2))
    assert [e.batch for e in writer.log.after(standing.entry.version)] == []
    assert DeltaTable(root.at("channels/a.main")).count() == 3


def test_newest_says_where_a_restart_stands(root: Root) -> None:
    writer = make_writer(root)
    assert (writer.newest().batch, writer.newest().epoch) == (NO_BATCH, 0)
    writer.commit_batch(NOTHING, batch(0), barrier=barrier(4))
    writer.commit_batch(NOTHING, batch(1), cancel=CheckpointId(5))
    last = writer.commit_batch(NOTHING, batch(2))
    newest = make_writer(root).newest()
    assert (newest.version, newest.batch, newest.epoch) == (last.entry.version, 2, 5)


def test_a_new_attempt_begins_with_nothing(root: Root) -> None:
    """Batch ids start again with the checkpoint; the old attempt's log and ids are not its own."""
    make_writer(root).commit_batch(NOTHING, batch(7), barrier=barrier(1))
    second = make_writer(root, attempt=2, run=2)
    second.begin()
    assert (second.newest().batch, second.newest().marker) == (NO_BATCH, None)
    assert second.commit_batch(NOTHING, batch(3)).fresh


def test_after_runs_that_have_ended_in_order_the_first_commit_is_the_fence(root: Root) -> None:
    """Not so after one that may be frozen: it must not come in between."""
    make_writer(root).begin()
    table = Table.open(root.place("channels/a.main"))

    def begun(run: int, since: int) -> ChannelWriter:
        writer = ChannelWriter(
            root,
            JOB,
            stage=StageId("a"),
            output="main",
            attempt=AttemptId(1),
            run=RunId(run),
            in_order_since=RunId(since),
        )
        writer.begin()
        return writer

    def fence() -> tuple[int, int | None]:
        table.refresh()
        return table.version, table.transaction(run_app_id(JOB))

    before, _ = fence()
    older, newer = begun(2, since=1), begun(3, since=1)
    assert fence() == (before, 1)
    newer.commit_batch(NOTHING, batch(0))
    assert fence() == (before + 1, 3)
    with pytest.raises(Fenced):
        older.commit_batch(NOTHING, batch(0))
    begun(5, since=4)
    assert fence() == (before + 2, 5)
    begun(6, since=6)
    assert fence() == (before + 3, 6)


def test_a_replaced_run_and_a_burnt_attempt_commit_nothing(root: Root) -> None:
    """Both were stopped in front of their commit, and go on when the new one has taken over."""
    old, new = make_writer(root, run=1), make_writer(root, run=2)
    at = old.refresh()
    new.begin()
    new.begin()
    for late in (
        lambda: old.commit_batch(NOTHING, batch(0), at=at),
        lambda: old.commit_batch(NOTHING, batch(0)),
        lambda: old.commit_barrier(barrier(1)),
        old.commit_end,
        old.begin,
    ):
        with pytest.raises(Fenced, match="run 1 of job was replaced by run 2"):
            late()
    table = Table.open(root.place("channels/a.main"))
    fence_attempt(table, JOB, StageId("a"), "main", AttemptId(1))
    version = table.version
    fence_attempt(table, JOB, StageId("a"), "main", AttemptId(1))
    assert table.version == version
    with pytest.raises(Fenced, match="newer attempt"):
        new.commit_batch(NOTHING, batch(0))
    with pytest.raises(Fenced, match="newer attempt"):
        new.commit_barrier(barrier(1))
    assert new.newest().batch > 0  # burnt, not used


def test_an_end_is_marked_once_a_run(root: Root) -> None:
    first = make_writer(root, run=1)
    assert (first.commit_end().fresh, first.commit_end().fresh) == (True, False)
    second = make_writer(root, run=2)
    second.begin()
    ended = second.commit_end()
    assert (ended.fresh, ended.entry.run, ended.entry.end) == (True, 2, True)


def test_a_batch_recorded_without_its_commit_is_damage(root: Root) -> None:
    """The table's checkpoint remembers the batch; the entry that would say its barrier is gone."""
    writer = make_writer(root)
    versions = [writer.commit_batch(NOTHING, batch(n)).entry.version for n in range(12)]
    (Path(root.path("channels/a.main/_delta_log")) / f"{versions[2]:020d}.json").unlink()
    with pytest.raises(DamageError, match=r"lacks the commit of \S+ 2, though"):
        writer.commit_batch(NOTHING, batch(2))


def test_a_channel_is_created_once_and_keeps_its_schema(root: Root) -> None:
    channel = ChannelId("a.main")
    assert create_channel(root, channel, NUMBERS) == create_channel(root, channel, NUMBERS)
    other = t.StructType([t.StructField("n", t.StringType()), t.StructField("m", t.DateType())])
    with pytest.raises(UsageError) as refused:
        create_channel(root, channel, other)
    assert "  n: bigint in the table, string in the query" in str(refused.value)


def test_a_channel_gets_new_columns_and_keeps_those_that_are_gone(root: Root) -> None:
    channel = ChannelId("a.main")
    create_channel(root, channel, NUMBERS)
    create_channel(root, channel, t.StructType([t.StructField("m", t.DateType())]))
    table = DeltaTable(root.path(root.channel(channel)))
    assert {field.name for field in table.schema().fields} == {*NUMBERS.names, "m"}
    assert create_channel(root, channel, NUMBERS) == create_channel(root, channel, NUMBERS)
    assert DeltaTable(table.table_uri).version() == table.version()


def test_names_that_differ_by_case_are_refused_by_check_and_start_alike(root: Root) -> None:
    channel = ChannelId("a.main")
    create_channel(root, channel, t.StructType([t.StructField("userId", t.LongType())]))
    for refuse in (check_channel, create_channel):
        with pytest.raises(UsageError, match="userid: spelled userId in the table"):
            refuse(root, channel, t.StructType([t.StructField("userid", t.LongType())]))


def test_a_column_whose_name_has_blanks_can_come_later(root: Root) -> None:
    channel, before = ChannelId("a.main"), t.StructType([t.StructField("first name", t.LongType())])
    for schema in (before, t.StructType([*before.fields, t.StructField("last, name", t.LongType())])):
        create_channel(root, channel, schema)
        create_channel(root, channel, schema)
    names = [field.name for field in DeltaTable(root.at("channels/a.main")).schema().fields]
    assert names == ["first name", "last, name"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ([("n", t.LongType()), ("N", t.LongType())], "occurs 2 times"),
        ([("gap", t.DayTimeIntervalType())], "'gap' is interval"),
        ([("s", t.StructType([t.StructField("in", t.NullType())]))], "'s.in' is void"),
        ([("a", t.ArrayType(t.VariantType()))], "'a.element' is variant"),
    ],
)
def test_a_schema_that_cannot_be_carried_is_refused(
    root: Root, fields: list[tuple[str, t.DataType]], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        create_channel(root, ChannelId("a.main"), t.StructType([t.StructField(*field) for field in fields]))


def test_a_writer_needs_its_channel(root: Root) -> None:
    with pytest.raises(FileNotFoundError):
        ChannelWriter(root, JOB, stage=StageId("a"), output="main", attempt=AttemptId(1), run=RunId(1))
