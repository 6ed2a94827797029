"""A small root in an object store: what commands say of it, and a restore that is killed after some steps.

No JVM.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from click.testing import CliRunner

import spark_abs
from spark_abs.cli.main import main
from spark_abs.errors import AttemptNotReady
from spark_abs.restore.prepare import prepare
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.root import Root
from tests.root_support import SmallJob
from tests.stores.server import Server

pytestmark = pytest.mark.timeout(1800)


class Killed(BaseException):
    """The restore is killed."""


@pytest.fixture
def job(root: Root) -> SmallJob:
    """A job with a checkpoint, a savepoint `good` and a row after it."""
    made = SmallJob(root.top)
    made.checkpoint(1)
    made.checkpoint(2, name="good")
    made.step(3)
    return made


def test_commands_show_verify_and_restore_a_root_by_its_url(server: Server, job: SmallJob) -> None:
    uri = job.root.uri.replace("s3a:", "s3:")

    def called(verb: str, *options: str) -> str:
        done = CliRunner().invoke(main, [verb, uri, *options], env=server.environment)
        assert done.exit_code == 0, (verb, done.output)
        assert server.secret not in done.output
        return done.stdout

    assert "good" in called("list")
    assert json.loads(called("status", "--output", "json"))["job"] == "job"
    assert "completed" in called("history")
    assert "totals" in called("show", "good")
    assert json.loads(called("verify", "--output", "json"))
    called("restore", "--to", "good", "--yes")
    assert job.rows() == [1, 2]
    assert job.native(2, "b").keys() >= {"metadata", "offsets/1", "commits/1"}


def test_a_restore_that_is_killed_after_a_step_is_finished_by_the_same_call(
    server: Server, job: SmallJob
) -> None:
    def restored(failpoint: Callable[[str], None] = no_failpoint) -> None:
        handle = spark_abs.open(job.root.uri, **server.settings)  # type: ignore[arg-type]
        replace(handle, failpoint=failpoint).restore("good")

    for at in (0, 0.5, 0.99):
        steps = prepare(job.root, "good").plan.steps
        number = int(at * len(steps))
        last = f"restore.{number + 1}.{type(steps[number]).__name__}.after"

        def failpoint(point: str, last: str = last) -> None:
            if point == last:
                raise Killed

        with pytest.raises(Killed):
            restored(failpoint)
        if not job.state.attempt.ready:
            with pytest.raises(AttemptNotReady):
                job.start()
        restored()
        assert job.state.attempt.ready
        assert job.rows() == [1, 2]
        assert job.native(int(job.state.attempt.id), "b").keys() >= {"metadata", "offsets/1"}
        job.start()
        job.step(3)
        assert job.rows() == [1, 2, 3]
