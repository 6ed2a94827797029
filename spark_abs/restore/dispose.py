"""Dispose of a savepoint: its manifest is removed for good."""

from __future__ import annotations

from collections.abc import Callable

from spark_abs.errors import Refused
from spark_abs.manifests.find import choose, list_manifests, on_path
from spark_abs.manifests.manifest_table import Checkpoints, Summary
from spark_abs.protocol.control import ControlState
from spark_abs.store.control import Control
from spark_abs.store.history import History, HistoryEvent, HistoryRow
from spark_abs.store.root import Root


def dispose_savepoint(root: Root, savepoint: str | int, clock_ms: Callable[[], int]) -> Summary:
    """Remove the manifest of a savepoint. The next clean-up of a run deletes the data that only it needed.

    One commit decides, at any time, also beside a run and its clean-up. A restore to the savepoint that
    begins meanwhile is refused before it has changed anything.

    Args:
        root: the job's root.
        savepoint: its id or name.
        clock_ms: the wall clock.

    Raises:
        UsageError: there is no job at this root.
        CheckpointNotFound: there is no such savepoint.
        DamageError: its row cannot be read.
        Refused: it is not a savepoint, or the job may still need it.
    """
    control = Control.open(root)
    checkpoints = Checkpoints.open(root, control.state.job)
    while True:
        state, found = control.state, list_manifests(root, control.state.job)
        chosen = choose(savepoint, found, state)
        _require_needless(chosen, found.completed, state)
        newest = state.newest_run
        assert newest is not None, "a run has taken it"
        if checkpoints.retire([chosen.id], newest):
            break
    row = HistoryRow(
        clock_ms(),
        HistoryEvent.RETIRED,
        attempt=chosen.attempt,
        run=None,
        checkpoint=chosen.id,
        kind=chosen.kind,
        name=chosen.name,
    )
    History(root).append([row])
    return chosen


def _require_needless(chosen: Summary, completed: tuple[Summary, ...], state: ControlState) -> None:
    if not chosen.kind.owned_by_user:
        raise Refused(
            f"{chosen.id} is a checkpoint and no savepoint: a run removes it by itself, see "
            "spark.abs.checkpoint.keep"
        )
    if not state.attempt.ready and state.attempt.checkpoint == chosen.id:
        raise Refused(
            f"a restore to savepoint {chosen.id} is not finished: run `{state.attempt.command}` again"
        )
    if on_path(chosen, state) and not any(on_path(s, state) and s.id > chosen.id for s in completed):
        raise Refused(
            f"savepoint {chosen.id} is the newest checkpoint of the job, which needs it if a native "
            "checkpoint is lost: wait for a newer checkpoint"
        )
