"""A watcher that is killed: `python -m tests.crash.watcher BASE SHAPE NUMBER` dies at its n-th point."""

from __future__ import annotations

import os
import sys

from spark_abs.store.storage import Place
from tests.watched_queries import WatchedWorld

KILLED = 9


def main(base: str, shape: str, number: str) -> None:
    world = WatchedWorld.__new__(WatchedWorld)
    world.top, world.shape = Place(base), shape
    left = iter(range(int(number), -1, -1))

    def failpoint(point: str) -> None:
        if next(left) == 0:
            sys.stderr.write(f"killed at {point}\n")
            sys.stderr.flush()
            os._exit(KILLED)

    world.watch(failpoint=failpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
