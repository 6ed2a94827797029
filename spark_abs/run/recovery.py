"""Partial recovery: a failed stage is restarted while the others run on (P18)."""

from __future__ import annotations

import logging
import random
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from deltalake.exceptions import DeltaError

from spark_abs.errors import AbsError, Fenced, StageFailed
from spark_abs.model import NO_BATCH, BatchId, StageId
from spark_abs.protocol.control import require_current
from spark_abs.protocol.final_errors import source_moved
from spark_abs.protocol.restarts import Failed, Failures, GiveUp, RestartAt, RestartPolicy, decide, is_final
from spark_abs.protocol.skipped_files import find_files
from spark_abs.run_context import RunContext
from spark_abs.snapshots.file_sources import FileSources
from spark_abs.spark.causes import cause_of, file_read, is_slow_start, one_line
from spark_abs.store.clock import now_ms, steady_ms
from spark_abs.store.control import Control
from spark_abs.store.history import HistoryEvent, HistoryRow, record_event

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageEnd:
    """The end of a stage's query: the batch and the error."""

    stage: StageId
    batch: BatchId
    error: BaseException
    fixed: str = ""
    """The outputs that hold the batch, and the consequence, as text; empty if no output holds the batch."""

    @property
    def cause(self) -> str:
        """The error as text for users."""
        return cause_of(self.error)


@dataclass(frozen=True, slots=True)
class _Due:
    """A restart that waits for its delay."""

    end: StageEnd
    failed_ms: int
    decision: RestartAt


class Recovery:
    """Decides about failed stages and restarts them. For the thread that watches the run."""

    def __init__(
        self,
        ctx: RunContext,
        policy: RestartPolicy,
        restart: Mapping[StageId, Callable[[], None]],
        renewable: Collection[StageId] = (),
    ) -> None:
        """Take the policy.

        Args:
            ctx: the run.
            policy: the restart policy.
            restart: functions that restart each stage from its native checkpoint.
            renewable: stages whose frame a restart creates again.
        """
        self._ctx = ctx
        self._policy = policy
        self._restart = restart
        self._renewable = frozenset(renewable)
        self._renewed: dict[StageId, BatchId] = {}
        """The last batch of each stage in which the source's columns differed from the frame's."""
        self._past = Failures()
        self._due: dict[StageId, _Due] = {}

    def waits(self, stage: StageId) -> bool:
        """Say whether a stage has failed and waits for its restart."""
        return stage in self._due

    @property
    def failing(self) -> str:
        """The failed stages that wait for a restart, as text for users; empty if there are none."""
        return "; ".join(
            f"{_failed(due.end)}, and is started again after {due.decision.ms - due.failed_ms} ms"
            f"{_without_progress(due)}"
            for due in self._due.values()
        )

    def take(self, end: StageEnd) -> None:
        """Take a failed stage and schedule its restart.

        Raises:
            Fenced: the run was replaced.
            StageFailed: the stage is not restarted; the message has the failures that counted.
        """
        if isinstance(end.error, Fenced):
            raise end.error
        self._require_current()
        now = steady_ms()
        slow = is_slow_start(end.error)
        final = is_final(end.error, end.cause) and not self._may_be_renewed(end)
        failed = Failed(now, end.stage, batch=end.batch, cause=end.cause, final=final, slow_start=slow)
        luck = random.random()  # noqa: S311 - spreads restarts, no secret
        self._past, decision = decide(self._policy, self._past, failed, luck)
        match decision:
            case RestartAt():
                log.warning(
                    "stage %s failed in batch %s: %s; restart %s of this run in %s ms",
                    end.stage,
                    end.batch,
                    end.cause,
                    decision.number,
                    decision.ms - now,
                )
                self._due[end.stage] = _Due(end, now, decision)
            case GiveUp():
                raise StageFailed(_told(end, decision, self._way_past(end))) from end.error

    def _way_past(self, end: StageEnd) -> str:
        """Name the command by which the stage goes past a file that its batch failed to read."""
        file = file_read(end.cause)
        if file is None or end.fixed:
            return ""
        try:
            planned = FileSources(self._ctx.native(end.stage)).planned()
        except (AbsError, OSError) as error:
            log.warning("the log of the sources of stage %s could not be read: %s", end.stage, error)
            return ""
        if not find_files([file], planned):
            return ""
        call = shlex.join(("spark-abs", "skip-file", self._ctx.root.uri, end.stage, file))
        return f"; to read the rest of the batch without the file: `{call}`"

    def _may_be_renewed(self, end: StageEnd) -> bool:
        """Say whether a new frame may solve a failure; true once for each batch."""
        if not source_moved(end.cause) or end.stage not in self._renewable:
            return False
        before = self._renewed.get(end.stage)
        self._renewed[end.stage] = end.batch
        return before != end.batch

    def _require_current(self) -> None:
        """Raise `Fenced` if the run was replaced: a newer run in the same directory also makes stages fail.

        If `control/` cannot be read, the stage's own error is reported.
        """
        try:
            require_current(Control.open(self._ctx.root).state, self._ctx.run)
        except Fenced:
            raise
        except (AbsError, DeltaError, OSError) as error:
            log.warning("control/ could not be read after a stage failed: %s", error)

    def start_due(self) -> None:
        """Restart the stages whose delay is over.

        Raises:
            StageFailed: a stage cannot be started, and no further attempt is allowed.
        """
        for due in [d for d in self._due.values() if d.decision.ms <= steady_ms()]:
            self._start(due)

    def start_now(self, stage: StageId) -> bool:
        """Restart a stage that waits for its delay; say whether it was started. Errors as `start_due`."""
        return self._start(self._due[stage])

    def _start(self, due: _Due) -> bool:
        end = due.end
        self._ctx.failpoint(f"restart.{end.stage}.before")
        del self._due[end.stage]
        try:
            self._restart[end.stage]()
        except Exception as error:  # noqa: BLE001 - whatever it is, the policy decides about it, too
            self.take(StageEnd(end.stage, end.batch, error))
            return False
        self._record(due)
        return True

    def _record(self, due: _Due) -> None:
        end, took = due.end, steady_ms() - due.failed_ms
        log.warning("stage %s runs again, %s ms after it failed", end.stage, took)
        row = HistoryRow(
            now_ms(),
            HistoryEvent.STAGE_RESTARTED,
            self._ctx.attempt,
            self._ctx.run,
            stage=end.stage,
            detail=end.cause,
            duration_ms=took,
            batch=end.batch,
            restarts=due.decision.number,
        )
        record_event(self._ctx.root, row)


def _without_progress(due: _Due) -> str:
    in_row = due.decision.in_row
    return f"; {in_row} restarts have not finished the batch" if in_row > 1 else ""


def _failed(end: StageEnd) -> str:
    where = "before its first batch" if end.batch == NO_BATCH else f"in batch {end.batch}"
    return f"stage {end.stage!r} failed {where}: {end.cause}"


def _told(end: StageEnd, decision: GiveUp, way_past: str) -> str:
    said = f"{_failed(end)}{end.fixed}{way_past}"
    if source_moved(end.cause):
        said += (
            "; start the job again from its script: the start creates the frame again, or says why it cannot"
        )
    before = decision.counted[:-1]
    if not before:
        return said
    times = [f"  stage {f.stage!r} in batch {f.batch}: {one_line(f.cause)}" for f in before]
    return "\n".join([said, f"{decision.why}; failures before it that counted:", *times])
