"""Ids and frozen values that all rooms share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Literal, NewType

from spark_abs.codec import from_plain, to_json
from spark_abs.errors import DamageError, UsageError

StageId = NewType("StageId", str)
ChannelId = NewType("ChannelId", str)
"""`<stage>.<output>`, also the name of the channel's directory."""
CheckpointId = NewType("CheckpointId", int)
AttemptId = NewType("AttemptId", int)
RunId = NewType("RunId", int)
BatchId = NewType("BatchId", int)
Version = NewType("Version", int)
"""A version of a Delta table; in a channel, the number of an entry."""

NO_EPOCH = CheckpointId(0)
NO_ATTEMPT = AttemptId(0)
NO_RUN = RunId(0)
NO_BATCH = BatchId(-1)
NO_TABLE = Version(-1)
"""The recorded version of a table that a sink function writes, if the table did not exist yet."""
FENCED = 2**62
"""The transaction version that makes an application id unusable for good."""

RowOutputMode = Literal["append", "update"]
OutputMode = Literal[RowOutputMode, "complete"]
ProviderName = Literal["rocksdb", "hdfs"]
PROVIDER_KEY = "spark.sql.streaming.stateStore.providerClass"

MAIN_OUTPUT = "main"
FORMAT = 1
"""Version of every stored format. A reader refuses newer versions."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def is_name(text: str) -> bool:
    """Say whether a text may be part of a path."""
    return _NAME.fullmatch(text) is not None


def is_number(text: str) -> bool:
    """Say whether a text, such as the name of a file of a log, is a number in ASCII digits."""
    return text.isascii() and text.isdecimal()


def checked_name(name: str, what: str) -> str:
    """Return `name` if it may be part of a path.

    Raises:
        UsageError: it has characters other than letters, digits, `_` and `-`, or does not begin with a
            letter.
    """
    if not isinstance(name, str) or not is_name(name):
        raise UsageError(
            f"{what} {name!r} is not a name: letters, digits, '_' and '-', "
            "a letter first, at most 64 characters"
        )
    return name


def checked_relative(path: str) -> str:
    """Return `path` if it stays below the directory that it will be joined to.

    Raises:
        DamageError: it is absolute, empty, or climbs out with `..`.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
        raise DamageError(f"stored path {path!r} leaves its root")
    return path


def channel_id(stage: str, output: str = MAIN_OUTPUT) -> ChannelId:
    """Name the channel that carries `output` of `stage`."""
    return ChannelId(f"{stage}.{output}")


def producer(channel: ChannelId) -> StageId:
    """Return the stage that writes a channel."""
    return StageId(channel.partition(".")[0])


class Provider(StrEnum):
    """A state store provider of Spark whose files this package can read."""

    ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    HDFS = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"


PROVIDERS: Mapping[ProviderName, Provider] = {"rocksdb": Provider.ROCKSDB, "hdfs": Provider.HDFS}


class CheckpointKind(StrEnum):
    """The kind of checkpoint that a barrier begins (P1)."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"
    SYNC_SAVEPOINT = "sync_savepoint"

    @property
    def owned_by_user(self) -> bool:
        """Whether retention must keep it (P21)."""
        return self is not CheckpointKind.CHECKPOINT


class RunKind(StrEnum):
    """The kinds of runs. Each writer to a root takes a run number and then owns the root."""

    JOB = "job"
    RESTORE = "restore"
    EDIT = "edit"


class CheckpointMode(StrEnum):
    """How stages handle a barrier. The barrier carries its mode, so that all stages decide alike."""

    ALIGNED = "aligned"
    """Wait for the barrier on every input (P4): exactly once."""
    UNALIGNED = "unaligned"
    """Let the barrier overtake unread rows, which become part of the checkpoint (P16): exactly once."""
    AT_LEAST_ONCE = "at_least_once"
    """Count the barrier without waiting (P7): after a restore, rows that faster inputs have read past it are
    read again.
    """


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier as it travels in a channel (P1). Ids strictly increase over the life of a root."""

    id: CheckpointId
    kind: CheckpointKind
    timestamp_ms: int
    name: str | None = None
    mode: CheckpointMode = CheckpointMode.ALIGNED


@dataclass(frozen=True, slots=True)
class Position:
    """How far a stage has read one input: the offset that Spark stores for a gate.

    Everything up to entry `version` has been consumed. `epoch` is the newest barrier id at or before
    it, `mode` the mode of that barrier; `at_barrier` says that entry `version` is that barrier. `closed` is
    the run whose end marker has been read, 0 while open: an input closed by an earlier run is open again.
    """

    channel: ChannelId
    attempt: AttemptId
    version: Version
    epoch: CheckpointId
    at_barrier: bool = False
    closed: RunId = RunId(0)
    feedback: bool = False
    """Whether the input closes a loop: it takes no part in alignment, and ends when the loop is empty
    (P17)."""
    mode: CheckpointMode = CheckpointMode.ALIGNED
    v: int = FORMAT

    def is_closed(self, run: RunId) -> bool:
        """Say whether this input has ended for `run`."""
        return self.closed == run


