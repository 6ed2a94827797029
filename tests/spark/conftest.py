"""Jobs that a test starts and does not end, because it fails, are stopped after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from spark_abs.errors import AbsError
from spark_abs.job import Job
from spark_abs.run.run import Run

Start = Callable[..., Run]
"""Starts a job; options as for `Job.start`."""


@pytest.fixture
def start() -> Iterator[Start]:
    runs: list[Run] = []

    def begin(job: Job, **options: Any) -> Run:
        runs.append(job.start(**options))
        return runs[-1]

    yield begin
    for run in runs:
        if run.is_active:
            with suppress(AbsError):
                run.stop()
