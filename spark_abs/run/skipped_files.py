"""The input files that the stages of a run do not read."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from spark_abs.model import StageId
from spark_abs.observe.skipping import Skips, find_skips
from spark_abs.protocol.control import Command, ControlState, SkippedFile, require_current, skip
from spark_abs.run.asked_restarts import AskedRestarts
from spark_abs.run_context import RunContext
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control


class SkippedFiles:
    """Which files each stage goes past. The thread that watches the run adds to them, any thread reads."""

    def __init__(self, ctx: RunContext, skipped: Iterable[SkippedFile]) -> None:
        """Take the run, and the files that were skipped before it began."""
        self._ctx = ctx
        self._skipped = tuple(skipped)

    def of(self, stage: StageId) -> frozenset[str]:
        """Return the files that a stage does not read, as Spark writes them in the log of a source."""
        return frozenset(one.file for one in self._skipped if one.stage == stage)

    def ask(self, restarts: AskedRestarts, command: Command) -> str | None:
        """Restart a stage without files; return what is said if all of them are skipped already.

        Raises:
            UsageError: as `skip_files`, or the run restarts no stage now.
        """
        found = self._find(Control.open(self._ctx.root).state, command)
        if not found.new:
            return found.said
        restarts.ask(command.stages[0], command.id, partial(self._skip, command))
        return None

    def _skip(self, command: Command) -> str:
        """Record the files, while the stage runs no batch: nothing reads without them before that."""
        ctx, control = self._ctx, Control.open(self._ctx.root)
        found = self._find(control.state, command)

        def change(state: ControlState) -> ControlState:
            require_current(state, ctx.run)
            return skip(state, found.new)

        ctx.failpoint("skip-file.record.before")
        self._skipped = control.update(change).skipped
        ctx.failpoint("skip-file.record.after")
        return found.said

    def _find(self, state: ControlState, command: Command) -> Skips:
        return find_skips(self._ctx.root, state, command, self._ctx.run, now_ms())
