"""Jobs that a test starts and does not end, because it fails, are stopped after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from spark_abs.errors import AbsError
from spark_abs.job import Job
from spark_abs.run.run import Run
from spark_abs.store.failpoint import Failpoint

Start = Callable[..., Run]


class Killed(BaseException):
    """Raised where a process would be killed."""


def killed_at(point: str, begin: Callable[[Failpoint], object]) -> None:
    """Begin something with a failpoint that ends it at a point, which must be reached once."""
    reached: list[str] = []

    def kill(at: str) -> None:
        if at == point:
            reached.append(at)
            raise Killed

    with pytest.raises(Killed):
        begin(kill)
    assert reached == [point]


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
