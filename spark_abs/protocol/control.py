"""The content of `control/` and its allowed changes: attempts, runs, claimed and aborted ids, commands.

Pure values. `store.control` commits them by compare-and-swap, so every function may be called again on a
newer state and must then decide anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from spark_abs.errors import AbortReason, AttemptNotReady, Fenced, UsageError
from spark_abs.model import (
    NO_ATTEMPT,
    NO_EPOCH,
    NO_RUN,
    AttemptId,
    Barrier,
    CheckpointId,
    CheckpointKind,
    CheckpointMode,
    RunId,
    RunKind,
    SinkWriter,
    StageId,
    Version,
)
from spark_abs.protocol.attempt import Attempt, Rebuilt
from spark_abs.protocol.change_data import LAST_WINS, ChangeOptions
from spark_abs.protocol.outside import Mark
from spark_abs.protocol.watch import Watch

WRAPPED_JOB = "queries"
"""The job name of a root that wrapped queries share."""

WATCHED_JOB = "watched-queries"
"""The job name of a root at which `spark-abs watch` keeps cuts of queries that are not ours."""

KEPT = 100
"""The number of settled aborts and of answered commands that stay in `control/`.

`history/` has all of them.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One start of the job."""

    id: RunId
    attempt: AttemptId
    host: str
    pid: int
    started_ms: int
    ended: str | None = None
    """How the run ended (`stopped`, `finished`, `failed: …`); None while it runs or if it was killed."""
    kind: RunKind | str = RunKind.JOB
    """What took the number; a text if only a later version knows the kind."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed checkpoint id without an outcome."""

    barrier: Barrier
    attempt: AttemptId
    run: RunId


@dataclass(frozen=True, slots=True)
class Aborted:
    """A checkpoint id that will never complete."""

    id: CheckpointId
    reason: AbortReason | str
    """A text if only a later version knows the reason."""
    detail: str = ""


class CommandKind(StrEnum):
    """The requests that users can send to a running job."""

    SAVEPOINT = "savepoint"
    STOP = "stop"
    """Stop gracefully; with a name, take an exact savepoint first, drained if asked."""
    SET = "set"
    """Change settings until the run ends."""
    FORGET = "forget"
    """Forget the wrapped query `name`, which is gone for good."""
    CHECKPOINT = "checkpoint"
    """Take a checkpoint now."""
    CANCEL = "cancel"
    """Abort the open checkpoint `name`: its id, or the name of a savepoint."""
    PAUSE = "pause"
    """Let the sources `stages` begin no further batch, all sources if it is empty."""
    RESUME = "resume"
    """Let the paused sources `stages` read again, all of them if it is empty."""
    RESTART = "restart"
    """Start the stage `stages` again when its batch has ended."""
    SKIP_FILE = "skip-file"
    """Let the stage `stages` go past the input files `files`, from its unfinished batch on."""


