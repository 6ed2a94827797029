"""Queries joined by tables: when each makes its cut, who waits for whom, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from spark_abs.errors import AbortReason, GraphError
from spark_abs.manifest import OutputVersion, StageSnapshot
from spark_abs.model import Barrier, BatchId, CheckpointId, CheckpointKind, StageId, Version
from spark_abs.snapshots.layout import parse_offsets
from spark_abs.snapshots.table_edges import misaligned
from spark_abs.stages.batch_lock import BatchLock
from spark_abs.stages.chain import Chain, Link
from spark_abs.stages.dormant import DormantStage
from spark_abs.stages.table_cuts import TableCuts
from spark_abs.store.log import log_file
from spark_abs.store.storage import Place, Storage
from spark_abs.store.table import Table
from spark_abs.wrapped.tables import Uses, refuse_together
from tests.failing_storage import fail_reads

W, R, FIRST, SECOND = StageId("writes"), StageId("reads"), CheckpointId(1), CheckpointId(2)
STORAGE = Storage()


def barrier(number: CheckpointId, kind: CheckpointKind = CheckpointKind.CHECKPOINT) -> Barrier:
    return Barrier(number, kind, 0)


class Line:
    """A query that writes a table and one that reads it, in a chain; the rows of a version are one row."""

    def __init__(self, base: Path, timeout_ms: int = 600_000) -> None:
        self.table = str(base / "between")
        self.append()
        self.append()
        self.id = str(DeltaTable(self.table).metadata().id)
        self.chain = Chain(STORAGE)
        self.reads = True
        """Whether the reader runs."""
        self.chain.put(Link(W, frozenset(), (self.table,)))
        self.chain.put(Link(R, frozenset([self.id]), (), runs=lambda: self.reads))
        ctx: Any = SimpleNamespace(settings=SimpleNamespace(timeout_ms=timeout_ms))
        self.locks = {stage: BatchLock() for stage in (W, R)}
        self.cuts = {stage: TableCuts(ctx, stage, self.chain, lock) for stage, lock in self.locks.items()}
        self.chain.opened(FIRST)

    def append(self) -> None:
        write_deltalake(self.table, pa.table({"id": pa.array([1], pa.int64())}), mode="append")

    def replace(self) -> None:
        """Make the table anew at the next version, as `CREATE OR REPLACE` does."""
        DeltaTable.create(self.table, pa.schema([("id", pa.int64())]), mode="overwrite")
        before, self.id = self.id, str(DeltaTable(self.table).metadata().id)
        assert self.id != before

    def merge(self, changes: int, adds: int) -> None:
        """Commit as Delta's MERGE does: rewritten files, and those of the change feed."""
        file: dict[str, object] = {"partitionValues": {}, "size": 1, "dataChange": True}
        actions: list[dict[str, object]] = [{"commitInfo": {"operation": "MERGE", "timestamp": 1}}]
        gone = DeltaTable(self.table).file_uris()[0].rpartition("/")[2]
        actions.append({"remove": {"path": gone, "dataChange": True, "deletionTimestamp": 1}})
        actions += [{"add": {**file, "path": f"a{n}", "modificationTime": 1}} for n in range(adds)]
        actions += [{"cdc": {**file, "path": f"c{n}", "dataChange": False}} for n in range(changes)]
        version = DeltaTable(self.table).version() + 1
        Path(self.table, log_file(version)).write_text("\n".join(map(json.dumps, actions)))

    def offsets(self, version: int, index: int = -100, initial: bool = False) -> str:
        plain = {
            "sourceVersion": 3,
            "reservoirId": self.id,
            "reservoirVersion": version,
            "index": index,
            "isStartingVersion": initial,
        }
        return f"v1\n{{}}\n-\n{json.dumps(plain)}"

    def output(self) -> OutputVersion:
        return OutputVersion(W, "table", self.table, self.id, Version(DeltaTable(self.table).version()))

    def write_cut(self, kind: CheckpointKind = CheckpointKind.CHECKPOINT) -> None:
        """The writer makes its cut after its batch 4."""
        self.cuts[W].made(barrier(FIRST, kind), BatchId(4), (self.output(),))

    def read_to(self, version: int, index: int = -100, *, initial: bool = False, batch: int = 3) -> bool:
        """The reader ends a batch; returns whether it takes the barrier after it."""
        offsets = parse_offsets(self.offsets(version, index, initial))
        if self.cuts[R].fitting(barrier(FIRST), BatchId(batch), offsets) is None:
            return False
        self.cuts[R].made(barrier(FIRST), BatchId(batch), ())
        return True

    def writer_may_begin(self) -> bool:
        """Whether the next batch of the writer begins."""
        assert list(self.cuts[W].declined()) == []
        return self.locks[W]._begun(BatchId(5), True)

    def declined(self, stage: StageId) -> str:
        (found,) = self.cuts[stage].declined()
        assert (found.id, found.stage, found.reason) == (FIRST, stage, AbortReason.DECLINED)
        return found.detail

    def part(self, offsets: str, batch: int = 3) -> StageSnapshot:
        return StageSnapshot(R, BatchId(batch), offsets=offsets, carried=CheckpointId(7))


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def test_the_reader_takes_the_barrier_where_the_writer_did_and_only_then_the_writer_goes_on(
    line: Line,
) -> None:
    assert not line.read_to(2)  # the writer has made no cut yet
    line.write_cut()
    assert not line.writer_may_begin()
    assert not line.read_to(1)
    assert not line.writer_may_begin()
    assert line.read_to(2)
    assert line.writer_may_begin()


