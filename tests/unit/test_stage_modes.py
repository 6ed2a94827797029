"""A stage and barriers that do not wait, without Spark: real channels and offset files, no rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.channels.taken import TakenHint, TakenNote
from spark_abs.channels.trim import trim
from spark_abs.codec import to_json
from spark_abs.model import (
    AttemptId,
    Barrier,
    Branch,
    ChannelId,
    CheckpointId,
    CheckpointMode,
    Position,
    RunId,
    StageId,
    Version,
)
from spark_abs.stages.consumers import Consumers
from spark_abs.stages.credit import Credit
from spark_abs.stages.evaluation import Evaluated
from spark_abs.stages.in_place import InPlace
from spark_abs.stages.outputs import Outputs
from spark_abs.stages.snapshotter import Taken
from spark_abs.stages.stage import StageRunner
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.root import Root
from tests.channel_support import JOB, Log, barrier, make_writer, position

UNALIGNED = replace(barrier(1), mode=CheckpointMode.UNALIGNED)


class Both:
    """The runner of a stage that reads a and b and writes one channel; Spark's part is done by hand."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.inputs = Log(root, "a"), Log(root, "b")
        self.taken: list[Taken] = []
        self.during: Callable[[], None] = lambda: None
        self.native = Path(root.path("native/1/both"))
        self.start()

    def start(self, *outputs: str) -> None:
        """Begin anew, with no memory; writes the outputs given, `main` if none are."""
        root = self.root
        ctx: Any = SimpleNamespace(
            root=root,
            job=JOB,
            attempt=AttemptId(1),
            run=RunId(1),
            floor=CheckpointId(0),
            bounded=False,
            settings=SimpleNamespace(capacity_entries=None, capacity_bytes=None),
            failpoint=no_failpoint,
            poll_ms=lambda _: 0,
            native=lambda stage: root.native("native", AttemptId(1), stage),
        )
        spec: Any = SimpleNamespace(name=StageId("both"), outputs={})
        writers = [make_writer(root, "both", output) for output in outputs or ("main",)]
        written = Outputs(ctx, spec, channels=writers, tables={}, sinks=[])
        written.evaluated = self._evaluated  # type: ignore[assignment]
        snapshots: Any = SimpleNamespace(submit=self.taken.append, permits=lambda *_: True)
        first = (position("a.main", 0), position("b.main", 0))
        credit = Credit(ctx, (), Consumers(ctx, {}), Version(0), 0)
        path = (Branch(AttemptId(1), None),)
        paths = {ChannelId("a.main"): path, ChannelId("b.main"): path}
        self.note = TakenNote(root.path("taken"))
        self.runner = StageRunner(
            ctx,
            StageId("both"),
            outputs=written,
            start=first,
            snapshots=snapshots,
            credit=credit,
            in_place=InPlace(ctx, paths, self.note),
        )

    @contextmanager
    def _evaluated(self, *_: object, idle: bool = False) -> Iterator[Evaluated]:
        self.during()
        yield Evaluated({}, (), {})

    def plan(self, batch: int, *positions: Position) -> None:
        self._file("offsets", batch, "\n".join(["v1", "{}", *map(to_json, positions)]))

    def batch(self, batch: int, *positions: Position) -> None:
        """Plan and run a batch to its end."""
        self.plan(batch, *positions)
        self.run(batch)

    def run(self, batch: int) -> None:
        self.runner.run_batch(None, batch)  # type: ignore[arg-type]
        self._file("commits", batch, "v1\n{}")

    def _file(self, log: str, batch: int, text: str) -> None:
        (self.native / log).mkdir(parents=True, exist_ok=True)
        (self.native / log / str(batch)).write_text(text)

    def written(self) -> list[tuple[int, int | None]]:
        """Return batch and barrier of each entry."""
        writer = make_writer(self.root, "both")
        writer.refresh()
        entries = writer.log.after(Version(-1))
        return [(e.batch, e.barrier.id if e.barrier else None) for e in entries]

    def cuts(self) -> list[tuple[int, int]]:
        return [(taken.barrier.id, taken.batch) for taken in self.taken]


@pytest.fixture
def both(tmp_path: Path) -> Both:
    return Both(Root(str(tmp_path)))


def offered(both: Both, given: Barrier = UNALIGNED) -> None:
    both.runner.offer(given)


