"""The gate: the reading end of a channel, a Python data source that holds its input at barriers (P4, P5).

Spark runs the two halves in Python processes of their own: the planning half (`latestOffset`,
`partitions`) in one that lives as long as the query, `read` in the executors. Neither has a session.
The planning half decides by logs only: the stage's offset files, the channel, `control/`. Its memory only
saves it from reading the same log twice.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyarrow import fs
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from spark_abs.alignment.align import Advance, Blocked, Limits, Settled, decide
from spark_abs.alignment.loops import forward
from spark_abs.channels.follow import Clock, Newest, follow
from spark_abs.channels.gate_facts import Aborts, StageOffsets
from spark_abs.channels.schema import arrow_schema, conformed
from spark_abs.channels.taken import TakenHint
from spark_abs.codec import from_json, from_plain, require_format, to_json
from spark_abs.errors import DamageError
from spark_abs.model import (
    FORMAT,
    AttemptId,
    Branch,
    ChannelId,
    CheckpointId,
    DataFile,
    Position,
    RunId,
    Version,
    dumps_position,
)
from spark_abs.protocol.credit import ANY, Capacity, holds_back, loads_of
from spark_abs.spark.versions import tells_start
from spark_abs.store.root import Root
from spark_abs.store.row_batches import read_batches
from spark_abs.store.storage import DEFAULTS, Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.datasource import ReadLimit

FORMAT_NAME = "spark_abs_gate"
SPEC = "spec"
"""The one option of the source."""
_ABORTS_POLL_MS = 100
_UNLIMITED = 2**62
_PAUSE_S = 0.02
_FIRST_REST_S, _LONGEST_REST_S = 0.2, 1.0
_LEAVES_S = 1.0
"""For so long a gate leaves a barrier to the agent of its stage, which looks some twenty times a second."""
_KEPT_IN_ORDER = 4
_registering = threading.Lock()
_registered: WeakKeyDictionary[SparkSession, Storage] = WeakKeyDictionary()
"""The fields of the class that a session has registered: Spark warns if a class is registered again."""
_SET_BY_READERS = {
    "SPARK_LOCAL_DIRS": "",
    "SPARK_AUTH_SOCKET_TIMEOUT": "",
    "SPARK_BUFFER_SIZE": "",
    "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
}
"""Every variable that a streaming reader sets; it replaces the empty ones before it starts a process.

All gates of a session share the map of the JVM that is made from their environment. Spark 4.2 sets those
variables in it (`PythonStreamingSourceRunner.init`) while other gates do so, and tasks are serialized with
it: a new key could break the map for good, a new value of an old key cannot.
"""


@dataclass(frozen=True, slots=True)
class BackEdge:
    """A channel that another input of the stage reads as its feedback edge."""

    start: Position
    path: tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class GateSpec:
    """The facts with which a gate starts; constant for a run, so that Spark may ask again at any time."""

    root: str
    """URI of the job's root."""
    start: Position
    """The first position, used until the stage has an offset file; names the channel."""
    schema: str
    """The columns that the stage declares to read, as Spark's JSON."""
    native: str
    """URI of the stage's native checkpoint directory, which holds `offsets/`."""
    path: tuple[Branch, ...]
    """The path through the attempt tree, for this channel."""
    run: RunId
    attempt: AttemptId
    floor: CheckpointId
    """The highest id claimed before this run began: the outcome of it and all below is known."""
    control_version: Version
    """The version of `control/` after which aborts of this run are found."""
    max_entries: int
    max_bytes: int
    partition_bytes: int
    poll_ms: int
    """Least time between looks at the channel."""
    native_poll_ms: int
    """Least time between looks at the native checkpoint."""
    back: tuple[BackEdge, ...] = ()
    """The stage's feedback edges, unless this input is one: while one is full, this input is not read."""
    capacity: Capacity = ANY
    """When a feedback edge is full."""
    others: tuple[ChannelId, ...] | None = None
    """The stage's other inputs; None if one of them is not a channel, and cannot be watched."""
    taken: str = ""
    """The file that tells which barriers the stage has taken where it stood; empty if it takes none so."""


