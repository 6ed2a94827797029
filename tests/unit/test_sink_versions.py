"""The version of a Delta sink at a cut, in a table that others write to: right, and each commit read once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

import spark_abs
from spark_abs.codec import to_json
from spark_abs.errors import DamageError, Fenced
from spark_abs.model import AttemptId, BatchId, RunId, StageId
from spark_abs.sinks.delta.changes import Own
from spark_abs.sinks.delta.commit_metadata import SinkMetadata
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.store import table
from spark_abs.store.log import log_file, read_commit
from tests.root_support import SmallJob, no_session


@pytest.fixture
def job(tmp_path: Path) -> SmallJob:
    return SmallJob(tmp_path)


@pytest.fixture
def read(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], set[int]]:
    """Return what asks for the version at a batch, and says which commits of the table were read for it."""
    reading = Mock(wraps=read_commit)
    monkeypatch.setattr(table, "read_commit", reading)

    def asked(batch: int) -> set[int]:
        reading.reset_mock()
        job.sink.version_at(BatchId(batch))
        return {call.args[2] for call in reading.call_args_list}

    return asked


def others(job: SmallJob, commits: int) -> None:
    for _ in range(commits):
        write_deltalake(job.table, pa.table({"n": [666]}), mode="append")


def found(sink: DeltaSink, batch: int) -> int | str:
    try:
        return int(sink.version_at(BatchId(batch)))
    except DamageError as error:
        return str(error)


def agree(job: SmallJob) -> list[int | str]:
    """Return the version at every batch: what the sink says must be what one says that has seen nothing."""
    state = job.state
    fresh = DeltaSink(
        job.root,
        job.table,
        writer=state.writer(state.attempt, StageId("b"), "totals"),
        run=job.run,
        session=no_session,
    )
    batches = range(job.batch + 2)
    versions = [found(job.sink, batch) for batch in batches]
    assert versions == [found(fresh, batch) for batch in batches]
    return versions


def trim(job: SmallJob, before: int) -> None:
    """Delete the log before a version, as its clean-up does after a checkpoint."""
    DeltaTable(job.table, version=before).create_checkpoint()
    for version in range(before):
        Path(job.table, log_file(version)).unlink(missing_ok=True)


def test_what_others_have_committed_is_read_once(job: SmallJob, read: Callable[[int], set[int]]) -> None:
    """The sink seldom has rows, and every cut asks for its version."""
    job.step(1)  # commit 2, after the table and the mark of the run
    others(job, 40)
    assert read(0) >= set(range(2, 43))
    assert read(0) == {2}
    others(job, 3)
    assert read(1) == {2, 43, 44, 45}
    job.step(2)
    assert read(1) == {46}
    others(job, 1)
    assert read(1) == {46, 47}
    assert read(1) == {46}


def test_marks_of_its_own_without_a_batch_are_passed_as_well(
    job: SmallJob, read: Callable[[int], set[int]]
) -> None:
    """A later run fences the table, and has read what lies between its mark and the last batch then."""
    job.step(1)
    others(job, 20)
    batch, job.run = job.batch, RunId(job.run + 1)
    state = job.state
    job.sink = DeltaSink(
        job.root,
        job.table,
        writer=state.writer(state.attempt, StageId("b"), "totals"),
        run=job.run,
        session=no_session,
    )
    job.sink.begin()
    others(job, 2)
    assert read(batch) == {2, 23, 24, 25}
    assert read(batch) == {2}


def test_a_sink_without_rows_reads_where_its_attempt_came_to_the_table(
    job: SmallJob, read: Callable[[int], set[int]]
) -> None:
    others(job, 20)
    assert len(read(0)) == 21
    assert read(0) == {1}


def test_a_start_after_runs_that_have_ended_in_order_commits_nothing_to_a_sink(job: SmallJob) -> None:
    """Neither before the first row nor later; the next rows bring the fence, and shut older runs out."""
    state = job.state

    def begun(run: int, since: int) -> DeltaSink:
        writer = state.writer(state.attempt, StageId("b"), "totals")
        sink = DeltaSink(
            job.root,
            job.table,
            writer=writer,
            run=RunId(run),
            session=no_session,
            in_order_since=RunId(since),
        )
        sink.begin()
        return sink

    first, at = job.run, DeltaTable(job.table).version()
    for rows in (False, True):
        if rows:
            job.step(1)
            at += 1
        begun(first + 1, since=first)
        assert DeltaTable(job.table).version() == at
    old, job.sink = job.sink, begun(first + 2, since=first)
    job.step(2)
    assert DeltaTable(job.table).version() == at + 1
    with pytest.raises(Fenced):
        old.commit_batch(None, BatchId(job.batch + 1))
    begun(first + 4, since=first + 3)  # run 3 may be frozen
    assert DeltaTable(job.table).version() == at + 2


def test_the_version_does_not_depend_on_what_was_asked_before(job: SmallJob) -> None:
    """Commits of others, batches, also those of which none is asked for yet, and a RESTORE by hand."""
    assert agree(job) == [1]
    others(job, 3)
    job.step(1)
    others(job, 2)
    job.step(2)
    assert agree(job) == [5, 8, 8]
    others(job, 2)
    assert agree(job) == [5, 8, 8]
    DeltaTable(job.table).restore(5)
    others(job, 1)
    assert agree(job) == [5, 8, 8]
    job.step(3)
    assert agree(job) == [5, 8, 13, 13]


def test_a_log_that_was_cleaned_up_is_looked_through_again(job: SmallJob) -> None:
    """The version that was found before cannot be gone back to any more; the oldest in the log can."""
    job.step(1)
    others(job, 10)
    assert agree(job) == [2, 2]
    trim(job, 6)
    assert agree(job) == [6, 6]
    others(job, 2)
    trim(job, 8)
    assert agree(job) == [8, 8]
    job.step(2)
    assert agree(job) == [f"the log of {job.table} begins at 8, after batch 0 of {_name(job)}", 15, 15]


def _name(job: SmallJob) -> str:
    state = job.state
    return state.writer(state.attempt, StageId("b"), "totals").name


class Moving:
    """The table of a job whose sink goes from stage to stage, each of which begins it in a run of its own."""

    def __init__(self, job: SmallJob) -> None:
        self.job = job
        self.stage = "b"
        self.batches = dict[str, int]()

    def begin(self, stage: str) -> None:
        """Start with the sink at a stage; the table is first fenced as the last one had it."""
        self.job.run = RunId(self.job.run + 1)
        fenced, self.job.sink = self._sink(self.stage), self._sink(stage)
        fenced.begin()
        self.job.sink.begin()
        self.stage = stage
        self.job.batch = self.batches.get(stage, -1)

    def write(self, *values: int) -> None:
        self.job.step(*values)
        self.batches[self.stage] = self.job.batch

    def cut(self) -> list[int]:
        """Return what the table holds at the version of a cut now, before the stage has more rows."""
        version = int(self.job.sink.version_at(BatchId(self.batches.get(self.stage, -1))))
        return sorted(DeltaTable(self.job.table, version=version).to_pyarrow_table()["n"].to_pylist())

    def _sink(self, stage: str) -> DeltaSink:
        state = self.job.state
        writer = state.writer(state.attempt, StageId(stage), "totals")
        return DeltaSink(self.job.root, self.job.table, writer=writer, run=self.job.run, session=no_session)


def test_a_cut_of_a_stage_that_took_a_table_over_has_what_was_written_before(job: SmallJob) -> None:
    """Renamed, or moved to another stage and back: none of these has a batch of its own there yet."""
    moving = Moving(job)
    moving.begin("b")
    moving.write(1, 2)
    moving.write(3)
    moving.begin("c")
    assert moving.cut() == [1, 2, 3]
    moving.begin("c")  # another run
    assert moving.cut() == [1, 2, 3]
    moving.write(4)
    assert moving.cut() == [1, 2, 3, 4]
    moving.begin("b")
    assert moving.cut() == [1, 2, 3, 4]
    moving.write(5)
    assert moving.cut() == [1, 2, 3, 4, 5]


def test_a_cut_of_a_stage_that_took_a_table_over_after_a_restore_has_all_of_it(job: SmallJob) -> None:
    job.checkpoint(1)
    job.step(2)
    spark_abs.open(job.root.uri).restore(1)
    job.start()
    moving = Moving(job)
    moving.begin("b")
    assert moving.cut() == [1]
    moving.write(7)
    moving.begin("c")
    assert moving.cut() == [1, 7]


def test_a_start_reads_what_others_have_committed_once(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To begin the table, and for the first cut."""
    job.step(1)
    others(job, 30)
    moving = Moving(job)
    reading = Mock(wraps=read_commit)
    monkeypatch.setattr(table, "read_commit", reading)
    moving.begin("b")
    moving.cut()
    read = [call.args[2] for call in reading.call_args_list]
    assert all(read.count(version) <= 2 for version in range(3, 33))  # by the one that fences, and this one


