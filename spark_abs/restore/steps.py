"""The steps of a restore: typed values, and a sentence for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from spark_abs.advice import named
from spark_abs.model import NO_TABLE, AttemptId, BatchId, ChannelId, CheckpointId, RunId, StageId, Version
from spark_abs.protocol.outside import Mark
from spark_abs.sinks.delta.changes import Changes


@dataclass(frozen=True, slots=True)
class BeginAttempt:
    """Record the new attempt and the run that restores it: both replace what ran before."""

    attempt: AttemptId
    parent: AttemptId
    checkpoint: CheckpointId
    replaces: RunId | None


@dataclass(frozen=True, slots=True)
class FenceRoot:
    """Refuse what older runs commit to `checkpoints/` or `state/`."""

    table: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """Take a damaged manifest out of `checkpoints/` and keep its bytes beside: no run could start with it."""

    path: str


@dataclass(frozen=True, slots=True)
class FenceChannel:
    """Refuse older runs on a channel, and burn what the replaced attempt commits under."""

    channel: ChannelId
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class FenceSink:
    """Burn the ids under which a replaced attempt commits to the table of a sink, or of several in turn."""

    table: str
    sinks: tuple[str, ...]
    """`<stage>/<sink>` of all that have written it under this root."""
    attempt: AttemptId
    apps: tuple[str, ...]
    needs_spark: bool
    name: str = ""
    """The name of the table in a catalog, if it has one."""


@dataclass(frozen=True, slots=True)
class AbortOpen:
    """Abort every id that has no outcome; more may be found once the fences stand."""

    open: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True)
class Materialise:
    """Write a stage's native directory from `state/`."""

    stage: StageId
    directory: str
    batch: BatchId
    files: int
    size: int


@dataclass(frozen=True, slots=True)
class Rescale:
    """Spread a stage's state over another number of partitions: Spark does it, as a batch of its own."""

    stage: StageId
    directory: str
    batch: BatchId
    """The batch after the cut: it reads nothing and holds the state anew."""
    before: int
    partitions: int


@dataclass(frozen=True, slots=True)
class StartAfresh:
    """Leave a stage without a native directory: it had run no batch at the cut."""

    stage: StageId


@dataclass(frozen=True, slots=True)
class RestoreSink:
    """Bring a table back to the version it had at the cut, whichever sinks have written it.

    There is one step a table.
    """

    table: str
    sinks: tuple[str, ...]
    """`<stage>/<sink>` of all that have written it under this root."""
    version: Version
    current: Version
    changes: Changes
    """What has changed its rows since, by whom."""
    by_function: bool
    needs_spark: bool
    name: str = ""
    """The name of the table in a catalog, if it has one."""


@dataclass(frozen=True, slots=True)
class KeepSink:
    """Leave a sink as it is."""

    sinks: tuple[str, ...]
    """`<stage>/<sink>`."""
    why: str


@dataclass(frozen=True, slots=True)
class FenceOutside:
    """Refuse older runs at a sink outside; what it has committed stays unless a `ReturnOutside` follows."""

    sink: str
    sent: CheckpointId
    """The checkpoint whose epoch it had committed last; 0 for none."""
    returns: bool
    """Whether its mark is brought back next."""
    version: Version | None = None
    """The entry that it had committed last, None for nothing: what follows may be of the same checkpoint."""
    spark_table: str = ""
    """Its table if only Spark can write it, else nothing."""


@dataclass(frozen=True, slots=True)
class ReturnOutside:
    """Bring the mark of a sink outside back, and with it what it has committed after, unless `keep`."""

    sink: str
    back: Mark
    epochs: tuple[CheckpointId, ...]
    """The checkpoints after it whose epochs it has committed, as far as they are known; none if it has only
    committed batches of a checkpoint that never was complete."""
    keep: bool
    spark_table: str = ""
    """Its table if only Spark can write it, else nothing."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Write the restore to `history/`, and mark the attempt ready."""

    attempt: AttemptId


Step = (
    BeginAttempt
    | FenceRoot
    | SetAside
    | FenceChannel
    | FenceSink
    | AbortOpen
    | Materialise
    | Rescale
    | StartAfresh
    | RestoreSink
    | KeepSink
    | FenceOutside
    | ReturnOutside
    | Finish
)


