"""Restarts of stages that somebody asked for: after the batch under way, while the other stages run on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spark_abs.checkpointing.coordination import Coordination
from spark_abs.errors import UsageError
from spark_abs.model import StageId
from spark_abs.protocol.messages import Answer
from spark_abs.run.recovery import Recovery, StageEnd
from spark_abs.run.running_stage import RunningStage
from spark_abs.spark.causes import cause_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A restart that is still to be carried out."""

    request: str
    change: Callable[[], str]


def _no_change() -> str:
    return ""


class AskedRestarts:
    """Takes requests from the coordinator's thread; the thread that watches the run carries them out."""

    def __init__(self, stages: Mapping[StageId, RunningStage], refuse: Callable[[], None]) -> None:
        """Take the stages, and a check that raises UsageError if the run restarts no stage now."""
        self._stages = stages
        self._refuse = refuse
        self._lock = threading.Lock()
        self._open: dict[StageId, _Asked] = {}

    @property
    def pending(self) -> bool:
        """Whether a stage is still to be restarted."""
        with self._lock:
            return bool(self._open)

    def ask(self, stage: StageId, request: str, change: Callable[[], str] = _no_change) -> None:
        """Ask for the restart of a stage; `look` answers the request.

        Args:
            stage: its name.
            request: the id of the request.
            change: changes what the stage is started with, while it runs no batch; returns what was changed.
                With UsageError it refuses the request, and the stage goes on as before.

        Raises:
            UsageError: the job has no such stage, it is being restarted already, or the run restarts none.
        """
        if stage not in self._stages:
            raise UsageError(f"no stage {stage!r}: the job has {', '.join(self._stages)}")
        self._refuse()
        with self._lock:
            if stage in self._open:
                raise UsageError(f"stage {stage!r} is being restarted already")
            self._open[stage] = _Asked(request, change)

    def look(self, recovery: Recovery, coordination: Coordination) -> None:
        """Restart the stages that were asked for and have finished their batch; does not wait for one.

        A stage that has failed and waits for its restart is restarted at once.

        Raises:
            StageFailed: a stage cannot be started, and no further attempt is allowed.
        """
        with self._lock:
            asked = [(self._stages[name], one) for name, one in self._open.items()]
        for stage, one in asked:
            if recovery.waits(stage.name):
                self._start_failed(stage.name, one, recovery, coordination)
                continue
            stage.runner.batch_lock.refuse()
            if stage.is_quiet:
                self._restart(stage, one, recovery, coordination)

    def _start_failed(
        self, stage: StageId, one: _Asked, recovery: Recovery, coordination: Coordination
    ) -> None:
        changed, refused = _changed(one)
        failed = "" if refused or recovery.start_now(stage) else "it failed again at its start"
        self._answer(stage, coordination, changed, refused=refused, failed=failed)

    def _restart(
        self, stage: RunningStage, one: _Asked, recovery: Recovery, coordination: Coordination
    ) -> None:
        changed, refused = _changed(one)  # it begins no batch any more: it is restarted in any case
        newest = stage.runner.native.newest_planned()
        log.info("stage %s is restarted, as was asked", stage.name)
        try:
            if stage.query is not None:
                stage.query.stop()
            stage.restart(coordination)
        except Exception as error:  # noqa: BLE001 - whatever it is, the policy decides about it
            self._answer(stage.name, coordination, changed, refused=refused, failed=cause_of(error))
            recovery.take(StageEnd(stage.name, newest, error))
        else:
            self._answer(stage.name, coordination, changed, refused=refused)

    def _answer(
        self, stage: StageId, coordination: Coordination, changed: str, *, refused: str, failed: str = ""
    ) -> None:
        said = f"could not be started: {failed}" if failed else "runs again"
        told = refused or "; ".join(filter(None, (changed, f"stage {stage!r} {said}")))
        with self._lock:
            request = self._open.pop(stage).request
        coordination.answer(Answer(request, None, not (failed or refused), told))


def _changed(one: _Asked) -> tuple[str, str]:
    """Change what a stage is started with; return what was changed, and why it was refused."""
    try:
        return one.change(), ""
    except UsageError as error:
        return "", str(error)
