"""A watcher at work: it looks for the newest aligned cut, copies it, and commits it as a checkpoint.

A watcher is a run of the root, like a run of a job: a newer one fences it, each cut is claimed, copied and
then completed by one commit. A kill leaves a claimed id, which the next round aborts, and bytes that no
manifest names, which it sweeps.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from deltalake.exceptions import DeltaError

from spark_abs.cuts.cut import newest_cut
from spark_abs.errors import (
    AbortReason,
    AbsError,
    CommitStateUnknown,
    DamageError,
    Fenced,
    RootNotFound,
    RunAlive,
    UsageError,
)
from spark_abs.keep import Keep
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.manifests.find import open_existing
from spark_abs.manifests.manifest_table import Checkpoints, abort_open
from spark_abs.model import Barrier, CheckpointId, CheckpointKind, RunId
from spark_abs.observe.status import lease_timeout_ms, live_run
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import WATCHED_JOB, Aborted
from spark_abs.protocol.watch import Watch
from spark_abs.rewind.query import QueryFacts
from spark_abs.rewind.survey import Survey, survey
from spark_abs.snapshots.capture import CaptureIncomplete
from spark_abs.snapshots.identity import identity, of_text
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.snapshots.sweep import sweep
from spark_abs.snapshots.take import snapshot_stage
from spark_abs.snapshots.tidy import retire, trim_tables
from spark_abs.store.clock import now_ms, steady_ms
from spark_abs.store.control import Control
from spark_abs.store.failpoint import Failpoint, no_failpoint
from spark_abs.store.history import HistoryEvent, HistoryRow, record_event
from spark_abs.store.lease import holding_lease, own_lease, renew
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.watch.taking import batch_of, candidates, manifest_of, part_of, stage_names, tables_of

log = logging.getLogger(__name__)

TRIM_EVERY = 50
"""How many kept cuts lie between two looks at the tables of the root."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round has done."""

    kept: CheckpointId | None
    """The id of the cut that it has kept; None: there is no newer one than before."""
    moment_ms: int | None = None
    """When the last batch of that cut had ended."""
    batches: tuple[tuple[str, int], ...] = ()
    """Each query with its batch."""
    size_new: int = 0
    size_full: int = 0
    passed: tuple[str, ...] = ()
    """Why newer cuts were passed over."""
    unfinished: str | None = None
    """Why the clean-up after the kept cut failed; None if it did not. The cut stays kept, and later rounds
    make up for it."""


def look(checkpoints: Sequence[Place], tables: Sequence[Place], newest: Manifest | None) -> Survey | None:
    """Look whether there is a cut that came after the newest kept one; None if there is none.

    Changes nothing.

    Raises:
        NoAlignedCut: no batches of the queries fit together.
        UsageError, Refused, DamageError: as `survey`.
    """
    found = survey(checkpoints, tables)
    newest_cut(found.pipeline, found.pipeline.newest())  # says why if there is none
    return None if next(candidates(found, newest), None) is None else found


def newest_kept(root: Root) -> Manifest | None:
    """Return the manifest of the cut that a root has kept last; None if none, or there is no root yet.

    Raises:
        DamageError: it cannot be read.
    """
    checkpoints = open_existing(root, WATCHED_JOB)
    summaries = () if checkpoints is None else checkpoints.summaries()
    return None if checkpoints is None or not summaries else checkpoints.load(summaries[-1].id)


def was_killed(root: Root) -> bool:
    """Say whether the last watcher of a root was killed: what it has left is not settled."""
    try:
        run = Control.open(root).state.run
    except RootNotFound:
        return False
    return run is not None and run.ended is None and live_run(root, now_ms(), lease_timeout_ms()) is None


@contextmanager
def watching(
    root: Root,
    checkpoints: Sequence[Place],
    tables: Sequence[Place],
    keep: Keep,
    *,
    every: str = "",
    failpoint: Failpoint = no_failpoint,
) -> Iterator[Watcher]:
    """Own a root as its watcher, until the block ends.

    Args:
        root: where cuts are kept.
        checkpoints: of the queries.
        tables: those that the queries write.
        keep: how long cuts are kept.
        every: the time between two looks, as it was given; empty for one look.
        failpoint: for tests.

    Raises:
        UsageError: the root is not a directory of its own.
        RunAlive: another watcher is at work.
        Refused: the root belongs to a job.
    """
    require_apart(root, (*checkpoints, *tables))
    control = Control.create(root, WATCHED_JOB, now_ms())
    newest = _require_alone(root, control)
    given = watch_of(checkpoints, tables, keep, every)

    def begin(state: ledger.ControlState) -> ledger.ControlState:
        if state.newest_run != newest:
            raise RunAlive(f"another watcher of {root.uri} has begun meanwhile, as run {state.newest_run}")
        state = ledger.begin_run(state, socket.gethostname(), os.getpid(), now_ms())
        return replace(state, watch=given)

    failpoint("watch.begin.before")
    run = control.update(begin).runs[-1].id
    failpoint("watch.begin.after")
    how = "stopped"
    try:
        with holding_lease(root, run):
            manifests = Checkpoints.open(root, WATCHED_JOB)
            manifests.fence(run)
            failpoint("watch.fence.after")
            storage = StateStorage.open(root, WATCHED_JOB, run, manifests.load_all(), failpoint)
            yield Watcher(root, control, manifests, storage, keep=keep, failpoint=failpoint)
    except Exception as error:
        how = f"failed: {error}".partition("\n")[0]
        raise
    finally:
        with suppress(AbsError, DeltaError, OSError):
            control.update(lambda state: ledger.end_run(state, run, how))
            renew(root, own_lease(run, now_ms()), now_ms(), ended=True)


