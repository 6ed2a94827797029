"""The end of a process in which jobs have run: it leaves no thread behind that could fail.

A script may end while a job runs, because of an error or because it does not wait. Its threads would then be
torn off in the middle of a commit, and the JVM would call into a Python that is no more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from spark_abs.spark.driver import end_session

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Guest:
    """A run in this process."""

    job: str
    stop: Callable[[], None]
    """Asks it to stop gracefully; does not wait."""
    done: threading.Event
    timeout_s: float
    """How long it may take."""


_guests: list[Guest] = []
_registering = threading.Lock()
_registered = False


def attend(guest: Guest) -> None:
    """Have a run stopped gracefully, and then the session that it used, when this process ends."""
    global _registered
    with _registering:
        _guests[:] = [other for other in _guests if not other.done.is_set()] + [guest]
        if not _registered:
            _registered = True
            # `atexit` comes later: pools of threads, which copies of state need, are closed by then.
            threading._register_atexit(_farewell)  # type: ignore[attr-defined]


def _farewell() -> None:
    running = [guest for guest in _guests if not guest.done.is_set()]
    for guest in running:
        log.warning("job %s: the script ends, the job is stopped", guest.job)
        guest.stop()
    for guest in running:
        if not guest.done.wait(guest.timeout_s):
            log.error("job %s has not stopped in time: the next start repeats its last batches", guest.job)
    end_session()