@dataclass(frozen=True, slots=True)
class Command:
    """A request that reaches a running job through `control/`, and its answer."""

    id: str
    kind: CommandKind | str
    """What is asked; a text if only a later version knows the kind, and the run refuses it."""
    name: str | None
    asked_ms: int
    drain: bool = False
    """Whether the job is drained before the savepoint."""
    answered: bool = False
    ok: bool = False
    checkpoint: CheckpointId | None = None
    message: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The settings to change: argument name to value, as text."""
    stages: tuple[StageId, ...] = ()
    """The stages that it is about."""
    by: str = ""
    """The user and the host that asked; empty if an earlier version asked."""
    files: tuple[str, ...] = ()
    """The input files that it is about, as they were given."""


@dataclass(frozen=True, slots=True)
class AttachedSink:
    """A Delta sink that the job has attached, recorded before its first row and its first manifest."""

    stage: StageId
    sink: str
    table: str
    table_id: str
    version: Version | None = None
    """For a table that a sink function writes by itself: its version when the job first used it."""
    key: tuple[str, ...] = ()
    """Key columns of the merge; empty if rows are appended."""
    overwrites: bool = False
    """Whether each batch replaces all rows."""
    changes: ChangeOptions = LAST_WINS
    """How changes of one key are applied."""
    name: str = ""
    """The name of the table in a catalog; empty if the table was declared by path."""
    attempt: AttemptId = NO_ATTEMPT
    """The newest attempt that used the table; `NO_ATTEMPT` if an earlier version recorded it."""
    took_over: RunId = NO_RUN
    """The run that has taken the table over with `existing="take_over"`; `NO_RUN` if none has."""

    @property
    def id(self) -> str:
        """The fields that identify the sink."""
        return f"{self.stage}/{self.sink}/{self.table_id or self.table}"


@dataclass(frozen=True, slots=True)
class OutsideSink:
    """A sink outside that the job has attached, see `protocol.outside`."""

    sink: str
    stage: StageId
    output: str
    kind: str
    """The name of the kind of sink, or `own` for a user's own sink."""
    settings: str
    """The configuration that finds the sink again, as JSON without secrets; empty for `own`."""
    first: Mark
    """Where it began."""
    begun: bool = False
    """Whether the sink has committed anything: from then on it must have a mark."""

    @property
    def id(self) -> str:
        """The fields that identify the sink."""
        return self.sink


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A wrapped query that is gone for good: checkpoints no longer include it."""

    stage: StageId
    attempt: AttemptId
    """The attempt in which the query was forgotten."""
    checkpoint: CheckpointId
    """The newest id claimed at that time."""
    at_ms: int

    @property
    def id(self) -> str:
        return self.stage


@dataclass(frozen=True, slots=True)
class Paused:
    """A source that begins no batch, until it is resumed: over restarts and restores, too."""

    stage: StageId
    by: str
    """The user and the host that paused it."""
    at_ms: int

    @property
    def id(self) -> str:
        """The field that identifies it."""
        return self.stage


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """An input file that a stage does not read, in any run and attempt from `since` on; never removed.

    When it was recorded, no output held the first batch with the file: a batch is the same in each repeat.
    """

    stage: StageId
    file: str
    """Its URI as Spark writes it in the log of a file source."""
    by: str
    """The user and the host that asked for it."""
    at_ms: int
    since: RunId
    """The first run whose batches lack the file."""

    @property
    def id(self) -> str:
        """The fields that identify it."""
        return f"{self.stage} {self.file}"


@dataclass(frozen=True, slots=True)
class LaterRecord:
    """A row of a kind that only a later version knows: it is written back as it was read."""

    kind: str
    id: str
    v: int
    body: str


@dataclass(frozen=True, slots=True)
class ControlState:
    """The whole state of `control/`."""

    job: str
    root: str = ""
    """The identity of the root from its creation: the id of the table."""
    attempts: tuple[Attempt, ...] = ()
    runs: tuple[Run, ...] = ()
    last_claimed: CheckpointId = NO_EPOCH
    claims: tuple[Claim, ...] = ()
    aborted: tuple[Aborted, ...] = ()
    commands: tuple[Command, ...] = ()
    sinks: tuple[AttachedSink, ...] = ()
    forgotten: tuple[Forgotten, ...] = ()
    outside: tuple[OutsideSink, ...] = ()
    paused: tuple[Paused, ...] = ()
    skipped: tuple[SkippedFile, ...] = ()
    watch: Watch | None = None
    """At a watched root; None if an earlier version watched."""
    later: tuple[LaterRecord, ...] = ()

    @property
    def attempt(self) -> Attempt:
        """The newest attempt."""
        return self.attempts[-1]

    @property
    def run(self) -> Run | None:
        """The newest run of any attempt."""
        return self.runs[-1] if self.runs else None

    @property
    def newest_run(self) -> RunId | None:
        """The number of the newest run; None before the first run."""
        return self.runs[-1].id if self.runs else None

    def lineage(self, attempt: AttemptId | None = None) -> tuple[Attempt, ...]:
        """Return the path from the first attempt to `attempt` (the newest if None), in order."""
        by_id = {a.id: a for a in self.attempts}
        node = by_id[attempt if attempt is not None else self.attempt.id]
        path = [node]
        while node.parent is not None:
            node = by_id[node.parent]
            path.append(node)
        return tuple(reversed(path))

    @property
    def unnamed(self) -> frozenset[AttemptId]:
        """The attempts that began before roots had an identity: their commits do not name the root."""
        return frozenset(a.id for a in self.attempts if not a.root)

    def writer(self, attempt: Attempt, stage: StageId, sink: str) -> SinkWriter:
        """Return the writer as which an attempt commits to the table of a sink."""
        return SinkWriter(self.job, attempt.root, stage, sink, attempt.id)

    def path_ends(self) -> dict[AttemptId, CheckpointId | None]:
        """Return the attempts of the current path, each with its last checkpoint there; None: it has all."""
        path = self.lineage()
        return {
            step.id: None if after is None else after.base or after.checkpoint
            for step, after in zip(path, (*path[1:], None), strict=True)
        }

    def on_path(self, attempt: AttemptId, checkpoint: CheckpointId) -> bool:
        """Say whether a checkpoint is on the current path.

        An edited checkpoint is if an attempt began from it.
        """
        ends = self.path_ends()
        if attempt in ends:
            until = ends[attempt]
            return until is None or checkpoint <= until
        return attempt == NO_ATTEMPT and any(step.checkpoint == checkpoint for step in self.lineage())


def require_current(state: ControlState, run: RunId) -> None:
    """Raise Fenced unless `run` is the newest run of the newest attempt (a restore replaces it too)."""
    newest = state.run
    if newest is None or newest.id != run:
        raise Fenced(f"run {run} of job {state.job!r} was replaced by run {newest.id if newest else None}")
    if state.attempt.id != newest.attempt:
        raise Fenced(
            f"run {run} of job {state.job!r} was replaced: the job was restored as attempt {state.attempt.id}"
        )


def begin_job(job: str, now_ms: int, root: str = "") -> ControlState:
    """Return the state of a new root."""
    return ControlState(
        job,
        root,
        (Attempt(AttemptId(1), None, checkpoint=None, plan="", ready=True, created_ms=now_ms, root=root),),
    )


def place_natives(state: ControlState, natives: str) -> ControlState:
    """Record the place of native checkpoints before the first run; later only a restore moves them.

    Raises:
        UsageError: the native checkpoints are in a different place.
    """
    attempt = state.attempt
    if attempt.natives == natives:
        return state
    if state.runs:
        raise UsageError(
            f"the native checkpoints of attempt {attempt.id} are in {attempt.natives}, but native_root is "
            f"now {natives}: give native_root as before, or start with restart='checkpoint' to move the "
            "native checkpoints"
        )
    return replace(state, attempts=(replace(attempt, natives=natives),))


def begin_run(
    state: ControlState, host: str, pid: int, now_ms: int, kind: RunKind = RunKind.JOB
) -> ControlState:
    """Add a run of the newest attempt, which fences all earlier runs.

    A new run of a job refuses the unanswered requests to earlier runs.

    Raises:
        AttemptNotReady: a restore was begun and not finished.
    """
    attempt = state.attempt
    if not attempt.ready:
        raise AttemptNotReady(
            f"restore of job {state.job!r} to checkpoint {attempt.checkpoint} (attempt {attempt.id}) is not "
            f"finished: run `{attempt.command}` again"
        )
    runs = with_run(state, attempt.id, host=host, pid=pid, now_ms=now_ms, kind=kind)
    if kind is RunKind.JOB:
        said = (
            f"the run that was asked ended before it answered, and run {runs[-1].id} has begun: repeat the "
            "request if it is still needed"
        )
        state = dismiss(state, said)
    return replace(state, runs=runs)


def rebuild(state: ControlState, run: RunId, rebuilt: Rebuilt) -> ControlState:
    """Record the new place of a stage's native checkpoint, before anything is written there."""
    require_current(state, run)
    others = tuple(r for r in state.attempt.rebuilt if r.stage != rebuilt.stage)
    attempt = replace(state.attempt, rebuilt=(*others, rebuilt))
    return replace(state, attempts=(*state.attempts[:-1], attempt))