class Gate(DataSource):
    """The data source under which Spark knows the gate; its one option is the spec."""

    storage: ClassVar[Storage] = DEFAULTS
    """How the root is reached; set by `open_gate`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT_NAME

    def schema(self) -> StructType:
        return StructType.fromJson(json.loads(self._spec().schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return a reader; Spark makes one per process."""
        if threading.current_thread() is threading.main_thread():
            # Ctrl-C on a terminal is for the driver, which stops gracefully; this process ends with its pipe.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        spec = self._spec()
        kind = GateReader if tells_start() else RememberingGateReader
        return kind(spec, schema, Root(spec.root, self.storage))

    def _spec(self) -> GateSpec:
        return from_json(GateSpec, self.options[SPEC])


def open_gate(spark: SparkSession, spec: GateSpec, storage: Storage = DEFAULTS) -> DataFrame:
    """Return the streaming frame of one input. Two calls with one channel are two inputs.

    Plans and the UI show the options of a source, so the storage, which may hold a secret, is part of the
    class.
    """
    # Not at the top: the processes that read have no session.
    from spark_abs.spark.worker_start import forked_start, quick_start

    _show_shipped_code()
    with _registering:  # a frame keeps the class that was registered when it was made
        if _registered.get(spark) != storage:
            context = spark.sparkContext
            with quick_start(context, {**_SET_BY_READERS, **forked_start(context)}):
                spark.dataSource.register(type("StorageGate", (Gate,), {"storage": storage}))
            _registered[spark] = storage
        return spark.readStream.format(FORMAT_NAME).option(SPEC, to_json(spec)).load()


def _show_shipped_code() -> None:
    """Let the planning process import the modules of `--py-files`, perhaps this package.

    Spark 4.2 sends it to a folder `streaming_job` below that of the shipped files and puts nothing there.
    """
    from pyspark import SparkFiles

    shipped = Path(SparkFiles.getRootDirectory())
    with suppress(FileExistsError):
        (shipped / "streaming_job").symlink_to(shipped, target_is_directory=True)


class FilePartition(InputPartition):
    """The files that one task reads, relative to the channel's table, in order."""

    def __init__(self, files: Sequence[str]) -> None:
        super().__init__(tuple(files))
        self.files = tuple(files)


