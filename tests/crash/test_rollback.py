"""Going back and forth between the checkpoints of one job."""

from __future__ import annotations

import pytest

import spark_abs
from spark_abs.channels.trim import earliest
from spark_abs.model import ChannelId
from spark_abs.observe.progress import SILENT
from spark_abs.observe.verification import verify_root
from spark_abs.protocol.control import ControlState
from spark_abs.store.control import Control
from tests.crash.facts import check, check_complete
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

pytestmark = pytest.mark.timeout(900)

KEEP_ALL = {"keep": "1 1h:all"}
"""Only the newest one keeps the rows of channels."""


@pytest.fixture(scope="module")
def job(first: DriverProcess, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A job that was stopped with at least nine checkpoints."""
    small = Small(tmp_path_factory.mktemp("rollback"))
    small.start(first, checkpoint=KEEP_ALL)
    small.run_until(first, lambda: len(small.completed()) >= 9, "nine checkpoints")
    small.stop(first)
    return small


def test_back_to_the_fifth_on_from_there_and_back_to_the_abandoned_ninth(
    job: Small, first: DriverProcess
) -> None:
    """The attempts form a tree: what one restore leaves behind another one finds again."""
    fifth, ninth = job.completed()[4], job.completed()[8]
    channel = ChannelId("events.main")
    assert earliest(job.root, channel) > fifth.channel_cuts()[channel], "rows after it are gone"

    spark_abs.open(job.root.uri).restore(fifth.id)
    assert job.rows() == job.rows(fifth)
    assert verify_root(job.root, SILENT) == ()
    assert not _state(job).on_path(ninth.attempt, ninth.id)

    job.start(first, checkpoint=KEEP_ALL)
    job.run_until(first, lambda: sum(m.attempt == 2 for m in job.completed()) >= 2, "checkpoints after it")
    job.stop(first)
    check(job.base)
    newest = job.completed()[-1]

    spark_abs.open(job.root.uri).restore(ninth.id)
    assert job.rows() == job.rows(ninth)
    assert not _state(job).on_path(newest.attempt, newest.id)
    check(job.base)

    job.finish(first)
    check_complete(job.base, job.files)


def _state(job: Small) -> ControlState:
    return Control.open(job.root).state