def begin_drain(state: ControlState, run: RunId, name: str) -> ControlState:
    """Record a drain, before event time ends in any stage."""
    require_current(state, run)
    return replace(state, attempts=(*state.attempts[:-1], replace(state.attempt, drain=name)))


def end_run(state: ControlState, run: RunId, how: str) -> ControlState:
    """Record how a run ended, unless its end is recorded already."""
    ended = (replace(r, ended=how) if r.id == run and r.ended is None else r for r in state.runs)
    return replace(state, runs=tuple(ended))


def in_order_since(state: ControlState, run: RunId) -> RunId:
    """Return the first of the runs before `run` that all ended in order.

    `run` itself if the last one did not.

    No part of such a run is active any more: later runs need no fence against it.
    """
    oldest = run
    for past in reversed(state.runs):
        if past.id >= run:
            continue
        if past.ended is None or past.ended.startswith("failed"):
            break
        oldest = past.id
    return oldest


def claim(
    state: ControlState,
    run: RunId,
    *,
    kind: CheckpointKind,
    name: str | None,
    now_ms: int,
    mode: CheckpointMode = CheckpointMode.ALIGNED,
) -> tuple[ControlState, Barrier]:
    """Take the next id for a checkpoint (P1: ids strictly increase over the life of the root)."""
    require_current(state, run)
    barrier = Barrier(CheckpointId(state.last_claimed + 1), kind, now_ms, name, mode)
    taken = Claim(barrier, state.attempt.id, run)
    return replace(state, last_claimed=barrier.id, claims=(*state.claims, taken)), barrier


