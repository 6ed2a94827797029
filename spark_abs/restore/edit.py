"""Edit a savepoint: read its state, write a new one, as with Flink's State Processor API."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spark_abs.errors import AbortReason, CommitStateUnknown, DamageError, Refused, RunAlive, UsageError
from spark_abs.manifest import Manifest, OperatorShape, OperatorState, StageShape, StateFunction
from spark_abs.manifests.find import check_savepoint_name
from spark_abs.manifests.manifest_table import Checkpoints, abort_open
from spark_abs.model import (
    NO_ATTEMPT,
    PROVIDERS,
    Barrier,
    CheckpointId,
    CheckpointKind,
    Provider,
    ProviderName,
    RunId,
    RunKind,
    StageId,
)
from spark_abs.observe.progress import SILENT, Progress
from spark_abs.observe.state import form_of, state_frame
from spark_abs.observe.state_at import StateAt, choose_operator, find_stage, find_state
from spark_abs.observe.status import lease_timeout_ms, live_run
from spark_abs.observe.verification import damaged_rows, require_intact
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import Aborted
from spark_abs.restore.edited_rows import (
    corrected,
    fitted,
    form_of_frame,
    require_one_row_a_key,
    require_something,
)
from spark_abs.restore.rewrite import NewState, OperatorChange, require_rewritable, rewrite_stage
from spark_abs.snapshots.materialise import clear_ahead, passing_place
from spark_abs.snapshots.operators import TRANSFORM
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.spark.versions import require_state_rewriter
from spark_abs.state.rows import StateRows
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control
from spark_abs.store.history import HistoryEvent, HistoryRow, record_event
from spark_abs.store.lease import holding_lease, own_lease, renew
from spark_abs.store.root import Root
from spark_abs.store.storage import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Edit:
    """Changes to a savepoint. Each call checks one; `write` makes the new savepoint from all of them.

    Rows of a function's state have the columns of `JobRoot.state`: structs `key` and `value`, and where
    they apply `timeout_ms` and `expires_ms`. Frames are evaluated when `write` is called. `replace`, `rekey`
    and `remove` discard earlier changes of the operator; `correct` adds to them.
    """

    def __init__(self, session: SparkSession, root: Root, manifest: Manifest) -> None:
        """Begin an edit.

        Raises:
            Refused: the installed Spark cannot write state.
        """
        require_state_rewriter(f"an edit of checkpoint {manifest.id}")
        self._session, self._root, self._manifest = session, root, manifest
        self._changes: dict[StageId, StageChange] = {}

    def __repr__(self) -> str:
        changed = ", ".join(self._changes) or "nothing"
        return f"Edit(checkpoint {self._manifest.id} of job {self._manifest.job!r}, changes {changed})"

    def state(self, stage: str, *, operator: int | str | None = None, store: str | None = None) -> DataFrame:
        """Return the state of a stage in the original savepoint; arguments and errors as `JobRoot.state`."""
        found = find_state(self._root, stage, self._manifest.id, operator, store)
        return state_frame(self._session, self._root, found)

    def replace(self, stage: str, rows: DataFrame, *, operator: int | str | None = None) -> Edit:
        """Replace all state of a function by these rows, for example to fill it from history.

        Without a column `timeout_ms` no key has a timeout; without `expires_ms` the time to live begins now.

        Raises:
            UsageError: the rows do not fit the form that the savepoint records, or the stage has no function.
            Refused: the state of the stage cannot be rewritten.
        """
        found = self._function(stage, operator)
        form = form_of(self._session, self._root, found)
        return self._take(found, form, fitted(rows, form, _function_name(found, form)))

    def correct(self, stage: str, rows: DataFrame, *, operator: int | str | None = None) -> Edit:
        """Replace the state of the keys in these rows; a row without value and timeout removes its key.

        The state of all other keys stays. Without a column `timeout_ms` or `expires_ms`, the keys of the rows
        keep their timeout or their time to live.

        Raises:
            UsageError, Refused: as `replace`.
        """
        found = self._function(stage, operator)
        form, before = self._so_far(found)
        changed = fitted(rows, form, _function_name(found, form))
        require_one_row_a_key(changed, _function_name(found, form))
        kept = [column for column in before.columns if column not in rows.columns]
        return self._take(found, form, corrected(before, changed, kept))

    def rekey(
        self,
        stage: str,
        rows: DataFrame,
        *,
        key_groups: int | None = None,
        operator: int | str | None = None,
    ) -> Edit:
        """Replace a function's state by rows of another form: other key, other fields, other key groups.

        The function must be declared in that form when the job is started on the savepoint.

        Raises:
            UsageError: the rows cannot be a state, or the stage has no function.
            Refused: the state of the stage cannot be rewritten.
        """
        found = self._function(stage, operator)
        old = form_of(self._session, self._root, found)
        form = form_of_frame(rows, old if key_groups is None else replace(old, key_groups=key_groups))
        return self._take(found, form, fitted(rows, form, _function_name(found, form)))

    def remove(self, stage: str, *, operator: int | str | None = None) -> Edit:
        """Remove all state of a stage, or of one of its operators; its positions stay.

        A function may then be declared with another uid, key, state or number of key groups.

        Raises:
            UsageError: there is no such stage or operator, or no state.
            Refused: the state of the stage cannot be rewritten.
        """
        at = find_stage(self._root, stage, self._manifest.id)
        chosen = at.operators if operator is None else (choose_operator(at, operator),)
        require_rewritable(self._root, at.snapshot)
        change = self._change(at.snapshot.stage)
        for each in chosen:
            change.operators[each.id] = None
            if each.id in change.places:
                change.functions[change.places[each.id]] = None
        return self

    def keep_in(self, stage: str, provider: ProviderName) -> Edit:
        """Move all state of a stage to another provider; declare the same `state_provider` for the stage.

        Args:
            stage: the stage.
            provider: `rocksdb` or `hdfs`.

        Raises:
            UsageError: there is no such stage or provider, or no state.
            Refused: the state of one of its operators must be in RocksDB, or its state cannot be rewritten.
        """
        if provider not in PROVIDERS:
            raise UsageError(f"provider {provider!r} is not one of {', '.join(PROVIDERS)}")
        at, keeper = find_stage(self._root, stage, self._manifest.id), PROVIDERS[provider]
        bound = [f"{o.id} ({o.name})" for o in at.operators if o.name in TRANSFORM]
        if keeper is Provider.HDFS and bound:
            raise Refused(f"stage {stage!r}: only RocksDB can keep the state of operator {', '.join(bound)}")
        require_rewritable(self._root, at.snapshot)
        self._changes[at.snapshot.stage] = replace(self._change(at.snapshot.stage), provider=keeper)
        return self

    def write(self, name: str, *, progress: Progress = SILENT) -> CheckpointId:
        """Write the new savepoint. One commit makes it exist: if the call is killed, there is no savepoint.

        Args:
            name: the name of the new savepoint, which no other has.
            progress: receives progress.

        Raises:
            UsageError: nothing is changed, rows cannot be a state, or `name` is no name.
            RunAlive: the job runs: it owns the root, stop it first.
            Refused: the name is taken, a restore is unfinished, or a run has begun and ended meanwhile.
            DamageError: the original is damaged.
            Fenced: the job was started or restored meanwhile.
        """
        check_savepoint_name(name)
        if not self._changes:
            raise UsageError("nothing is changed: call replace, correct, rekey, remove or keep_in first")
        return write_edited(
            self._session,
            self._root,
            manifest=self._manifest,
            changes=self._changes,
            name=name,
            progress=progress,
        )

    def _function(self, stage: str, operator: int | str | None) -> StateAt:
        found = find_state(self._root, stage, self._manifest.id, operator)
        if found.part is not None:
            raise UsageError(
                f"operator {found.operator.id} ({found.operator.name}) of stage {stage!r} is Spark's own: "
                "only the state of functions can be replaced; that of Spark's own operators can be removed"
            )
        require_rewritable(self._root, found.snapshot)
        return found

    def _so_far(self, found: StateAt) -> tuple[StateFunction, DataFrame]:
        """Return form and rows of a function's state after the changes so far."""
        changed = self._change(found.snapshot.stage).operators
        new = changed.get(found.operator.id)
        if new is not None:
            return new.rows.function, new.frame
        rows = state_frame(self._session, self._root, found)
        removed = found.operator.id in changed
        return form_of(self._session, self._root, found), rows.limit(0) if removed else rows

    def _take(self, found: StateAt, form: StateFunction, rows: DataFrame) -> Edit:
        change = self._change(found.snapshot.stage)
        change.operators[found.operator.id] = NewState(StateRows(form), rows)
        change.functions[form.uid] = form
        return self

    def _change(self, stage: StageId) -> StageChange:
        if stage not in self._changes:
            self._changes[stage] = StageChange({}, {}, self._places(stage))
        return self._changes[stage]

    def _places(self, stage: StageId) -> dict[int, str]:
        """Return the uids of a stage's functions by operator, from the manifest or else from the state."""
        at, found = find_stage(self._root, stage, self._manifest.id), {}
        for operator in (o for o in at.operators if o.ours):
            if at.names_functions:
                found[operator.id] = operator.function
            else:
                state = find_state(self._root, stage, self._manifest.id, operator.id)
                with suppress(DamageError):  # an edit by an earlier version has removed its state
                    found[operator.id] = form_of(self._session, self._root, state).uid
        return {number: uid for number, uid in found.items() if uid}


