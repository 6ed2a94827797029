"""A restore in a process of its own that kills itself at a fault point: root, target and point are given."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import spark_abs


def main() -> None:
    root, to, point = sys.argv[1:]

    def failpoint(name: str) -> None:
        if name == point:
            os.killpg(0, signal.SIGKILL)

    replace(spark_abs.open(root), failpoint=failpoint).restore(to)


if __name__ == "__main__":
    main()
