"""`python -m spark_abs`: the same as the command `spark-abs`."""

from __future__ import annotations

from spark_abs.cli.main import main

main(prog_name="spark-abs")
