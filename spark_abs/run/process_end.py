"""Stop jobs when their process ends, so that no thread fails in the middle of its work.

A script may end while a job runs, because of an error or because it does not wait. Without this module its
threads would be cut off in the middle of a commit, and the JVM would call a Python process that has ended.
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
    """Requests a graceful stop; does not wait."""
    done: threading.Event
    timeout_s: float
    """The time limit of the stop."""


_guests: list[Guest] = []
_registering = threading.Lock()
_registered = False


def attend(guest: Guest) -> None:
    """Stop a run gracefully, and then its session, when this process ends."""
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
        log.warning("job %s: the script has ended, the job is being stopped", guest.job)
        guest.stop()
    for guest in running:
        if not guest.done.wait(guest.timeout_s):
            log.error("job %s has not stopped in time: the next start repeats its last batches", guest.job)
    end_session()
