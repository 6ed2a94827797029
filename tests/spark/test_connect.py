"""A session of Spark Connect: what only reads Delta tables works there, the rest is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_abs.job import Job
from tests.jvm import java_options
from tests.ports import free_port

SERVER = """
import sys
import spark_abs

plugin = {"spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin", "spark.ui.enabled": "false"}
plugin["spark.connect.grpc.binding.port"] = sys.argv[1]
spark = spark_abs.spark_session("connect", "local[2]", **plugin)
print("ready", flush=True)
sys.stdin.read()
spark.stop()
"""

CLIENT = """
import json
import sys

from pyspark import SparkContext
from pyspark.sql import SparkSession

import spark_abs

root = sys.argv[1]
spark = SparkSession.builder.getOrCreate()
shop = spark_abs.open(root, spark)
refused = {}


def refuse(name, call):
    try:
        call()
    except spark_abs.UsageError as error:
        refused[name] = str(error)


def batch(frame, number):
    pass


refuse("job", lambda: spark_abs.Job("shop", root=root, spark=spark))
refuse("session", lambda: spark_abs.spark_session("shop"))
refuse("builder", lambda: spark_abs.configure(SparkSession.builder))
refuse("state", lambda: shop.state("doubled", "first"))
refuse("edit", lambda: shop.edit("first"))
refuse("rescale", lambda: shop.restore("first", shuffle_partitions=3))
refuse("location", lambda: spark_abs.checkpoint_location(root + "-wrapped", "query"))
ticks = spark.readStream.format("rate").load()
counting = (ticks, "value", batch, "n long", "n long")
refuse("function", lambda: spark_abs.map_groups_with_state(*counting))
refuse("flat function", lambda: spark_abs.flat_map_groups_with_state(*counting))
refuse("function of batches", lambda: spark_abs.map_batches_with_state(*counting))
refuse("wrapped", lambda: spark_abs.foreach_batch(batch, root=root + "-wrapped", stage="query"))

found = {
    "kind": type(spark).__module__,
    "at first": sorted(row.n for row in shop.read("out", "first").collect()),
    "latest": sorted(row.n for row in spark_abs.open(root).read("out").collect()),
    "tables": shop.tables("first").column("sink").to_pylist(),
    "views": shop.views("first", "then-").column("view").to_pylist(),
    "view": spark.sql("SELECT count(*) AS n FROM then_out").first().n,
    "checkpoints": shop.checkpoints().column("name").to_pylist(),
    "damage": shop.verify().num_rows,
    "alive": shop.status().alive is not None,
    "refused": refused,
}
found["restored"] = shop.restore("first").plan.checkpoint
found["disposed"] = shop.dispose("second")
found["history"] = sorted(set(shop.history().column("event").to_pylist()))
found["after"] = sorted(row.n for row in shop.read("out").collect())
found["jvm"] = SparkContext._jvm is not None
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def remote() -> Iterator[str]:
    """A Connect server, as Spark has it: a plugin of a session in another process."""
    port = free_port()
    env = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_SUBMIT_OPTS": java_options()}
    command = [sys.executable, "-c", SERVER, str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "ready\n"
            yield f"sc://127.0.0.1:{port}"
        finally:
            server.stdin.close()
            server.wait()


@pytest.fixture(scope="module")
def found(spark: SparkSession, remote: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a client found at the root of a job that has run in a classic session."""
    base: Path = tmp_path_factory.mktemp("connect")
    root = base / "root"
    (base / "in").mkdir()
    for number, name in ((1, "first"), (2, "second")):
        (base / f"in/{number}.json").write_text(json.dumps({"n": number}))
        job = Job("shop", root=str(root), spark=spark)
        rows = job.source("rows", spark.readStream.schema("n long").json(str(base / "in")))
        doubled = job.stage("doubled", [rows], lambda r: r.selectExpr("n * 2 AS n").dropDuplicates())
        job.sink("out", doubled, table=str(base / "out"))
        run = job.start()
        run.query("rows").processAllAvailable()
        run.stop(savepoint=name)
    env = {**os.environ, "SPARK_REMOTE": remote, "JAVA_HOME": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", CLIENT, str(root)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert not Path(f"{root}-wrapped").exists()
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_tables_are_read_as_they_were_at_a_checkpoint(found: dict[str, Any]) -> None:
    assert found["kind"].startswith("pyspark.sql.connect")
    assert (found["at first"], found["latest"]) == ([2], [2, 4])
    assert (found["tables"], found["views"], found["view"]) == (["out"], ["then_out"], 1)


def test_what_needs_no_session_works(found: dict[str, Any]) -> None:
    assert {"first", "second"} <= set(found["checkpoints"])
    assert (found["damage"], found["alive"]) == (0, False)
    assert found["after"] == [2]
    assert found["disposed"] > found["restored"]
    assert {"run-started", "restored"} <= {*found["history"]}
    assert not found["jvm"]


def test_commands_that_need_a_session_name_what_they_need(tmp_path: Path) -> None:
    """With the environment of a notebook on such compute; `doctor` says what works there all the same."""
    env = {**os.environ, "SPARK_REMOTE": "sc://127.0.0.1:1", "JAVA_HOME": "/nowhere"}
    command = [sys.executable, "-m", "spark_abs", "doctor", str(tmp_path), "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    parts = {one["part"]: one for one in json.loads(done.stdout)}
    assert (done.returncode, parts["commits in the root"]["verdict"]) == (1, "works")
    assert parts["session"]["verdict"] == "fails"
    assert "needs the driver's JVM" in parts["session"]["says"]
    assert parts["a job"]["says"] == "needs a session"


def test_the_rest_is_refused_at_the_first_call_and_says_what_it_needs(found: dict[str, Any]) -> None:
    calls = {"job", "session", "builder", "state", "edit", "rescale", "location", "wrapped"}
    assert found["refused"].keys() == {*calls, "function", "flat function", "function of batches"}
    assert found["refused"]["rescale"].startswith("nothing was changed")
    for said in found["refused"].values():
        assert "needs the driver's JVM" in said
        assert "dedicated access mode" in said