def require_apart(root: Root, given: Sequence[Place]) -> None:
    """Refuse a root in a checkpoint directory or a table, or around one: what cleans one would see the other.

    Raises:
        UsageError: it is.
    """
    for place in given:
        if place.holds(root.top) or root.top.holds(place):
            raise UsageError(
                f"the root {root.uri} and {place} are not apart: give a root that is a directory of its own"
            )


def watch_of(checkpoints: Sequence[Place], tables: Sequence[Place], keep: Keep, every: str) -> Watch:
    """Return what a root records of its watcher."""
    return Watch(
        tuple(sorted(place.uri for place in checkpoints)),
        tuple(sorted(place.uri for place in tables)),
        str(keep),
        every,
    )


def _require_alone(root: Root, control: Control) -> RunId | None:
    """Refuse beside another watcher; return the newest run, None if there is none."""
    alive = live_run(root, now_ms(), lease_timeout_ms())
    if alive is not None:
        raise RunAlive(
            f"{root.uri} is watched already: run {alive.run}, process {alive.pid} on {alive.host}, last "
            f"heard of {alive.heard_ms / 1000:.0f} s ago; stop that process first"
        )
    return control.state.newest_run


class Watcher:
    """The owner of a root. Not thread-safe."""

    def __init__(
        self,
        root: Root,
        control: Control,
        checkpoints: Checkpoints,
        storage: StateStorage,
        *,
        keep: Keep,
        failpoint: Failpoint,
    ) -> None:
        self._root, self._control, self._checkpoints = root, control, checkpoints
        self._storage, self._keep, self._failpoint = storage, keep, failpoint
        self._trimmed = 0

    @property
    def newest(self) -> Manifest | None:
        """The manifest that was made last."""
        manifests = self._checkpoints.load_all()
        return manifests[-1] if manifests else None

    def given(self, checkpoints: Sequence[Place], tables: Sequence[Place]) -> None:
        """Record to which places the patterns of the watcher lead now.

        Raises:
            Fenced: another watcher has taken over.
            OSError: the store cannot be read or written now.
        """
        before = self._control.state.watch
        assert before is not None
        now = watch_of(checkpoints, tables, self._keep, before.every)

        def record(state: ledger.ControlState) -> ledger.ControlState:
            ledger.require_current(state, self._storage.run)
            return replace(state, watch=now)

        if now != before:
            require_apart(self._root, (*checkpoints, *tables))
            self._control.update(record)

    def round(self, found: Survey | None) -> Round:
        """Settle what an earlier watcher has left, and keep the newest cut whose files are all there.

        Then remove what need not be kept.

        Args:
            found: what is in storage; None if there is no newer cut.

        Raises:
            Refused: a query has state in a format that is not known.
            Fenced: another watcher has taken over.
            DamageError: the root is damaged.
            CommitStateUnknown, DeltaError, OSError: a store cannot be read or written now, and nothing is
                kept; the next round goes on.
        """
        abort_open(self._control, self._checkpoints, self._storage.run)
        done, passed = Round(None), list[str]()
        if found is None:
            return done
        for cut in candidates(found, self.newest):
            try:
                done = self._keep_cut(found, cut)
            except (CaptureIncomplete, DamageError, _NotKept) as error:
                passed.append(str(error))
                continue
            break
        return replace(done, passed=tuple(passed))

    def _keep_cut(self, found: Survey, cut: Mapping[str, int]) -> Round:
        run, kind = self._storage.run, CheckpointKind.CHECKPOINT
        barrier = self._control.claim(run, kind=kind, name=None, now_ms=now_ms())
        self._failpoint("watch.claim.after")
        try:
            manifest = self._copy(found, cut, barrier)
            self._failpoint("watch.manifest.before")
            if not self._complete(manifest):
                raise _NotKept(f"cut {barrier.id}: its manifest could not be committed")
        except BaseException as error:
            self._abort(barrier, error)
            raise
        unfinished = self._finish(barrier, manifest)
        batches = tuple((query.name, int(batch_of(found, cut, query))) for query in found.queries)
        return Round(
            barrier.id,
            manifest.acked_ms,
            batches,
            size_new=manifest.size_new,
            size_full=manifest.size_full,
            unfinished=unfinished,
        )

    def _finish(self, barrier: Barrier, manifest: Manifest) -> str | None:
        """Settle and record a cut whose manifest is committed, and clean up; return why that failed, if so.

        Raises:
            Fenced: another watcher has taken over.
        """
        try:
            self._failpoint("watch.manifest.after")
            self._storage.unpin(barrier.id, completed=True)
            self._control.update(lambda state: ledger.settle(state, completed=(barrier.id,)))
            self._record(HistoryEvent.COMPLETED, barrier, manifest)
            self._tidy()
        except Fenced:
            raise
        except (AbsError, DeltaError, OSError) as error:
            return str(error)
        return None

    def _copy(self, found: Survey, cut: Mapping[str, int], barrier: Barrier) -> Manifest:
        """Copy what the cut needs of each query.

        Raises:
            CaptureIncomplete: Spark has deleted a file, or not written it yet.
            DamageError: a file is not whole.
            _NotKept: a query was rewound or begun anew meanwhile.
        """
        names, stages = stage_names(found.queries), list[StageSnapshot]()
        for query in found.queries:
            self._failpoint(f"watch.{query.name}.copy.before")
            began = steady_ms()
            batch = batch_of(found, cut, query)
            copy = snapshot_stage(self._storage, barrier.id, query.place, batch, later_logs=True)
            took, tables = steady_ms() - began, tables_of(found, cut, query)
            part = part_of(names[query.name], query.place.uri, copy, tables, took)
            _require_same(query, part)
            stages.append(part)
            self._failpoint(f"watch.{query.name}.copy.after")
        if gone := self._storage.missing(file for part in stages for file in part.files):
            raise CaptureIncomplete(f"cut {barrier.id}: {gone[0].path} is gone from state/ again")
        return manifest_of(
            barrier,
            self._control.state.attempt.id,
            self._storage.run,
            stages=tuple(stages),
            moment_ms=found.pipeline.ended_ms(cut),
            now_ms=now_ms(),
        )

    def _complete(self, manifest: Manifest) -> bool:
        """Commit a manifest; False if it is aborted instead.

        If the store does not confirm the commit, the id is aborted, unless the commit did take place.
        """
        try:
            return self._checkpoints.complete(manifest) or self._checkpoints.is_complete(manifest.id)
        except CommitStateUnknown:
            self._checkpoints.abort(manifest.id, self._storage.run)
            return self._checkpoints.is_complete(manifest.id)

    def _abort(self, barrier: Barrier, error: BaseException) -> None:
        """Abort the id, unless its manifest is committed; if the store fails, the next round does it."""
        self._storage.unpin(barrier.id, completed=False)
        with suppress(Exception):
            self._checkpoints.abort(barrier.id, self._storage.run)
            if self._checkpoints.is_complete(barrier.id):
                self._control.update(lambda state: ledger.settle(state, completed=(barrier.id,)))
                return
            gone = Aborted(barrier.id, AbortReason.DECLINED, str(error).partition("\n")[0])
            self._control.update(lambda state: ledger.settle(state, (gone,)))

    def _record(self, event: HistoryEvent, barrier: Barrier, manifest: Manifest) -> None:
        row = HistoryRow(
            now_ms(),
            event,
            manifest.attempt,
            manifest.run,
            barrier.id,
            kind=barrier.kind,
            duration_ms=manifest.completed_ms - manifest.triggered_ms,
            size_full=manifest.size_full,
            size_new=manifest.size_new,
            stages=len(manifest.stages),
        )
        record_event(self._root, row)

    def _tidy(self) -> None:
        """Remove older cuts by the words, then the bytes that only they named."""
        retire(self._root, self._checkpoints, self._control.state, run=self._storage.run, keep=self._keep)
        self._failpoint("watch.retire.after")
        sweep(self._storage, self._checkpoints.load_all)
        self._failpoint("watch.sweep.after")
        if self._trimmed % TRIM_EVERY == 0:
            trim_tables(self._root)
        self._trimmed += 1


class _NotKept(AbsError):
    """A query is no longer the one that was surveyed, or the store did not take the manifest."""


def _require_same(query: QueryFacts, part: StageSnapshot) -> None:
    """Refuse the copy of a query that was rewound, or begun anew with another id, since the survey."""
    if identity(part) != of_text(query.metadata):
        raise _NotKept(
            f"query {query.name!r} was begun anew, or a rewind of it has begun, while it was copied"
        )
