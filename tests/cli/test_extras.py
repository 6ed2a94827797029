"""Commands that come to what an extra of the package brings, and it is not installed: the extra is named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import click
import pytest
from click.testing import CliRunner

from spark_abs.cli.main import main
from spark_abs.model import AttemptId, CheckpointId, StageId, Version
from spark_abs.protocol.control import OutsideSink
from spark_abs.protocol.outside import Mark
from spark_abs.store.control import Control
from tests.cli.conftest import Cli
from tests.root_support import SmallJob

CLIENTS = {"postgres": "psycopg", "kafka": "confluent_kafka", "iceberg": "pyiceberg"}
SETTINGS = {
    "postgres": '{"table": "sent"}',
    "kafka": '{"topic": "sent"}',
    "iceberg": '{"table": "shop.sent"}',
}
"""What `control/` keeps of a sink of each kind, at least."""


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
    record = OutsideSink("sent", StageId("b"), "main", missing, SETTINGS[missing], begin, begun=True)
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


WITHOUT_SPARK = """
import json, sys
sys.modules.update(pyspark=None, py4j=None)
import spark_abs.sinks.delta.epoch_sink, spark_abs.sinks.iceberg.sink  # what a restore makes again
import spark_abs.sinks.kafka.sink, spark_abs.sinks.postgres.sink
from click.testing import CliRunner
from spark_abs.cli.main import main
done = [CliRunner().invoke(main, arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([[one.exit_code, one.stderr] for one in done]))
"""


def test_a_root_is_looked_at_and_restored_without_spark(job: SmallJob) -> None:
    job.checkpoint(1)
    job.step(2)
    root, back = job.root.uri, ["restore", job.root.uri, "--to", "1", "--yes"]
    looking = [[verb, root] for verb in ("list", "status", "history", "verify")]
    calls = [*looking, ["show", root, "1"], [*back, "--dry-run"], back]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_SPARK, json.dumps(calls)], capture_output=True, text=True, check=True
    )
    done = json.loads(ran.stdout)
    assert [code for code, _ in done] == [0] * len(calls), ran.stdout
    assert job.rows() == [1]


def test_what_needs_spark_names_the_extra() -> None:
    program = "import sys, spark_abs; sys.modules['pyspark'] = None; spark_abs.spark_session"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (
        "spark_abs.spark_session needs Spark, and pyspark is not installed: pip install 'spark-abs[spark]'"
        in ran.stderr
    )


def test_a_command_that_needs_spark_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)

    @click.command
    def needing() -> None:
        import pyspark.sql  # noqa: F401

    monkeypatch.setitem(main.commands, "needing", needing)
    result = CliRunner().invoke(main, ["needing"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "pip install 'spark-abs[spark]'" in result.stderr
