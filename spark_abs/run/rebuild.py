"""Rebuild a stage that has lost its native checkpoint, without effects on the other stages (P18).

1. Copy its state from the newest intact checkpoint into a directory that no query has used.  2. Repeat its
batches up to its last output, each planned from the offset text in its outputs.  3. Run it like any other
stage. `control/` records the directory before 1, and the end of the rebuild after 2: after a kill in between,
the next start continues with the directory if it is complete, or takes a new one.
"""

from __future__ import annotations

import json
import logging
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from spark_abs.errors import AbsError, DamageError, Refused, StageFailed
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import NO_BATCH, BatchId, CheckpointId, StageId
from spark_abs.plan.graph import JobGraph, StageDecl
from spark_abs.protocol import control as ledger
from spark_abs.protocol.attempt import Attempt, Rebuilt
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.rebuild import LostStage, Repeat, repeats
from spark_abs.protocol.restarts import is_final
from spark_abs.protocol.sources import same_sources
from spark_abs.run.running_stage import RunningStage
from spark_abs.run_context import RunContext
from spark_abs.snapshots.capture import capture
from spark_abs.snapshots.layout import file_source_offset, parse_offsets
from spark_abs.snapshots.materialise import METADATA, fresh_query_id, materialise
from spark_abs.snapshots.verify import verify_state
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.stages.native import NativeLog, plan_batch
from spark_abs.stages.outputs import output_logs
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control
from spark_abs.store.history import HistoryEvent, HistoryRow, record_event
from spark_abs.store.lease import Heartbeat

log = logging.getLogger(__name__)

