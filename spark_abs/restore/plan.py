"""The plan of a restore, a pure function (P18): facts about the root go in, steps come out.

Every reason to refuse a restore is found here, before anything is changed; `apply` carries the steps out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from spark_abs.advice import named
from spark_abs.codec import from_json
from spark_abs.errors import DamageError, Refused
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.manifests.manifest_table import Summary
from spark_abs.model import (
    NO_BATCH,
    AttemptId,
    BatchId,
    ChannelId,
    CheckpointId,
    StageId,
    Version,
    checked_name,
)
from spark_abs.observe.status import LiveRun
from spark_abs.protocol.attempt_changes import replaced_by
from spark_abs.protocol.control import ControlState
from spark_abs.restore.inputs import InputsSince
from spark_abs.restore.outside import OutsideFacts, outside_steps
from spark_abs.restore.refusals import Force, alive, forced_by, lost_inputs, lost_records, lost_tables
from spark_abs.restore.restoring import RestorePlan, Step
from spark_abs.restore.steps import (
    AbortOpen,
    BeginAttempt,
    FenceChannel,
    FenceRoot,
    FenceSink,
    Finish,
    KeepSink,
    Materialise,
    Rescale,
    RestoreSink,
    SetAside,
    StartAfresh,
    TableReader,
)
from spark_abs.sinks.delta.changes import NO_CHANGES, Changes


@dataclass(frozen=True, slots=True)
class ReaderFacts:
    """A stage of the checkpoint that reads the table of a function as a stream."""

    stage: StageId
    sources: tuple[str, ...]
    """The sources that read it, as the stage's offset files name them."""
    misfit: str = ""
    """Why the cut of the stage does not fit the version to go back to; empty if it does."""


