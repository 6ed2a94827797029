"""`spark_abs.restore` is a function, although a room of the package has its name."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("first", ["", "import spark_abs.restore.apply", "import spark_abs.cli.main"])
def test_the_public_name_stays_the_function_whatever_was_loaded_before(first: str) -> None:
    program = f"{first}\nimport spark_abs\n" + "assert callable(spark_abs.restore)\n" * 2
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
