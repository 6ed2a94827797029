"""A job adopts native queries: it copies their checkpoints, and sinks take over their tables.

Everything is decided from storage before anything is changed: the query's last batch, its sources and state,
and which of its batches the table holds. Then the checkpoint is copied, `control/` records the copy, and one
commit to the table lets the sink write and fences the query. A start that is killed before this commit leaves
the query as it was, and the next start begins anew.

Where a query reads the table of another, its position there becomes the beginning of the channel between
their stages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyarrow import fs

from spark_abs.compatibility.chain import why_not_aligned
from spark_abs.compatibility.existing import is_marked, refuse_rows_of_others
from spark_abs.compatibility.restored import Past
from spark_abs.errors import AbsError, DamageError, Refused
from spark_abs.manifest import CHANNEL, SourceShape
from spark_abs.model import (
    FENCED,
    NO_BATCH,
    BatchId,
    ChannelId,
    SinkWriter,
    StageId,
    dumps_position,
    is_number,
    positions_of,
)
from spark_abs.plan.specs import JobSpec, SinkSpec, StageSpec
from spark_abs.protocol.attempt import Rebuilt
from spark_abs.protocol.control import ControlState
from spark_abs.restore.delta_inputs import asked
from spark_abs.run_context import RunContext
from spark_abs.sinks.delta.adopted import (
    is_adopted,
    named,
    refuse_running,
    take_over_query,
    was_fenced,
    written_by,
)
from spark_abs.snapshots.adopt import adopt_native
from spark_abs.snapshots.delta_offsets import DELTA, delta_offset
from spark_abs.snapshots.kafka_offsets import KAFKA, kafka_offsets
from spark_abs.snapshots.layout import file_source_offset, parse_operator
from spark_abs.snapshots.materialise import METADATA
from spark_abs.snapshots.rearrange import rearrange, source_offsets
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.stages.native import NativeLog, check_native, native_of
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_KEPT_BY = {
    "Aggregate": "an aggregation",
    "Distinct": "an aggregation",
    "Deduplicate": "dropDuplicates",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
    "Join": "a join of streams",
    "FlatMapGroupsWithState": "flatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPySpark": "transformWithState in Python",
    "GlobalLimit": "a limit",
}
"""Names of a plan's operators, for messages."""
_STORED_AS = {
    "stateStoreSave": "an aggregation",
    "sessionWindowStateStoreSaveExec": "an aggregation",
    "dedupe": "dropDuplicates",
    "dedupeWithinWatermark": "dropDuplicatesWithinWatermark",
    "symmetricHashJoin": "a join of streams",
    "flatMapGroupsWithState": "flatMapGroupsWithState",
    "applyInPandasWithState": "applyInPandasWithState",
    "transformWithStateExec": "transformWithState",
    "transformWithStateInPySparkExec": "transformWithState in Python",
    "transformWithStateInPandasExec": "transformWithState in Python",
    "globalLimit": "a limit",
}
"""The same operators as the metadata of a checkpoint names them."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """A native query that a stage adopts."""

    stage: StageId
    source: Place
    """Its checkpoint."""
    query: str
    """The query's id in Spark."""
    finished: BatchId
    planned: BatchId
    channels: tuple[ChannelId | None, ...] = ()
    """For each source the channel that takes the place of the table that it reads; empty if none does."""

    def __str__(self) -> str:
        """Return the adoption as `check` shows it."""
        return f"adopts {self.source}: query {self.query}, after batch {self.finished}"


def is_open(job: JobSpec, root: Root, past: Past | None, stage: StageId) -> bool:
    """Say whether a stage must still adopt its query: it has run no batch, and none of its sinks has begun.

    Before a sink begins, no table holds rows of the job, and the query may have run further since it was
    copied. A recorded stage that has lost its native checkpoint need not adopt again: its rows are in the
    table already.
    """
    given = job.stages[stage].adopt
    if given is None or past is None:
        return given is not None
    state = past.control
    record = state.attempt.rebuilt_stage(stage)
    if record is None:
        known = {s.stage for s in state.attempt.shapes}
        known |= {s.stage for s in past.manifest.stages} if past.manifest is not None else set()
        return stage not in known and native_of(root, state, stage).read(METADATA) is None
    place = root.storage.place(given)
    if place.read(METADATA) is None or NativeLog(place).query_id() != record.query:
        return False
    tables = ((sink, _table(root, sink)) for sink in _sinks(job, stage))
    begun = any(t is not None and is_adopted(t, _writer(state, sink), record.query) for sink, t in tables)
    return not begun and all(attached.stage != stage for attached in state.sinks)