class GateReader(DataSourceStreamReader):
    """Decides how far the input goes, splits a batch into files, and reads them."""

    def __init__(
        self,
        spec: GateSpec,
        schema: StructType,
        root: Root | None = None,
        clock: Clock = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._spec, self._schema = spec, arrow_schema(schema)
        self._root = Root(spec.root) if root is None else root
        self._table = self._root.path(self._root.channel(spec.start.channel))
        follow_one = partial(follow, self._root, poll_ms=spec.poll_ms, clock=clock)
        self._follower = follow_one(spec.start.channel, spec.path)
        self._stage = StageOffsets(self._root.storage.place(spec.native), spec.native_poll_ms, clock)
        self._back = [(edge.start, follow_one(edge.start.channel, edge.path)) for edge in spec.back]
        self._aborts = Aborts(self._root, spec.control_version, max(spec.poll_ms, _ABORTS_POLL_MS), clock)
        self._clock, self._pause = clock, pause
        self._own = Newest(self._root.fs, self._table)
        others = (self._root.path(self._root.channel(channel)) for channel in spec.others or ())
        self._others = [Newest(self._root.fs, table) for table in others]
        self._taken = TakenHint(spec.taken)
        self._leaves: tuple[Version, int | None] | None = None
        """The entry that is left to the agent, after which batch."""
        self._leaves_since = 0.0
        self._planned: int | None = None
        self._patience = _FIRST_REST_S

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the first position; asked again whenever batch 0 is repeated."""
        return dumps_position(self._spec.start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit in entries; Spark hands it back unless the trigger wants all there is."""
        from pyspark.sql.streaming.datasource import ReadMaxFiles

        return ReadMaxFiles(self._spec.max_entries)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return where the input shall stand after the next batch; `start` itself to stay.

        Spark asks again at once when no input has news. So an idle stage waits in the input that is asked
        first, until an input has news, but only for a moment: other events may start a batch, too.

        `ReadAllAvailable` lifts the limits, and still stops at a barrier: rows after it are not available
        before the stage's other inputs have it.

        Raises:
            DamageError: the channel, the stage's offsets or `control/` cannot be read.
        """
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        return self._after(start, everything=isinstance(limit, ReadAllAvailable))

    def _after(self, start: dict[str, Any], *, everything: bool = False) -> dict[str, Any]:
        spec, own = self._spec, self._own_position(start)
        limits = Limits(_UNLIMITED, _UNLIMITED) if everything else Limits(spec.max_entries, spec.max_bytes)
        position = self._next(own, limits)
        at_work = self._has_planned()
        if position == own and not everything and not at_work and self._may_rest(own):
            position = self._rest(own, limits)
        return start if position == own else dumps_position(position)

    def _own_position(self, offset: dict[str, Any]) -> Position:
        """Return the position in an offset, which must be of this gate's channel."""
        own, ours = position_of(offset), self._spec.start.channel
        if own.channel != ours:
            raise DamageError(
                f"Spark gave the offset of channel {own.channel} to the gate of channel {ours}: the stage's "
                "inputs are in another order than in its native checkpoint; restore a checkpoint"
            )
        return own

    def _next(self, own: Position, limits: Limits) -> Position:
        spec = self._spec
        if self._held_back():
            return own
        while True:
            decision = decide(
                own,
                self._stage.positions(planned=own != spec.start),
                self._follower.after(own.version),
                settled=Settled(
                    spec.floor, self._aborts.ids, self._aborts.overtaken, taken=self._taken.newest
                ),
                limits=limits,
                run=spec.run,
                attempt=spec.attempt,
            )
            bare = isinstance(decision, Advance) and decision.bare and bool(spec.taken)
            # What it may learn there can only unblock, so a gate that goes on need not know of it.
            if not bare and not isinstance(decision, Blocked):
                return decision.position
            if self._taken.look() or self._aborts.poll():
                continue
            return own if bare and self._leaves_to_agent(decision.position) else decision.position

    def _leaves_to_agent(self, barrier: Position) -> bool:
        """Say whether a barrier that is all there is to read waits: perhaps the stage is at its cut already.

        Only for a moment, so that an agent that cannot take it holds nothing up; never before the first
        batch, which is always run.
        """
        leaves, now = (barrier.version, self._stage.batch), self._clock()
        if leaves != self._leaves:
            self._leaves, self._leaves_since = leaves, now
        patience = max(_LEAVES_S, 4 * self._spec.poll_ms / 1000)
        return self._stage.batch is not None and now - self._leaves_since < patience

    def _has_planned(self) -> bool:
        """Note the newest batch; say whether it has changed since the last call.

        After rows, rests are short again. A barrier alone does not shorten them, so that checkpoints of a job
        without input cost no more calls.
        """
        before, self._planned = self._planned, self._stage.batch
        if before == self._planned:
            return False
        if not any(position.at_barrier for position in self._stage.positions()):
            self._patience = _FIRST_REST_S
        return True

    def _may_rest(self, own: Position) -> bool:
        """Say whether an idle stage may wait in this input: only the input that is asked first.

        If an input that is asked later waited, the answers before it would be old, and Spark would tell
        `processAllAvailable` that there is no input though there was. Spark asks in the order of the offset
        file as long as a Scala `Map` keeps it: up to four. Two at one position cannot be told apart. A stage
        whose inputs have ended waits for nothing: it ends when Spark says that it has nothing to do.
        """
        if self._spec.others is None:
            return False
        if not (positions := self._stage.positions()):
            return not self._spec.others
        if all(position.is_closed(self._spec.run) for position in forward(positions)):
            return False
        return positions[0] == own and positions.count(own) == 1 and len(positions) <= _KEPT_IN_ORDER

    def _rest(self, own: Position, limits: Limits) -> Position:
        """Wait for news of an input, at most a moment; return where this input goes on to, `own` to stay.

        A look costs one question to the store for each input. Ten times a second it also asks for news from
        elsewhere, such as the abort of a checkpoint. `processAllAvailable` has to wait for the
        end of two such calls, and is often called soon after rows: then the first ones are short.
        """
        began = asked = self._clock()
        while self._clock() - began < self._patience:
            self._pause(max(_PAUSE_S, self._spec.poll_ms / 1000))
            if any(other.moved() for other in self._others):
                break
            if self._own.moved() or self._clock() - asked >= _ABORTS_POLL_MS / 1000:
                asked, position = self._clock(), self._next(own, limits)
                if position != own:
                    return position
        else:
            self._patience = min(2 * self._patience, _LONGEST_REST_S)
        return own

    def _held_back(self) -> bool:
        """Say whether a feedback edge holds so much that this input has to wait for it."""
        for start, follower in self._back:
            channel = start.channel
            own = (p for p in self._stage.positions() if p.feedback and p.channel == channel)
            behind = min((p.version for p in own), default=start.version)
            follower.forget(behind)
            if holds_back(loads_of(follower.after(behind)), behind, self._spec.capacity):
                return True
        return False

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the files between two positions, in partitions of about `partition_bytes`.

        Raises:
            DamageError: an entry between the two is not in the log any more.
        """
        after, until = position_of(start).version, position_of(end).version
        files = [file for entry in self._follower.between(after, until) for file in entry.files]
        return [
            FilePartition([file.path for file in group])
            for group in grouped(files, self._spec.partition_bytes)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the files of a partition as record batches of the declared schema; runs in an executor.

        Raises:
            DamageError: a file is gone or does not fit the schema.
        """
        assert isinstance(partition, FilePartition)
        for file in partition.files:
            yield from read_file(self._root.fs, f"{self._table}/{file}", self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Forget what the batches up to `end` have read: Spark will not ask for it again."""
        self._follower.forget(position_of(end).version)


class RememberingGateReader(GateReader):
    """The gate on Spark before 4.2, which does not say from which position it asks.

    Spark takes each answer as the end of the next batch, so the newest one is where the next begins. It is
    kept in memory only: before Spark asks a query that was started again, it has an empty range planned at
    the newest end in the offset log (`AcceptsLatestSeenOffset`), and without a log the query has read nothing
    yet.
    """

    _newest: dict[str, Any] | None = None

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802 - Spark's name
        """Return where the input shall stand after the next batch."""
        self._newest = self._after(self.initialOffset() if self._newest is None else self._newest)
        return self._newest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the files between two positions; the first call of a process says where the input stands.

        Raises:
            DamageError: an entry between the two is not in the log any more, or the positions are those of
                another input.
        """
        self._own_position(end)
        if self._newest is None:
            self._newest = end
        return [] if start == end else super().partitions(start, end)


def position_of(offset: dict[str, Any]) -> Position:
    """Read the position out of an offset that Spark hands back.

    Raises:
        DamageError: it is none, or has a newer format.
    """
    position = from_plain(Position, offset)
    require_format(position.v, FORMAT, f"position of {position.channel}")
    return position


def grouped(files: Sequence[DataFile], size: int) -> list[list[DataFile]]:
    """Split files, in order, into groups of at most `size` uncompressed bytes, a file at least."""
    groups: list[list[DataFile]] = []
    filled = 0
    for file in files:
        if not groups or filled + file.uncompressed > size:
            groups.append([])
            filled = 0
        groups[-1].append(file)
        filled += file.uncompressed
    return groups


def read_file(filesystem: fs.FileSystem, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read a Parquet file as record batches of `schema`; a nullable column that it lacks is null.

    Spark takes a batch into memory as a whole, in the worker and in the JVM: each has a bounded size there.

    Raises:
        DamageError: it is gone, torn, or does not fit.
    """
    try:
        with filesystem.open_input_file(path) as source:
            for batch in read_batches(source, schema.names):
                yield conformed(batch, schema)
    except (OSError, pa.ArrowException) as error:
        raise DamageError(f"{path} of a channel cannot be read: {error}; run `spark-abs verify`") from error
