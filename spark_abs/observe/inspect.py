"""What a root holds, as Arrow tables for programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.manifests.find import lookup, open_existing
from spark_abs.model import StageId
from spark_abs.observe.listing import CheckpointRow, checkpoint_rows, checkpoint_table, event_table
from spark_abs.observe.status import StageStatus, job_status, lease_timeout_ms
from spark_abs.protocol.control import ControlState
from spark_abs.store.control import Control
from spark_abs.store.history import HistoryEvent
from spark_abs.store.root import Root

STAGES = pa.schema(
    [
        ("stage", pa.string()),
        ("finished", pa.int64()),
        ("planned", pa.int64()),
        ("checkpoint", pa.int64()),
        ("cut", pa.int64()),
        ("restarts", pa.int64()),
        ("waiting", pa.string()),
        ("first", pa.bool_()),
        ("phase", pa.string()),
        ("what", pa.string()),
        ("since_ms", pa.int64()),
        ("batch", pa.int64()),
        ("began_ms", pa.int64()),
        ("ended_ms", pa.int64()),
        ("last_ms", pa.int64()),
        ("slowest_ms", pa.int64()),
        ("rows_per_s", pa.float64()),
        ("watermark_ms", pa.int64()),
        ("state_rows", pa.int64()),
        ("state_memory", pa.int64()),
    ]
)
CHANNELS = pa.schema(
    [
        ("channel", pa.string()),
        ("stage", pa.string()),
        ("entries", pa.int64()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("oldest_ms", pa.int64()),
        ("more", pa.bool_()),
        ("moved_ms", pa.int64()),
    ]
)
STATE = pa.schema(
    [
        ("checkpoint", pa.int64()),
        ("stage", pa.string()),
        ("operator", pa.int64()),
        ("name", pa.string()),
        ("function", pa.string()),
        ("partition", pa.int64()),
        ("size", pa.int64()),
        ("growth", pa.int64()),
    ]
)
RETENTION = pa.schema(
    [
        ("id", pa.int64()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("completed_ms", pa.int64()),
        ("age_ms", pa.int64()),
        ("size_full", pa.int64()),
        ("kept_by", pa.string()),
    ]
)
SINKS = pa.schema(
    [
        ("sink", pa.string()),
        ("stage", pa.string()),
        ("kind", pa.string()),
        ("table", pa.string()),
        ("name", pa.string()),
        ("key", pa.list_(pa.string())),
        ("checkpoint", pa.int64()),
        ("version", pa.int64()),
    ]
)
_PARTITION = re.compile(r"state/(\d+)/(\d+)/")
_FAILURES = (HistoryEvent.STAGE_RESTARTED, HistoryEvent.STAGE_REBUILT, HistoryEvent.ABORTED)
_FAILURE_COLUMNS = ["at_ms", "event", "attempt", "run", "checkpoint", "stage", "batch", "reason", "detail"]
_RESTORE_COLUMNS = ["at_ms", "attempt", "run", "checkpoint", "kind", "name", "detail", "duration_ms"]


@dataclass(frozen=True, slots=True)
class Inspection:
    """The tables of a root, read anew by each call. Safe to use from any thread; no session is needed.

    All raise RootNotFound if there is no job at the root, and DamageError if its tables cannot be read.
    """

    root: Root
    clock_ms: Callable[[], int]

    def checkpoints(self) -> pa.Table:
        """Return what `JobRoot.checkpoints` returns."""
        return checkpoint_table(self.root, self.clock_ms())

    def stages(self) -> pa.Table:
        """Return a row for each stage, those first that hold an open checkpoint up.

        Columns: `stage`, `finished` and `planned` (batches), `checkpoint` and `cut` (its newest completed
        checkpoint, and the last batch in it), `restarts`, `waiting` (why an open checkpoint waits for it),
        `first` (it is late by itself). Null unless a run is alive: `phase`, `what`, `since_ms`, `batch`,
        `began_ms`, `ended_ms`, `last_ms`, `slowest_ms`, `rows_per_s`, `watermark_ms`, `state_rows`,
        `state_memory` (bytes).
        """
        status = job_status(self.root, self.clock_ms(), lease_timeout_ms())
        return _table(STAGES, (_stage_row(stage) for stage in status.stages))

    def channels(self) -> pa.Table:
        """Return what each stage of a live run has not read of each of its channels; no rows without a run.

        Columns: `channel`, `stage` (that reads), `entries`, `rows`, `size` (bytes before compression),
        `oldest_ms` (when the oldest of these rows was written), `more` (not all is counted), `moved_ms` (when
        a batch last read from it).
        """
        status = job_status(self.root, self.clock_ms(), lease_timeout_ms())
        found = [(stage.stage, stage.activity) for stage in status.stages if stage.activity is not None]
        rows = ({"stage": name, **asdict(one)} for name, doing in found for one in doing.inputs)
        return _table(CHANNELS, rows)

    def state(self, checkpoint: str | int = "latest") -> pa.Table:
        """Return the bytes of each state partition of each operator in a checkpoint.

        Columns: `checkpoint`, `stage`, `operator` (its number), `name`, `function` (the uid of a stateful
        function, else empty), `partition`, `size` (bytes of its files), `growth` (bytes since the checkpoint
        before it on the same path; null without one).

        Args:
            checkpoint: an id, the name of a savepoint, or `latest`.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
        """
        manifest = lookup(self.root, checkpoint).manifest
        before = self._before(manifest)
        return _table(STATE, _state_rows(manifest, before))

    def _before(self, manifest: Manifest) -> Manifest | None:
        job = Control.open(self.root).state.job
        checkpoints = open_existing(self.root, job)
        if checkpoints is None:
            return None
        same = [s.id for s in checkpoints.summaries() if s.attempt == manifest.attempt and s.id < manifest.id]
        return checkpoints.load(max(same)) if same else None

    def failures(self) -> pa.Table:
        """Return stages that were restarted or rebuilt, and checkpoints that were aborted, oldest first.

        Columns are those of `history/`: `at_ms`, `event`, `attempt`, `run`, `checkpoint`, `stage`, `batch`,
        `reason`, `detail`.
        """
        return _events(self.root, [event.value for event in _FAILURES]).select(_FAILURE_COLUMNS)

    def restores(self) -> pa.Table:
        """Return the restores, oldest first.

        Columns are those of `history/`: `at_ms`, `attempt` (that it made), `run`, `checkpoint`, `kind`,
        `name`, `detail`, `duration_ms`.
        """
        return _events(self.root, [HistoryEvent.RESTORED.value]).select(_RESTORE_COLUMNS)

    def retention(self) -> pa.Table:
        """Return what can be restored, and what keeps it.

        Columns: `id`, `kind`, `name`, `completed_ms`, `age_ms`, `size_full` (bytes that a restore reads),
        `kept_by`: `user` (a savepoint: until it is disposed of), `retention` (the setting `keep` keeps
        it), or `abandoned` (a restore left it behind).
        """
        rows = (row for row in checkpoint_rows(self.root, self.clock_ms()) if row.damage is None)
        return _table(RETENTION, ({**asdict(row), "kept_by": _kept_by(row)} for row in rows))

    def sinks(self) -> pa.Table:
        """Return the sinks that the job has written.

        Columns: `sink`, `stage`, `kind` (`delta`, or the kind of a sink outside), `table` (its URI, empty
        outside), `name` (in a catalog), `key` (columns by which rows are merged), `checkpoint` and `version`
        (of a Delta sink: its version at the newest completed checkpoint).
        """
        state = Control.open(self.root).state
        checkpoints = open_existing(self.root, state.job)
        newest = None if checkpoints is None else checkpoints.newest_on(state.attempt)
        return _table(SINKS, _sink_rows(state, newest))


def partition_sizes(snapshot: StageSnapshot) -> Mapping[int, Mapping[int, int]]:
    """Return the bytes of the state of a stage, by operator and partition."""
    sizes: dict[int, dict[int, int]] = {}
    for file in snapshot.files:
        found = _PARTITION.match(file.path)
        if found is not None:
            of_operator = sizes.setdefault(int(found[1]), {})
            partition = int(found[2])
            of_operator[partition] = of_operator.get(partition, 0) + file.size
    return {operator: dict(sorted(of.items())) for operator, of in sorted(sizes.items())}


def _table(schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Make a table of the columns that the schema names."""
    return pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema)


