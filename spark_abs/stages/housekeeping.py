"""Clean-ups after checkpoints, in a thread of their own, for a small share of the time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from deltalake.exceptions import DeltaError

from spark_abs.errors import AbsError, Fenced

log = logging.getLogger(__name__)

PAUSES = 20
"""After a clean-up the next one waits so many times as long as it took. With many channels one takes more CPU
time than a checkpoint, and what a checkpoint leaves behind can be removed together with that of the next."""
_LONGEST_S = 30.0
"""The longest of these pauses: a store that answers slowly would keep what nobody needs for very long."""


class Housekeeping:
    """Calls a clean-up when it is asked for. Safe to use from any thread.

    The first call begins at once, a later one after a pause; all that ask meanwhile get one call together.
    """

    def __init__(
        self,
        clean: Callable[[], None],
        on_failure: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the clean-up; no thread is started before it is asked for.

        Args:
            clean: repeatable; called in this object's thread.
            on_failure: called if the run was fenced.
            clock: seconds that never go back.
        """
        self._clean, self._on_failure, self._clock = clean, on_failure, clock
        self._changed = threading.Condition()
        self._asked = self._closing = False
        self._next = 0.0
        """When the next clean-up may begin."""
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Clean up soon."""
        with self._changed:
            self._asked = True
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="spark-abs-tidy", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Do at once what is asked for, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._await_turn():
            began = self._clock()
            self._clean_once()
            ended = self._clock()
            self._next = ended + min(PAUSES * (ended - began), _LONGEST_S)

    def _await_turn(self) -> bool:
        """Wait until a clean-up is asked for and may begin; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._closing)
            self._changed.wait_for(lambda: self._closing, max(0.0, self._next - self._clock()))
            asked, self._asked = self._asked, False
            return asked

    def _clean_once(self) -> None:
        try:
            self._clean()
        except Fenced as error:
            self._on_failure(error)
        except (AbsError, DeltaError, OSError) as error:
            log.warning("tidying up failed, it is tried again after the next checkpoint: %s", error)
        except Exception:
            log.exception("tidying up failed, it is tried again after the next checkpoint")
