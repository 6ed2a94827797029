"""Every interleaving of small systems; broken on purpose, each has a shortest counterexample."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from spark_abs.alignment import align, marker
from spark_abs.model import NO_EPOCH, Barrier, CheckpointMode, Position, StageId
from spark_abs.protocol.coordinator import Coordinator
from spark_abs.protocol.credit import Capacity, Load
from spark_abs.protocol.trigger import TriggerSettings
from tests.simulator.explore import Choice, TooLarge, Violation, explore
from tests.simulator.parts import Parts
from tests.simulator.systems import (
    SYSTEMS,
    Small,
    System,
    chain,
    diamond,
    loop,
    two_inputs,
    two_outputs,
)

LEAST = {
    "two inputs, two checkpoints": 10_000,
    "two outputs, the source crashes": 10_000,
    "diamond, with room for one entry": 10_000,
}
"""States of the largest systems, and at least a thousand of each other."""


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_interleaving_violates_an_invariant(name: str) -> None:
    """`explore` ends only when there is no state left to look at, and every state can come to an end."""
    explored = explore(SYSTEMS[name].first())
    assert explored.states >= LEAST.get(name, 1_000)
    assert explored.ends > 0


@pytest.mark.parametrize(
    "system",
    [
        System(two_inputs(1, 0), checkpoints=2, timeout=True),
        System(two_outputs(2), checkpoints=2, crash="a"),
        System(diamond(1), checkpoints=2, crash="coordinator"),
        System(chain(1), checkpoints=1, crash="driver"),
        System(chain(1), checkpoints=1, crash="snapshotter"),
        System(diamond(1), checkpoints=2, mode=CheckpointMode.UNALIGNED),
        System(two_outputs(1), checkpoints=2, overtaken=True),
    ],
    ids=lambda system: f"crash of {system.crash}, {system.mode}",
)
def test_a_state_is_told_by_its_fingerprint_and_copies_are_apart(system: System) -> None:
    """What is kept of a fingerprint is what making it anew gives, and moving copies leaves a state alone."""
    for seed in range(10):
        rng, world = Random(seed), system.first()
        assert isinstance(world, Small)
        for _ in range(40):
            if not (choices := world.choices()):
                break
            world.take(rng.choice(choices))
            kept = world.fingerprint()
            for choice in world.choices():
                world.copy().take(choice)
            world.forget()
            assert world.fingerprint() == kept


# -- what is broken on purpose has to be found, by a shortest way


def violation(system: System) -> Violation:
    with pytest.raises(Violation) as found:
        explore(system.first())
    return found.value


def reads_past_the_barrier(own: Position, *others: Any, **known: Any) -> align.Decision:
    """Ignore that the input is blocked: read on, and go on saying that it stands at the barrier."""
    if not own.at_barrier:
        return align.decide(own, *others, **known)
    decision = align.decide(replace(own, at_barrier=False), *others, **known)
    return align.Advance(replace(decision.position, at_barrier=True))


def waits_for_all_but_one(stages: Iterable[StageId], settings: Callable[[], TriggerSettings]) -> Coordinator:
    return Coordinator(sorted(stages)[1:], settings)


def test_a_gate_that_does_not_hold_at_the_barrier() -> None:
    """The end of b, after its barrier, is read before a has the barrier."""
    found = violation(System(two_inputs(2, 0), checkpoints=1, parts=Parts(decide=reads_past_the_barrier)))
    assert found.wrong == (
        "1: checkpoint 1, both reading b.main: consumed up to 3, after the producer's cut at 2"
    )
    assert len(found.steps) == 10


def test_a_coordinator_that_completes_before_all_have_acknowledged() -> None:
    """Nothing is waited for of a, which never sees the barrier; the message reads like a story."""
    found = violation(System(two_inputs(0, 0), checkpoints=1, parts=Parts(coordinator=waits_for_all_but_one)))
    assert str(found).splitlines() == [
        "after 7 steps: 1: checkpoint 1 is completed and holds nothing of a",
        "  1. life:a: a.main gets entry 2 (end)",
        "  2. committer: id 1 is claimed; a message is under way: claimed 1",
        "  3. coordinator: sources may take barrier 1",
        "  4. agent:b: the agent of b is about to pass barrier 1 on",
        "  5. agent:b: b.main gets entry 2 (barrier 1); b has its cut of 1",
        "  6. life:both: both plans batch 0: a.main to 2, its end, b.main to 2, barrier 1; "
        "both has finished batch 0; both has its cut of 1; the coordinator wants to complete",
        "  7. committer: checkpoint 1 is completed",
    ]


def test_a_batch_run_again_that_does_not_follow_what_one_output_holds() -> None:
    """The batch is in main without a barrier; run again, it takes the barrier that is open by now to late."""
    broken = Parts(written=lambda process, batch: None)
    found = violation(System(two_outputs(2), checkpoints=1, crash="a", parts=broken))
    assert found.wrong == (
        "1: checkpoint 1, both reading a.main: consumed up to 3, after the producer's cut at 2"
    )
    assert len(found.steps) == 16
    assert "  7. crash of a: no longer: a has batch 0 ready for late" in found.steps


def test_credit_that_counts_entries_without_rows() -> None:
    """The second record goes to main alone; nobody consumes its empty entry in late, and a waits for ever."""
    full = Parts(capacity=Capacity(entries=1), load=lambda entry: Load(entry.version, entry.size))
    found = violation(System(two_outputs(3), checkpoints=0, parts=full))
    assert found.wrong.startswith("3: a cannot go on: 3 records")
    assert len(found.steps) == 11


def aligns(own: Position, stage: Any, *others: Any, **known: Any) -> align.Decision:
    """Take a feedback edge for an input like others: wait until the barrier has come round."""
    decision = align.decide(replace(own, feedback=False), plain(stage), *others, **known)
    return replace(decision, position=replace(decision.position, feedback=own.feedback))


def plain(positions: Sequence[Position]) -> tuple[Position, ...]:
    return tuple(replace(position, feedback=False) for position in positions)


def test_a_head_that_waits_for_its_way_back() -> None:
    """It holds the barrier that it waits for: nothing goes on (P17)."""
    broken = Parts(decide=aligns, emission=lambda a, b, run: marker.emission(plain(a), plain(b), run))
    found = violation(System(loop(0), checkpoints=1, parts=broken))
    assert found.wrong.splitlines() == [
        "3: head cannot go on: a.main to 2, barrier 1, head.again to 0",
        "2: checkpoint 1 gets no outcome",
    ]
    assert len(found.steps) == 8


def takes_barriers_it_is_beyond(barriers: Iterable[Barrier], positions: Any) -> Barrier | None:
    """Take what is offered wherever the inputs stand."""
    return next((b for b in barriers if b.mode is CheckpointMode.UNALIGNED), None)


def cuts_at_the_first(before: Any, after: Sequence[Position], run: Any) -> marker.Emission:
    """Do not wait for the last input: count a barrier that need not be waited for when the first has it."""
    newest = max((p.epoch for p in after), default=NO_EPOCH)
    if newest > max((p.epoch for p in before), default=NO_EPOCH):
        return marker.Cut(newest)
    return marker.emission(before, after, run)


def test_a_batch_that_goes_beyond_an_overtaken_barrier_before_it_was_taken() -> None:
    """The gate was let on; the batch has read what is behind the barrier, and no cut can be made any more."""
    broken = Parts(lets_ahead=lambda process, batch: False)
    found = violation(System(two_outputs(0), checkpoints=1, overtaken=True, parts=broken))
    assert found.wrong == "2: checkpoint 1 gets no outcome"


def test_a_stage_that_takes_an_unaligned_barrier_it_is_beyond() -> None:
    """What is behind the barrier is in its state: after a restore it would be there twice."""
    broken = Parts(lets_ahead=lambda process, batch: False, overtaking=takes_barriers_it_is_beyond)
    found = violation(System(two_outputs(0), checkpoints=1, overtaken=True, parts=broken))
    assert "after the producer's cut" in found.wrong


def test_a_tracker_that_does_not_wait_for_the_last_input() -> None:
    """What is before the barrier on the slower input is in no state, and the source will not repeat it."""
    broken = Parts(emission=cuts_at_the_first)
    counted = CheckpointMode.AT_LEAST_ONCE
    found = violation(System(two_inputs(1, 0), checkpoints=1, mode=counted, parts=broken))
    assert "only, the producer's cut is at" in found.wrong


# -- the explorer itself, on a world that is a number


class Count:
    """A number that moves as it is told to; `broken` is refused, `ends` may stand still."""

    def __init__(self, moves: Mapping[int, Sequence[int]], broken: int | None = None, ends: int = 0) -> None:
        self.moves, self.broken, self.ends = moves, broken, ends
        self.at = 0

    def copy(self) -> Count:
        twin = Count(self.moves, self.broken, self.ends)
        twin.at = self.at
        return twin

    def choices(self) -> Sequence[Choice]:
        return [Choice("move", to) for to in self.moves[self.at]]

    def take(self, choice: Choice) -> None:
        self.at = choice.pick
        assert self.at != self.broken, "broken"

    def fingerprint(self) -> Hashable:
        return self.at

    def unfinished(self) -> Iterable[str]:
        return [] if self.at == self.ends else [f"stuck at {self.at}"]

    def facts(self) -> Sequence[str]:
        return [f"at {self.at}"]


def test_the_shortest_way_is_told() -> None:
    with pytest.raises(Violation) as found:
        explore(Count({0: [1, 2], 1: [2], 2: [3], 3: []}, broken=3))
    assert found.value.steps == ("  1. move: at 2", "  2. move: at 3")


def test_a_state_without_a_way_on_has_to_be_an_end() -> None:
    with pytest.raises(Violation, match="stuck at 1"):
        explore(Count({0: [1], 1: [1]}, ends=2))


def test_going_round_for_ever_is_found() -> None:
    with pytest.raises(Violation, match="cannot end") as found:
        explore(Count({0: [1, 2], 1: [], 2: [3], 3: [2]}, ends=1))
    assert found.value.steps == ("  1. move: at 2",)


def test_all_states_are_counted_once() -> None:
    explored = explore(Count({0: [1, 2], 1: [3], 2: [3, 2], 3: []}, ends=3))
    assert (explored.states, explored.steps, explored.depth, explored.ends) == (4, 4, 2, 1)


def test_a_space_larger_than_was_allowed_is_an_error() -> None:
    with pytest.raises(TooLarge, match="more than 2 states"):
        explore(Count({0: [1], 1: [2], 2: []}, ends=2), most=2)
