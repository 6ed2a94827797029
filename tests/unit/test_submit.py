"""The script that submits the job says what is missing before it starts anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SUBMIT = Path(__file__).parents[2] / "jobs" / "submit.sh"


def submit(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, **env}
    return subprocess.run(
        ["/bin/sh", str(SUBMIT), *arguments], env=everything, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ((), "spark-submit is missing: put the bin"),
        (("spark-submit",), "Java 17 is missing: apt-get install"),
    ],
)
def test_what_is_missing_is_one_line_with_the_remedy(
    tmp_path: Path, found: tuple[str, ...], says: str
) -> None:
    for name in found:
        (tmp_path / name).touch(mode=0o755)
    done = submit("spark://host:7077", "/data", PATH=str(tmp_path), JAVA_HOME=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1


def test_master_and_base_must_be_given() -> None:
    assert submit("spark://host:7077").stderr.startswith("usage: jobs/submit.sh MASTER BASE")