def test_a_commit_without_rows_keeps_nobody_back(line: Line) -> None:
    """As OPTIMIZE: whether the reader has passed it already or not."""
    line.write_cut()
    DeltaTable(line.table).optimize.compact()
    assert line.read_to(3)


def test_an_initial_snapshot_is_read_to_its_end_first(line: Line) -> None:
    line.write_cut()
    assert not line.read_to(1, 0, initial=True)
    assert line.read_to(2)


def test_a_position_at_the_last_file_of_the_feed_counts_as_behind_it(line: Line) -> None:
    line.write_cut()
    assert line.read_to(1, 0)


@pytest.mark.parametrize("feeds", [True, False])
def test_a_position_at_the_last_change_of_a_merge_is_behind_it_if_the_reader_is_known_to_read_the_feed(
    line: Line, feeds: bool
) -> None:
    """The merge adds more files than it has files of changes: a plain stream would read the second, too."""
    line.chain.put(Link(R, frozenset([line.id]), (), (line.id,) if feeds else ()))
    line.merge(changes=1, adds=2)
    line.write_cut()
    assert line.read_to(2, 0) == feeds
    writer = StageSnapshot(W, BatchId(4), outputs=(line.output(),))
    reader = replace(line.part(line.offsets(2, 0)), feeds=(line.id,) if feeds else ())
    assert (misaligned([writer, reader], STORAGE) == "") == feeds


def test_a_reader_of_a_feed_that_does_not_run_is_judged_as_one(line: Line) -> None:
    line.merge(changes=1, adds=2)
    part = replace(line.part(line.offsets(2, 0)), feeds=(line.id,))
    line.chain.put(Link(R, frozenset([line.id]), (), part=part))
    line.write_cut()
    assert line.writer_may_begin()


def test_rows_that_others_have_inserted_after_the_cut_end_the_checkpoint(line: Line) -> None:
    line.write_cut()
    line.append()
    assert not line.read_to(3)
    assert line.declined(R) == (
        f"query 'reads' has read {line.table} until the beginning of version 3, and the table was at version "
        "1 at the cut of query 'writes', which writes it"
    )
    line.cuts[W].release(FIRST)
    assert line.writer_may_begin()


def test_the_first_batch_of_a_reader_is_no_cut(line: Line) -> None:
    """Spark plans it again at a start, from the beginning of the table: that plan would hold the restore."""
    line.write_cut()
    assert not line.read_to(2, batch=0)
    assert "has ended its first batch only" in line.declined(R)