def _function_name(found: StateAt, form: StateFunction) -> str:
    return f"stage {found.snapshot.stage!r}, function {form.uid!r}"


@dataclass(frozen=True, slots=True)
class StageChange:
    """The changes of an edit to one stage."""

    operators: dict[int, OperatorChange]
    functions: dict[str, StateFunction | None]
    """New forms of its functions, by uid; None for a function whose state is removed."""
    places: dict[int, str]
    """The uids of its functions before the edit, by the numbers of their operators."""
    provider: Provider | None = None
    """The new provider of its state; None if it stays the same."""


def write_edited(
    session: SparkSession,
    root: Root,
    *,
    manifest: Manifest,
    changes: Mapping[StageId, StageChange],
    name: str,
    progress: Progress,
) -> CheckpointId:
    """Write a savepoint with some state changed; see `Edit.write`."""
    control = Control.open(root)
    newest = _require_free(root, control, name)
    changes = {stage: _settled(stage, change) for stage, change in changes.items()}
    with progress.count(f"verifying checkpoint {manifest.id}", manifest.size_full) as counted:
        require_intact(root, manifest, damaged_rows(root), counted)
    state = _begin(root, control, newest)
    run, asked = state.runs[-1].id, frozenset(c.id for c in state.commands)
    how = "failed: the edit did not end"
    try:
        with holding_lease(root, run):
            checkpoints = Checkpoints.open(root, state.job)
            checkpoints.fence(run)
            clear_ahead(root.anywhere(state.attempt.natives), run)
            abort_open(control, checkpoints, run)
            kept = StateStorage.open(root, state.job, run, checkpoints.load_all())
            editor = _Editor(session, root, control=control, checkpoints=checkpoints, kept=kept, run=run)
            written = editor.write(manifest, changes, name, progress)
        how = f"edited: savepoint {name!r}"
    finally:
        try:
            control.update(lambda s: _ended(s, run, how, asked))
        finally:
            renew(root, own_lease(run, now_ms()), now_ms(), ended=True)
    return written