@dataclass(frozen=True, slots=True)
class SinkFacts:
    """The facts about one table and all sinks of this root that have written it."""

    sinks: tuple[tuple[StageId, str], ...]
    """Stage and name of each; the checkpoint's own first."""
    table: str
    current: Version | None
    """None if there is no table any more."""
    recorded_id: str = ""
    """The table id that the manifests name."""
    table_id: str = ""
    target: Version | None = None
    """The version to go back to: the oldest that the checkpoint records for one of the sinks, or if it
    records none, the version at which the job attached the table. `NO_TABLE` if there was no table: it is
    emptied. None if the log no longer has it."""
    changes: Changes = NO_CHANGES
    """The commits since `target` that changed rows, and their authors."""
    gone: str = ""
    """Why `target` cannot be restored; empty if it can."""
    entangled: str = ""
    """Why rows of this root cannot be told from rows of others; empty if they can."""
    by_function: bool = False
    """A function writes it by itself: a restore undoes all later changes, by any author."""
    later: bool = False
    """The job attached it after the checkpoint."""
    needs_spark: bool = False
    """The table uses features that only delta-spark can write."""
    name: str = ""
    """The name of the table in a catalog, if it was declared by one."""
    stuck: tuple[str, ...] = ()
    """Ids under which its function writes, and which cannot be set back."""
    readers: tuple[ReaderFacts, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Its sinks as `<stage>/<sink>`."""
        return tuple(f"{stage}/{sink}" for stage, sink in self.sinks)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that a plan is made from."""

    completed: tuple[Summary, ...]
    channels: tuple[ChannelId, ...]
    """Every channel that has a table."""
    has_state: bool
    sinks: tuple[SinkFacts, ...]
    """Every table that a known manifest names as a sink, once."""
    damaged_rows: tuple[str, ...] = ()
    """Files of `checkpoints/` that are damaged."""
    inputs: InputsSince = field(default_factory=InputsSince)
    """Input files that were read since the checkpoint."""
    alive: LiveRun | None = None
    outside: tuple[OutsideFacts, ...] = ()
    """All sinks outside that the job has attached."""


@dataclass(frozen=True, slots=True)
class StoredQueries:
    """The query ids in the stored plan of an unfinished restore."""

    queries: Mapping[str, str]


def plan_restore(
    state: ControlState,
    manifest: Manifest,
    facts: Facts,
    *,
    attempt: AttemptId,
    natives: str,
    fresh_id: Callable[[], str],
    force: Collection[Force] = (),
    notes: Sequence[str] = (),
    partitions: Mapping[str, int] = MappingProxyType({}),
    dry_run: bool = False,
) -> RestorePlan:
    """Plan a restore to a checkpoint.

    Every step may be repeated, so the plan of a restore that was interrupted is the same list again.

    Args:
        state: the content of `control/`.
        manifest: the checkpoint to go back to.
        facts: the facts, read from the root.
        attempt: the attempt of this restore, by `attempt_changes.attempt_for`.
        natives: the place of native checkpoints after the restore.
        fresh_id: makes a query id for a stage that has none yet.
        force: the reasons to refuse that are ignored.
        notes: sentences for the plan, for example that this is a fallback.
        partitions: from `rescale.changes`: the stages whose number of partitions changes.
        dry_run: the plan is only shown: a live run becomes a note of the plan.

    Raises:
        RunAlive: a run of the job is alive.
        DamageError: the recorded version of a sink cannot be restored; no force helps.
        Refused: a sink was replaced, others have changed its rows, or input files are gone.
    """
    living = alive(state, facts.alive, forced=Force.RUN in force, dry_run=dry_run)
    since = f"input files read since checkpoint {manifest.id}"
    lost = lost_inputs(since, facts.inputs.lost, forced=Force.INPUTS in force)
    lost += lost_records(manifest.id, facts.inputs.kafka.lost, forced=Force.INPUTS in force)
    rows = f"rows to read after checkpoint {manifest.id}"
    lost += lost_tables(rows, facts.inputs.delta.lost, forced=Force.INPUTS in force)
    parent = manifest.cut.attempt
    # Attempts before the one that last ran were burnt when that one was restored.
    replaced = replaced_by(state, attempt)
    begun = from_json(StoredQueries, state.attempt.plan).queries if state.attempt.id == attempt else {}
    said = [*notes, *lost]
    if not state.attempt.ready and state.attempt.id != attempt:
        said.append(f"the unfinished restore to checkpoint {state.attempt.checkpoint} is abandoned")
    said += living
    if any(sink.needs_spark for sink in facts.sinks) or any(sink.spark_table for sink in facts.outside):
        said.append("a sink uses table features that only Spark can write: a Spark session is needed")
    said += [
        f"stage {f.stage!r} first reads entries {f.after + 1} to {f.until} of channel {f.channel}, which "
        "were in flight"
        for f in manifest.in_flight()
    ]
    said += [f"stage {stage!r} reads again {_files(count)}" for stage, count in facts.inputs.files.items()]
    said += [
        f"{source} is no longer read: it is not known which of its files were read since the checkpoint, and "
        "whether they are still there"
        for source in facts.inputs.left
    ]
    said += (*facts.inputs.kafka.unknown, *facts.inputs.delta.unknown)
    said += [
        f"{named(sink.name, sink.table)} loses rows: {'another' if sink.readers else 'a'} stream that has "
        "read them fails at the commit of this restore, and one with skipChangeCommits gets them twice; no "
        "restore takes such a reader back with them: see `spark-abs guide adopting-a-query`"
        for sink in facts.sinks
        if sink.by_function and sink.changes
    ]
    if partitions:
        said.append("state is repartitioned: a Spark session is needed")
    replaces = state.newest_run
    fences: list[Step] = [FenceRoot("checkpoints"), *([FenceRoot("state")] if facts.has_state else [])]
    fences += [SetAside(path) for path in facts.damaged_rows]
    fences += [FenceChannel(channel, old) for channel in sorted(facts.channels) for old in replaced]
    fences += [
        FenceSink(
            s.table,
            s.names,
            attempt=old,
            apps=_apps(state, old, s.sinks),
            needs_spark=s.needs_spark,
            name=s.name,
        )
        for s in facts.sinks
        for old in replaced
        if s.current is not None
    ]
    return RestorePlan(
        job=state.job,
        checkpoint=manifest.id,
        name=manifest.name,
        parent=parent,
        attempt=attempt,
        replaces=replaces,
        newest=state.attempt.id,
        abandons=_abandoned(state, manifest, facts.completed),
        channels=manifest.channel_cuts(),
        queries={s.stage: begun.get(s.stage) or fresh_id() for s in manifest.stages},
        steps=(
            BeginAttempt(attempt, parent, manifest.id, replaces),
            *fences,
            AbortOpen(tuple(c.barrier.id for c in state.claims)),
            *(step for s in manifest.stages for step in _stage(s, f"{natives}/{attempt}", partitions)),
            *(_sink(s, Force.ROWS in force, f"{natives}/{attempt}") for s in facts.sinks),
            *outside_steps(facts.outside, Force.OUTSIDE in force),
            *(
                KeepSink(
                    (f"{s.stage}/{o.output}",),
                    "a function has no versions: its effects outside the tables of this plan stay",
                )
                for s in manifest.stages
                for o in s.outputs
                if o.kind == "function"
            ),
            Finish(attempt),
        ),
        notes=tuple(said),
        natives=natives,
        partitions=dict(partitions),
        base=manifest.edited.checkpoint if manifest.edited is not None else None,
    )


def _files(count: int) -> str:
    return (
        "one input file that it has read since"
        if count == 1
        else f"{count} input files that it has read since"
    )


def _abandoned(
    state: ControlState, manifest: Manifest, completed: Sequence[Summary]
) -> tuple[CheckpointId, ...]:
    """Return the checkpoints that leave the current path by a restore to `manifest`."""
    cut = manifest.cut
    limits: dict[AttemptId, CheckpointId] = {cut.attempt: cut.checkpoint}
    stays = {manifest.id}
    for attempt in state.lineage(cut.attempt):
        left_at = attempt.base or attempt.checkpoint
        if attempt.parent is not None and attempt.checkpoint is not None and left_at is not None:
            limits[attempt.parent] = left_at
            stays.add(attempt.checkpoint)  # also if an edit made it, of no attempt
    return tuple(
        s.id
        for s in completed
        if state.on_path(s.attempt, s.id)
        and s.id not in stays
        and s.id > limits.get(s.attempt, CheckpointId(0))
    )


def _stage(snapshot: StageSnapshot, below: str, partitions: Mapping[str, int]) -> Iterator[Step]:
    stage, cut = snapshot.stage, snapshot.cut_batch
    checked_name(stage, "stage")
    if cut == NO_BATCH:
        yield StartAfresh(stage)
        return
    directory = f"{below}/{stage}"
    yield Materialise(stage, directory, cut, len(snapshot.files), snapshot.size_full)
    if stage in partitions:
        before = snapshot.shuffle_partitions
        yield Rescale(stage, directory, BatchId(cut + 1), before, partitions[stage])


def _apps(state: ControlState, attempt: AttemptId, sinks: Sequence[tuple[StageId, str]]) -> tuple[str, ...]:
    """Return the ids under which an attempt may commit to the table of these sinks."""
    (old,) = [a for a in state.attempts if a.id == attempt]
    return tuple(dict.fromkeys(state.writer(old, stage, sink).app for stage, sink in sinks))


def _sink(found: SinkFacts, undo_others: bool, below: str) -> Step:
    table = named(found.name, found.table)
    where = f"{', '.join(found.names)} ({table})"
    same = found.current is not None and found.table_id == found.recorded_id
    if found.by_function and (found.current is None or found.target is None):
        return KeepSink(found.names, f"{table} is gone")
    if found.later and (not same or found.target is None):
        why = "the job attached it after the checkpoint, and its log does not tell when: its rows stay"
        return KeepSink(found.names, why)
    _refuse_readers(found, where)
    if replaced := _replaced(found):
        if not undo_others:
            raise Refused(
                f"sink {where} {replaced}. Put the recorded table back, or pass {forced_by(Force.ROWS)}: "
                "then the table that is there stays, and rows after the checkpoint are written to it"
            )
        return KeepSink(found.names, f"{table} {replaced}: it stays as it is")
    if found.current is None or found.target is None:
        raise DamageError(f"sink {where}: the checkpoint does not record its version")
    if found.gone:
        raise DamageError(f"sink {where}: {found.gone}")
    if found.entangled:
        raise Refused(f"sink {where}: {found.entangled}")
    if found.changes.of_others and not undo_others and not found.by_function:
        raise Refused(
            f"sink {where}: others have changed rows since the checkpoint, in version "
            f"{', '.join(map(str, found.changes.of_others[:5]))}; a restore would undo their changes, "
            f"too: pass {forced_by(Force.ROWS)} to accept that"
        )
    if found.stuck and not undo_others:
        raise Refused(
            f"sink {where}: only Delta's own writer can write the table, and it cannot set back "
            f"application id {', '.join(map(repr, found.stuck[:5]))}: Delta would skip the batches that come "
            "again under it. Let the function write under spark_abs.current().app_id from now on, and pass "
            f"{forced_by(Force.ROWS)}"
        )
    return RestoreSink(
        table=found.table,
        sinks=found.names,
        version=found.target,
        current=found.current,
        changes=found.changes,
        by_function=found.by_function,
        needs_spark=found.needs_spark,
        name=found.name,
        readers=tuple(
            TableReader(reader.stage, f"{below}/{reader.stage}", reader.sources) for reader in found.readers
        ),
    )


def _refuse_readers(found: SinkFacts, where: str) -> None:
    """Refuse a table if a stage that reads it could not continue behind the commit of the restore."""
    for reader in found.readers:
        if reader.misfit:
            raise Refused(
                f"sink {where}: {reader.misfit}: rows would be lost or come twice. Choose a checkpoint "
                "that has both queries, see `spark-abs list`"
            )
        if replaced := _replaced(found):
            raise Refused(
                f"sink {where} {replaced}: the position of query {reader.stage!r}, which reads it, "
                "belongs to the recorded table. Put that back"
            )
        if versions := found.changes.of_roots:
            raise Refused(
                f"sink {where}: another root has written to it since the checkpoint, in version "
                f"{', '.join(map(str, versions[:5]))}: its rows would stay, and query {reader.stage!r} would "
                "not read them"
            )


def _replaced(found: SinkFacts) -> str:
    """Say how the table of a sink was replaced, empty if it was not."""
    if found.current is None:
        return "has lost its table"
    if found.table_id != found.recorded_id:
        return (
            f"is not the table that the job wrote (its id is {found.table_id}, recorded was "
            f"{found.recorded_id}): it is a different Delta table"
        )
    if found.target is not None and found.current < found.target:
        return (
            f"is at version {found.current}, older than version {found.target} of the checkpoint: it was "
            "replaced by an older copy"
        )
    return ""
