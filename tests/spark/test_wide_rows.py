"""Rows that are far larger in memory than in files go through channels with little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.wide_rows import ROWS, WIDTH

HERE = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_wide_rows_that_compress_well_fit_into_little_memory(tmp_path: Path) -> None:
    """160 megabytes in each column, where the JVM may have 128 outside its heap."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.wide_rows", str(tmp_path)],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    digits = sum(len(str(number)) for number in range(ROWS))
    assert done.stdout.split("\n")[:2] == [
        f"same {ROWS} {ROWS * WIDTH}",
        f"own {ROWS} {ROWS * WIDTH + digits}",
    ]
