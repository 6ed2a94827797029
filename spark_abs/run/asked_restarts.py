"""Restarts of stages that somebody asked for: after the batch under way, while the other stages run on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from spark_abs.checkpointing.coordination import Coordination
from spark_abs.errors import UsageError
from spark_abs.model import StageId
from spark_abs.protocol.messages import Answer
from spark_abs.run.recovery import Recovery, StageEnd
from spark_abs.run.running_stage import RunningStage
from spark_abs.spark.causes import cause_of

log = logging.getLogger(__name__)


class AskedRestarts:
    """Takes requests from the coordinator's thread; the thread that watches the run carries them out."""

    def __init__(self, stages: Mapping[StageId, RunningStage], refuse: Callable[[], None]) -> None:
        """Take the stages, and a check that raises UsageError if the run restarts no stage now."""
        self._stages = stages
        self._refuse = refuse
        self._lock = threading.Lock()
        self._open: dict[StageId, str] = {}
        """The request of each stage that is still to be restarted."""

    @property
    def pending(self) -> bool:
        """Whether a stage is still to be restarted."""
        with self._lock:
            return bool(self._open)

    def ask(self, stage: StageId, request: str) -> None:
        """Ask for the restart of a stage; `look` answers the request.

        Raises:
            UsageError: the job has no such stage, it is being restarted already, or the run restarts none.
        """
        if stage not in self._stages:
            raise UsageError(f"no stage {stage!r}: the job has {', '.join(self._stages)}")
        self._refuse()
        with self._lock:
            if stage in self._open:
                raise UsageError(f"stage {stage!r} is being restarted already")
            self._open[stage] = request

    def look(self, recovery: Recovery, coordination: Coordination) -> None:
        """Restart the stages that were asked for and have finished their batch; does not wait for one.

        A stage that has failed and waits for its restart is restarted at once.

        Raises:
            StageFailed: a stage cannot be started, and no further attempt is allowed.
        """
        with self._lock:
            asked = tuple(self._stages[name] for name in self._open)
        for stage in asked:
            if recovery.waits(stage.name):
                said = "" if recovery.start_now(stage.name) else "it failed again at its start"
                self._answer(stage.name, coordination, said)
                continue
            stage.runner.batch_lock.refuse()
            if stage.is_quiet:
                self._restart(stage, recovery, coordination)

    def _restart(self, stage: RunningStage, recovery: Recovery, coordination: Coordination) -> None:
        newest = stage.runner.native.newest_planned()
        log.info("stage %s is restarted, as was asked", stage.name)
        try:
            if stage.query is not None:
                stage.query.stop()
            stage.restart(coordination)
        except Exception as error:  # noqa: BLE001 - whatever it is, the policy decides about it
            self._answer(stage.name, coordination, cause_of(error))
            recovery.take(StageEnd(stage.name, newest, error))
        else:
            self._answer(stage.name, coordination, "")

    def _answer(self, stage: StageId, coordination: Coordination, failed: str) -> None:
        said = f"could not be started: {failed}" if failed else "runs again"
        with self._lock:
            request = self._open.pop(stage)
        coordination.answer(Answer(request, None, not failed, f"stage {stage!r} {said}"))
