"""Runs tests in the environments below `.venv/versions`: `python -m tests.versions.run [again|NAME…]`.

With names it only records the outcomes of those; without, it then writes the support matrix if all passed.
`again` runs those that have not passed since the package was changed, and then writes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.versions import matrix
from tests.versions.features import HERE, on_each_spark

VERSIONS = Path(sys.prefix) / "versions"
AGAIN = "again"
OWN = "4.2"
"""The Spark of the environment that this module runs in."""

NEWEST = "newest"
"""The environment with the newest Spark, Python and pandas, and Java of `NEWEST_JAVA`, if that is set."""

RUNS: Mapping[str, tuple[str, ...]] = {
    "4.0": on_each_spark(),
    "4.1": on_each_spark(),
    NEWEST: on_each_spark(),
    "carried": (HERE,),
}
"""What runs where; in this environment all tests run anyway. `carried` starts processes in it, too."""

_SOCKETS = "ignore:unclosed:ResourceWarning"
QUIET: Mapping[str, str] = {
    "4.0": _SOCKETS,
    "4.1": _SOCKETS,
    NEWEST: "ignore:PySpark does not yet fully support pandas:FutureWarning",
}
"""Warnings of Spark itself: before 4.2 it leaves a socket open with each collect(); it advises pandas 2."""


def python_of(name: str) -> str:
    """Return the interpreter of an environment."""
    here = name in (OWN, "carried")
    return sys.executable if here else str(VERSIONS / name / "bin/python")


def variables_of(name: str) -> Mapping[str, str]:
    """Return the variables of the processes of an environment: its Python, and its Java if it has its own."""
    found = {**os.environ, "PYSPARK_PYTHON": python_of(name)}
    if name == NEWEST and (java := os.environ.get("NEWEST_JAVA")):
        found["JAVA_HOME"] = java
    return found


def outcomes_of(name: str) -> Path:
    """Return the file with the outcomes of an environment."""
    return VERSIONS / f"{name}.json"


_FETCH = "import spark_abs; spark_abs.spark_session('set-up', 'local[1]').stop()"
"""Fetches Delta's jars once, not in two processes at a time."""


def run(name: str, again: bool = False) -> bool:
    """Run the tests of an environment and record their outcomes; return whether all passed.

    Args:
        name: that of the environment.
        again: leave out those that have passed since the package was changed.
    """
    python = python_of(name)
    sys.stdout.write(f"pytest in the environment {name}\n")
    sys.stdout.flush()
    options = ["-p", "tests.versions.recorder", "--outcomes", str(outcomes_of(name))]
    options += ["-W", QUIET[name]] if name in QUIET else []
    if again:
        options.append("--keep-outcomes")
    else:
        outcomes_of(name).unlink(missing_ok=True)
    command = [python, "-c", _FETCH]
    subprocess.run(command, env=variables_of(name), check=True, stderr=subprocess.DEVNULL)
    command = [python, "-m", "pytest", "-n", "0" if name == "carried" else "2", *options, *RUNS[name]]
    done = subprocess.run(command, env=variables_of(name), check=False)
    return done.returncode == 0 or (again and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED)


def main(names: Iterable[str]) -> int:
    """Run some environments, or all and print the matrix; return 1 if any test did not pass, else 0."""
    wanted = tuple(names)
    again = wanted == (AGAIN,)
    alone = wanted and not again
    passed = [run(name, again) for name in (wanted if alone else RUNS)]
    files = [str(file) for file in map(outcomes_of, RUNS) if file.exists()]
    written = 0 if alone else matrix.main(files)
    return int(written != 0 or not all(passed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