_TRIES = 3
_FIRST = 2
"""The number of the first directory that replaces a lost native checkpoint."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """The plan to rebuild one stage."""

    record: Rebuilt
    snapshot: StageSnapshot | None
    """The files for the new directory; None if the directory begins empty or exists already."""
    goes_on: bool
    """Whether the directory exists already, from a start that was killed."""
    repeats: tuple[Repeat[str], ...]

    @property
    def stage(self) -> StageId:
        """The stage."""
        return self.record.stage


class Rebuilder:
    """Plans and prepares the rebuilding of stages, before any query runs."""

    def __init__(
        self,
        ctx: RunContext,
        graph: JobGraph,
        plans: Mapping[StageId, PlanFacts],
        control: Control,
    ) -> None:
        """Take the run, the job, the facts of its plans, and the handle on `control/`."""
        self._ctx = ctx
        self._graph = graph
        self._plans = plans
        self._control = control
        self._checkpoints = Checkpoints.open(ctx.root, ctx.job)

    def plan(self, stage: StageId) -> Rebuild:
        """Say how a stage can be rebuilt; changes nothing.

        Raises:
            Refused: the rebuild would not be exact; the message says why.
        """
        decl = next(s for s in self._graph.stages if s.name == stage)
        attempt = self._control.state.attempt
        before = attempt.rebuilt_stage(stage)
        if before is not None and not before.done:
            committed = self._reached(before)
            if committed is not None:
                origin = before.checkpoint
                began = None if origin is None else self._checkpoints.load(origin).stage(stage)
                return Rebuild(before, None, True, self._repeats(decl, committed, began))
        checkpoint, snapshot = self._newest_intact(attempt, stage)
        if stage in attempt.partitions and checkpoint == attempt.checkpoint:
            raise Refused(
                f"the restore gave its state {attempt.partitions[stage]} partitions, and no checkpoint has "
                "been completed since"
            )
        number = _FIRST if before is None else before.number + 1
        record = Rebuilt(stage, number, fresh_query_id(), checkpoint)
        cut = snapshot.cut_batch if snapshot is not None else NO_BATCH
        return Rebuild(record, snapshot, False, self._repeats(decl, cut, snapshot))

    def prepare(self, rebuilds: Sequence[Rebuild]) -> RunContext:
        """Record the new directories, write them, and return the context with them."""
        ctx = self._ctx
        for rebuild in rebuilds:
            ctx.failpoint(f"rebuild.{rebuild.stage}.record.before")
            self._control.update(partial(_recorded, ctx, rebuild.record))
            ctx.failpoint(f"rebuild.{rebuild.stage}.record.after")
        attempt = self._control.state.attempt
        ctx = replace(ctx, directories=attempt.directories)
        heartbeat = partial(Heartbeat(ctx.root, self._control), ctx.run)
        for rebuild in rebuilds:
            origin = rebuild.record.checkpoint
            log.warning(
                "the native checkpoint of stage %s is lost: it is rebuilt alone from %s, %s batches repeated",
                rebuild.stage,
                "its first batch on" if origin is None else f"checkpoint {origin}",
                len(rebuild.repeats),
            )
            if not rebuild.goes_on:
                self._write(ctx, rebuild, heartbeat)
            ctx.failpoint(f"rebuild.{rebuild.stage}.write.after")
        return ctx

    def _write(self, ctx: RunContext, rebuild: Rebuild, heartbeat: Callable[[], None]) -> None:
        place, query = ctx.native(rebuild.stage), rebuild.record.query
        files = rebuild.snapshot.files if rebuild.snapshot is not None else ()
        materialise(ctx.root, files, target=place, query_id=query, progress=lambda _: heartbeat())
        if not files:
            place.write(METADATA, json.dumps({"id": query}).encode())

    def _reached(self, record: Rebuilt) -> BatchId | None:
        """Return the last batch that an unfinished rebuild has repeated.

        None if the rebuild must begin again.
        """
        place = replace(self._ctx, directories={record.stage: record.directory}).native(record.stage)
        try:
            native = NativeLog(place)
            if native.query_id() != record.query:
                return None
            committed = native.newest_committed()
            capture(place.fs, place.path, committed)
        except AbsError:
            return None
        return committed

    def _newest_intact(
        self, attempt: Attempt, stage: StageId
    ) -> tuple[CheckpointId | None, StageSnapshot | None]:
        """Return the newest checkpoint with intact state of the stage, from this attempt or its origin."""
        summaries = self._checkpoints.summaries()
        mine = [s.id for s in summaries if s.attempt == attempt.id or s.id == attempt.checkpoint]
        for checkpoint in sorted(mine, reverse=True):
            try:
                manifest = self._checkpoints.load(checkpoint)
            except DamageError as error:
                log.warning("checkpoint %s: %s", checkpoint, error)
                continue
            snapshot = manifest.stage(stage)
            if snapshot is None:
                continue
            self._require_same_sources(manifest, stage)
            findings = verify_state(self._ctx.root, (replace(manifest, stages=(snapshot,)),))
            if not findings:
                return checkpoint, snapshot
            log.warning("checkpoint %s: %s: %s", checkpoint, findings[0].path, findings[0].problem)
        if mine or attempt.parent is not None:
            raise Refused("no retained checkpoint has its state intact")
        return None, None

    def _repeats(
        self, decl: StageDecl, cut: BatchId, snapshot: StageSnapshot | None
    ) -> tuple[Repeat[str], ...]:
        outputs = output_logs(self._ctx, self._graph, decl.name)
        written = max((output.last_batch() for output in outputs), default=NO_BATCH)
        facts = self._plans[decl.name]
        lost = LostStage(
            cut,
            written,
            has_native_inputs=bool(facts.sources),
            calls_functions=any(s.table is None and not s.outside for s in self._graph.sinks_of(decl.name)),
        )
        plans = [output.plans(cut) for output in outputs] if written > cut else []
        repeated = repeats(lost, dict(ChainMap(*plans)))
        if repeated:
            self._require_same_tables(facts, snapshot)
            _require_readable_again(repeated, snapshot)
        return repeated

    def _require_same_sources(self, manifest: Manifest, stage: StageId) -> None:
        """Refuse batches that were planned for other sources: a plan names sources by position."""
        then = next((s.sources for s in manifest.graph if s.stage == stage), ())
        if then and not same_sources(then, self._plans[stage].streams):
            raise Refused(
                f"its inputs at checkpoint {manifest.id}, the newest with its state, were different"
            )

    def _require_same_tables(self, facts: PlanFacts, snapshot: StageSnapshot | None) -> None:
        then = dict(snapshot.static_tables) if snapshot is not None else {}
        if any(then.get(table) != version for table, version in facts.static_tables.items()):
            raise Refused(
                "it reads static tables whose versions at that checkpoint are different or unknown: "
                f"{', '.join(sorted(facts.static_tables))}"
            )


def _recorded(ctx: RunContext, record: Rebuilt, state: ControlState) -> ControlState:
    return ledger.rebuild(state, ctx.run, record)


def _require_readable_again(batches: Sequence[Repeat[str]], snapshot: StageSnapshot | None) -> None:
    """Refuse batches that read files: the list of consumed files was in the lost checkpoint."""
    then = parse_offsets(snapshot.offsets).offsets if snapshot is not None and snapshot.offsets else {}
    for repeat in batches:
        for source, offset in parse_offsets(repeat.plan).offsets.items():
            if file_source_offset(offset) is not None and offset != then.get(source):
                raise Refused(
                    f"batch {repeat.batch} has read files, and only the lost checkpoint had their names"
                )


def _repeat(
    ctx: RunContext,
    repeat: Repeat[str],
    stage: RunningStage,
    heartbeat: Callable[[], None],
) -> None:
    """Repeat one batch, with retries: starts of queries sometimes fail."""
    native = ctx.native(stage.name)
    for tries_left in reversed(range(_TRIES)):
        ctx.failpoint(f"rebuild.{stage.name}.plan.before")
        plan_batch(native, repeat.batch, repeat.plan)
        ctx.failpoint(f"rebuild.{stage.name}.plan.after")
        try:
            stage.run_only(repeat.batch, heartbeat)
        except StageFailed as error:
            if not tries_left or (error.__cause__ is not None and is_final(error.__cause__)):
                raise
            log.warning("%s; it is tried again", error)
            stage.runner.failure = None
        else:
            return


def repeat_batches(
    ctx: RunContext,
    control: Control,
    rebuild: Rebuild,
    rebuilt: RunningStage,
) -> None:
    """Let a stage repeat its batches one after the other, then record the end of the rebuild.

    Each batch is planned by writing its offset file, and run by a separate query: Spark reads the offset log
    only when a query starts.

    Raises:
        StageFailed: a batch failed repeatedly; the next start resumes the rebuild with this batch.
        Fenced: another run has taken over.
    """
    began, stage = now_ms(), rebuild.stage
    heartbeat = partial(Heartbeat(ctx.root, control), ctx.run)
    for repeat in rebuild.repeats:
        _repeat(ctx, repeat, rebuilt, heartbeat)
        ctx.failpoint(f"rebuild.{stage}.batch.after")
    control.update(partial(_recorded, ctx, replace(rebuild.record, done=True)))
    ctx.failpoint(f"rebuild.{stage}.done.after")
    took = now_ms() - began
    said = f"{len(rebuild.repeats)} batches repeated, now in {ctx.native(stage)}"
    log.warning("stage %s is rebuilt after %s ms: %s", stage, took, said)
    row = HistoryRow(
        now_ms(),
        HistoryEvent.STAGE_REBUILT,
        ctx.attempt,
        ctx.run,
        rebuild.record.checkpoint,
        stage=stage,
        detail=said,
        duration_ms=took,
    )
    record_event(ctx.root, row)