def test_an_idle_stage_takes_an_unaligned_barrier_behind_its_last_batch(both: Both) -> None:
    both.batch(0, position("a.main", 1), position("b.main", 1))
    offered(both)
    both.runner.offer_idle()
    assert (both.written(), both.cuts()) == ([(0, None), (-1, 1)], [(1, 0)])


def test_an_idle_stage_leaves_an_aligned_barrier_to_its_inputs(both: Both) -> None:
    both.batch(0, position("a.main", 1), position("b.main", 1))
    offered(both, barrier(1))
    both.runner.offer_idle()
    assert both.cuts() == []


def test_an_idle_stage_takes_an_aligned_barrier_that_is_all_its_inputs_have(both: Both) -> None:
    """Rows behind the barrier do not matter, and the batch that reads them makes no marker for it."""
    both.batch(0, position("a.main", 0), position("b.main", 0))
    one, other = both.inputs
    one.batch(barrier_id=1)
    offered(both, barrier(1))
    both.runner.offer_idle()
    assert both.cuts() == []  # it has not come out of b
    one.batch(7)
    other.batch(barrier_id=1)
    both.runner.offer_idle()
    both.runner.offer_idle()
    assert (both.written(), both.cuts()) == ([(0, None), (-1, 1)], [(1, 0)])
    assert both.taken[0].positions == (position("a.main", 0), position("b.main", 0))
    hint = TakenHint(both.note.path)
    assert (hint.look(), hint.newest) == (True, 1)
    both.batch(1, position("a.main", 2, 1), position("b.main", 0))
    both.batch(2, position("a.main", 2, 1), position("b.main", 1, 1, True))
    assert (both.written(), both.cuts()) == ([(0, None), (-1, 1), (1, None), (2, None)], [(1, 0)])


def test_a_stage_takes_no_aligned_barrier_while_rows_stand_before_it(both: Both) -> None:
    both.batch(0, position("a.main", 0), position("b.main", 0))
    one, other = both.inputs
    one.batch(barrier_id=1)
    other.batch(7, barrier_id=1)
    offered(both, barrier(1))
    both.runner.offer_idle()
    assert both.cuts() == []
    both.batch(1, position("a.main", 0), position("b.main", 1, 1, True))
    both.runner.offer_idle()
    assert (both.written(), both.cuts()) == ([(0, None), (1, None), (-1, 1)], [(1, 1)])


def test_a_stage_takes_no_aligned_barrier_before_its_first_batch_or_ahead_of_a_planned_one(
    both: Both,
) -> None:
    for log in both.inputs:
        log.batch(barrier_id=1)
    offered(both, barrier(1))
    both.runner.offer_idle()
    both.plan(0, position("a.main", 0), position("b.main", 0))
    both.runner.offer_idle()
    assert both.cuts() == []


def test_a_stage_with_sinks_alone_repeats_no_cut_that_it_took_where_it_stood(both: Both) -> None:
    """No output tells of it."""
    both.runner._outputs.channels = ()
    both.batch(0, position("a.main", 0), position("b.main", 0))
    for log in both.inputs:
        log.batch(barrier_id=1)
    offered(both, barrier(1))
    both.runner.offer_idle()
    both.batch(1, position("a.main", 1, 1, True), position("b.main", 1, 1, True))
    assert both.cuts() == [(1, 0)]


@pytest.mark.parametrize(("there", "cuts"), [(True, [(1, 0)]), (False, [])])
def test_a_head_whose_other_inputs_have_ended_takes_no_barrier_that_its_way_back_is_beyond(
    both: Both, there: bool, cuts: list[tuple[int, int]]
) -> None:
    """It takes barriers like a source; but a feedback edge may have brought it before it heard of it."""
    back = replace(position("b.main", 3, 1, there), feedback=True)
    both.batch(0, position("a.main", 1, closed=1), back)
    offered(both)
    both.runner.offer_idle()
    assert both.cuts() == cuts


def test_a_barrier_goes_out_ahead_of_the_next_batch(both: Both) -> None:
    """What that one reads may be behind it: the gate has passed a barrier that became unaligned."""
    waiting = position("a.main", 2, 1, True)
    both.batch(0, waiting, position("b.main", 1))
    offered(both)
    both.batch(1, position("a.main", 3, 1), position("b.main", 1))
    assert (both.written(), both.cuts()) == ([(0, None), (-1, 1), (1, None)], [(1, 0)])


