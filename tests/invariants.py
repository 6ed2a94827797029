"""The six invariants, over plain recorded facts: simulation, Spark tests and crash tests all use these.

A check takes facts that anybody can record and returns what is wrong, a sentence each; nothing is wrong
if it returns nothing. `require` turns sentences into one error.

    1 `consistent_cut`    a completed checkpoint holds what is before its barrier, all of it, and no more;
      `state_and_flight`  an unaligned one holds part of it as data in flight, one at least once may hold more
    2 `one_outcome`       ids increase, one outcome per id, in id order; `intact`: named bytes are as named
    3 `none_blocked`      no input stays blocked after completion or abort
    4 `same_rows`         restore and replay equal the run that never failed; `same_order`: per channel
    5 `no_dead_work`      nothing of a replaced run or a dead attempt stands after its fence
    6 `nothing_lost`      retention leaves all that a manifest or an unread position can reach
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spark_abs.model import (
    AttemptId,
    ChannelId,
    CheckpointId,
    CheckpointMode,
    Position,
    RunId,
    StageId,
    Version,
)

_SHOWN = 5
_NOBODY = AttemptId(0)
_NO_RUN = RunId(0)


class InvariantViolated(AssertionError):
    """One or more invariants do not hold."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A channel at a checkpoint: where its producer's part of the cut ends, where a consumer's begins."""

    checkpoint: CheckpointId
    channel: ChannelId
    consumer: StageId
    produced: Version
    """The channel's version that the producer recorded."""
    consumed: Position
    closed: bool
    """Whether the consumer had read the channel to its end."""
    mode: CheckpointMode = CheckpointMode.ALIGNED
    rowless: bool = False
    """Whether the consumer stands before the barrier, and no rows lie between."""

    @property
    def may_lag(self) -> bool:
        """Whether the consumer may stand before the barrier.

        Rows in between are in flight then: part of the checkpoint, but of no state.
        """
        return self.rowless or self.consumed.feedback or self.mode is CheckpointMode.UNALIGNED


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an id; recorded in the order of the commits."""

    id: CheckpointId
    completed: bool


@dataclass(frozen=True, slots=True)
class NamedBytes:
    """A file that a manifest names, and what is found there; None where nothing can be read."""

    checkpoint: CheckpointId
    path: str
    size: int
    sha256: str
    found_size: int | None
    found_sha256: str | None


@dataclass(frozen=True, slots=True)
class BlockedInput:
    """An input that waits at a barrier."""

    stage: StageId
    channel: ChannelId
    on: CheckpointId


@dataclass(frozen=True, slots=True)
class Logged:
    """A commit of one table's log: work of an attempt and run, a fence, or neither (attempt 0)."""

    table: str
    version: Version
    attempt: AttemptId = _NOBODY
    run: RunId = _NO_RUN
    fences_runs_below: RunId = _NO_RUN
    burns: frozenset[AttemptId] = frozenset()


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a retained manifest or a reader can still reach."""

    by: str
    thing: Hashable


def require(wrong: Iterable[str], context: str = "") -> None:
    """Raise InvariantViolated with all that is wrong; `context` says how to see it again, e.g. a seed."""
    found = list(wrong)
    if found:
        raise InvariantViolated("\n".join([*([context] if context else []), *found]))


def consistent_cut(edges: Iterable[Edge]) -> Iterator[str]:
    """Invariant 1, by position: a consumer has read exactly what its producer had written at the cut.

    Less, if no rows lie between, or the checkpoint is unaligned or the input a feedback edge (P17): then they
    are in flight.
    More, if the checkpoint is at least once.
    Rows are compared with `same_rows`: what a stage's state and outputs hold at the checkpoint, against
    what the inputs make of it up to the recorded source offsets.
    """
    for edge in edges:
        where = f"checkpoint {edge.checkpoint}, {edge.consumer} reading {edge.channel}"
        version = edge.consumed.version
        if version > edge.produced and edge.mode is not CheckpointMode.AT_LEAST_ONCE:
            yield f"1: {where}: consumed up to {version}, after the producer's cut at {edge.produced}"
        elif version < edge.produced and not edge.closed and not edge.may_lag:
            yield f"1: {where}: consumed up to {version} only, the producer's cut is at {edge.produced}"


def state_and_flight(
    where: str,
    held: Sequence[Hashable],
    in_flight: Sequence[Hashable],
    before: Sequence[Hashable],
    repeats: bool,
) -> Iterator[str]:
    """Invariant 1, by rows: a consumer's state and what is in flight to it are all before the barrier.

    Args:
        where: names checkpoint, consumer and channel.
        held: the rows of the channel that the state holds, in the order in which they were read.
        in_flight: the rows between the recorded position and the barrier.
        before: the rows before the barrier; at least once, before the recorded position if that is beyond.
        repeats: whether the state may hold rows that a restore had repeated (P7).
    """
    whole = [*held, *in_flight]
    if repeats:
        yield from none_lost(1, where, whole, before)
        return
    yield from same_rows(1, where, whole, before)
    yield from same_order(where, whole, before)


def one_outcome(claimed: Sequence[CheckpointId], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Invariant 2: ids strictly increase in order of claims; each has one outcome at most, in id order."""
    for earlier, later in pairwise(claimed):
        if later <= earlier:
            yield f"2: id {later} was claimed after {earlier}"
    for before, after in pairwise(outcomes):
        if after.id <= before.id:
            yield f"2: outcome of {after.id} ({_word(after)}) came after {before.id} ({_word(before)})"
    for outcome in outcomes:
        if outcome.id not in claimed:
            yield f"2: id {outcome.id} has an outcome ({_word(outcome)}) and was never claimed"