@pytest.mark.parametrize("undone", [True, False])
def test_rows_of_others_before_the_mark_of_a_restore_are_behind_what_it_has_undone(
    job: SmallJob, undone: bool
) -> None:
    """Delta's own writer makes two commits, and a stream that continues behind the mark would miss a row."""
    job.step(1)
    cut = job.sink.version_at(BatchId(0))
    if undone:
        others(job, 2)
    state, attempt = job.state, AttemptId(2)
    writer = replace(state.writer(state.attempt, StageId("b"), "totals"), attempt=attempt)
    note = SinkMetadata(writer.name, attempt, RunId(2), restored=cut, root=writer.root)
    said = {"userMetadata": to_json(note)}
    if undone:
        DeltaTable(job.table).restore(int(cut), commit_properties=CommitProperties(custom_metadata=said))
    before = DeltaTable(job.table).version()
    others(job, 1)
    mark = CommitProperties(said, app_transactions=[Transaction(writer.restore_app, int(cut))])
    write_deltalake(
        job.table, pa.table({"n": pa.array([], pa.int64())}), mode="append", commit_properties=mark
    )
    sink = DeltaSink(job.root, job.table, writer=writer, run=RunId(2), session=no_session)
    own = Own(state.job, state.root, state.unnamed)
    assert sink.restore_to(cut, own, undo_others=True) == before
    assert (before > cut) == undone
