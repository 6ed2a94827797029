"""Seeded runs of a whole job under faults; a failure names its seed, `simulate(seed)` shows it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_abs.alignment import align, in_place, marker
from spark_abs.model import (
    NO_EPOCH,
    AttemptId,
    Barrier,
    BatchId,
    ChannelId,
    CheckpointMode,
    Entry,
    Position,
    RunId,
    StageId,
    channel_id,
)
from spark_abs.protocol.coordinator import Coordinator
from spark_abs.protocol.credit import Capacity, Load
from spark_abs.protocol.messages import Effect
from spark_abs.snapshots.retention import Needed, needed_of_channels
from tests.invariants import InvariantViolated
from tests.simulator import recovery
from tests.simulator.cluster import Checkpoint, Graph, Native, Stage, State, Storage
from tests.simulator.parts import Parts
from tests.simulator.simulate import FIVE, GRAPHS, LOOP, main, simulate
from tests.simulator.strategies import graphs

MUTANT_SEEDS = range(150)


def runs(graph: Graph, seeds: range) -> Counter[str]:
    return sum((simulate(seed, graph) for seed in seeds), Counter[str]())


@pytest.mark.parametrize("block", range(4))
def test_five_stages_survive_everything(block: int) -> None:
    """Sources, a join with two outputs and a diamond: no invariant is violated, and the faults took place."""
    seen = runs(FIVE, range(block * 100, (block + 1) * 100))
    wanted = {"completed", "aborted: expired", "driver kills", "drivers fenced", "stage crashes", "restores"}
    wanted |= {"aborted: subsumed", "aborted: alignment-limit"}
    wanted |= {"native checkpoints lost", "batches repeated"}
    wanted |= {"completed unaligned", "completed with data in flight", "overtaken"}
    wanted |= {"completed at_least_once", "completed with data from after", "barriers taken in place"}
    assert wanted - seen.keys() == set()


@pytest.mark.parametrize("name", ["self-join", "mixed"])
def test_other_shapes_survive_everything(name: str) -> None:
    """A channel read twice; a silent source, and a native input beside channels."""
    seen = runs(GRAPHS[name], range(100))
    wanted = {"completed", "restores to an abandoned checkpoint"}
    assert (wanted | ({"skipped"} if name == "mixed" else set())) - seen.keys() == set()


@pytest.mark.parametrize("name", ["loop", "loops"])
def test_loops_survive_everything(name: str) -> None:
    """A loop of two stages and a diamond out of it; a loop within a loop. Rows go round at cuts (P17)."""
    seen = runs(GRAPHS[name], range(100))
    assert {"completed", "restores", "rows on their way round"} - seen.keys() == set()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(graph=graphs(), seed=st.integers(0, 2**32))
def test_any_graph_survives_everything(graph: Graph, seed: int) -> None:
    """Up to eight stages, whatever is wired to what; `simulate` raises on the first violation."""
    simulate(seed, graph)


def test_a_seed_is_the_whole_run() -> None:
    """A failure can be seen again."""
    assert simulate(7) == simulate(7)


def test_the_command_tells_what_it_saw() -> None:
    result = CliRunner().invoke(main, ["--runs", "2", "--graph", "five"])
    assert "no violation" in result.output


# -- what is broken on purpose has to be found


def violated(parts: Parts, graph: Graph = FIVE) -> str:
    """Run a broken job until an invariant does not hold; return its number, `-` if all seeds pass."""
    for seed in MUTANT_SEEDS:
        try:
            simulate(seed, graph, parts)
        except InvariantViolated as error:
            return str(error).partition(": ")[2][0]
    return "-"


def on_one_input(channel: str, broken: Callable[..., align.Decision]) -> Parts:
    def decide(own: Position, *others: Any, **known: Any) -> align.Decision:
        return (broken if own.channel == channel else align.decide)(own, *others, **known)

    return Parts(decide=decide)


def reads_past_the_barrier(own: Position, *others: Any, **known: Any) -> align.Decision:
    """Ignore that the input is blocked: read on, and go on saying that it stands at the barrier."""
    if not own.at_barrier:
        return align.decide(own, *others, **known)
    decision = align.decide(replace(own, at_barrier=False), *others, **known)
    return align.Advance(replace(decision.position, at_barrier=True))


def does_not_see_barriers(
    own: Position, stage: Any, entries: Any, *others: Any, **known: Any
) -> align.Decision:
    """Ignore the barrier itself: for this input the log holds nothing but data."""
    return align.decide(own, stage, (replace(entry, barrier=None) for entry in entries), *others, **known)


def without_waiting(
    inner: Callable[..., marker.Emission], before: Any, after: Sequence[Position], run: Any
) -> marker.Emission:
    """Cut an at-least-once barrier when the first input has it."""
    newest = max((p.epoch for p in after), default=NO_EPOCH)
    counted = any(p.epoch == newest and p.mode is CheckpointMode.AT_LEAST_ONCE for p in after)
    if counted and newest > max((p.epoch for p in before), default=NO_EPOCH):
        return marker.Cut(newest)
    return inner(before, after, run)


def newest_state(native: Native, batch: BatchId) -> State:
    """Take along state files newer than the cut, as a copy of the whole directory would."""
    newest = native.states[max(native.states)]
    return newest[next(reversed(newest))]


def test_a_gate_that_reads_past_its_barrier_is_caught() -> None:
    """What is behind the barrier on one input gets into the state: no consistent cut."""
    assert violated(on_one_input("clicks.main", reads_past_the_barrier)) == "1"


def test_a_gate_that_does_not_see_barriers_is_caught() -> None:
    """The input counts at last because it ends, with all that was after its barrier: no consistent cut."""
    assert violated(on_one_input("clicks.main", does_not_see_barriers)) == "1"


def test_a_tracker_that_does_not_wait_for_the_last_input_is_caught() -> None:
    """At least once: what is before the barrier on the slower input is missing from the cut."""
    assert violated(Parts(emission=partial(without_waiting, marker.emission))) == "1"


def test_a_restore_that_forgets_what_was_in_flight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unaligned: the stage goes on at the barrier, and rows before it are in no state."""

    def at_the_barrier(storage: Storage, stage: Stage, checkpoint: Checkpoint, attempt: AttemptId) -> Native:
        native = recovery_materialised(storage, stage, checkpoint, attempt)
        for batch, planned in native.offsets.items():
            ahead = (
                replace(p, version=max(p.version, storage.cut_version(checkpoint.id, p.channel)))
                for p in planned.positions
            )
            native.offsets[batch] = replace(planned, positions=tuple(ahead))
        return native

    recovery_materialised = recovery.materialised
    monkeypatch.setattr(recovery, "materialised", at_the_barrier)
    assert violated(Parts()) in {"1", "4"}