def why_too_late(job: JobSpec, root: Root, stage: StageId) -> str:
    """Return why a stage that has already run cannot adopt its query; empty if the query was adopted before.

    The query was never adopted if it may still write a table of the stage's sinks. If the query's checkpoint
    is gone or cannot be read, the answer is empty, so that `adopt` may stay in a script.
    """
    given = job.stages[stage].adopt
    with suppress(AbsError, OSError):
        place = root.storage.place(given or "")
        query = NativeLog(place).query_id() if place.read(METADATA) is not None else ""
        tables = [table for sink in _sinks(job, stage) if (table := _table(root, sink)) is not None]
        free = next((t for t in tables if query and t.transaction(query) not in (None, FENCED)), None)
        if free is not None:
            return (
                f"stage {stage!r} cannot adopt {place}: the stage has run already, without the position and "
                f"the state of query {query}, and the query may still write {free.uri}. Give the stage a "
                "new name, so that it can adopt the query; or leave adopt= out"
            )
    return ""


def refuse_progress(before: Sequence[Adoption], now: Sequence[Adoption]) -> None:
    """Refuse queries that ran while the start inspected them; changes nothing.

    Raises:
        Refused: a query planned or finished a batch in between.
    """
    then = {one.stage: one for one in before}
    for one in now:
        seen = then.get(one.stage, one)
        if (seen.finished, seen.planned) != (one.finished, one.planned):
            raise Refused(_runs(one))


def goes_on(job: JobSpec, root: Root, state: ControlState, stage: StageId) -> str:
    """Return how the old checkpoint of an adopted query has changed since the adoption; empty if it has not.

    It has changed if the query has planned a batch that the job has not, or has planned differently.
    """
    with suppress(AbsError, OSError):
        place = root.storage.place(job.stages[stage].adopt or "")
        theirs, ours = NativeLog(place), NativeLog(native_of(root, state, stage))
        newest = theirs.newest_planned() if place.read(METADATA) is not None else NO_BATCH
        same = _same_plan(theirs.find_offsets(newest), ours.find_offsets(newest))
        gone = newest <= ours.newest_planned() and ours.find_offsets(newest) is None  # long ago
        if newest != NO_BATCH and not same and not gone:
            return (
                f"stage {stage!r} has adopted {place}, and the adopted query has planned batch {newest} "
                "there since. The query can no longer write, and the job reads the same rows: stop the "
                "query, wherever it runs"
            )
    return ""


def _same_plan(theirs: str | None, ours: str | None) -> bool:
    """Say whether a batch was planned alike, apart from tables whose place a channel has taken."""
    if theirs is None or ours is None:
        return theirs == ours
    if theirs.split("\n")[:2] != ours.split("\n")[:2]:
        return False
    offsets = zip(source_offsets(theirs), source_offsets(ours), strict=True)
    return all(one == other or bool(positions_of([other or ""])) for one, other in offsets)


def plan_adoption(
    job: JobSpec, root: Root, state: ControlState | None, stage: StageId, plan: PlanFacts
) -> Adoption:
    """Plan the adoption of a stage's query; changes nothing.

    Args:
        job: the declarations.
        root: of the job.
        state: the state of `control/`; None for a new root.
        stage: the stage declared with `adopt`.
        plan: of its frame.

    Raises:
        Refused: the query cannot be adopted as declared; the message has the reason and an alternative.
        DamageError: the checkpoint cannot be read.
    """
    spec = job.stages[stage]
    assert spec.adopt is not None
    place = root.storage.place(spec.adopt)
    reasons = list(_whole(place))
    if reasons:
        raise Refused(_said(stage, place, reasons))
    log = NativeLog(place)
    channels = tuple(ChannelId(s.name) if s.kind == CHANNEL else None for s in plan.streams)
    adoption = Adoption(
        stage,
        place,
        log.query_id(),
        finished=log.newest_committed(),
        planned=log.newest_planned(),
        channels=channels if any(channels) else (),
    )
    _refuse_active(job.spark, adoption)
    offsets = log.offsets_text(adoption.planned)
    sources = source_offsets(offsets, f"{place}/offsets/{adoption.planned}")
    reasons += _sources(place, sources, plan.streams)
    reasons += why_not_aligned(job, root, state, log, offsets=sources, streams=plan.streams)
    before = log.find_offsets(BatchId(adoption.finished - 1)) or ""
    reasons += asked(
        root, stage, offsets=log.offsets_text(adoption.finished), declared=plan.streams, before=before
    ).lost
    reasons += _operators(place, plan)
    reasons += _outputs(job, root, state, adoption, spec)
    if reasons:
        raise Refused(_said(stage, place, reasons))
    return adoption