def overtake(state: ControlState, run: RunId, checkpoint: CheckpointId) -> ControlState:
    """Make a claimed checkpoint unaligned, so that its barrier overtakes rows (P16); repeatable.

    Changes nothing if the checkpoint has an outcome already.
    """
    require_current(state, run)
    return replace(
        state,
        claims=tuple(
            replace(c, barrier=replace(c.barrier, mode=CheckpointMode.UNALIGNED))
            if c.barrier.id == checkpoint
            else c
            for c in state.claims
        ),
    )


def overtaken(before: ControlState | None, after: ControlState) -> tuple[CheckpointId, ...]:
    """Return the claimed checkpoints that are aligned in the first state and unaligned in the second."""
    aligned = CheckpointMode.ALIGNED
    were = {c.barrier.id for c in before.claims if c.barrier.mode is aligned} if before else set()
    return tuple(c.barrier.id for c in after.claims if c.barrier.id in were and c.barrier.mode is not aligned)


def settle(
    state: ControlState, aborted: tuple[Aborted, ...] = (), completed: tuple[CheckpointId, ...] = ()
) -> ControlState:
    """Close claims whose outcome is durable in `checkpoints/`; repeatable."""
    gone = {a.id for a in aborted} | set(completed)
    known = {a.id for a in state.aborted}
    news = tuple(a for a in aborted if a.id not in known)
    return replace(
        state,
        claims=tuple(c for c in state.claims if c.barrier.id not in gone),
        aborted=(*state.aborted, *news)[-KEPT:],
    )


def taken_over(state: ControlState, sink: str, table: str, table_id: str = "") -> RunId:
    """Return the newest run in which a sink has taken a table over; `NO_RUN` without one.

    Args:
        state: the recorded state.
        sink: the name of the sink.
        table: the place of the table.
        table_id: the id of the table; empty for any table at that place.
    """
    mine = (s for s in state.sinks if (s.sink, s.table) == (sink, table))
    known = (s for s in mine if table_id in ("", s.table_id))
    return max((s.took_over for s in known), default=NO_RUN)


def attach(state: ControlState, sinks: Iterable[AttachedSink]) -> ControlState:
    """Record Delta sinks, the newest last.

    A known sink keeps its version; its options and its name may change.
    """
    found = {s.id: s for s in state.sinks}
    for sink in sinks:
        known = found.pop(sink.id, sink)
        found[sink.id] = replace(sink, version=known.version)
    return replace(state, sinks=tuple(found.values()))