def _require_free(root: Root, control: Control, name: str) -> RunId | None:
    """Refuse if a run is alive or the name is taken; return the newest run, None if there is none."""
    state = control.state
    _require_quiet(root, state.job)
    if any(s.name == name for s in Checkpoints.open(root, state.job).summaries()):
        raise Refused(f"job {state.job!r} has a savepoint {name!r}: give the new one another name")
    return state.newest_run


def _require_quiet(root: Root, job: str) -> None:
    alive = live_run(root, now_ms(), lease_timeout_ms())
    if alive is not None:
        raise RunAlive(
            f"run {alive.run} of job {job!r} is alive: process {alive.pid} on {alive.host}; an edit writes "
            "as the owner of the root: stop the job, with run.stop() where it was started or with "
            "`spark-abs stop ROOT`, edit, then restore"
        )


def _begin(root: Root, control: Control, newest: RunId | None) -> ledger.ControlState:
    """Begin a run, unless another began while rows were computed and bytes read."""

    def begin(state: ledger.ControlState) -> ledger.ControlState:
        now = state.newest_run
        if now != newest:
            raise Refused(f"run {now} of job {state.job!r} has begun meanwhile: stop it, then edit again")
        return ledger.begin_run(state, socket.gethostname(), os.getpid(), now_ms(), RunKind.EDIT)

    _require_quiet(root, control.state.job)
    return control.update(begin)