def intact(named: Iterable[NamedBytes]) -> Iterator[str]:
    """Invariant 2: a manifest names only bytes that can be read and have the recorded size and hash."""
    for file in named:
        where = f"2: checkpoint {file.checkpoint} names {file.path}"
        if file.found_sha256 is None:
            yield f"{where}, which cannot be read"
        elif (file.found_size, file.found_sha256) != (file.size, file.sha256):
            found = f"{file.found_size} bytes {file.found_sha256}"
            yield f"{where}: {file.size} bytes {file.sha256}, found {found}"


def none_blocked(blocked: Iterable[BlockedInput], outcomes: Mapping[CheckpointId, bool]) -> Iterator[str]:
    """Invariant 3: no input waits for an id whose outcome is known.

    Args:
        blocked: inputs that wait, seen after they had the time to learn of the outcomes.
        outcomes: known id to completed.
    """
    for wait in blocked:
        if wait.on in outcomes:
            word = "completed" if outcomes[wait.on] else "aborted"
            yield f"3: {wait.stage} still holds {wait.channel} at barrier {wait.on}, which was {word}"


def same_rows(
    invariant: int, where: str, found: Iterable[Hashable], expected: Iterable[Hashable]
) -> Iterator[str]:
    """Invariants 1 and 4: the same rows, each as often; `invariant` is the one that it is asked for."""
    have, want = Counter(found), Counter(expected)
    yield from none_lost(invariant, where, have.elements(), want.elements())
    if extra := have - want:
        yield f"{invariant}: {where}: {extra.total()} rows too many, e.g. {_some(extra)}"


def none_lost(
    invariant: int, where: str, found: Iterable[Hashable], expected: Iterable[Hashable]
) -> Iterator[str]:
    """Invariants 1 and 4 at least once: every row, at least as often."""
    if lost := Counter(expected) - Counter(found):
        yield f"{invariant}: {where}: {lost.total()} rows lost, e.g. {_some(lost)}"


def same_order(where: str, found: Sequence[Hashable], expected: Sequence[Hashable]) -> Iterator[str]:
    """Invariant 4: a channel keeps the order of what it was made from."""
    for place, (have, want) in enumerate(zip(found, expected, strict=False)):
        if have != want:
            yield f"4: {where}: row {place} is {have!r}, in order it would be {want!r}"
            return


def no_dead_work(log: Iterable[Logged]) -> Iterator[str]:
    """Invariant 5: after a fence, a table's log holds nothing of those that were fenced."""
    runs: dict[str, RunId] = {}
    burnt: dict[str, set[AttemptId]] = {}
    for commit in log:
        where = f"5: {commit.table} version {commit.version}"
        if commit.attempt:
            if commit.run < runs.get(commit.table, 0):
                yield f"{where} is work of run {commit.run}, replaced by run {runs[commit.table]}"
            if commit.attempt in burnt.get(commit.table, ()):
                yield f"{where} is work of attempt {commit.attempt}, which was dead by then"
        runs[commit.table] = max(runs.get(commit.table, RunId(0)), commit.fences_runs_below)
        burnt.setdefault(commit.table, set()).update(commit.burns)


def only_completed(visible: Iterable[CheckpointId], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Invariant 5: what is listed as a checkpoint was completed."""
    completed = {outcome.id for outcome in outcomes if outcome.completed}
    for checkpoint in visible:
        if checkpoint not in completed:
            yield f"5: checkpoint {checkpoint} is visible and was never completed"


def within_bound(channel: ChannelId, entries: int, marked: int, capacity: int) -> None:
    """A bounded channel holds its capacity, and a batch for each open checkpoint (P19).

    Args:
        channel: the channel.
        entries: how many with rows it holds that some consumer has not durably consumed.
        marked: how many barriers and cancel markers some consumer has not durably consumed, with rows or not:
            a barrier's batch may find that the agent has written the barrier before it.
        capacity: how many it may hold.
    """
    if entries > capacity + marked:
        raise InvariantViolated(
            f"P19: {channel} has room for {capacity} entries, and holds {entries} and {marked} markers unread"
        )


def nothing_lost(needs: Iterable[Need], present: Collection[Hashable]) -> Iterator[str]:
    """Invariant 6: all that can still be reached is there."""
    for need in needs:
        if need.thing not in present:
            yield f"6: {need.thing!r} was removed, and {need.by} can reach it"


def _word(outcome: Outcome) -> str:
    return "completed" if outcome.completed else "aborted"


def _some(rows: Counter[Hashable]) -> str:
    return ", ".join(repr(row) for row in list(rows)[:_SHOWN])
