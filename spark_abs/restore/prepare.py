"""Prepare a restore: choose the checkpoint, gather facts, verify, plan. Nothing that is in use changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Concatenate, ParamSpec

from spark_abs.advice import way
from spark_abs.errors import DamageError, Refused, StoreFailed
from spark_abs.manifest import Manifest
from spark_abs.manifests.find import (
    LATEST,
    ManifestListing,
    choose,
    cut_by,
    list_manifests,
    load,
    newest_first,
    readable,
)
from spark_abs.manifests.manifest_table import PATH, Summary
from spark_abs.model import NO_EPOCH, Branch, CheckpointId, is_number
from spark_abs.observe.progress import SILENT, Progress
from spark_abs.observe.status import lease_timeout_ms, live_run
from spark_abs.observe.verification import damaged_rows, require_intact, require_restorable
from spark_abs.protocol.attempt import NATIVES
from spark_abs.protocol.attempt_changes import attempt_for
from spark_abs.protocol.control import WATCHED_JOB, ControlState
from spark_abs.restore.facts import gather
from spark_abs.restore.inputs import inputs_since
from spark_abs.restore.outside import NO_SINKS, Own, outside_facts
from spark_abs.restore.plan import plan_restore
from spark_abs.restore.refusals import Force
from spark_abs.restore.rescale import Wanted, changes
from spark_abs.restore.restoring import Prestaged, RestorePlan
from spark_abs.restore.steps import Materialise
from spark_abs.snapshots.materialise import fresh_query_id, is_whole, materialise, passing_place
from spark_abs.snapshots.verify import Finding
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.storage import remedy

P = ParamSpec("P")

_COPIES = 2
"""How often the copy of an intact checkpoint is tried."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan, and the verified manifest that it goes back to."""

    plan: RestorePlan
    manifest: Manifest
    force: frozenset[Force]
    sinks: Own = field(default_factory=dict)
    """The user's own sinks, by name."""
    prestaged: Prestaged | None = None
    """The native directories, if they were written while the checkpoint was verified."""


def _preparing(
    function: Callable[Concatenate[Root, P], Prepared],
) -> Callable[Concatenate[Root, P], Prepared]:
    """Raise StoreFailed if storage fails: it is no damage, and no reason for a fallback."""

    @functools.wraps(function)
    def told(root: Root, /, *args: P.args, **kwargs: P.kwargs) -> Prepared:
        try:
            return function(root, *args, **kwargs)
        except OSError as error:
            raise StoreFailed(
                f"nothing was changed, {remedy(root.uri)}: storage failed while the restore was prepared: "
                f"{error}"
            ) from error

    return told


