"""A face in a notebook that changes while what it shows is at work."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)

EVERY_S = 2.0


class Handle(Protocol):
    """What IPython returns for an output that can change."""

    def update(self, shown: object) -> None:
        """Show something else in its place."""


@dataclass(frozen=True, slots=True, repr=False)
class Face:
    """What a notebook shows: HTML, and text where it shows none."""

    text: str
    html: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def follow(face: Callable[[], Face], over: threading.Event) -> bool:
    """Show a face below the cell that runs now, and in its place what it has become, until an event.

    A daemon thread looks every two seconds, and once more after the event. If it fails, the face stays as it
    was: what is shown never ends or delays what is at work.

    Returns:
        Whether it is followed: not outside a notebook, nor in one that cannot change what it has shown.
    """
    first = face()
    handle = _displayed(first)
    if handle is None:
        return False
    go_on = threading.Thread(
        target=_follow, args=(face, over, handle, first), name="spark-abs-face", daemon=True
    )
    go_on.start()
    return True


def _follow(face: Callable[[], Face], over: threading.Event, handle: Handle, shown: Face) -> None:
    ended = False
    while not ended:
        ended = over.wait(EVERY_S)
        try:
            now = face()
            if now != shown:
                handle.update(now)
                shown = now
        except Exception as error:  # noqa: BLE001 - a thread's edge: the kernel may be ending
            log.debug("the face in the notebook stays as it was: %s", error)


def _displayed(face: Face) -> Handle | None:
    """Show a face by IPython, and return its handle; None, and nothing is shown, where none can change.

    A front end that listens to a kernel can; a terminal would print each change below the last.
    """
    ipython = sys.modules.get("IPython")  # whoever has not loaded it has no notebook
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(getattr(shell, "display_pub", None), "pub_socket", None) is None:
        return None
    try:
        found = importlib.import_module("IPython.display").display(face, display_id=True)
    except TypeError:  # a notebook has put a function of its own in its place
        return None
    return found if hasattr(found, "update") else None
