"""Change what a savepoint holds: read its state, write another one, as with Flink's State Processor API."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from spark_abs.errors import DamageError, Refused, UsageError
from spark_abs.manifest import Manifest, StateFunction
from spark_abs.manifests.find import check_savepoint_name
from spark_abs.model import PROVIDERS, CheckpointId, Provider, ProviderName, StageId
from spark_abs.observe.progress import SILENT, Progress
from spark_abs.observe.state import form_of, state_frame
from spark_abs.observe.state_at import StateAt, choose_operator, find_stage, find_state
from spark_abs.restore.edited import StageChange, write_edited
from spark_abs.restore.edited_rows import corrected, fitted, form_of_frame, require_one_row_a_key
from spark_abs.restore.rewrite import NewState, require_rewritable
from spark_abs.snapshots.operators import TRANSFORM
from spark_abs.spark.versions import require_state_rewriter
from spark_abs.state.rows import StateRows
from spark_abs.store.root import Root

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Edit:
    """Changes to a savepoint that are gathered, checked as they come, and written together.

    Rows of a function's state have the columns of `JobRoot.state`: structs `key` and `value`, and where
    they apply `timeout_ms` and `expires_ms`. Frames are evaluated when `write` is called. What is said later
    of an operator holds: `replace`, `rekey` and `remove` take the place of all before, `correct` adds to it.
    """

    def __init__(self, session: SparkSession, root: Root, manifest: Manifest) -> None:
        """Begin an edit.

        Raises:
            Refused: Spark here cannot write state anew.
        """
        require_state_rewriter(f"an edit of checkpoint {manifest.id}")
        self._session, self._root, self._manifest = session, root, manifest
        self._changes: dict[StageId, StageChange] = {}

    def __repr__(self) -> str:
        changed = ", ".join(self._changes) or "nothing"
        return f"Edit(checkpoint {self._manifest.id} of job {self._manifest.job!r}, changes {changed})"

    def state(self, stage: str, *, operator: int | str | None = None, store: str | None = None) -> DataFrame:
        """Return the state of a stage as the original has it; arguments and errors as `JobRoot.state`."""
        found = find_state(self._root, stage, self._manifest.id, operator, store)
        return state_frame(self._session, self._root, found)

    def replace(self, stage: str, rows: DataFrame, *, operator: int | str | None = None) -> Edit:
        """Let a function's state be these rows and nothing else: also to fill it from history.

        Without a column `timeout_ms` no key has a timeout; without `expires_ms` the time to live begins now.

        Raises:
            UsageError: the rows do not fit the form that the savepoint records, or the stage has no function.
            Refused: the state of the stage cannot be written anew.
        """
        found = self._function(stage, operator)
        form = form_of(self._session, self._root, found)
        return self._take(found, form, fitted(rows, form, _named(found, form)))

    def correct(self, stage: str, rows: DataFrame, *, operator: int | str | None = None) -> Edit:
        """Let the keys of these rows have what they say; a row without value and timeout removes its key.

        Other keys stay as they are, or as this edit has made them before. Without a column `timeout_ms` or
        `expires_ms` a key keeps what it has of it.

        Raises:
            UsageError, Refused: as `replace`.
        """
        found = self._function(stage, operator)
        form, before = self._so_far(found)
        changed = fitted(rows, form, _named(found, form))
        require_one_row_a_key(changed, _named(found, form))
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
        """Replace a function's state by rows of another form: other key, other state, other key groups.

        The function must be declared in that form when the job is started on the savepoint.

        Raises:
            UsageError: the rows are not those of a state, or the stage has no function.
            Refused: the state of the stage cannot be written anew.
        """
        found = self._function(stage, operator)
        old = form_of(self._session, self._root, found)
        form = form_of_frame(rows, old if key_groups is None else replace(old, key_groups=key_groups))
        return self._take(found, form, fitted(rows, form, _named(found, form)))

    def remove(self, stage: str, *, operator: int | str | None = None) -> Edit:
        """Remove all state of a stage, or of one of its operators: it goes on from its positions with none.

        A function may then be declared anew: by another uid, with another key, state or number of key groups.

        Raises:
            UsageError: there is no such stage or operator, or no state.
            Refused: the state of the stage cannot be written anew.
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
        """Let all state of a stage be kept by another provider: declare its `state_provider` so, too.

        Args:
            stage: the stage.
            provider: `rocksdb` or `hdfs`.

        Raises:
            UsageError: there is no such stage or provider, or no state.
            Refused: it has an operator that RocksDB alone can keep the state of, or its state cannot be
                written anew.
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
        """Write the new savepoint; one commit makes it exist. Killed in the middle, nothing is there of it.

        Args:
            name: of the savepoint, which no other has.
            progress: told what is done.

        Raises:
            UsageError: nothing is changed, rows cannot be a state, or `name` is no name.
            RunAlive: the job runs: it owns the root, stop it first.
            Refused: the name is taken, a restore is unfinished, or a run has begun and ended meanwhile.
            DamageError: the original is damaged.
            Fenced: somebody has started or restored the job meanwhile.
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
                "only the state of functions can be replaced, of others it can be removed"
            )
        require_rewritable(self._root, found.snapshot)
        return found

    def _so_far(self, found: StateAt) -> tuple[StateFunction, DataFrame]:
        """Return form and rows of a function's state, as this edit has left them."""
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
        """Return the uids of a stage's functions by their operators; what is not recorded the state says."""
        at, found = find_stage(self._root, stage, self._manifest.id), {}
        for operator in (o for o in at.operators if o.ours):
            if at.names_functions:
                found[operator.id] = operator.function
            else:
                state = find_state(self._root, stage, self._manifest.id, operator.id)
                with suppress(DamageError):  # an edit by an earlier version has removed its state
                    found[operator.id] = form_of(self._session, self._root, state).uid
        return {number: uid for number, uid in found.items() if uid}


def _named(found: StateAt, form: StateFunction) -> str:
    return f"stage {found.snapshot.stage!r}, function {form.uid!r}"