@_preparing
def prepare(
    root: Root,
    to: str | int | datetime,
    *,
    force: Collection[Force] = (),
    fallback: bool = False,
    native_root: str | None = None,
    shuffle_partitions: Wanted | None = None,
    sinks: Own = NO_SINKS,
    writing: bool = False,
    ask_kafka: bool = True,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> Prepared:
    """Plan a restore to a checkpoint, after reading every byte that it needs.

    Args:
        root: the job's root.
        to: an id, the name of a savepoint, `latest`, or the moment by which the cut was made.
        force: the obstacles to override.
        fallback: if that checkpoint is damaged, take the newest intact one before it on the current path;
            the plan's notes say so.
        native_root: the new `native_root` of the job, empty for none; None if it does not change.
        shuffle_partitions: new numbers of state partitions, as `restore` takes them.
        sinks: two-phase sinks of the user's own, by name.
        writing: copy the bytes while they are read, for a plan that is carried out at once. The caller then
            moves or discards `Prepared.prestaged`; `apply` does.
        ask_kafka: ask the brokers for the records after the checkpoint; a start does not, since it asks with
            the options of its sources.
        dry_run: the plan is only shown, also if a run is alive.
        progress: receives progress.

    Raises:
        UsageError: there is no job at this root.
        CheckpointNotFound: there is no such checkpoint.
        DamageError: it is damaged; with `fallback`, so are all before it.
        StoreFailed: the store cannot be read now: that is not damage, and no reason for a fallback.
        Refused: see `plan_restore` and `rescale.changes`; or native checkpoints cannot be seen from this
            machine.
    """
    control = Control.open(root)
    state = control.state
    if state.job == WATCHED_JOB:
        raise Refused(
            f"{root.uri} has kept cuts of queries that are not ours: `spark-abs rewind --root {root.uri}` "
            "goes back to one of them"
        )
    natives = state.attempt.natives
    if native_root is not None:
        natives = control.natives_at(native_root)
    elif natives != NATIVES and not root.anywhere(natives).exists():
        raise Refused(
            f"native checkpoints of job {state.job!r} are in {natives}, which cannot be seen from this "
            "machine: restore on a machine that sees it, or pass "
            f"{way('native_root=DIR', '--native-root DIR')} to put them elsewhere; if the disk is lost, "
            "restart='checkpoint' starts the job from its newest checkpoint"
        )
    listing = list_manifests(root, state.job)
    planner = _Planner(
        root=root,
        state=state,
        listing=listing,
        known=readable(root, state.job),
        rows=damaged_rows(root),
        force=frozenset(force),
        natives=natives,
        shuffle_partitions=shuffle_partitions,
        sinks=sinks,
        writing=writing,
        ask_kafka=ask_kafka,
        dry_run=dry_run,
        progress=progress,
    )
    wanted: Summary | None = None
    try:
        wanted = choose(to, listing, state)
        return planner.plan(wanted)
    except DamageError as error:
        if not fallback:
            raise
        damage = error
    below = _below(to, wanted, listing)
    for summary in newest_first(listing.completed, state):
        if summary == wanted or (below is not None and summary.id >= below):
            continue
        note = f"{damage}; this restores {summary.id}, the newest intact checkpoint before it"
        try:
            return planner.plan(summary, (note,))
        except DamageError as error:
            progress.say(f"checkpoint {summary.id}: {error}")
    which = "" if below is None else " before it"
    raise DamageError(f"no checkpoint{which} on the current path is intact: {damage}") from damage


def _below(to: str | int | datetime, wanted: Summary | None, listing: ManifestListing) -> CheckpointId | None:
    """Return the id that a fallback stays below; None if there is no bound, as for `latest`."""
    if isinstance(to, datetime):
        return min((s.id for s in listing.completed if not cut_by(to, s)), default=None)
    if str(to) == LATEST:
        return None
    if wanted is not None:
        return wanted.id
    if is_number(str(to)):
        return CheckpointId(int(to))
    # A savepoint's name, in one of the rows that cannot be read.
    return min((row.id or NO_EPOCH for row in listing.damaged), default=NO_EPOCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planner:
    """Plans a restore to one checkpoint after another, with the same arguments."""

    root: Root
    state: ControlState
    listing: ManifestListing
    known: tuple[Manifest, ...]
    rows: tuple[Finding, ...]
    force: frozenset[Force]
    natives: str
    shuffle_partitions: Wanted | None
    sinks: Own
    writing: bool
    ask_kafka: bool
    dry_run: bool
    progress: Progress

    def plan(self, summary: Summary, notes: tuple[str, ...] = ()) -> Prepared:
        """Plan, then verify: reasons to refuse are found before all bytes are read."""
        root, state = self.root, self.state
        manifest = load(root, summary)
        partitions = changes(manifest, self.shuffle_partitions)
        attempt = attempt_for(state, manifest.cut.attempt, manifest.id, self.natives, partitions)
        gathered = gather(
            root, manifest, known=self.known, completed=self.listing.completed, attempt=attempt, state=state
        )
        facts = replace(
            gathered,
            damaged_rows=tuple(f.path for f in self.rows if f.path != PATH),
            inputs=inputs_since(root, manifest, state, self.known, ask_kafka=self.ask_kafka),
            alive=live_run(root, now_ms(), lease_timeout_ms()),
            outside=outside_facts(
                root,
                state,
                manifest=manifest,
                known=self.known,
                attempt=Branch(attempt, None),
                own=self.sinks,
            ),
        )
        plan = plan_restore(
            state,
            manifest,
            facts,
            attempt=attempt,
            natives=self.natives,
            fresh_id=fresh_query_id,
            force=self.force,
            notes=notes,
            partitions=partitions,
            dry_run=self.dry_run,
        )
        prestaged = self._prestage(manifest, plan) if self.writing else None
        if prestaged is None:
            with self.progress.count(f"verifying checkpoint {manifest.id}", manifest.size_full) as counted:
                require_intact(root, manifest, self.rows, counted)
        return Prepared(plan, manifest, self.force, self.sinks, prestaged)

    def _prestage(self, manifest: Manifest, plan: RestorePlan) -> Prestaged | None:
        require_restorable(self.root, manifest, self.rows)
        said = ""
        for _ in range(_COPIES):
            try:
                with self.progress.count(f"copying checkpoint {manifest.id}", manifest.size_full) as counted:
                    return _prestage(self.root, manifest, plan, counted)
            except DamageError as error:
                # Raises an error with all damage. If there is none, a sweep has moved bytes meanwhile, or the
                # store has not answered.
                require_intact(self.root, manifest, self.rows, lambda _: None)
                said = str(error)
        raise StoreFailed(
            f"nothing was changed, try again: checkpoint {manifest.id} is intact, and could not be copied: "
            f"{said}"
        )


def _prestage(
    root: Root, manifest: Manifest, plan: RestorePlan, progress: Callable[[int], None]
) -> Prestaged | None:
    """Write the native directories of a plan that are not complete yet; remove them on an error.

    Returns:
        None in an object store, which has no directories that can be moved.

    Raises:
        DamageError: bytes are missing from `state/` or altered.
        Refused: a place belongs to another query.
    """
    natives = root.anywhere(plan.natives)
    if not natives.local:
        return None
    prestaged = Prestaged(passing_place(natives, plan.replaces))
    try:
        steps = {step.stage: step for step in plan.steps if isinstance(step, Materialise)}
        for snapshot in manifest.stages:
            if (step := steps.get(snapshot.stage)) is None:
                continue
            target, query = root.anywhere(step.directory), plan.queries[step.stage]
            if is_whole(target, query):
                progress(step.size)
            else:
                place = prestaged.place.below(step.stage)
                materialise(
                    root, snapshot.files, target=place, query_id=query, progress=progress, lands=target
                )
    except BaseException:
        prestaged.discard()
        raise
    return prestaged