def _stage_row(stage: StageStatus) -> dict[str, Any]:
    return {
        **({} if stage.activity is None else asdict(stage.activity)),
        **{name: getattr(stage, name) for name in ("stage", "finished", "planned", "checkpoint", "cut")},
        **{name: getattr(stage, name) for name in ("restarts", "waiting", "first")},
    }


def _state_rows(manifest: Manifest, before: Manifest | None) -> Iterator[dict[str, Any]]:
    for snapshot in manifest.stages:
        earlier = None if before is None else before.stage(snapshot.stage)
        sizes_before = {} if earlier is None else partition_sizes(earlier)
        named = {operator.operator_id: operator for operator in snapshot.operators}
        for operator, sizes in partition_sizes(snapshot).items():
            known, was = named.get(operator), sizes_before.get(operator, {})
            for partition, size in sizes.items():
                yield {
                    "checkpoint": manifest.id,
                    "stage": snapshot.stage,
                    "operator": operator,
                    "name": None if known is None else known.name,
                    "function": "" if known is None else known.function,
                    "partition": partition,
                    "size": size,
                    "growth": None if earlier is None else size - was.get(partition, 0),
                }


def _events(root: Root, kinds: list[str]) -> pa.Table:
    events = event_table(root)
    return events.filter(pc.is_in(events["event"], value_set=pa.array(kinds, pa.string())))


def _kept_by(row: CheckpointRow) -> str:
    if row.name is not None:
        return "user"
    return "abandoned" if row.abandoned else "retention"


def _sink_rows(state: ControlState, newest: Manifest | None) -> Iterator[dict[str, Any]]:
    versions: dict[tuple[StageId, str], int | None] = {}
    for snapshot in () if newest is None else newest.stages:
        versions |= {(snapshot.stage, one.output): one.version for one in snapshot.outputs}
    for sink in state.sinks:
        yield {
            "sink": sink.sink,
            "stage": sink.stage,
            "kind": "delta",
            "table": sink.table,
            "name": sink.name,
            "key": list(sink.key),
            "checkpoint": None if newest is None else newest.id,
            "version": versions.get((sink.stage, sink.sink)),
        }
    for outside in state.outside:
        yield {
            "sink": outside.sink,
            "stage": outside.stage,
            "kind": outside.kind,
            "table": "",
            "name": "",
            "key": [],
            "checkpoint": None if newest is None else newest.id,
            "version": None,
        }
