"""One thread that feeds the coordinator its events and carries out its effects."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

from deltalake.exceptions import DeltaError

from spark_abs.checkpointing.checkpoint_stats import CheckpointStats
from spark_abs.checkpointing.commands import Abilities, Commands
from spark_abs.checkpointing.late_stages import late_stages
from spark_abs.checkpointing.reporting import OpenBarrier, Reporter
from spark_abs.errors import (
    AbortReason,
    CheckpointsFailed,
    CommitStateUnknown,
    ConfigError,
    StoreFailed,
    UsageError,
)
from spark_abs.manifest import Manifest, StageShape
from spark_abs.manifests.find import check_savepoint_name
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import Barrier, CheckpointId, CheckpointMode, StageId
from spark_abs.protocol import control as ledger
from spark_abs.protocol import messages as protocol
from spark_abs.protocol.control import Command, overtake
from spark_abs.protocol.coordinator import Coordinator
from spark_abs.protocol.trigger import Request, RunStatus, TriggerSettings
from spark_abs.run_context import RunContext
from spark_abs.settings import Settings
from spark_abs.stages.snapshotter import Snapshotter
from spark_abs.stages.stage import Member, StageRunner
from spark_abs.store.activity import Skips
from spark_abs.store.clock import now_ms, steady_ms
from spark_abs.store.control import Control
from spark_abs.store.lease import BEAT_EVERY_MS, own_lease, renew

log = logging.getLogger(__name__)

_TICK_S = 0.05
_POLL_S = 0.1
_COMMANDS_EVERY_MS = 200
_ANSWER = "answer a command in control/"


@dataclass(frozen=True, slots=True)
class _Task:
    """Work that another thread leaves to the coordinator's, in the order of the events."""

    what: str
    """What it does, for the error of a failing store."""
    work: Callable[[], None]
    done: threading.Event


Events = queue.SimpleQueue[protocol.Event | _Task | None]
"""The events of a coordination; made before it, so that the parts it needs can already put some."""