def test_a_stage_that_takes_a_barrier_by_one_of_its_inputs_is_caught() -> None:
    """Rows before the barrier on another input are in no state."""

    def by_the_first(barrier: Barrier, positions: Sequence[Position], *others: Any) -> bool:
        return in_place.is_at_cut(barrier, positions[:1], *others)

    assert violated(Parts(is_at_cut=by_the_first)) == "1"


def test_a_stage_that_takes_a_barrier_over_rows_is_caught() -> None:
    """Rows before the barrier are in no state."""

    def blind(barrier: Barrier, positions: Sequence[Position], unread: in_place.Unread, run: RunId) -> bool:
        def markers(own: Position) -> Iterator[Entry]:
            return (replace(entry, files=()) for entry in unread(own))

        return in_place.is_at_cut(barrier, positions, markers, run)

    assert violated(Parts(is_at_cut=blind)) == "1"


def test_a_capture_that_takes_newer_state_is_caught() -> None:
    """State from after the barrier is in the checkpoint: no consistent cut."""
    assert violated(Parts(captured=newest_state)) == "1"


class InAnyOrder(Coordinator):
    """Lets the verdict on the newest id out first that has one."""

    def _commit_next(self) -> tuple[Effect, ...]:
        for pending in reversed(self.pending):
            if pending.verdict and not pending.committing:
                self._pending[pending.id] = replace(pending, committing=True)
                return (pending.verdict,)
        return ()


def test_outcomes_that_do_not_come_in_id_order_are_caught() -> None:
    """With several checkpoints open, a late completion would follow what was decided of a younger one."""
    assert violated(Parts(coordinator=InAnyOrder)) == "2"


def test_a_writer_that_does_not_check_its_transaction_is_caught() -> None:
    """A batch that is run again is written again: in a checkpoint, or at the end, rows are there twice."""
    assert violated(Parts(already=lambda *_: False)) in {"1", "4"}


def test_a_stage_that_is_rebuilt_and_plans_its_old_batches_anew_is_caught() -> None:
    """Its state has read other rows than its outputs hold: some are lost, or there twice."""
    assert violated(Parts(repeats=lambda *_: ())) in {"1", "4"}


def test_a_clean_up_that_takes_rows_in_flight_to_an_old_checkpoint_is_caught() -> None:
    """A restore to it finds the entries, and not the rows (P16)."""

    def without(*facts: Any) -> dict[ChannelId, Needed]:
        return {c: replace(needed, in_flight=()) for c, needed in needed_of_channels(*facts).items()}

    longer = (Stage(StageId("a"), native=40), Stage(StageId("b"), (channel_id("a"),), outputs=(), sink=True))
    assert violated(Parts(needed=without), longer) == "6"


def test_a_checkpoint_that_is_skipped_though_a_stage_has_moved_is_caught() -> None:
    """State or an output has rows that the last checkpoint lacks."""
    assert violated(Parts(stands_at=lambda *_: True)) == "1"


ONE = Capacity(entries=1)


def test_credit_that_counts_entries_without_rows_is_caught() -> None:
    """Nobody consumes them: the channel is full for ever, and the job does not end (P19)."""
    broken = Parts(capacity=ONE, load=lambda entry: Load(entry.version, entry.size))
    assert violated(broken) == "3"


def test_credit_by_the_fastest_consumer_is_caught() -> None:
    """A channel with two readers grows beyond its bound (P19)."""
    fastest = Parts(capacity=ONE, slowest=lambda consumers: max(consumers, default=None))
    readers = (Stage(StageId(n), (channel_id("a"),), outputs=(), sink=True) for n in ("one", "two"))
    assert violated(fastest, (Stage(StageId("a"), native=10), *readers)) == "P"


def test_a_loop_that_ends_with_its_input_is_caught() -> None:
    """What still goes round is never read: it is lost (P17)."""
    assert violated(Parts(loop_ended=lambda *_: True), LOOP) == "4"