def adopt(ctx: RunContext, attempt_number: int, adoption: Adoption, heartbeat: Callable[[], None]) -> Rebuilt:
    """Copy the checkpoint of a query into a directory that no start has used, and return its record.

    Raises:
        Refused: the query ran meanwhile.
    """
    record = Rebuilt(adoption.stage, attempt_number, adoption.query, None, done=True)
    target = ctx.root.native(ctx.natives, ctx.attempt, record.directory)
    ctx.failpoint(f"adopt.{adoption.stage}.copy.before")
    if adoption.channels:
        begin = [
            number if channel is None else json.dumps(dumps_position(ctx.start(adoption.stage, channel)))
            for number, channel in enumerate(adoption.channels)
        ]
        rearrange(
            adoption.source,
            target,
            batch=adoption.finished,
            query_id=adoption.query,
            sources=begin,
            heartbeat=heartbeat,
        )
    else:
        adopt_native(adoption.source, target, heartbeat)
    log = NativeLog(adoption.source)
    if (log.newest_committed(), log.newest_planned()) != (adoption.finished, adoption.planned):
        raise Refused(_runs(adoption))
    ctx.failpoint(f"adopt.{adoption.stage}.copy.after")
    return record


def _runs(adoption: Adoption) -> str:
    return f"query {adoption.query} runs on {adoption.source}: stop it, and start the job again"


def fence_query(
    ctx: RunContext, stage: StageId, sink: str, uri: str, session: Callable[[], SparkSession]
) -> None:
    """Let a sink continue a table that the adopted query wrote; see `take_over_query`."""
    native = NativeLog(ctx.native(stage))
    if native.place.read(METADATA) is None:
        return
    ctx.failpoint(f"adopt.{stage}.fence.before")
    table = Table.open(ctx.root.storage.place(uri))
    query, planned = native.query_id(), native.newest_planned()
    take_over_query(
        table, ctx.writer(stage, sink), run=ctx.run, query=query, planned=planned, session=session
    )
    ctx.failpoint(f"adopt.{stage}.fence.after")


def _whole(place: Place) -> Iterator[str]:
    """Iterate the reasons why a query could not resume from a checkpoint."""
    if place.read(METADATA) is None:
        yield "it is not the checkpoint of a query: it has no metadata file"
        return
    log = NativeLog(place)
    finished, planned = log.newest_committed(), log.newest_planned()
    if finished == NO_BATCH:
        yield (
            "its query has finished no batch: run the query again until it has; or, if it has written "
            "nothing, start the job without adopt"
        )
    elif planned > finished + 1:
        yield (
            f"batch {planned} is planned, and {finished} is the last finished one: progress was tracked "
            "asynchronously. Start the query once without asyncProgressTrackingEnabled, until it has "
            "finished a batch"
        )
    elif (finding := check_native(place, NO_BATCH)) is not None:
        yield finding
    if any("_schema_log" in name for name in _further(place)):
        yield "it holds a log of schemas (schemaTrackingLocation), which cannot be adopted"


def _further(place: Place) -> Iterator[str]:
    """Iterate the names directly below a checkpoint directory."""
    for info in place.fs.get_file_info(fs.FileSelector(place.path)):
        if info.base_name not in ("offsets", "commits", "sources", "state", METADATA):
            yield info.base_name
            if info.type is fs.FileType.Directory:
                yield from (inner.base_name for inner in place.fs.get_file_info(fs.FileSelector(info.path)))


def _refuse_active(spark: SparkSession, adoption: Adoption) -> None:
    if any(query.id == adoption.query for query in spark.streams.active):
        raise Refused(f"query {adoption.query} runs in this session and cannot be adopted: stop it first")


def _sources(place: Place, offsets: Sequence[str | None], shapes: Sequence[SourceShape]) -> Iterator[str]:
    """Iterate the differences between the sources of a checkpoint and of a frame."""
    if len(offsets) != len(shapes):
        yield f"its query reads {len(offsets)} sources, and the declared frame reads {len(shapes)}"
        return
    for number, (offset, shape) in enumerate(zip(offsets, shapes, strict=True)):
        if offset is None or shape.kind == CHANNEL:
            continue
        delta, files, kafka = delta_offset(offset), file_source_offset(offset), kafka_offsets(offset)
        was = DELTA if delta else KAFKA if kafka else "files" if files is not None else ""
        kind = shape.kind.lower()
        now = kind if kind in (DELTA, KAFKA) else "files" if kind in _FILES else ""
        if was != now and not (now == "" and was in ("files", KAFKA)):  # a format that is not known here
            yield (
                f"source {number} of its query reads {was or 'an unknown source'}, and the declared frame "
                f"reads {shape}"
            )
        elif delta is not None:
            with suppress(FileNotFoundError, DamageError):
                table = Table.open(place.storage.place(shape.name))
                if table.id != delta.table_id:
                    yield f"source {number} of its query reads the table {delta.table_id}, not {shape.name}"


