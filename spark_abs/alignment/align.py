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


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one micro-batch takes from one channel. An entry is never split, so one always fits.

    Silent entries are not counted: they cost nothing downstream.
    """

    max_entries: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The ids for which no input need wait: their outcome is known, or they have become unaligned.

    All ids up to `floor` were claimed before this run began; `aborted` came to be known since. Ids that
    completed since are left out on purpose: a stage with a blocked input cannot have acknowledged them.
    """

    floor: CheckpointId
    aborted: frozenset[CheckpointId]
    overtaken: frozenset[CheckpointId] = frozenset()
    """Claimed as aligned, unaligned since (P16): stages heard of it before gates did."""

    def __contains__(self, checkpoint: CheckpointId) -> bool:
        return checkpoint <= self.floor or checkpoint in self.aborted or checkpoint in self.overtaken


@dataclass(frozen=True, slots=True)
class Advance:
    """Read on: the next micro-batch takes this input to `position`."""

    position: Position


@dataclass(frozen=True, slots=True)
class Blocked:
    """Stay at the barrier `on`: not all other inputs have it. The channel's log is the buffer (P5)."""

    position: Position
    on: CheckpointId


@dataclass(frozen=True, slots=True)
class Idle:
    """Stay: the channel has nothing to read, or has ended."""

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
    """Decide how far one input may go in the stage's next micro-batch.

    An input that stands at an aligned barrier n stays until every other open input has n, or one has skipped
    it, or n is settled. Any other input reads on to the next barrier, of whatever mode, or to the end of the
    channel and stops there, within the limits. A barrier or cancel marker not above the input's epoch is
    passed over; a cancel marker above it moves the epoch and stops nothing. A feedback edge waits for nobody,
    nobody waits for it, and only an unaligned barrier stops it: the stage has passed any other one on before
    (P17). Once all other inputs have ended it reads nothing but rows and unaligned barriers: another barrier
    may then come round first, from a stage that has ended too.

    Args:
        own: where the input stands.
        stage: all gate positions of the stage's newest offset file, `own` among them; a channel used twice
            gives two lines. Empty before the first batch.
        entries: the entries after `own.version` that count, ascending. Not touched while the input is
            blocked or closed, and read no further than the decision needs.
        settled: the known outcomes. More knowledge can only unblock an input, never move a barrier.
        limits: how much may be read.
        run: the current run; only its own end marker closes the input, older ones are passed over (P10).
        attempt: the current attempt, recorded in the position that is reached.

    Returns:
        `Advance` with another position, or `Blocked` or `Idle` with `own` itself.
    """
    if own.is_closed(run):
        return Idle(own)
    if _is_held(own, stage, settled, run):
        return Blocked(own, own.epoch)
    others = forward(stage)
    only_rows = own.feedback and bool(others) and all(p.is_closed(run) for p in others)
    reached, taken, size = own, 0, 0
    for entry in entries:
        if entry.silent or (only_rows and not entry.files and not _is_unaligned(entry)):
            continue
        if taken and size + entry.size > limits.max_bytes:
            break
        reached = _after(reached, entry, attempt)
        taken, size = taken + 1, size + entry.size
        stops = reached.at_barrier and (not own.feedback or reached.mode is CheckpointMode.UNALIGNED)
        if stops or reached.is_closed(run) or taken >= limits.max_entries:
            break
    return Advance(reached) if taken else Idle(own)


def waiting(stage: Sequence[Position], settled: Settled, run: RunId) -> tuple[Position, ...]:
    """Return the inputs of a stage that `decide` keeps at their barriers.

    The entries after them in their channels are delayed by the alignment (P6).
    """
    return tuple(own for own in stage if not own.is_closed(run) and _is_held(own, stage, settled, run))


def exceeds(queued_bytes: int, limit: int | None) -> bool:
    """Say whether an alignment has to be given up: more waits behind its barrier than `limit`, None for none.

    Then the checkpoint is aborted, the inputs go on, and nothing is lost: the data is in the log (P6).
    """
    return limit is not None and queued_bytes > limit


def _is_held(own: Position, stage: Sequence[Position], settled: Settled, run: RunId) -> bool:
    """Say whether an open input stays at its barrier: only an aligned one holds (P7, P16, P17)."""
    waits = own.at_barrier and not own.feedback and own.mode is CheckpointMode.ALIGNED
    return waits and own.epoch not in settled and _must_wait(own, forward(stage), run)


def _is_unaligned(entry: Entry) -> bool:
    return entry.barrier is not None and entry.barrier.mode is CheckpointMode.UNALIGNED


def _must_wait(own: Position, stage: Sequence[Position], run: RunId) -> bool:
    """Say whether the barrier at which `own` stands is still to come on another input (P8).

    An input past the barrier has it too. An input, even a closed one, with a newer epoch than one that
    lacks the barrier can only have skipped it: the barrier is subsumed.
    """
    if any(other.epoch > own.epoch for other in stage):
        return False
    return any(other.epoch < own.epoch for other in stage if not other.is_closed(run))


def _after(position: Position, entry: Entry, attempt: AttemptId) -> Position:
    """Return the position after `entry`.

    Whose end marker it was is recorded, not whether that run is the present one: a driver that was frozen
    and plans one more batch would else pass over the end that the run after it has to see.
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
