"""SIGTERM and Ctrl-C while a script waits for its job: the first one stops the job, the second kills it."""

from __future__ import annotations

import builtins
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from pyspark import SparkContext

from spark_abs.spark.driver import halt_jvm, hearing_signals

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_SAME_S = 1.0
"""Signals within this time count as one: Ctrl-C goes to a whole process group and may arrive twice."""
_ENDING = (signal.SIGTERM, signal.SIGINT)
_PYSPARKS = "pyspark.core.context"
"""The module of the Ctrl-C handler that a session installs."""


class SignalledStop:
    """Turns signals into a stop of one run. `wait` is for one thread; a notebook keeps its signals.

    Args:
        job: its name, for the log.
        timeout_ms: how long an orderly stop may take; then the process ends at once.
        stop: stops the run gracefully; called once, in a separate thread.
        end: ends the process at once with an exit code.
    """

    def __init__(
        self,
        job: str,
        timeout_ms: int,
        stop: Callable[[], None],
        end: Callable[[int], None] | None = None,
    ) -> None:
        self._job, self._timeout_s, self._stop = job, timeout_ms / 1000, stop
        self._end = end_at_once if end is None else end
        self._heard: list[tuple[float, int]] = []
        self._deadline: float | None = None

    def wait(self, done: threading.Event, timeout: float | None) -> bool:
        """Wait until `done`, at most `timeout` seconds, and handle signals meanwhile."""
        if not _is_script():
            return done.wait(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        with _listening(self.hear):
            while not done.wait(_LOOK_S if until is None else min(_LOOK_S, max(0, until - time.monotonic()))):
                self._obey()
                if until is not None and time.monotonic() >= until:
                    return False
        return True

    def hear(self, number: int) -> None:
        """Record a signal, from a handler or any thread."""
        self._heard.append((time.monotonic(), number))

    def _obey(self) -> None:
        if not self._heard:
            return
        first, number = self._heard[0]
        if self._deadline is None:
            self._deadline = first + self._timeout_s
            log.info(
                "job %s: %s, stopping gracefully within %g s; a second signal ends the process at once",
                self._job,
                signal.Signals(number).name,
                self._timeout_s,
            )
            threading.Thread(target=self._stop, name="spark-abs-signal", daemon=True).start()
        again = next((n for at, n in self._heard if at - first > _SAME_S), None)
        if again is None and time.monotonic() < self._deadline:
            return
        why = "has not stopped in time" if again is None else f"{signal.Signals(again).name} again"
        log.error(
            "job %s: %s: the process ends at once, the next start repeats its last batches", self._job, why
        )
        self._end(128 + (again or number))


def end_at_once(code: int) -> None:
    """End this process and its JVM at once, as SIGKILL would."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    halt_jvm(code)
    os._exit(code)


def _is_script() -> bool:
    interactive = bool(sys.flags.interactive) or hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")
    return threading.current_thread() is threading.main_thread() and not interactive


@contextmanager
def _listening(hear: Callable[[int], None]) -> Iterator[None]:
    """Handle signals that have no other handler, including those that the JVM gets instead of Python."""

    def handler(number: int, _frame: FrameType | None) -> None:
        hear(number)

    before = {}
    for number in _ENDING:
        found = signal.getsignal(number)
        default = found in (signal.SIG_DFL, signal.default_int_handler)
        if default or getattr(found, "__module__", None) == _PYSPARKS:
            before[number] = found
            signal.signal(number, handler)
    context = SparkContext._active_spark_context
    try:
        if context is None:
            yield
        else:
            with hearing_signals(context, hear):
                yield
    finally:
        for number, found in before.items():
            signal.signal(number, found)
