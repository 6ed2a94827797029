"""The coordinator: claims ids, counts acknowledgements, decides outcomes (P2, P3, P13, P15).

Events in, effects out. The coordinator reads no clock, and its memory may be lost: a new coordinator that
gets `Claimed` again for ids without an outcome completes them if their acknowledgements are sent again, and
aborts them after their timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar, assert_never

from spark_abs.errors import AbortReason
from spark_abs.manifest import StageSnapshot
from spark_abs.model import Barrier, CheckpointId, CheckpointKind, CheckpointMode, StageId
from spark_abs.protocol import trigger
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
    Discard,
    Effect,
    Event,
    FailJob,
    Joined,
    Left,
    Notify,
    Overtake,
    Requested,
    Skipped,
    StatusChanged,
    Tick,
)
from spark_abs.protocol.trigger import Past, Request, RunStatus, TriggerSettings

_FAILURES = frozenset(
    (AbortReason.EXPIRED, AbortReason.DECLINED, AbortReason.FINALIZE_FAILED, AbortReason.STATE_MISSING)
)
"""Reasons that count as failures. With the other reasons the checkpoint was no longer needed."""
_REMEMBERED = 64
"""The number of outcomes and answers that are remembered, to recognise late and repeated messages."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A claimed checkpoint without a durable outcome."""

    barrier: Barrier
    request_id: str | None
    since_ms: int
    acks: Mapping[StageId, StageSnapshot] = field(default_factory=dict)
    verdict: Complete | Abort | None = None
    """The verdict of this coordinator; it is durable when `Decided` comes."""
    committing: bool = False
    """Whether the verdict was sent. A verdict that was sent cannot change."""
    cancels: frozenset[str] = frozenset()
    """The requests to cancel it: its outcome answers them."""

    @property
    def id(self) -> CheckpointId:
        """The checkpoint's id."""
        return self.barrier.id


