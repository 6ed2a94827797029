"""State machines over the real protocol: what Hypothesis does to it, against a plain model beside it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from spark_abs.alignment.align import Limits, Settled, waiting
from spark_abs.alignment.marker import Cancelled, Cut
from spark_abs.errors import AbortReason
from spark_abs.manifest import StageSnapshot
from spark_abs.model import BatchId, CheckpointId, CheckpointKind, Entry, StageId
from spark_abs.protocol.coordinator import (
    Coordinator,
)
from spark_abs.protocol.messages import (
    Abort,
    AckAnswer,
    Acked,
    AckResult,
    Answer,
    CancelRequested,
    Claim,
    Claimed,
    Complete,
    Decided,
    Declined,
    Event,
    Requested,
    StatusChanged,
    Tick,
)
from spark_abs.protocol.trigger import (
    Request,
    RunStatus,
    TriggerSettings,
)
from tests.simulator.alignment import Alignment, barrier

CHANNELS = st.integers(0, 2)
ACTIONS = st.sampled_from(("pass", "pass", "pass", "later", "cancel"))
STAGES = (StageId("a"), StageId("b"))


class AlignmentMachine(RuleBasedStateMachine):
    """One stage, its channels, and producers that pass barriers, skip, cancel, end, and fall silent.

    The model is the log: what a cut may hold is read off it, entry by entry.
    """

    @initialize(inputs=st.sampled_from((("a",), ("a", "b"), ("a", "a"), ("a", "b", "c"), ("a", "a", "b"))))
    def begin(self, inputs: tuple[str, ...]) -> None:
        self.stage = Alignment(*inputs)
        self.claimed = CheckpointId(0)
        self.marked = dict.fromkeys(inputs, 0)
        self.ended: set[str] = set()

    def producer(self, number: int) -> str | None:
        """Name a producer that has not ended."""
        alive = [name for name in self.stage.logs if name not in self.ended]
        return alive[number % len(alive)] if alive else None

    @rule(number=CHANNELS, rows=st.integers(0, 3))
    def writes(self, number: int, rows: int) -> None:
        if name := self.producer(number):
            self.stage.write(name, rows=rows)

    @rule(actions=st.lists(ACTIONS, min_size=3, max_size=3), rows=st.integers(0, 2))
    def checkpoint_begins(self, actions: list[str], rows: int) -> None:
        """Each producer passes the new barrier on, cancels it, or leaves it for later; then it may go on."""
        self.claimed = CheckpointId(self.claimed + 1)
        for name, action in zip(self.stage.logs, actions, strict=False):
            if name not in self.ended and action != "later":
                self.mark(name, cancels=action == "cancel")
                self.stage.write(name, rows=rows)

    @rule(number=CHANNELS, rows=st.integers(0, 2))
    def passes_marker(self, number: int, rows: int) -> None:
        """A producer that was late passes on the newest barrier; those that it missed are skipped."""
        name = self.producer(number)
        if name and self.marked[name] < self.claimed:
            self.mark(name, cancels=False)
            self.stage.write(name, rows=rows)

    def mark(self, name: str, cancels: bool) -> None:
        self.marked[name] = self.claimed
        if cancels:
            self.stage.aborted.add(self.claimed)
            self.stage.write(name, rows=1, cancel=self.claimed)
        else:
            self.stage.write(name, rows=1, marker=self.claimed)

    @precondition(lambda self: self.claimed > 1)
    @rule(number=CHANNELS)
    def ends(self, number: int) -> None:
        if name := self.producer(number):
            self.ended.add(name)
            self.stage.write(name, end=True)

    @precondition(lambda self: self.claimed > 2)
    @rule(back=st.integers(0, 3))
    def aborted(self, back: int) -> None:
        self.stage.aborted.add(CheckpointId(max(1, self.claimed - back)))

    @rule(entries=st.integers(1, 4), size=st.sampled_from((1, 30, 1_000)), times=st.integers(1, 3))
    def runs_batches(self, entries: int, size: int, times: int) -> None:
        """Any batch: blocked inputs stay, and if it is a cut, it holds exactly what is before the barrier."""
        for _ in range(times):
            held = {n: self.stage.positions[n] for n in range(len(self.stage.positions)) if self.must_wait(n)}
            found = self.stage.batch(Limits(entries, size))
            assert {n: self.stage.positions[n] for n in held} == held, "an input left its barrier too early"
            if isinstance(found, Cut) and found.id not in self.stage.aborted:
                for number in range(len(self.stage.positions)):
                    self.check_cut(number, found.id)

    def read(self, number: int) -> list[Entry]:
        """Return what an input has consumed, from its log."""
        own = self.stage.positions[number]
        return self.stage.logs[own.channel][: own.version]

    def must_wait(self, number: int) -> bool:
        """Say from the logs alone whether an input stands at a barrier that another one still has to get."""
        consumed = self.read(number)
        if not consumed or not (marker := consumed[-1].barrier) or marker.id in self.stage.aborted:
            return False
        newest = {n: _newest(self.read(n)) for n in range(len(self.stage.positions)) if n != number}
        if newest and max(newest.values()) > marker.id:
            return False
        return any(newest[n] < marker.id and not any(e.end for e in self.read(n)) for n in newest)

    def check_cut(self, number: int, checkpoint: CheckpointId) -> None:
        own = self.stage.positions[number]
        log = self.stage.logs[own.channel]
        at = next((n for n, entry in enumerate(log, 1) if entry.barrier == barrier(checkpoint)), None)
        if at is not None:
            behind = [entry for entry in log[at : own.version] if not _only_end(entry)]
            assert own.version >= at, f"input {number}: data before barrier {checkpoint} is missing"
            assert not behind, f"input {number}: {len(behind)} entries after barrier {checkpoint} are in it"
        else:
            assert own.is_closed(self.stage.run), f"input {number} is open and never had {checkpoint}"

    @rule()
    def comes_to_rest(self) -> None:
        """When nothing moves any more, whoever waits, waits for an input that still has to bring the id."""
        self.stage.drain()
        for number, checkpoint in self.stage.waiting().items():
            others = [p for n, p in enumerate(self.stage.positions) if n != number]
            missing = [p for p in others if not p.is_closed(self.stage.run) and p.epoch < checkpoint]
            assert missing, f"input {number} waits at {checkpoint} for nobody"
            assert all(self.marked[p.channel] < checkpoint for p in missing), f"{missing} could read on"

    @invariant()
    def nobody_waits_for_what_is_settled(self) -> None:
        if hasattr(self, "stage"):
            assert not set(self.stage.waiting().values()) & self.stage.aborted

    @invariant()
    def who_waits_can_be_told_from_positions_alone(self) -> None:
        """What stands after these inputs is what an alignment holds up (P6)."""
        if hasattr(self, "stage"):
            blocked = [self.stage.positions[number] for number in self.stage.waiting()]
            settled = Settled(self.stage.floor, frozenset(self.stage.aborted))
            assert list(waiting(self.stage.positions, settled, self.stage.run)) == blocked

    @invariant()
    def markers_go_out_in_id_order(self) -> None:
        if hasattr(self, "stage"):
            ids = [e.id for e in self.stage.emitted if isinstance(e, Cut | Cancelled)]
            assert ids == sorted(set(ids))


def _newest(entries: list[Entry]) -> int:
    """Return the newest id that a marker among the entries carries."""
    return max((max(e.barrier.id if e.barrier else 0, e.cancel or 0) for e in entries), default=0)


def _only_end(entry: Entry) -> bool:
    return entry.silent or (entry.end and not entry.files)


class CoordinatorMachine(RuleBasedStateMachine):
    """A coordinator whose answers come late, twice, or with another outcome than it asked for."""

    @initialize(most=st.integers(1, 3))
    def begin(self, most: int) -> None:
        self.most = most
        self.now = 0
        self.newest = 0
        self.claims: list[Claim] = []
        self.kinds: dict[int, CheckpointKind] = {}
        self.verdicts: list[Complete | Abort] = []
        self.outcomes: dict[int, bool] = {}
        self.counted: dict[int, set[str]] = {}
        self.cancels: dict[str, tuple[int, bool]] = {}
        """Requests to cancel: the id, and whether it was open then."""
        self.cancelled: dict[str, bool] = {}
        """Their answers."""
        self.running = True
        settings_now = TriggerSettings(interval_ms=50, min_pause_ms=10, timeout_ms=200, max_concurrent=most)
        self.coordinator = Coordinator(STAGES, lambda: settings_now)
        self.feed(StatusChanged(0, RunStatus.RUNNING))

    def feed(self, event: Event) -> None:
        """Hand over an event and hold its effects against the model."""
        for effect in self.coordinator.handle(event):
            match effect:
                case Claim():
                    assert self.running, "a claim while the job does not run"
                    assert not self.claims, "two claims in flight"
                    if effect.kind is CheckpointKind.CHECKPOINT:
                        assert self.newest - len(self.outcomes) < self.most, "more are open than allowed"
                    self.claims.append(effect)
                case Complete(checkpoint, snapshots):
                    assert {s.stage for s in snapshots} == self.counted[checkpoint] == set(STAGES)
                    self.verdicts.append(effect)
                case Abort():
                    subsumed = effect.reason is AbortReason.SUBSUMED
                    assert not subsumed or self.kinds[effect.id] is CheckpointKind.CHECKPOINT
                    self.verdicts.append(effect)
                case AckAnswer(checkpoint, stage, result):
                    self.check_answer(checkpoint, stage, result)
                case Answer(request, _, ok, _) if request in self.cancels:
                    assert self.cancelled.setdefault(request, ok) is ok, "two answers that differ"
                    number, was_open = self.cancels[request]
                    assert ok is (was_open and self.outcomes.get(number) is False)
                case _:
                    pass
        assert len(self.verdicts) <= 1, "a second verdict leaves before the first is durable"

    def check_answer(self, checkpoint: CheckpointId, stage: StageId, result: AckResult) -> None:
        if result is AckResult.SUCCESS:
            assert stage not in self.counted[checkpoint], "counted twice"
            assert checkpoint not in self.outcomes, "counted after the outcome"
            self.counted[checkpoint].add(stage)
        if checkpoint in self.outcomes:
            expected = AckResult.DUPLICATE if self.outcomes[checkpoint] else AckResult.DISCARDED
            assert result is expected

    @precondition(lambda self: not self.claims and not (self.verdicts and self.most == 1))
    @rule()
    def checkpoint_begins(self) -> None:
        """Time goes by until a checkpoint is claimed; the claim is durable at once."""
        self.time_passes(60)
        if self.claims:
            self.claim_is_durable()

    @rule(ms=st.integers(1, 120))
    def time_passes(self, ms: int) -> None:
        self.now += ms
        self.feed(Tick(self.now))

    @rule(number=st.integers(0, 5), kind=st.sampled_from(list(CheckpointKind)[:2]))
    def somebody_asks(self, number: int, kind: CheckpointKind) -> None:
        self.feed(Requested(self.now, Request(f"r{number}", kind)))

    @precondition(lambda self: self.claims)
    @rule()
    def claim_is_durable(self) -> None:
        claim = self.claims.pop()
        self.newest += 1
        self.counted[self.newest] = set()
        self.kinds[self.newest] = claim.kind
        claimed = replace(barrier(self.newest), kind=claim.kind)
        self.feed(Claimed(self.now, claimed, claim.request_id))

    @precondition(lambda self: self.newest)
    @rule(
        back=st.sampled_from((0, 0, 0, 1, 2)),
        stages=st.lists(st.sampled_from(STAGES), min_size=1, max_size=3),
    )
    def stages_acknowledge(self, back: int, stages: list[StageId]) -> None:
        """Some stages, in any order, some of them again, perhaps for an older id."""
        checkpoint = CheckpointId(max(1, self.newest - back))
        for stage in stages:
            self.feed(Acked(self.now, checkpoint, StageSnapshot(stage, BatchId(0))))

    @precondition(lambda self: self.newest)
    @rule(stage=st.sampled_from(STAGES))
    def stage_declines(self, stage: StageId) -> None:
        self.feed(Declined(self.now, CheckpointId(self.newest), stage, AbortReason.DECLINED, "no"))

    @precondition(lambda self: self.newest and self.running)
    @rule(back=st.sampled_from((0, 0, 1, 2)), twice=st.booleans())
    def somebody_cancels(self, back: int, twice: bool) -> None:
        number = max(1, self.newest - back)
        request = f"c{len(self.cancels)}"
        self.cancels[request] = number, number not in self.outcomes
        for _ in range(1 + twice):
            self.feed(CancelRequested(self.now, request, str(number), "me@here"))

    @precondition(lambda self: self.verdicts)
    @rule(fails=st.booleans(), twice=st.booleans())
    def outcome_is_durable(self, fails: bool, twice: bool) -> None:
        verdict = self.verdicts.pop()
        completed = isinstance(verdict, Complete) and not fails
        assert all(verdict.id > earlier for earlier in self.outcomes), "outcomes out of id order"
        self.outcomes[verdict.id] = completed
        for _ in range(1 + twice):
            self.feed(Decided(self.now, verdict.id, completed, None if completed else AbortReason.EXPIRED))

    @precondition(lambda self: self.newest > 4)
    @rule()
    def job_stops(self) -> None:
        self.running = False
        self.feed(StatusChanged(self.now, RunStatus.STOPPING))

    @rule()
    def every_id_gets_an_outcome(self) -> None:
        """Whatever is open ends, by acknowledgement or by its timeout."""
        while len(self.outcomes) < self.newest:
            if self.verdicts:
                self.outcome_is_durable(fails=False, twice=False)
            else:
                self.time_passes(200)
        assert self.cancelled.keys() == self.cancels.keys(), "a request to cancel without an answer"


def test_alignment_against_the_log() -> None:
    """Any order of writes, markers, ends, aborts and batches: cuts are exact, nobody waits in vain."""
    run_state_machine_as_test(
        AlignmentMachine,
        settings=settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True),
    )


def test_the_coordinator_against_a_ledger() -> None:
    """Any order of answers, repeats, timeouts: each counted once, outcomes in order, few enough open."""
    run_state_machine_as_test(
        CoordinatorMachine,
        settings=settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True),
    )