class Coordination:
    """Runs the coordinator of one run in a thread of its own; `put` may be called from any thread.

    Owns the run's handles on `control/` and `checkpoints/`, and its checkpoint statistics.
    Gives idle stages their barriers. A manifest of which `misfit` says why its parts do not fit together is
    not completed.
    If anything here fails, the run fails: `on_failure` is called once, from this thread.
    """

    def __init__(
        self,
        ctx: RunContext,
        events: Events,
        *,
        stages: Mapping[StageId, Member],
        shapes: Callable[[], tuple[StageShape, ...]],
        snapshots: Snapshotter,
        can: Abilities,
        on_failure: Callable[[Exception], None],
        on_completed: Callable[[Manifest], None] = lambda _: None,
        outside: tuple[str, ...] = (),
        misfit: Callable[[Manifest], str] = lambda _: "",
    ) -> None:
        self._ctx = ctx
        self._misfit = misfit
        self._stages = dict(stages)
        self._shapes = shapes
        self._snapshots = snapshots
        self._on_failure = on_failure
        self._on_completed, self._outside = on_completed, outside
        self._control = Control.open(ctx.root)
        self._commands = Commands(
            ctx,
            self._control,
            can,
            change=self._set,
            check_name=self.check_name,
            request=self._request,
            cancel=self._cancel,
        )
        self._checkpoints = Checkpoints.open(ctx.root, ctx.job)
        newest = max((s.completed_ms for s in self._checkpoints.summaries()), default=None)
        self._stats = CheckpointStats(ctx, newest)
        self._live = DynamicSettings(ctx.settings)
        self._coordinator = Coordinator(stages, self._live.times)
        self._events = events
        self._skips = Skips()
        self._barriers: dict[CheckpointId, Barrier] = {}
        self._answers: dict[str, queue.SimpleQueue[protocol.Answer]] = {}
        self._declined: set[tuple[CheckpointId, StageId]] = set()
        """The checkpoints without an outcome that stages have declined."""
        self._commands_ms = self._beat_ms = 0
        self._open: tuple[OpenBarrier, ...] = ()
        """The open checkpoints, for the reporter's thread."""
        self._reporter = Reporter(
            ctx,
            lambda: tuple(self._stages.values()),
            lambda: self._open,
            settings=lambda: self._live.now,
            skips=lambda: self._skips,
        )
        self._thread = threading.Thread(target=self._run, name=f"spark-abs-{ctx.job}", daemon=True)

    def start(self) -> None:
        """Start the thread and trigger from now on."""
        self.put(protocol.StatusChanged(steady_ms(), RunStatus.RUNNING))
        self._thread.start()
        self._reporter.start()

    def put(self, event: protocol.Event) -> None:
        """Hand over an event."""
        self._events.put(event)

    def request(self, request: Request) -> queue.SimpleQueue[protocol.Answer]:
        """Ask for a checkpoint; its answer comes through the queue."""
        answer: queue.SimpleQueue[protocol.Answer] = queue.SimpleQueue()
        self._answers[request.id] = answer
        self.put(protocol.Requested(steady_ms(), request))
        return answer

    def ask(self, command: Command) -> queue.SimpleQueue[protocol.Answer]:
        """Let the run carry a command out, as one that comes through `control/`; the queue gets its answer.

        Not ok, and nothing changed, if it is refused.
        """
        answer: queue.SimpleQueue[protocol.Answer] = queue.SimpleQueue()
        what = f"carry out the command {command.kind}"
        self._leave_to_thread(what, lambda: self._commands.ask(command, answer))
        return answer

    def answer(self, answer: protocol.Answer) -> None:
        """Answer a command that another thread has carried out."""
        self._leave_to_thread(_ANSWER, lambda: self._commands.answer(answer))

    def change(self, given: Mapping[str, object]) -> queue.SimpleQueue[protocol.Answer]:
        """Change settings until the run ends; the answer, which comes through the queue, says what changed.

        Not ok, and nothing changed, if a setting is not live or conflicts with another.
        """
        answer: queue.SimpleQueue[protocol.Answer] = queue.SimpleQueue()
        self._leave_to_thread("change settings", lambda: answer.put(self._changed(given)))
        return answer

    def join(self, stage: Member) -> threading.Event:
        """Add a stage, or replace the runner of a stage; the returned event is set when that is done.

        A new runner runs no batch before: it would miss barriers that the older runner gets meanwhile.
        """
        return self._leave_to_thread(f"add stage {stage.name}", partial(self._welcome, stage))

    def leave(self, stage: StageId) -> None:
        """Take a stage out: no checkpoint waits for it any more."""
        self._leave_to_thread(f"take stage {stage} out", partial(self._dismiss, stage))

    def handled(self) -> threading.Event:
        """Return an event that is set when all events put so far are handled.

        `on_completed` has then heard of every checkpoint that they complete, whose manifest can be read
        earlier.
        """
        return self._leave_to_thread("handle the events before", lambda: None)

    def await_done(self, done: threading.Event) -> bool:
        """Wait for the event of `join` or `handled`; False if the thread ends first, and the run with it."""
        while not done.wait(_POLL_S):
            if not self._thread.is_alive():
                return False
        return True

    def _leave_to_thread(self, what: str, work: Callable[[], None]) -> threading.Event:
        """Let the thread do some work after all events put so far; the returned event is set after it."""
        task = _Task(what, work, threading.Event())
        self._events.put(task)
        return task.done

    def close(self) -> None:
        """Stop the thread after the events put so far; wait for it."""
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._reporter.close()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:
            log.debug("coordination failed", exc_info=True)
            self._on_failure(error)

    def _step(self) -> bool:
        try:
            event = self._events.get(timeout=_TICK_S)
        except queue.Empty:
            event = protocol.Tick(steady_ms())
        match event:
            case None:
                return False
            case _Task(what, work, done):
                with storing(what):
                    work()
                done.set()
            case _:
                self._handle(event)
        for stage in self._stages.values():
            with storing(f"pass a barrier on from stage {stage.name}"):
                stage.offer_idle()
            for declined in stage.declined(self._ctx.settings.alignment_limit):
                said = declined.id, declined.stage
                if said not in self._declined:  # stages say it again until there is an outcome
                    self._declined.add(said)
                    self.put(declined)
        self._open = tuple(OpenBarrier(p.barrier, frozenset(p.acks)) for p in self._coordinator.pending)
        now = steady_ms()
        if now - self._commands_ms >= _COMMANDS_EVERY_MS:
            self._commands_ms = now
            with storing("read or answer the commands in control/"):
                self._commands.read()
        if now - self._beat_ms >= BEAT_EVERY_MS:
            self._beat_ms = now
            with storing("renew the lease in control/"):
                renew(self._ctx.root, own_lease(self._ctx.run, now_ms()), now_ms())
        return True

    def _welcome(self, stage: Member) -> None:
        before = self._stages.get(stage.name)
        if before is not None and isinstance(stage, StageRunner):
            stage.succeed(before)
        self._stages[stage.name] = stage
        for barrier in self._barriers.values():
            stage.offer(barrier)
        self._handle(protocol.Joined(steady_ms(), stage.name))

    def _dismiss(self, stage: StageId) -> None:
        self._stages.pop(stage, None)
        self._handle(protocol.Left(steady_ms(), stage))

    def _handle(self, event: protocol.Event) -> None:
        for effect in self._coordinator.handle(event):
            with storing(purpose(effect)):
                self._carry_out(effect)

    def _carry_out(self, effect: protocol.Effect) -> None:
        match effect:
            case protocol.Claim():
                self._claim(effect)
            case protocol.Overtake():
                self._overtake(effect.id)
            case protocol.Complete():
                self._complete(effect)
            case protocol.Abort():
                self._abort(effect.id, effect.reason, effect.detail)
            case protocol.AckAnswer():
                self._ctx.failpoint(f"ack.{effect.stage}.after")
                log.debug("ack of %s for checkpoint %s: %s", effect.stage, effect.id, effect.result)
            case protocol.Discard():
                self._snapshots.settle(effect.id, completed=False)
            case protocol.Notify():
                self._notify(effect)
            case protocol.Answer():
                self._answer(effect)
            case protocol.FailJob():
                raise CheckpointsFailed(effect.message)
            case _:
                assert_never(effect)

    def _claim(self, effect: protocol.Claim) -> None:
        looked_ms = now_ms()
        if effect.unless and all(self._stages[cut.stage].stands_at(cut) for cut in effect.unless):
            self._skips = Skips(self._skips.number + 1, looked_ms, self._skips.in_run + 1)
            self._handle(protocol.Skipped(steady_ms()))
            return
        self._ctx.failpoint("claim.before")
        barrier = self._control.claim(
            self._ctx.run, kind=effect.kind, name=effect.name, now_ms=now_ms(), mode=effect.mode
        )
        self._ctx.failpoint("claim.after")
        self._barriers[barrier.id] = barrier
        for stage in self._stages.values():
            stage.offer(barrier)
        self._stats.triggered(barrier)
        self._handle(protocol.Claimed(steady_ms(), barrier, effect.request_id))

    def _overtake(self, checkpoint: CheckpointId) -> None:
        """Tell the stages first: gates go on when they read it in `control/`."""
        self._barriers[checkpoint] = replace(self._barriers[checkpoint], mode=CheckpointMode.UNALIGNED)
        barrier = self._barriers[checkpoint]
        late = self._stats.late(barrier, tuple(self._stages.values()))
        for stage in self._stages.values():
            stage.offer(barrier)
        self._ctx.failpoint("overtake.before")
        self._control.update(lambda state: overtake(state, self._ctx.run, checkpoint))
        self._ctx.failpoint("overtake.after")
        self._stats.overtaken(barrier, late, len(self._stages))

    def _complete(self, effect: protocol.Complete) -> None:
        barrier, now = self._barriers[effect.id], now_ms()
        acked = max((s.timings.end_to_end_ms for s in effect.snapshots), default=0)
        manifest = Manifest(
            barrier.id,
            self._ctx.attempt,
            run=self._ctx.run,
            job=self._ctx.job,
            kind=barrier.kind,
            name=barrier.name,
            triggered_ms=barrier.timestamp_ms,
            acked_ms=barrier.timestamp_ms + acked,
            completed_ms=now,
            graph=self._shapes(),
            stages=effect.snapshots,
            mode=barrier.mode,
            outside=self._outside,
        )
        if misfit := self._misfit(manifest):
            self._abort(barrier.id, AbortReason.DECLINED, misfit)
            return
        missing = self._snapshots.missing(manifest)
        if missing:
            detail = f"gone from state/: {', '.join(missing)}; see `spark-abs verify`"
            self._abort(barrier.id, AbortReason.STATE_MISSING, detail)
            return
        self._ctx.failpoint("manifest.before")
        try:
            completed = self._checkpoints.complete(manifest) or self._checkpoints.is_complete(barrier.id)
        except CommitStateUnknown as error:
            log.warning("manifest of checkpoint %s: %s; reading back", barrier.id, error)
            aborted = self._checkpoints.abort(barrier.id, self._ctx.run)
            completed = not aborted and self._checkpoints.is_complete(barrier.id)
        if not completed:
            self._settle_abort(barrier, AbortReason.FINALIZE_FAILED, "its manifest could not be committed")
            return
        self._ctx.failpoint("manifest.after")
        self._control.update(lambda state: ledger.settle(state, completed=(barrier.id,)))
        self._ctx.failpoint("manifest.settle.after")
        self._skips = Skips(in_run=self._skips.in_run)
        self._on_completed(manifest)
        self._stats.completed(barrier, manifest, self._control.state)
        log.info("checkpoint %s (%s) complete in %s ms", barrier.id, barrier.kind, now - barrier.timestamp_ms)
        self._handle(protocol.Decided(steady_ms(), barrier.id, True))

    def _abort(self, checkpoint: CheckpointId, reason: AbortReason, detail: str) -> None:
        self._ctx.failpoint("abort.before")
        self._checkpoints.abort(checkpoint, self._ctx.run)
        self._ctx.failpoint("abort.after")
        self._settle_abort(self._barriers[checkpoint], reason, detail)

    def _settle_abort(self, barrier: Barrier, reason: AbortReason, detail: str) -> None:
        acks = next((p.acks for p in self._coordinator.pending if p.id == barrier.id), {})
        late = late_stages(barrier, tuple(self._stages.values()), acks)
        if reason is AbortReason.EXPIRED and late:
            detail += f"; {late[0].stage} is late: {late[0].why}"
        aborted = ledger.Aborted(barrier.id, reason, detail)
        self._control.update(lambda state: ledger.settle(state, aborted=(aborted,)))
        self._ctx.failpoint("abort.settle.after")
        self._stats.aborted(barrier, reason, detail, acks, late)
        level = logging.INFO if reason is AbortReason.JOB_STOPPING else logging.WARNING
        log.log(level, "checkpoint %s aborted: %s: %s", barrier.id, reason.value, detail)
        self._handle(protocol.Decided(steady_ms(), barrier.id, False, reason))

    def _notify(self, effect: protocol.Notify) -> None:
        self._barriers.pop(effect.id, None)
        self._declined = {(n, stage) for n, stage in self._declined if n != effect.id}
        for stage in self._stages.values():
            stage.notify(effect.id, effect.completed)
        self._snapshots.settle(effect.id, completed=effect.completed)
        if effect.completed:
            self._snapshots.tidy()

    def _answer(self, effect: protocol.Answer) -> None:
        waiter = self._answers.pop(effect.request_id, None)
        if waiter is not None:
            waiter.put(effect)
        self._commands.answer(effect)

    def _request(self, request: Request) -> None:
        self._handle(protocol.Requested(steady_ms(), request))

    def _changed(self, given: Mapping[str, object]) -> protocol.Answer:
        try:
            return protocol.Answer("set", None, True, self._set(given))
        except ConfigError as error:
            return protocol.Answer("set", None, False, str(error))

    def _cancel(self, command: Command) -> None:
        wanted, by = command.name or "", command.by or "somebody"
        self._handle(protocol.CancelRequested(steady_ms(), command.id, wanted, by))

    def _set(self, given: Mapping[str, object]) -> str:
        changed = self._live.change(given)
        if not changed:
            return "nothing changed: these are the settings already"
        self._stats.settings_changed(changed)
        log.info("settings changed: %s", changed)
        return f"{changed}; at its next start the job takes its own configuration again"

    def check_name(self, name: str | None) -> None:
        """Refuse a savepoint name that is invalid or in use."""
        check_savepoint_name(name or "")
        if any(s.name == name for s in Checkpoints.open(self._ctx.root, self._ctx.job).summaries()):
            raise UsageError(
                f"there is a savepoint {name!r} already: savepoints are never replaced, choose another name"
            )


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Name the purpose of a read or write in the error of a failing store; the innermost purpose is named.

    Raises:
        StoreFailed: the store did not do it.
    """
    try:
        yield
    except (CommitStateUnknown, DeltaError, OSError) as error:
        raise StoreFailed(
            f"could not {what}: {error}; start the job again once the store takes writes"
        ) from error


def purpose(effect: protocol.Effect) -> str:
    """Describe the write of a coordinator's effect."""
    match effect:
        case protocol.Claim():
            return "claim a checkpoint in control/"
        case protocol.Overtake(id=checkpoint):
            return f"make checkpoint {checkpoint} unaligned in control/"
        case protocol.Complete(id=checkpoint):
            return f"complete checkpoint {checkpoint} in checkpoints/"
        case protocol.Abort(id=checkpoint):
            return f"abort checkpoint {checkpoint} in checkpoints/"
        case _:
            return _ANSWER


class DynamicSettings:
    """The settings as they are now. Changed from the coordinator's thread, read from any.

    Nothing of it outlives the run: the next start reads the job's own configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self.now = settings

    def times(self) -> TriggerSettings:
        """Return the settings that the coordinator decides by."""
        now = self.now
        return TriggerSettings(
            now.interval_ms,
            now.min_pause_ms,
            timeout_ms=now.timeout_ms,
            tolerated_failures=now.tolerable_failures,
            max_concurrent=now.max_concurrent,
            mode=now.mode,
            aligned_timeout_ms=now.aligned_timeout_ms,
            skip_unchanged=now.skip_unchanged,
        )

    def change(self, given: Mapping[str, object]) -> str:
        """Change settings and describe the change; empty if there is none.

        Raises:
            ConfigError: one cannot be set, or not to this.
        """
        before, self.now = self.now, self.now.changed(given)
        return before.differences(self.now)
