"""A batch that is in some outputs of a stage is brought into the others from its files, without Spark."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from spark_abs.channels.files import directory_name
from spark_abs.channels.staged import Files, over, sweep_staging
from spark_abs.channels.trim import trim
from spark_abs.channels.writer import ChannelWriter, create_channel
from spark_abs.errors import DamageError
from spark_abs.model import (
    NO_BATCH,
    NO_EPOCH,
    AttemptId,
    BatchId,
    ChannelId,
    RunId,
    SinkWriter,
    StageId,
    Version,
)
from spark_abs.protocol.control import AttachedSink
from spark_abs.run_context import RunContext
from spark_abs.settings import Settings
from spark_abs.sinks.delta.sink import DeltaSink
from spark_abs.stages.complete import Completion, complete_batch
from spark_abs.store.control import Control
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Table
from tests.channel_support import JOB, NUMBERS, barrier, make_writer, write_table
from tests.root_support import no_session


class Torn:
    """A stage with two channels and two sinks, of which a batch is killed between its commits."""

    def __init__(self, path: Path) -> None:
        self.root = Root(str(path / "root"))
        Control.create(self.root, JOB, 1_000)
        for output in ("keyed", "main"):
            create_channel(self.root, ChannelId(f"a.{output}"), NUMBERS)
        self.lake = [str(path / "lake" / name) for name in ("one", "two")]
        for table in self.lake:
            Table.ensure(Place(table), pa.schema([("n", pa.int64())]), {})
        self.attached = [AttachedSink(StageId("a"), str(i), t, "id") for i, t in enumerate(self.lake)]
        self.start()

    def start(self, run: int = 1, attempt: int = 1) -> None:
        settings = Settings.resolve(None, {}, {}, {})
        self.ctx = RunContext(
            self.root, JOB, AttemptId(attempt), "native", RunId(run), NO_EPOCH, Version(0), settings, 100,
            False, no_failpoint,
        )  # fmt: skip
        self.channels = [make_writer(self.root, "a", o, attempt, run) for o in ("keyed", "main")]
        self.sinks = [
            DeltaSink(
                self.root,
                s.table,
                writer=self.ctx.writer(s.stage, s.sink),
                run=RunId(run),
                session=no_session,
            )
            for s in self.attached
        ]
        for writer in self.channels:
            writer.begin()
        for sink in self.sinks:
            sink.begin()

    def batch(self, number: int, *values: int, commits: int = 4, named: bool = True) -> None:
        """Write the files of all outputs, then commit so many: channels `keyed`, `main`, then the sinks."""
        batch, ctx = BatchId(number), self.ctx
        directory = f"{int(ctx.attempt)}-{int(ctx.run)}-{number}-"
        files = []
        for at, channel in enumerate(("a.keyed", "a.main")):
            written = write_table(self.root, channel, pa.table({"n": values}), f"{directory}{at:012}")
            files.append(Files(self.root.place(f"channels/{channel}"), written))
        files += [sink.copy_files(files[0], batch) for sink in self.sinks]
        outputs = ("keyed", "main", "keyed", "keyed")
        tables = ("channels/a.keyed", "channels/a.main", *self.lake)
        said = tuple(f.name(o, t) for f, o, t in zip(files, outputs, tables, strict=True)) if named else ()
        barrier_ = barrier(number + 1)
        for writer, given in list(zip(self.channels, files, strict=False))[:commits]:
            writer.commit_batch(
                given.written, batch, barrier=barrier_, watermark_ms=7, offsets="v1", evaluated=said
            )
            said = ()
        for sink, given in list(zip(self.sinks, files[2:], strict=True))[: max(0, commits - 2)]:
            sink.commit_batch(given, batch)

    def complete(self) -> Completion:
        return complete_batch(self.ctx, StageId("a"), self.attached, no_session)

    def rows(self) -> list[list[int]]:
        tables = (*(self.root.at(f"channels/a.{o}") for o in ("keyed", "main")), *self.lake)
        return [sorted(DeltaTable(t).to_pyarrow_table()["n"].to_pylist()) for t in tables]


@pytest.fixture
def torn(tmp_path: Path) -> Torn:
    return Torn(tmp_path)


@pytest.mark.parametrize("commits", [1, 2, 3])
def test_a_torn_batch_is_completed_without_its_query_by_another_run(torn: Torn, commits: int) -> None:
    """All outputs hold the same rows, barrier, watermark and offsets; a repeat changes nothing."""
    torn.batch(0, 1, 2)
    torn.batch(1, 3, 4, commits=commits)
    torn.start(run=2)
    done = torn.complete()
    assert (done.batch, len(done.completed), done.torn) == (1, 4 - commits, ())
    assert torn.rows() == [[1, 2, 3, 4]] * 4
    assert torn.complete() == Completion(BatchId(1))
    found = [w.log.commit_of(BatchId(1)) for w in make_all(torn)]
    notes = [commit[1] for commit in found if commit is not None]
    assert len({(n.barrier, n.watermark, n.offsets) for n in notes}) == 1


def make_all(torn: Torn) -> list[ChannelWriter]:
    writers = [make_writer(torn.root, "a", output, run=2) for output in ("keyed", "main")]
    for writer in writers:
        writer.refresh()
    return writers


def test_a_torn_batch_of_a_version_that_named_nothing_is_reported(torn: Torn) -> None:
    torn.batch(0, 1, commits=1, named=False)
    assert torn.complete() == Completion(BatchId(0), torn=("channels/a.main", *torn.lake))


def test_nothing_is_completed_where_nothing_is_torn(torn: Torn) -> None:
    """Nor in a new attempt: what an earlier one has named is not its own."""
    assert torn.complete() == Completion(NO_BATCH)
    torn.batch(0, 1)
    assert torn.complete() == Completion(BatchId(0))
    torn.batch(1, 2, commits=1)
    torn.start(run=2, attempt=2)
    assert torn.complete() == Completion(NO_BATCH)


@pytest.mark.parametrize("table", [0, 1])
def test_a_table_that_another_root_has_taken_over_is_left_out(torn: Torn, table: int) -> None:
    """Whether it holds the batch or lacks it: the other tables get it."""
    torn.batch(0, 1)
    torn.batch(1, 2, commits=3)
    other = SinkWriter("other", "", StageId("b"), "out", AttemptId(1))
    DeltaSink(torn.root, torn.lake[table], writer=other, run=RunId(1), session=no_session).begin(
        take_over=True
    )
    done = torn.complete()
    assert (done.batch, done.torn) == (1, ())
    assert done.completed == ((torn.lake[1],) if table == 0 else ())
    assert torn.rows() == [[1, 2], [1, 2], [1, 2], [1, 2] if table == 0 else [1]]


def test_files_that_somebody_has_deleted_are_missed(torn: Torn) -> None:
    torn.batch(0, 1, commits=3)
    (directory,) = Path(torn.lake[1], "data").iterdir()
    shutil.rmtree(directory)
    with pytest.raises(
        DamageError, match=r"two/data/.* had 1 files of output 'keyed' and has 0.*restart='checkpoint'"
    ):
        torn.complete()


def test_a_clean_up_of_the_channel_spares_what_is_named(torn: Torn) -> None:
    torn.batch(0, 1)
    torn.batch(1, 2, commits=1)
    torn.start(run=2)
    trim(torn.root, ChannelId("a.main"), Version(100))
    assert torn.complete().completed == ("channels/a.main", *torn.lake)
    assert torn.rows()[2] == [1, 2]


def test_what_is_staged_below_the_root_goes_but_for_the_newest_batch_of_the_attempt(tmp_path: Path) -> None:
    """That may be torn. A newer run, which has taken over, keeps what is its own."""
    root = Root(str(tmp_path))
    names = {
        of: directory_name(AttemptId(of[0]), RunId(of[1]), BatchId(of[2]))
        for of in ((1, 3, 9), (2, 4, 6), (2, 4, 7), (2, 5, 7), (2, 6, 8), (2, 5, 8))
    }
    for name in names.values():
        for above in ("a.keyed", "ab.keyed"):
            (tmp_path / "staging" / above / name).mkdir(parents=True)
    left = sweep_staging(root, StageId("a"), over(AttemptId(2), RunId(5), BatchId(7)))
    assert set(left) == {f"staging/a.keyed/{names[of]}" for of in ((2, 4, 7), (2, 5, 7), (2, 6, 8))}
    assert {str(p.relative_to(tmp_path)) for p in (tmp_path / "staging/a.keyed").iterdir()} == set(left)
    assert len(list((tmp_path / "staging/ab.keyed").iterdir())) == 6
