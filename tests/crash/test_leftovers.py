"""What a kill leaves in places that are not ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.expected import write_file
from tests.crash.facts import check_complete
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess
from tests.crash.small_job import STAGES

pytestmark = pytest.mark.timeout(900)


def test_spark_killed_while_it_plans_the_first_batch_begins_again(
    first: DriverProcess, tmp_path: Path
) -> None:
    """Half of a plan is under a temporary name; Spark refuses a first batch where it finds any file."""
    job = Small(tmp_path)
    for stage in STAGES:
        offsets = tmp_path / "root" / "native" / "1" / stage / "offsets"
        offsets.mkdir(parents=True)
        (offsets / ".0.585ca8a4-f99e-4fac-8e18-c61e3b11bf16.tmp").write_text("v1\n")
    write_file(tmp_path, 0)
    job.files = 1
    job.finish(first)
    check_complete(tmp_path, job.files)
