"""Commands that come to a sink whose extra of the package is not installed: the extra is named."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from spark_abs.model import AttemptId, CheckpointId, StageId, Version
from spark_abs.protocol.control import OutsideSink
from spark_abs.protocol.outside import Mark
from spark_abs.store.control import Control
from tests.cli.conftest import Cli
from tests.root_support import SmallJob

CLIENTS = {"postgres": "psycopg", "kafka": "confluent_kafka", "iceberg": "pyiceberg"}


@pytest.fixture(params=CLIENTS)
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of sink whose client is not installed."""
    kind = str(request.param)
    below = (f"spark_abs.sinks.{kind}", CLIENTS[kind])
    for name in [name for name in sys.modules if name.startswith(below)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, CLIENTS[kind], None)
    return kind


def test_a_restore_names_it_and_can_be_forced(job: SmallJob, cli: Cli, missing: str) -> None:
    begin = Mark(AttemptId(1), CheckpointId(0), Version(0))
    record = OutsideSink("sent", StageId("b"), "main", missing, "{}", begin, begun=True)
    Control.open(job.root).update(lambda s: replace(s, outside=(record,)))
    job.checkpoint(1)
    job.step(2)
    said = cli("restore", "--to", "1", "--yes", exits=1).stderr
    assert f"pip install 'spark-abs[{missing}]'" in said
    assert "--force outside" in said
    assert job.rows() == [1, 2]
    shown = cli("restore", "--to", "1", "--yes", "--force", "outside").stderr
    assert f"pip install 'spark-abs[{missing}]'" in shown
    assert job.rows() == [1]