def test_a_writer_waits_for_a_reader_that_is_slow_but_not_for_ever(tmp_path: Path) -> None:
    line = Line(tmp_path, timeout_ms=0)
    line.write_cut()
    assert not line.read_to(1)
    assert "until the beginning of version 1, and the table was at version 1" in line.declined(W)


def test_a_reader_that_does_not_run_is_judged_by_its_recorded_part(tmp_path: Path) -> None:
    for at, version in enumerate((2, 1)):
        line = Line(tmp_path / str(at), timeout_ms=0)
        line.chain.put(Link(R, frozenset([line.id]), (), part=line.part(line.offsets(version))))
        line.write_cut()
        if version == 2:
            assert line.writer_may_begin()
        else:
            assert line.declined(W).startswith("query 'reads' has read ")
            assert "'reads' does not run, or has begun no batch yet: start it, or " in line.declined(W)
            assert "run `spark-abs forget ROOT reads`" in line.declined(W)


def test_a_log_that_cannot_be_read_now_is_looked_at_again(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    DeltaTable(line.table).optimize.compact()
    line.chain.put(Link(R, frozenset([line.id]), (), part=line.part(line.offsets(2))))
    line.write_cut()
    with monkeypatch.context() as patch:
        fail_reads(patch, lambda path: path.endswith(log_file(2)))
        assert not line.writer_may_begin()
    assert line.writer_may_begin()


def test_a_log_that_is_damaged_aborts_a_checkpoint_and_ends_no_run(tmp_path: Path) -> None:
    """It is the log of a user's table: somebody may mend it."""
    line = Line(tmp_path, timeout_ms=0)
    DeltaTable(line.table).optimize.compact()
    line.chain.put(Link(R, frozenset([line.id]), (), part=line.part(line.offsets(2))))
    line.write_cut()
    commit = Path(line.table, log_file(2))
    whole = commit.read_bytes()
    commit.write_bytes(whole[:-9])
    assert f"the log of a table could not be read: {commit} is not a Delta commit" in line.declined(W)
    commit.write_bytes(whole)
    assert line.writer_may_begin()


def test_a_reader_that_has_stopped_in_order_may_be_at_its_cut(tmp_path: Path) -> None:
    line = Line(tmp_path, timeout_ms=0)
    line.reads = False
    line.write_cut()
    assert line.read_to(2)
    assert line.writer_may_begin()


def test_a_writer_that_wakes_up_has_answered_with_its_recorded_part(line: Line) -> None:
    """It makes no other cut for that checkpoint, and its reader need not wait for one."""
    part = StageSnapshot(W, BatchId(4), outputs=(line.output(),), carried=CheckpointId(7))
    sleeper = DormantStage(part, lambda _: None)
    sleeper.offer(barrier(FIRST))
    sleeper.offer_idle()
    line.chain.opened(SECOND)
    line.cuts[W].succeed(sleeper)
    assert line.read_to(2)
    offsets = parse_offsets(line.offsets(2))
    assert line.cuts[R].fitting(barrier(SECOND), BatchId(3), offsets) is None  # of the next one it will


def test_after_an_exact_savepoint_no_batch_begins_though_the_reader_is_there(line: Line) -> None:
    line.write_cut(CheckpointKind.SYNC_SAVEPOINT)
    assert line.read_to(2)
    assert not line.writer_may_begin()


def test_a_new_runner_of_the_writer_waits_as_the_old_one_did(line: Line) -> None:
    line.write_cut()
    ctx: Any = SimpleNamespace(settings=SimpleNamespace(timeout_ms=600_000))
    lock = BatchLock()
    lock.succeed(line.locks[W])
    cuts = TableCuts(ctx, W, line.chain, lock)
    cuts.succeed(line.cuts[W])
    line.locks[W], line.cuts[W] = lock, cuts
    assert not line.writer_may_begin()
    assert line.read_to(2)
    assert line.writer_may_begin()


def test_a_table_that_the_first_batch_did_not_show_is_waited_for_all_the_same(line: Line) -> None:
    line.chain.put(Link(R, frozenset(), ()))
    assert not line.read_to(1)
    line.write_cut()
    assert not line.writer_may_begin()


def test_a_reader_that_began_anew_on_a_replaced_table_waits_for_its_writer(line: Line) -> None:
    assert not line.read_to(2)
    line.replace()
    line.chain.put(Link(R, frozenset([line.id]), ()))
    assert not line.read_to(3)  # the writer has made no cut yet
    line.write_cut()
    assert not line.writer_may_begin()
    assert line.read_to(3)
    assert line.writer_may_begin()


def test_a_log_is_read_once_for_each_table_that_a_reader_names(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at each batch: neither of a table that another root writes, nor of one that is not there yet."""
    line.chain.put(Link(W, frozenset(), (str(tmp_path / "to come"), line.table)))
    looked, find = [], Table.find

    def counted(place: Place) -> Table | None:
        looked.append(place.uri)
        return find(place)

    monkeypatch.setattr(Table, "find", counted)
    known = line.id
    for line.id in (known, "of another root"):
        looked.clear()
        for version in (1, 2, 2):
            line.read_to(version)
        assert looked == [str(tmp_path / "to come"), line.table]


def test_parts_fit_if_the_reader_is_exactly_behind_the_writer(line: Line) -> None:
    writer = StageSnapshot(W, BatchId(4), outputs=(line.output(),))
    assert misaligned([writer, line.part(line.offsets(2))], STORAGE) == ""
    assert "until the beginning of version 1" in misaligned([writer, line.part(line.offsets(1))], STORAGE)
    line.append()
    assert "until the beginning of version 3" in misaligned([writer, line.part(line.offsets(3))], STORAGE)
    assert "first batch only" in misaligned([writer, line.part(line.offsets(2), batch=0)], STORAGE)
    before = StageSnapshot(W, BatchId(-1), outputs=(OutputVersion(W, "table", line.table, "", None),))
    assert "and the table was not there at the cut" in misaligned(
        [before, line.part(line.offsets(2))], STORAGE
    )


def uses(line: Line, name: str, reads: bool, *tables: str) -> Uses:
    return Uses(StageId(name), frozenset([line.id] if reads else ()), tables)


def test_a_query_that_reads_its_own_table_is_refused(line: Line) -> None:
    with pytest.raises(GraphError, match=r"query 'a' reads .*between, which itself writes"):
        refuse_together(uses(line, "a", True, line.table), [], STORAGE)


def test_queries_in_a_line_share_a_root_and_queries_in_a_circle_do_not(line: Line, tmp_path: Path) -> None:
    """The circle may go through a query that does not run."""
    other = str(tmp_path / "other")
    write_deltalake(other, pa.table({"id": pa.array([1], pa.int64())}))
    writer, reader = uses(line, "a", False, line.table), uses(line, "b", True, other)
    third = str(DeltaTable(other).metadata().id)
    last = Uses(StageId("c"), frozenset([third, line.id]), ())
    refuse_together(reader, [writer, last], STORAGE)
    refuse_together(writer, [last, reader], STORAGE)
    back = Uses(StageId("a"), frozenset([third]), (line.table,), CheckpointId(3))
    with pytest.raises(
        GraphError, match=r"'b' reads .*between, which query 'a' .* 'a' reads .*other in turn"
    ):
        refuse_together(reader, [back, last], STORAGE)


def test_two_queries_that_write_one_table_are_refused(line: Line) -> None:
    with pytest.raises(GraphError, match="and so does query 'b' of the same root"):
        refuse_together(uses(line, "a", False, line.table), [uses(line, "b", False, line.table)], STORAGE)


def test_a_reader_that_waits_at_an_earlier_checkpoint_is_described_by_what_it_waits_for(
    tmp_path: Path,
) -> None:
    """It is asked for the oldest open checkpoint only."""
    line = Line(tmp_path)
    line.chain.opened(SECOND)
    line.write_cut()
    line.chain.cut(W, SECOND, (line.output(),))
    assert not line.read_to(1)
    line.reads = False
    for number in (FIRST, SECOND):
        unread = line.chain.unread(W, number)
        assert unread is not None
        assert unread.hopeless
        assert unread.said.startswith("query 'reads' has read")
        assert "'reads' does not run" in unread.said
