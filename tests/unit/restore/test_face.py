"""`spark_abs.restore` and `spark_abs.state` are functions, although rooms of the package have their names."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "first", ["", "import spark_abs.restore.apply, spark_abs.state.functions", "import spark_abs.cli.main"]
)
def test_the_public_name_stays_the_function_whatever_was_loaded_before(first: str) -> None:
    calls = "assert callable(spark_abs.restore)\nassert callable(spark_abs.state)\n"
    program = f"{first}\nimport spark_abs\n{calls}import spark_abs.state.functions\n{calls}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