def sentence(step: Step) -> str:
    """Say what a step does, for a person."""
    match step:
        case BeginAttempt():
            origin = f"checkpoint {step.checkpoint} of attempt {step.parent}"
            replaced = f", in place of run {step.replaces}" if step.replaces is not None else ""
            return f"record attempt {step.attempt}, from {origin}{replaced}"
        case FenceRoot():
            return f"refuse older runs on {step.table}/"
        case SetAside():
            return f"set {step.path} aside, it is damaged"
        case FenceChannel():
            return f"refuse older runs and attempt {step.attempt} on channel {step.channel}"
        case FenceSink():
            where = f"{_sinks(step.sinks)} ({named(step.name, step.table)})"
            return f"refuse older runs and attempt {step.attempt} on {where}{_by(step.needs_spark)}"
        case AbortOpen():
            return f"abort open checkpoints: {_listed(step.open) or 'none'}"
        case Materialise() | Rescale():
            return _native(step)
        case StartAfresh():
            return f"stage {step.stage} starts afresh: it had run no batch"
        case RestoreSink() | FenceOutside() | ReturnOutside():
            return _brought_back(step)
        case KeepSink():
            return f"leave {_sinks(step.sinks)}: {step.why}"
        case Finish():
            return f"mark attempt {step.attempt} ready"
        case _:
            assert_never(step)


def _native(step: Materialise | Rescale) -> str:
    if isinstance(step, Materialise):
        what = f"{step.files} files, {step.size:,} bytes"
        return f"write {step.directory} as it was after batch {step.batch}: {what}"
    what = f"the state of stage {step.stage} from {step.before} to {step.partitions} partitions"
    return f"spread {what}, as batch {step.batch} of {step.directory}{_by(True)}"


def _brought_back(step: RestoreSink | FenceOutside | ReturnOutside) -> str:
    if not isinstance(step, RestoreSink):
        return _outside(step)
    then = f"back to the rows of version {step.version}"
    if step.version == NO_TABLE:
        then = "to no rows: there was no such table"
    where = f"{_sinks(step.sinks)} ({named(step.name, step.table)}){_by(step.needs_spark)}"
    return f"bring {where} from version {step.current} {then}{_undone(step.changes, step.by_function)}"


def _outside(step: FenceOutside | ReturnOutside) -> str:
    if isinstance(step, FenceOutside):
        sent = step.sent or step.version is not None
        has = f"has sent up to checkpoint {step.sent}" if sent else "has sent nothing"
        rest = "" if step.returns else ", which stays; what follows is sent once"
        by = _by(bool(step.spark_table))
        return f"refuse older runs at sink {step.sink}{by}, which {has}{rest if sent else ''}"
    epochs = f"the epochs of checkpoints {_listed(step.epochs)}" if step.epochs else "what was sent after it"
    where = f"in sink {step.sink}{_by(bool(step.spark_table))}"
    if step.keep:
        return f"leave {epochs} in sink {step.sink}: what is computed again is sent there again"
    return f"undo {epochs} {where}, from what it has kept of them"


def _sinks(names: Sequence[str]) -> str:
    return f"{'sink' if len(names) == 1 else 'sinks'} {', '.join(names)}"


def _undone(changes: Changes, by_function: bool) -> str:
    """Say whose rows go, and whose stay; commits of a function do not say who made them."""
    said = []
    if changes.own_rows or (changes.own and not by_function):
        said.append(f"{_rows(changes.own_rows)} of this job {'goes' if changes.own_rows == 1 else 'go'}")
    if changes.of_others:
        who = f"{'the function and ' if by_function else ''}others"
        where = _versions(changes.of_others)
        said.append(f"what {who} did in {where} is undone ({_rows(changes.rows_of_others)} added)")
    if changes.of_roots:
        said.append(f"rows of jobs on other roots in {_versions(changes.of_roots)} stay")
    return "".join(f"; {one}" for one in said)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _versions(numbers: Sequence[int]) -> str:
    return f"{'version' if len(numbers) == 1 else 'versions'} {_listed(numbers)}"


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return f"{shown} and {len(numbers) - 5} more" if len(numbers) > 5 else shown


def _by(needs_spark: bool) -> str:
    return " through Spark" if needs_spark else ""