def test_a_barrier_that_comes_while_a_batch_runs_goes_out_with_it(both: Both) -> None:
    both.during = lambda: offered(both)
    both.batch(0, position("a.main", 1), position("b.main", 1))
    assert (both.written(), both.cuts()) == ([(0, 1)], [(1, 0)])


def test_a_batch_that_is_run_again_stands_by_what_it_wrote(both: Both) -> None:
    """Offered only now, the barrier goes after it: an output holds the batch without it."""
    both.batch(0, position("a.main", 1), position("b.main", 1))
    (both.native / "commits/0").unlink()
    both.start()
    offered(both)
    both.run(0)
    assert (both.written(), both.cuts()) == ([(0, None)], [])
    both.runner.offer_idle()
    assert (both.written(), both.cuts()) == ([(0, None), (-1, 1)], [(1, 0)])


def test_an_unaligned_barrier_is_taken_once_however_often_it_is_seen(both: Both) -> None:
    offered(both)
    both.runner.offer_idle()
    seen = replace(position("a.main", 2, 1, True), mode=CheckpointMode.UNALIGNED)
    both.batch(0, seen, position("b.main", 1))
    both.batch(1, seen, replace(seen, channel=position("b.main", 0).channel))
    assert (both.written(), both.cuts()) == ([(-1, 1), (0, None), (1, None)], [(1, -1)])


def test_at_least_once_the_last_input_makes_the_cut_though_another_is_beyond(both: Both) -> None:
    counted = replace(barrier(1), mode=CheckpointMode.AT_LEAST_ONCE)
    offered(both, counted)
    beyond = replace(position("a.main", 3, 1), mode=counted.mode)
    both.batch(0, beyond, position("b.main", 1))
    both.batch(1, beyond, replace(position("b.main", 2, 1, True), mode=counted.mode))
    assert (both.written(), both.cuts()) == ([(0, None), (1, 1)], [(1, 1)])


def declined(both: Both) -> list[int]:
    return [d.id for d in both.runner.declined(None)]


def test_a_barrier_that_goes_on_without_a_cut_is_declined(both: Both) -> None:
    """Both inputs are beyond it before the stage has heard of it: nobody need wait for its timeout."""
    counted = replace(barrier(1), mode=CheckpointMode.AT_LEAST_ONCE)
    beyond = replace(position("a.main", 3, 1), mode=counted.mode)
    both.batch(0, beyond, position("b.main", 1))
    both.batch(1, beyond, replace(beyond, channel=position("b.main", 0).channel))
    assert (both.cuts(), declined(both)) == ([], [])
    offered(both, counted)
    assert declined(both) == [1]
    both.runner.notify(counted.id, completed=False)
    assert declined(both) == []


@pytest.mark.parametrize("failed", [True, False])
def test_a_barrier_ahead_of_a_batch_whose_cut_was_not_handed_over_is_declined_by_the_next_runner(
    both: Both, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """It is in the channel already: running the batch again does not repeat it."""
    offered(both)
    before = both.runner
    both.plan(0, position("a.main", 1), position("b.main", 1))

    def away(*_: object) -> None:
        raise OSError("503")

    if failed:
        monkeypatch.setattr(before._outputs, "versions", away)
    with pytest.raises(OSError, match="503") if failed else nullcontext():
        both.run(0)
    both.start()
    both.runner.succeed(before)
    offered(both)
    both.run(0)
    assert both.written() == [(-1, 1), (0, None)]
    assert (both.cuts(), declined(both)) == (([], [1]) if failed else ([(1, -1)], []))


def test_barriers_that_all_channels_have_may_be_cleaned_up_in_any_of_them(both: Both) -> None:
    """A slow reader keeps one channel back while others are trimmed; the next batch looks for none."""
    both.start("early", "late")
    for number in range(1, 7):
        offered(both, replace(UNALIGNED, id=CheckpointId(number)))
        both.runner.offer_idle()
    assert both.cuts() == [(number, -1) for number in range(1, 7)]
    trim(both.root, ChannelId("both.late"), Version(6))
    both.batch(0, position("a.main", 1), position("b.main", 1))
    writer = make_writer(both.root, "both", "late")
    writer.refresh()
    assert [e.batch for e in writer.log.after(Version(6))] == [0]
