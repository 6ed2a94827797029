"""The life of a run, of a job or of wrapped queries: causes of its end, watching, shutdown."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

from spark_abs.checkpointing.coordination import Coordination
from spark_abs.errors import Fenced
from spark_abs.protocol.messages import StatusChanged
from spark_abs.protocol.trigger import RunStatus
from spark_abs.run.registration import end
from spark_abs.run_context import RunContext
from spark_abs.spark.causes import one_line
from spark_abs.stages.snapshotter import Snapshotter
from spark_abs.store.clock import steady_ms
from spark_abs.store.lease import holding_lease

log = logging.getLogger(__name__)


class Termination:
    """Whether a run must end, the reason, and whether it has ended. Safe to use from any thread.

    Created before all other parts of a run, which may hold it.
    """

    def __init__(self) -> None:
        self._requested = threading.Event()
        self.over = threading.Event()
        """Set when all parts of the run have ended and the end is recorded."""
        self.failure: Exception | None = None
        """The first error that ended the run, if any."""

    @property
    def requested(self) -> bool:
        """Whether the end was requested."""
        return self._requested.is_set()

    def request(self) -> None:
        """Request a graceful end; does not wait."""
        self._requested.set()

    def fail(self, error: Exception) -> None:
        """Request the end because of an error; the first error is kept."""
        if self.failure is None:
            self.failure = error
        self._requested.set()

    def await_request(self, seconds: float) -> bool:
        """Wait at most for this time; say whether the end was requested."""
        return self._requested.wait(seconds)

    def raise_failure(self) -> None:
        """Raise the error that ended the run, if any."""
        if self.failure is not None:
            raise self.failure


def end_all(ends: Iterable[Callable[[], object]]) -> None:
    """Call every function, even after one has failed; then raise the first error."""
    errors = []
    for end_one in ends:
        try:
            end_one()
        except Exception as error:  # noqa: BLE001 - the others are to end, too
            errors.append(error)
    if errors:
        raise errors[0]


class Lifecycle:
    """The thread that watches a run and shuts it down.

    1. The coordinator begins no further checkpoint.  2. The queries finish their batches.  3. The threads of
    coordination and copies end.  4. `finish` is called.  5. The end is recorded and the lease, held until
    then, is released.  If a step fails, the run has failed, and the later steps are still done: anything left
    running would block the next start.
    """

    def __init__(
        self,
        ctx: RunContext,
        title: str,
        termination: Termination,
        coordination: Coordination,
        snapshots: Snapshotter,
        *,
        watch: Callable[[], str],
        stop_queries: Callable[[], None],
        finish: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the parts of a run.

        Args:
            ctx: the run.
            title: the owner of the run, for the log.
            termination: the requests to end the run.
            coordination: its coordinator.
            snapshots: its copies.
            watch: returns the kind of end when the run must end; raises the error if the run fails.
            stop_queries: step 2.
            finish: step 4.
            on_end: called after step 5.
        """
        self._ctx = ctx
        self._title = title
        self._termination = termination
        self._coordination = coordination
        self._snapshots = snapshots
        self._watch = watch
        self._stop_queries = stop_queries
        self._finish = finish
        self._on_end = on_end
        self._told = (RunStatus.RUNNING, "")
        """The phase of the run and the failing stages, as last told to the coordinator."""
        self._thread = threading.Thread(target=self._live, name=f"spark-abs-watch-{ctx.job}", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def report(self, status: RunStatus, failing: str) -> None:
        """Tell the coordinator a changed phase of the run or changed failing stages; for the watcher."""
        if (status, failing) != self._told:
            self._told = status, failing
            self._coordination.put(StatusChanged(steady_ms(), status, failing))

    def _live(self) -> None:
        how = "stopped"
        try:
            how = self._watch()
        except Exception as error:
            log.debug("watching failed", exc_info=True)
            self._termination.fail(error)
        try:
            self._shut_down(how)
        finally:
            self._termination.over.set()

    def _shut_down(self, how: str) -> None:
        failure = self._termination.failure
        status = RunStatus.STOPPING if failure is None else RunStatus.FAILED
        why = self._told[1] if failure is None else one_line(str(failure))
        self._coordination.put(StatusChanged(steady_ms(), status, why))  # 1
        with ExitStack() as until_the_end:
            # Who has taken over waits until this run has ended, or until its lease is not renewed any more.
            if not isinstance(failure, Fenced):
                with suppress(OSError):  # the coordinator may still be able to renew it
                    until_the_end.enter_context(holding_lease(self._ctx.root, self._ctx.run))
            for step in (
                self._stop_queries,  # 2
                self._coordination.close,  # 3
                self._snapshots.close,
                self._finish,  # 4
            ):
                self._attempt(step)
        failure = self._termination.failure
        self._attempt(lambda: end(self._ctx, how if failure is None else failure))  # 5
        said = how if failure is None else f"failed: {one_line(str(failure))}"
        log.info("%s: run %s has ended: %s", self._title, self._ctx.run, said)
        self._attempt(self._on_end)

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            log.debug("shutting down failed", exc_info=True)
            self._termination.fail(error)