_POSITION_FIELDS = frozenset(("channel", "attempt", "version", "epoch", "at_barrier", "closed", "v"))
_LATER_FIELDS = frozenset(("feedback", "mode"))
"""Fields that are not encoded while they have their default."""


def positions_of(offset_lines: Sequence[str]) -> tuple[Position, ...]:
    """Return the gate positions among the lines of a Spark offset file, in order, with repeats.

    A channel that occurs twice in a plan gives two lines, which need not be told apart.

    Raises:
        DamageError: a position was written by a newer format.
    """
    found = []
    for line in offset_lines:
        try:
            plain = json.loads(line)
        except ValueError:
            continue
        if isinstance(plain, dict) and plain.keys() - _LATER_FIELDS == _POSITION_FIELDS:
            position = from_plain(Position, plain)
            if position.v > FORMAT:
                raise DamageError(
                    f"position of {position.channel} has format {position.v}, newest known is {FORMAT}"
                )
            found.append(position)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Entry:
    """One commit of a channel: the rows of a micro-batch, and perhaps a marker after them.

    A commit that is not from the channel's producer (OPTIMIZE, property changes, fences) is an empty entry
    with `attempt` 0.
    """

    version: Version
    attempt: AttemptId = AttemptId(0)
    run: RunId = RunId(0)
    batch: BatchId = NO_BATCH
    """The producer's batch; `NO_BATCH` for an entry that holds only a marker."""
    barrier: Barrier | None = None
    cancel: CheckpointId | None = None
    end: bool = False
    watermark_ms: int | None = None
    files: tuple[DataFile, ...] = ()

    @property
    def rows(self) -> int:
        """Rows in the entry."""
        return sum(file.rows for file in self.files)

    @property
    def size(self) -> int:
        """Uncompressed bytes of the entry's files."""
        return sum(file.uncompressed for file in self.files)

    @property
    def silent(self) -> bool:
        """Whether the entry starts no batch downstream."""
        return not (self.files or self.barrier or self.cancel is not None or self.end)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file of an entry; `path` is relative to its table."""

    path: str
    size: int
    rows: int
    inflated: int = 0
    """Bytes before compression, 0 if that is not known."""

    @property
    def uncompressed(self) -> int:
        """Bytes as limits count them."""
        return max(self.size, self.inflated)


@dataclass(frozen=True, slots=True)
class LookupVersion:
    """The version of a Delta table at which a batch reads a lookup."""

    lookup: str
    """The lookup's name."""
    table: str
    """The place of the table."""
    table_id: str
    version: Version
    at_ms: int
    """When it was chosen; it was the newest version at that time."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One attempt on the current path, and its last valid entry in one channel."""

    attempt: AttemptId
    until: Version | None
    """Inclusive; None for the newest attempt, whose entries are all valid."""


def counts(path: Sequence[Branch], attempt: AttemptId, version: Version) -> bool:
    """Say whether an entry lies on the current path of the attempt tree."""
    return any(b.attempt == attempt and (b.until is None or version <= b.until) for b in path)


def app_id(owner: str, stage: str, output: str, attempt: AttemptId) -> str:
    """Name the Delta application id under which an attempt commits the batches of one output."""
    return f"{owner}/{stage}/{output}@{attempt}"


def barrier_app_id(job: str, stage: str, output: str, attempt: AttemptId) -> str:
    """Name the application id of entries that hold only a marker; the version is the marker's number."""
    return app_id(job, stage, output, attempt) + "/barrier"


def run_app_id(owner: str) -> str:
    """Name the application id that fences a table against older runs of a job."""
    return f"{owner}/run"


@dataclass(frozen=True, slots=True)
class SinkWriter:
    """The writer of a sink's table: one stage of one attempt of a job, on one root.

    Two roots that run the same job are two writers. The ids do not include the name of the sink: a root has
    one sink on a table, so a renamed sink continues under its ids. Attempts from before roots had an identity
    keep the ids that they began with: `root` is empty.
    """

    job: str
    root: str
    """The identity of the root; empty for an attempt that an earlier version began."""
    stage: StageId
    sink: str
    attempt: AttemptId

    @property
    def owner(self) -> str:
        """The job on its root: the part of the ids that all its attempts share."""
        return owner_of(self.job, self.root)

    @property
    def name(self) -> str:
        """The name of the sink in its commits, for people."""
        return f"{self.job}/{self.stage}/{self.sink}"

    @property
    def app(self) -> str:
        """The application id of its batches."""
        if not self.root:
            return app_id(self.job, self.stage, self.sink, self.attempt)
        return f"{self.owner}/{self.stage}@{self.attempt}"

    @property
    def restore_app(self) -> str:
        """The application id of the commit that brought the table back for the attempt."""
        return f"{self.owner}@{self.attempt}/restore" if self.root else f"{self.app}/restore"


def owner_of(job: str, root: str) -> str:
    """Return the prefix of a job's commit ids on a root with this identity."""
    return f"{job}#{root}" if root else job


def dumps_position(position: Position) -> dict[str, object]:
    """Encode a position as the flat object that Spark stores as an offset."""
    plain: dict[str, object] = json.loads(to_json(position))
    if not position.feedback:
        del plain["feedback"]
    if position.mode is CheckpointMode.ALIGNED:
        del plain["mode"]
    return plain