_FILES = frozenset(("json", "csv", "parquet", "orc", "text", "avro", "xml", "binaryfile", "textfile"))


def _operators(place: Place, plan: PlanFacts) -> Iterator[str]:
    """Iterate the differences between the stateful operators of a checkpoint and of a frame."""
    if any(plan.functions):
        yield (
            "its frame has stateful functions of spark_abs: a native query does not record their state "
            "formats"
        )
    kept = Counter(_kept(place))
    declared = Counter(_KEPT_BY.get(o.name, o.name) for o in plan.operators)
    known = kept.keys() | declared.keys() <= set(_KEPT_BY.values())
    if kept != declared if known else kept.total() != declared.total():
        yield (
            f"its query has state for {_listed(kept)}, and the declared frame needs state for "
            f"{_listed(declared)}"
        )


def _kept(place: Place) -> Iterator[str]:
    selector = fs.FileSelector(f"{place.path}/state", allow_not_found=True)
    for info in place.fs.get_file_info(selector):
        if not is_number(info.base_name):
            continue
        below = f"state/{info.base_name}/_metadata"
        text = place.read_text(f"{below}/metadata")
        if text is None:
            inside = place.fs.get_file_info(fs.FileSelector(f"{place.path}/{below}/v2", allow_not_found=True))
            names = [i.base_name for i in inside if is_number(i.base_name)]
            text = place.read_text(f"{below}/v2/{max(names, key=int)}") if names else None
        if text is not None:
            name = parse_operator(text).name
            yield _STORED_AS.get(name, name)


def _outputs(
    job: JobSpec, root: Root, state: ControlState | None, adoption: Adoption, spec: StageSpec
) -> Iterator[str]:
    """Iterate the reasons why a stage's sinks cannot continue after the query's last batch."""
    own = []
    for sink in _sinks(job, adoption.stage):
        table = _table(root, sink)
        if table is None or refuse_running(table, adoption.query, adoption.planned) is None:
            try:
                refuse_rows_of_others(job, sink, root, state)
            except Refused as error:
                yield str(error)
            continue
        own.append(table)
        if was_fenced(table, adoption.query) and not (state is not None and is_marked(state, sink, table)):
            yield (
                f"another root has adopted query {adoption.query} already, and may have written {table.uri} "
                "since: this job would write the same rows again; start the job with that root"
            )
        if sink.key:
            yield (
                f"sink {sink.name!r} merges by key, but the query appended its rows: declare the sink "
                "without a key"
            )
        written = written_by(table, adoption.query, "" if state is None else state.root)
        mode = written.mode
        if mode and mode != spec.output_mode:
            yield (
                f"the query wrote {table.uri} in output mode {mode!r}: declare the stage with "
                f"output_mode={mode!r}"
            )
        if written.others and sink.existing is None:
            yield (
                f"sink {sink.name!r}: {table.uri} has rows from other writers than the query (versions "
                f"{named(written.others)}): declare the sink with existing='append' to keep these rows "
                "beside those of the job"
            )
    if not own:
        yield (
            f"no Delta sink of the stage, written with each batch, holds a batch of query {adoption.query}. "
            "If the query uses foreachBatch, keep it as it is, see spark_abs.checkpoint_location(adopt=). "
            "If it has written nothing yet, leave adopt= out. If it writes to Kafka, files or the console, "
            "it cannot be adopted: begin a new job, from offsets that you choose"
        )


def _sinks(job: JobSpec, stage: StageId) -> list[SinkSpec]:
    """Return the sinks of a stage that write a Delta table with each batch."""
    return [sink for sink in job.sinks if sink.source.stage == stage and sink.table is not None]


def _table(root: Root, sink: SinkSpec) -> Table | None:
    assert sink.table is not None
    return Table.find(root.storage.place(sink.table))


def _writer(state: ControlState, sink: SinkSpec) -> SinkWriter:
    return state.writer(state.attempt, sink.source.stage, sink.name)


def _said(stage: StageId, place: Place, reasons: Sequence[str]) -> str:
    return "\n".join([f"stage {stage!r} cannot adopt {place}:", *reasons])


def _listed(kinds: Counter[str]) -> str:
    return (
        ", ".join(f"{kind} ({n} times)" if n > 1 else kind for kind, n in sorted(kinds.items())) or "nothing"
    )
