"""The gate rule: how far one channel input of a stage may be read (P4, P5, P7, P8, P9, P10, P16).

The states of Flink's `SingleCheckpointBarrierHandler` are values here, not objects with a memory: the
situation of an input is its own position, the positions of its neighbours and the log of its channel, all
of them durable. Deciding again after a crash gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from spark_abs.alignment.loops import forward
from spark_abs.model import NO_EPOCH, AttemptId, CheckpointId, CheckpointMode, Entry, Position, RunId

MOST_PASSED = 64
"""So many barriers that a stage has taken where it stood are passed over; then a batch reads them. Until it
does, the log keeps their entries, and the gate, too."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one micro-batch takes from one channel.

    Entries are never split, and at least one is taken.

    Silent entries are not counted: they cost nothing downstream.
    """

    max_entries: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The checkpoints for which no input has to wait: their outcome is known, or they have become unaligned.

    All ids up to `floor` were claimed before this run began; those in `aborted` were aborted during this run.
    Ids completed during this run are left out on purpose: a stage with a blocked input cannot have
    acknowledged them.
    """

    floor: CheckpointId
    aborted: frozenset[CheckpointId]
    overtaken: frozenset[CheckpointId] = frozenset()
    """Claimed as aligned and made unaligned later (P16): stages learned of it before gates did."""
    taken: CheckpointId = NO_EPOCH
    """A barrier that the stage has taken where it stood, see `in_place`: no input waits for it or for an
    older one."""

    def __contains__(self, checkpoint: CheckpointId) -> bool:
        known = max(self.floor, self.taken)
        return checkpoint <= known or checkpoint in self.aborted or checkpoint in self.overtaken


@dataclass(frozen=True, slots=True)
class Advance:
    """The next micro-batch reads this input up to `position`."""

    position: Position
    bare: bool = False
    """Whether it reads a barrier for which inputs wait, and nothing else: perhaps the stage can take this
    barrier where it stands, see `in_place`."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The input waits at the barrier `on`: another input has not reached it.

    The channel's log is the buffer (P5).
    """

    position: Position
    on: CheckpointId


@dataclass(frozen=True, slots=True)
class Idle:
    """The channel has nothing to read, or has ended."""

    position: Position


Decision = Advance | Blocked | Idle


def decide(
    own: Position,
    stage: Sequence[Position],
    entries: Iterable[Entry],
    *,
    settled: Settled,
    limits: Limits,
    run: RunId,
    attempt: AttemptId,
) -> Decision:
    """Decide how far the stage's next micro-batch may read one input.

    An input at aligned barrier n waits until every other open input has n, or one has skipped it, or n is
    settled. Any other input reads, within the limits, up to the next barrier of any mode or to the end of the
    channel. Barriers and cancel markers not above the input's epoch are ignored; a cancel marker above it
    moves the epoch and does not stop the input. A barrier that the stage has taken where it stood is passed
    over, and starts no batch by itself: it is read with the entry after it. A feedback edge never waits, no
    input waits for it, and only an unaligned barrier stops it: the stage has already passed aligned barriers
    on (P17). Once all other inputs have ended, a feedback edge skips aligned barriers and reads on to rows
    and unaligned barriers.

    Args:
        own: the position of the input.
        stage: all gate positions of the stage's newest offset file, `own` among them; a channel used twice
            gives two lines. Empty before the first batch.
        entries: the valid entries after `own.version`, ascending. Not read while the input is blocked or
            closed, and otherwise only as far as the decision needs.
        settled: the known outcomes. A newly known outcome can only unblock an input, never move a barrier.
        limits: how much may be read.
        run: the current run; only its own end marker closes the input, those of older runs are ignored (P10).
        attempt: the current attempt, recorded in the position that is reached.

    Returns:
        `Advance` with a new position, or `Blocked` or `Idle` with `own`.
    """
    if own.is_closed(run):
        return Idle(own)
    if _is_held(own, stage, settled, run):
        return Blocked(own, own.epoch)
    others = forward(stage)
    only_rows = own.feedback and bool(others) and all(p.is_closed(run) for p in others)
    reached, taken, size, bare = own, 0, 0, False
    passing, passed = own, 0
    for entry in entries:
        if entry.silent or (only_rows and not entry.files and not _is_unaligned(entry)):
            continue
        if taken and size + entry.size > limits.max_bytes:
            break
        passing = _after(passing, entry, attempt)
        if is_bare(entry) and passing.epoch <= settled.taken and passed < MOST_PASSED:
            passed += 1
            continue
        reached, passed = passing, 0
        taken, size = taken + 1, size + entry.size
        bare = taken == 1 and is_bare(entry) and reached.at_barrier and reached.epoch not in settled
        stops = reached.at_barrier and (not own.feedback or reached.mode is CheckpointMode.UNALIGNED)
        if stops or reached.is_closed(run) or taken >= limits.max_entries:
            break
    waits = bare and not own.feedback and reached.mode is not CheckpointMode.UNALIGNED
    return Advance(reached, waits) if taken else Idle(own)


def is_bare(entry: Entry) -> bool:
    """Say whether an entry has a barrier and nothing else."""
    return entry.barrier is not None and not entry.files and entry.cancel is None and not entry.end


def waiting(stage: Sequence[Position], settled: Settled, run: RunId) -> tuple[Position, ...]:
    """Return the inputs of a stage that `decide` keeps at their barriers.

    Alignment delays the entries after these barriers (P6).
    """
    return tuple(own for own in stage if not own.is_closed(run) and _is_held(own, stage, settled, run))


def exceeds(queued_bytes: int, limit: int | None) -> bool:
    """Say whether more data waits behind a barrier than `limit` allows; None is no limit.

    The checkpoint is then aborted and the inputs are read again; no data is lost, it is in the log (P6).
    """
    return limit is not None and queued_bytes > limit


def _is_held(own: Position, stage: Sequence[Position], settled: Settled, run: RunId) -> bool:
    """Say whether an open input waits at its barrier: only an aligned barrier blocks (P7, P16, P17)."""
    waits = own.at_barrier and not own.feedback and own.mode is CheckpointMode.ALIGNED
    return waits and own.epoch not in settled and _must_wait(own, forward(stage), run)


def _is_unaligned(entry: Entry) -> bool:
    return entry.barrier is not None and entry.barrier.mode is CheckpointMode.UNALIGNED


def _must_wait(own: Position, stage: Sequence[Position], run: RunId) -> bool:
    """Say whether another input has not yet reached the barrier at which `own` is (P8).

    An input past the barrier has reached it too. If an input, even a closed one, has a newer epoch while
    another lacks the barrier, the barrier was skipped: it is subsumed.
    """
    if any(other.epoch > own.epoch for other in stage):
        return False
    return any(other.epoch < own.epoch for other in stage if not other.is_closed(run))


def _after(position: Position, entry: Entry, attempt: AttemptId) -> Position:
    """Return the position after `entry`.

    The position records the run of an end marker, not whether that run is the current one: otherwise a frozen
    driver that plans one more batch would skip the end marker of the run after it.
    """
    epoch = max(position.epoch, entry.cancel or NO_EPOCH)
    mode = position.mode if epoch == position.epoch else CheckpointMode.ALIGNED
    arrived = entry.barrier is not None and entry.barrier.id > epoch
    if entry.barrier is not None and arrived:
        epoch, mode = entry.barrier.id, entry.barrier.mode
    return replace(
        position,
        attempt=attempt,
        version=entry.version,
        epoch=epoch,
        at_barrier=arrived,
        closed=entry.run if entry.end else position.closed,
        mode=mode,
    )