class Coordinator:
    """Turns events into effects. Not thread-safe; the caller carries effects out in the order given.

    Guarantees: one claim at a time, and no more open periodic and requested checkpoints than allowed;
    verdicts are sent one at a time, in id order; a checkpoint is completed only with the acknowledgements of
    all stages; every claimed id gets a verdict. Any event may come twice or late, except the first `Claimed`
    of each id, which come in id order: a new coordinator first gets `Claimed` for every claim without an
    outcome.
    """

    def __init__(self, stages: Iterable[StageId], settings: Callable[[], TriggerSettings]) -> None:
        self._stages = frozenset(stages)
        self._settings = settings
        self._status = RunStatus.CREATED
        self._past = Past()
        self._waiting: list[Request] = []
        self._claiming: Claim | None = None
        self._pending: dict[CheckpointId, Pending] = {}
        self._outcomes: dict[CheckpointId, bool] = {}
        self._answers: dict[str, Answer] = {}
        self._named: set[str] = set()
        self._newest: Pending | None = None
        """The last checkpoint that this coordinator has completed, if none has failed since."""
        self._failures: list[str] = []
        """Periodic checkpoints that have failed since the last completed checkpoint."""
        self._ended = False

    @property
    def pending(self) -> tuple[Pending, ...]:
        """Checkpoints without a durable outcome, in id order."""
        return tuple(self._pending[number] for number in sorted(self._pending))

    def handle(self, event: Event) -> tuple[Effect, ...]:
        """Take one event and return its effects, in order."""
        effects = self._react(event)
        self._expire(event.now_ms)
        return (
            *effects,
            *self._overtake(event.now_ms),
            *self._commit_next(),
            *self._begin(event.now_ms),
        )

    def _react(self, event: Event) -> tuple[Effect, ...]:
        match event:
            case StatusChanged():
                return self._on_status(event)
            case Tick():
                return ()
            case Requested():
                return self._on_request(event.request)
            case CancelRequested():
                return self._on_cancel(event)
            case Joined():
                self._stages |= {event.stage}
                return ()
            case Left():
                self._stages -= {event.stage}
                self._complete_all()
                return ()
            case Claimed():
                return self._on_claimed(event)
            case Skipped():
                self._claiming = None
                return ()
            case Acked():
                return self._on_ack(event)
            case Declined():
                self._abort(event.id, event.reason, f"stage {event.stage}: {event.detail}")
                return ()
            case Decided():
                return self._on_decided(event)
            case _:
                assert_never(event)

    def _on_status(self, event: StatusChanged) -> tuple[Effect, ...]:
        if event.status is RunStatus.RUNNING and self._status is not RunStatus.RUNNING:
            self._past = Past(running_since_ms=event.now_ms)
        self._status, self._why = event.status, event.why
        for pending in self.pending:
            if reason := self._forbidden(pending.barrier.kind):
                self._abort(pending.id, reason, self._status_text)
        refused = [r for r in self._waiting if self._forbidden(r.kind)]
        self._waiting = [r for r in self._waiting if r not in refused]
        answers = [self._answer(r.id, None, False, self._status_text) for r in refused]
        claim = self._claiming
        if claim and claim.request_id and self._status in (RunStatus.FAILED, RunStatus.FINISHED):
            answers.append(self._answer(claim.request_id, None, False, self._status_text))
        return tuple(answers)

    @property
    def _status_text(self) -> str:
        """The status of the job, for answers to requests."""
        return f"the job is {self._status}" + (f": {self._why}" if self._why else "")

    def _forbidden(self, kind: CheckpointKind) -> AbortReason | None:
        """Return why a checkpoint of this kind cannot continue in the present status."""
        match self._status:
            case RunStatus.CREATED | RunStatus.RUNNING | RunStatus.ENDING:
                return None
            case RunStatus.STOPPING:
                return None if kind is CheckpointKind.SYNC_SAVEPOINT else AbortReason.JOB_STOPPING
            case RunStatus.FINISHED:
                return AbortReason.RUN_ENDED
            case RunStatus.FAILED:
                return AbortReason.STAGE_FAILED
            case _:
                assert_never(self._status)

    def _on_request(self, request: Request) -> tuple[Effect, ...]:
        if answered := self._answers.get(request.id):
            return (answered,)
        under_way = [p.request_id for p in self.pending] + [r.id for r in self._waiting]
        if request.id in under_way or (self._claiming and self._claiming.request_id == request.id):
            return ()
        if self._ended or self._forbidden(request.kind):
            why = "the job ends with the savepoint that was just taken" if self._ended else self._status_text
            return (self._answer(request.id, None, False, why),)
        if request.name is not None and request.name in self._names():
            why = f"a savepoint {request.name!r} exists already or is being taken: choose a different name"
            return (self._answer(request.id, None, False, why),)
        self._waiting.append(request)
        return ()

    def _on_cancel(self, event: CancelRequested) -> tuple[Effect, ...]:
        """Abort an open checkpoint unless its verdict is there: the commit of its outcome decides."""
        if answered := self._answers.get(event.request_id):
            return (answered,)
        found = next((p for p in self.pending if event.which in (str(p.id), p.barrier.name)), None)
        if found is None:
            return (self._answer(event.request_id, None, False, self._not_open(event.which)),)
        if self._status is RunStatus.STOPPING:
            why = f"the job ends with checkpoint {found.id}, which can no longer be cancelled"
            return (self._answer(event.request_id, found.id, False, why),)
        self._pending[found.id] = replace(found, cancels=found.cancels | {event.request_id})
        self._abort(found.id, AbortReason.CANCELLED, f"by {event.by}")
        return ()

    def _not_open(self, which: str) -> str:
        """Say why a checkpoint cannot be cancelled, and which can be."""
        outcome = next((done for number, done in self._outcomes.items() if str(number) == which), None)
        said = f"no checkpoint {which} is open"
        if outcome is not None:
            said = f"checkpoint {which} is {'complete' if outcome else 'aborted'} already"
        still = ", ".join(str(p.id) for p in self.pending)
        return f"{said}; open are: {still}" if still else f"{said}, and no other is open"

    def _names(self) -> frozenset[str | None]:
        """Return the savepoint names that requests of this run use; they cannot be used a second time."""
        claiming = self._claiming.name if self._claiming else None
        waiting = [r.name for r in self._waiting]
        return frozenset((*self._named, claiming, *waiting, *(p.barrier.name for p in self.pending)))

    def _on_claimed(self, event: Claimed) -> tuple[Effect, ...]:
        barrier = event.barrier
        if self._claiming and self._claiming.request_id == event.request_id:
            self._claiming = None
        if barrier.id in self._pending or barrier.id in self._outcomes:
            return ()
        self._pending[barrier.id] = Pending(barrier, event.request_id, event.now_ms)
        if self._past.triggered_ms is None:  # a new coordinator that is told of its predecessor's claim
            self._past = replace(self._past, triggered_ms=event.now_ms)
        if reason := self._forbidden(barrier.kind):
            self._abort(barrier.id, reason, self._status_text)
        return ()

    def _on_ack(self, event: Acked) -> tuple[Effect, ...]:
        result = self._count(event)
        answer = AckAnswer(event.id, event.snapshot.stage, result)
        pending = self._pending.get(event.id)
        if result in (AckResult.SUCCESS, AckResult.DUPLICATE):
            return (answer,)
        if pending is not None and not isinstance(pending.verdict, Abort):
            return (answer,)  # a stage that has left: what the others hold still counts
        return (answer, Discard(event.id))

    def _count(self, event: Acked) -> AckResult:
        stage, pending = event.snapshot.stage, self._pending.get(event.id)
        if stage not in self._stages:
            return AckResult.UNKNOWN
        if pending is None:
            match self._outcomes.get(event.id):
                case None:
                    return AckResult.UNKNOWN
                case completed:
                    return AckResult.DUPLICATE if completed else AckResult.DISCARDED
        if isinstance(pending.verdict, Abort):
            return AckResult.DISCARDED
        if stage in pending.acks:
            return AckResult.DUPLICATE
        self._pending[event.id] = replace(pending, acks={**pending.acks, stage: event.snapshot})
        self._complete_all()
        return AckResult.SUCCESS

    def _complete_all(self) -> None:
        """Complete the checkpoints that all stages have acknowledged."""
        for pending in self.pending:
            acks = pending.acks
            if pending.verdict is None and acks and acks.keys() >= self._stages:
                complete = Complete(pending.id, tuple(acks[name] for name in sorted(acks)))
                self._pending[pending.id] = replace(pending, verdict=complete)
                self._subsume(pending.barrier)

    def _subsume(self, complete: Barrier) -> None:
        """Abort older checkpoints that a newer one subsumes (P8), as Flink does.

        Savepoints are never aborted. A savepoint of a job that continues does not abort checkpoints either: a
        failed job does not restart from savepoints.
        """
        if complete.kind is CheckpointKind.SAVEPOINT:
            return
        for older in self.pending:
            if older.id < complete.id and older.barrier.kind is CheckpointKind.CHECKPOINT:
                self._abort(older.id, AbortReason.SUBSUMED, f"checkpoint {complete.id} is complete")

    def _abort(self, checkpoint: CheckpointId, reason: AbortReason, detail: str) -> None:
        """Abort a checkpoint, unless it has an outcome or is unknown."""
        pending = self._pending.get(checkpoint)
        if pending and pending.verdict is None:
            self._pending[checkpoint] = replace(pending, verdict=Abort(checkpoint, reason, detail))

    def _on_decided(self, event: Decided) -> tuple[Effect, ...]:
        pending = self._pending.pop(event.id, None)
        if pending is None:
            return ()
        self._past = replace(self._past, decided_ms=event.now_ms)
        _remember(self._outcomes, event.id, event.completed)
        if not event.completed:
            self._newest = None
        elif pending.barrier.kind is CheckpointKind.CHECKPOINT:
            self._newest = pending
        if event.completed and pending.barrier.name is not None:
            self._named.add(pending.barrier.name)
        self._ended |= event.completed and pending.barrier.kind is CheckpointKind.SYNC_SAVEPOINT
        effects: list[Effect] = [Notify(event.id, event.completed)]
        if pending.request_id and pending.request_id not in self._answers:
            message = "completed" if event.completed else f"aborted: {event.reason or 'no reason recorded'}"
            if event.completed and isinstance(pending.verdict, Complete):
                message += _carried(pending.verdict.snapshots)
            if isinstance(pending.verdict, Abort) and pending.verdict.reason is event.reason:
                message += f", {pending.verdict.detail}"
            if not event.completed and self._why not in message:
                message += f"; {self._why}"
            effects.append(self._answer(pending.request_id, event.id, event.completed, message))
        effects += self._answer_cancels(pending, event)
        if self._ended:
            why = f"the job ends with savepoint {event.id}"
            effects += [self._answer(request.id, None, False, why) for request in self._waiting]
            self._waiting = []
        return (*effects, *self._count_failure(pending, event))

    def _answer_cancels(self, pending: Pending, event: Decided) -> list[Answer]:
        how = "is cancelled" if event.reason is AbortReason.CANCELLED else f"was aborted: {event.reason}"
        if event.completed:
            how = "was completed before it could be cancelled"
        said = f"checkpoint {event.id} {how}"
        return [
            self._answer(request, event.id, not event.completed, said) for request in sorted(pending.cancels)
        ]

    def _count_failure(self, pending: Pending, event: Decided) -> tuple[Effect, ...]:
        """Fail the job if more checkpoints failed in a row than tolerated; savepoints do not count."""
        tolerated = self._settings().tolerated_failures
        if event.completed:
            self._failures.clear()
        counts = pending.barrier.kind is CheckpointKind.CHECKPOINT and event.reason in _FAILURES
        if event.completed or tolerated is None or not counts:
            return ()
        detail = f", {pending.verdict.detail}" if isinstance(pending.verdict, Abort) else ""
        self._failures.append(f"checkpoint {event.id}: {event.reason}{detail}")
        if len(self._failures) <= tolerated:
            return ()
        head = f"{len(self._failures)} checkpoints have failed in a row, {tolerated} are tolerated"
        return (FailJob("\n".join([head, *self._failures])),)

    def _expire(self, now_ms: int) -> None:
        timeout_ms = self._settings().timeout_ms
        for pending in self.pending:
            if now_ms - pending.since_ms >= timeout_ms:
                missing = ", ".join(sorted(self._stages - pending.acks.keys()))
                self._abort(pending.id, AbortReason.EXPIRED, f"after {timeout_ms} ms without {missing}")

    def _overtake(self, now_ms: int) -> tuple[Effect, ...]:
        """Make aligned checkpoints that take too long unaligned (P16); savepoints stay aligned."""
        timeout_ms = self._settings().aligned_timeout_ms
        overdue = [
            p
            for p in self.pending
            if p.verdict is None
            and p.barrier.kind is CheckpointKind.CHECKPOINT
            and p.barrier.mode is CheckpointMode.ALIGNED
            and timeout_ms is not None
            and now_ms - p.since_ms >= timeout_ms
        ]
        for late in overdue:
            barrier = replace(late.barrier, mode=CheckpointMode.UNALIGNED)
            self._pending[late.id] = replace(late, barrier=barrier)
        return tuple(Overtake(late.id) for late in overdue)

    def _commit_next(self) -> tuple[Effect, ...]:
        """Send the verdict on the lowest open id, once: no later verdict may become durable before it."""
        first = next(iter(self.pending), None)
        if first is None or first.verdict is None or first.committing:
            return ()
        self._pending[first.id] = replace(first, committing=True)
        return (first.verdict,)

    def _begin(self, now_ms: int) -> tuple[Effect, ...]:
        busy = bool(self._claiming or self._ended or self._ending())
        pending = len(self._pending)
        match trigger.decide(
            now_ms,
            self._status,
            settings=self._settings(),
            waiting=self._waiting,
            busy=busy,
            past=self._past,
            pending=pending,
        ):
            case trigger.WaitUntil():
                return ()
            case trigger.Trigger(request):
                self._past = replace(self._past, triggered_ms=now_ms)
                wanted = request or Request("", CheckpointKind.CHECKPOINT)
                periodic = wanted.kind is CheckpointKind.CHECKPOINT
                mode = self._settings().mode if periodic else CheckpointMode.ALIGNED
                unless = () if request is not None else self._cuts_to_equal(mode)
                self._claiming = Claim(wanted.kind, wanted.name, wanted.id or None, mode, unless)
                if request is not None:
                    self._waiting.remove(request)
                return (self._claiming,)

    def _cuts_to_equal(self, mode: CheckpointMode) -> tuple[StageSnapshot, ...]:
        """Return the cuts that a periodic checkpoint would repeat if no stage does anything after them.

        None before the first checkpoint of a run, which may have other code than the run before, and none
        after a failure, which a new attempt has to overcome. A savepoint does not count: its user may delete
        it.
        """
        newest = self._newest
        if newest is None or self._pending or not self._settings().skip_unchanged:
            return ()
        if newest.barrier.mode is not mode or newest.acks.keys() != self._stages:
            return ()
        return tuple(newest.acks.values())

    def _ending(self) -> bool:
        """Say whether a savepoint that ends the job is open: no checkpoint begins after it."""
        return any(p.barrier.kind is CheckpointKind.SYNC_SAVEPOINT for p in self.pending)

    def _answer(self, request_id: str, checkpoint: CheckpointId | None, ok: bool, message: str) -> Answer:
        answer = Answer(request_id, checkpoint, ok, message)
        _remember(self._answers, request_id, answer)
        return answer


def _carried(snapshots: Iterable[StageSnapshot]) -> str:
    """Name the stages whose parts were copied from an older checkpoint."""
    old = [
        f"{s.stage!r} did not run and is as of checkpoint {s.carried}"
        for s in snapshots
        if s.carried is not None
    ]
    return f"; {', '.join(old)}" if old else ""


_K = TypeVar("_K")
_V = TypeVar("_V")


def _remember(recent: dict[_K, _V], key: _K, value: _V) -> None:
    """Keep the newest facts and forget the oldest."""
    recent[key] = value
    while len(recent) > _REMEMBERED:
        del recent[next(iter(recent))]