def attach_outside(state: ControlState, run: RunId, sinks: Iterable[OutsideSink]) -> ControlState:
    """Record sinks outside; each replaces its older record."""
    require_current(state, run)
    found = {s.sink: s for s in (*state.outside, *sinks)}
    return replace(state, outside=tuple(found.values()))


def forget(state: ControlState, stage: StageId, now_ms: int) -> ControlState:
    """Record that a wrapped query is gone: no later checkpoint of the attempt includes it."""
    gone = Forgotten(stage, state.attempt.id, state.last_claimed, now_ms)
    others = remember(state, stage)
    return replace(others, forgotten=(*others.forgotten, gone))


def remember(state: ControlState, stage: StageId) -> ControlState:
    """Record that a wrapped query takes part, even if it was forgotten before."""
    return replace(state, forgotten=tuple(f for f in state.forgotten if f.stage != stage))


def forgotten(state: ControlState) -> frozenset[StageId]:
    """Return the wrapped queries that checkpoints of the newest attempt do not include.

    A query that was forgotten in an earlier attempt takes part again if the restored checkpoint includes it.
    """
    return frozenset(f.stage for f in state.forgotten if f.attempt == state.attempt.id)


def ask(state: ControlState, command: Command) -> ControlState:
    """Add a command for the running job."""
    done = tuple(c for c in state.commands if c.answered)[-KEPT:]
    return replace(state, commands=(*done, *(c for c in state.commands if not c.answered), command))


def answer(
    state: ControlState, command: str, ok: bool, checkpoint: CheckpointId | None, message: str
) -> ControlState:
    """Answer a command, unless it is gone or already answered."""
    return replace(
        state,
        commands=tuple(
            replace(c, answered=True, ok=ok, checkpoint=checkpoint, message=message)
            if c.id == command and not c.answered
            else c
            for c in state.commands
        ),
    )


def pause(state: ControlState, stages: Iterable[StageId], by: str, now_ms: int) -> ControlState:
    """Record paused sources; a source that is paused already keeps its record."""
    known = {paused.stage for paused in state.paused}
    news = (Paused(stage, by, now_ms) for stage in dict.fromkeys(stages) if stage not in known)
    return replace(state, paused=(*state.paused, *news))


def resume(state: ControlState, stages: Collection[StageId]) -> ControlState:
    """Remove the records of paused sources."""
    return replace(state, paused=tuple(paused for paused in state.paused if paused.stage not in stages))


def paused_of(state: ControlState, stages: Collection[StageId]) -> tuple[StageId, ...]:
    """Return the paused sources of these names, all paused sources if no name is given.

    Raises:
        UsageError: one of them is not paused.
    """
    known = tuple(paused.stage for paused in state.paused)
    for stage in stages:
        if stage not in known:
            raise UsageError(f"source {stage!r} is not paused; paused are: {', '.join(known) or 'none'}")
    return tuple(dict.fromkeys(stages)) or known


def skip(state: ControlState, files: Iterable[SkippedFile]) -> ControlState:
    """Record files that a stage does not read; a file that is recorded already keeps its record."""
    known = {one.id for one in state.skipped}
    return replace(state, skipped=(*state.skipped, *(one for one in files if one.id not in known)))


def dismiss(state: ControlState, message: str, but: Collection[str] = ()) -> ControlState:
    """Refuse all open commands except some, with a reason."""
    for command in state.commands:
        if command.id not in but:
            state = answer(state, command.id, False, None, message)
    return state


def with_run(
    state: ControlState, attempt: AttemptId, *, host: str, pid: int, now_ms: int, kind: RunKind
) -> tuple[Run, ...]:
    """Return the runs with a new run added."""
    newest = RunId(state.run.id + 1 if state.run else 1)
    return (*state.runs[-KEPT:], Run(newest, attempt, host, pid, now_ms, kind=kind))
