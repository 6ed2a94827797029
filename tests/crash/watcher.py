"""A watcher that is killed: a process that dies at its n-th point."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from tests.watched_queries import WatchedWorld

KILLED = 9


def _watch(world: WatchedWorld, number: int, said: Path) -> None:
    left = iter(range(number, -1, -1))

    def failpoint(point: str) -> None:
        if next(left) == 0:
            said.write_text(point)
            os._exit(KILLED)

    world.watch(failpoint=failpoint)


def killed_at(world: WatchedWorld, number: int, said: Path) -> str | None:
    """Watch in a process of its own; return the point at which it was killed, None if it came to its end.

    Processes are forked from one that has the modules: to import them takes longer than to watch.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    process = processes.Process(target=_watch, args=(world, number, said))
    process.start()
    process.join()
    assert process.exitcode in (0, KILLED)
    return said.read_text() if process.exitcode else None