def _ended(state: ledger.ControlState, run: RunId, how: str, before: Collection[str]) -> ledger.ControlState:
    """End the run, and refuse commands that were sent to it: they are not for the next run."""
    if state.newest_run == run:
        state = ledger.dismiss(state, f"run {run} was an edit, which has ended: nothing was done", before)
    return ledger.end_run(state, run, how)


def _settled(stage: StageId, change: StageChange) -> StageChange:
    """Compute the new rows, once and before anything is written, and check their keys and values."""
    operators = dict(change.operators)
    for number, new in operators.items():
        if isinstance(new, NewState):
            frame = new.frame.localCheckpoint(eager=True)
            who = f"stage {stage!r}, function {new.rows.function.uid!r}"
            require_one_row_a_key(frame, who)
            require_something(frame, who)
            operators[number] = replace(new, frame=frame)
    return replace(change, operators=operators)


@dataclass(frozen=True, slots=True)
class _Editor:
    """Writes the savepoint of an edit, once the edit owns the root."""

    session: SparkSession
    root: Root
    control: Control
    checkpoints: Checkpoints
    kept: StateStorage
    run: RunId

    def write(
        self, manifest: Manifest, changes: Mapping[StageId, StageChange], name: str, progress: Progress
    ) -> CheckpointId:
        """Claim an id, write the state, and commit the manifest."""
        barrier = self.control.claim(self.run, kind=CheckpointKind.SAVEPOINT, name=name, now_ms=now_ms())
        try:
            self._record(HistoryEvent.TRIGGERED, barrier, manifest)
            new = self._manifest(barrier, manifest, changes, progress)
            if missing := self.kept.missing(f for s in new.stages for f in s.files):
                raise DamageError(f"bytes of {missing[0].path} are gone from state/: see `spark-abs verify`")
            if not self._complete(new):
                raise Refused(f"checkpoint {barrier.id} was aborted by another run meanwhile: edit again")
        except BaseException as error:
            self._close(barrier, manifest, error)
            raise
        self.control.update(lambda s: ledger.settle(s, completed=(barrier.id,)))
        self.kept.unpin(barrier.id, completed=True)
        self._record(HistoryEvent.COMPLETED, barrier, manifest, new)
        return barrier.id

    def _manifest(
        self,
        barrier: Barrier,
        manifest: Manifest,
        changes: Mapping[StageId, StageChange],
        progress: Progress,
    ) -> Manifest:
        stages = []
        for snapshot in manifest.stages:
            change = changes.get(snapshot.stage)
            if change is None:
                stages.append(replace(snapshot, size_new=0))
                continue
            progress.say(f"writing the state of stage {snapshot.stage}")
            with self._scratch() as scratch:
                new = rewrite_stage(
                    self.session,
                    self.kept,
                    checkpoint=barrier.id,
                    snapshot=snapshot,
                    scratch=scratch,
                    changes=change.operators,
                    provider=change.provider,
                )
            stages.append(replace(new, operators=tuple(_named(o, change) for o in new.operators)))
        now = now_ms()
        return replace(
            manifest,
            id=barrier.id,
            attempt=NO_ATTEMPT,
            run=self.run,
            kind=barrier.kind,
            name=barrier.name,
            triggered_ms=barrier.timestamp_ms,
            acked_ms=now,
            completed_ms=now,
            graph=tuple(_shape(shape, changes.get(shape.stage)) for shape in manifest.graph),
            stages=tuple(stages),
            edited=manifest.cut,
        )

    @contextmanager
    def _scratch(self) -> Iterator[Place]:
        if (self.session.sparkContext.master or "").startswith("local"):
            with tempfile.TemporaryDirectory(prefix="spark-abs-") as directory:
                yield Place(str(Path(directory) / "edit"))
            return
        from spark_abs.spark.session import apply_storage_conf

        natives = self.root.anywhere(self.control.state.attempt.natives)
        apply_storage_conf(self.session, self.root.storage, [natives.uri])
        place = passing_place(natives, self.run)
        try:
            yield place
        finally:
            with suppress(FileNotFoundError):
                place.fs.delete_dir(place.path)

    def _complete(self, new: Manifest) -> bool:
        try:
            return self.checkpoints.complete(new)
        except CommitStateUnknown:
            # Too late to abort it: it did take place.
            return not self.checkpoints.abort(new.id, self.run)

    def _close(self, barrier: Barrier, origin: Manifest, error: BaseException) -> None:
        """Abort the id, unless its manifest is committed; if the store fails, the next run does it."""
        with suppress(Exception):
            if not self.checkpoints.abort(barrier.id, self.run):
                self.control.update(lambda s: ledger.settle(s, completed=(barrier.id,)))
                return
            detail = f"the edit failed: {type(error).__name__}: {error}".splitlines()[0][:500]
            gone = Aborted(barrier.id, AbortReason.DECLINED, detail)
            self.control.update(lambda s: ledger.settle(s, (gone,)))
            self._record(HistoryEvent.ABORTED, barrier, origin, reason=gone)

    def _record(
        self,
        event: HistoryEvent,
        barrier: Barrier,
        origin: Manifest,
        new: Manifest | None = None,
        reason: Aborted | None = None,
    ) -> None:
        row = HistoryRow(
            now_ms(),
            event,
            attempt=NO_ATTEMPT,
            run=self.run,
            checkpoint=barrier.id,
            kind=barrier.kind.value,
            name=barrier.name,
            reason=None if reason is None else str(reason.reason),
            detail=f"an edit of checkpoint {origin.id}" if reason is None else reason.detail,
            duration_ms=None if new is None else new.completed_ms - new.triggered_ms,
            size_full=None if new is None else new.size_full,
            size_new=None if new is None else new.size_new,
        )
        record_event(self.root, row)


def _named(operator: OperatorState, change: StageChange) -> OperatorState:
    """Record the function of an operator; none if the edit removes its state."""
    number = operator.operator_id
    removed = number in change.operators and change.operators[number] is None
    return replace(operator, function="" if removed else change.places.get(number, ""))


def _shape(shape: StageShape, change: StageChange | None) -> StageShape:
    if change is None:
        return shape
    forms = (change.functions.get(f.uid, f) for f in shape.functions)
    operators = shape.operators
    if any(new is None for new in change.operators.values()):
        operators = tuple(
            OperatorShape(o.name) for o in operators
        )  # without state, others may take its place
    functions = tuple(form for form in forms if form is not None)
    return replace(shape, functions=functions, operators=operators)
