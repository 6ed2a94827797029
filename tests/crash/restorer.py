"""A restore in a process of its own that kills itself at a fault point: root, target and point are given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import spark_abs
from spark_abs.restore import steps
from spark_abs.snapshots import materialise
from tests.crash.process import HERE, PATIENCE_S

BEFORE_READERS = "readers.before"
"""Within a step: a table is back, the positions of its readers are not."""


def main() -> None:
    root, to, point = sys.argv[1:]

    def failpoint(name: str) -> None:
        if name == point:
            os.killpg(0, signal.SIGKILL)

    def continue_at(*given: Any) -> None:
        failpoint(BEFORE_READERS)
        materialise.continue_at(*given)

    with patch.object(steps, "continue_at", continue_at):
        replace(spark_abs.open(root), failpoint=failpoint).restore(to)


def points(root: str, to: int | str) -> list[str]:
    """Return the fault points of a restore in their order: before its first step, and after each."""
    planned = spark_abs.open(root).restore(to, dry_run=True).plan.steps
    names = [f"restore.{number}.{type(step).__name__}" for number, step in enumerate(planned, 1)]
    return [f"{names[0]}.before", *(f"{name}.after" for name in names)]


def kill_restore(root: str, to: int | str, point: str) -> None:
    """Restore in a process that is killed at a fault point, and see that it was."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.restorer", root, str(to), point],
        cwd=HERE,
        start_new_session=True,
        timeout=PATIENCE_S,
        capture_output=True,
        check=False,
    )
    assert done.returncode < 0, (point, done)


if __name__ == "__main__":
    main()
