"""A session that `spark_session` built can run a job; what cannot run one is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import cast

import pandas
import pyspark
import pytest
from pyspark.logger import SPARK_LOG_SCHEMA
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_abs.errors import ConfigError, UsageError
from spark_abs.job import Job
from spark_abs.settings import session_settings
from spark_abs.spark import session as session_module
from spark_abs.spark.driver import close_state_stores
from spark_abs.spark.plans import as_active
from spark_abs.spark.session import (
    apply_storage_conf,
    check_session,
    configure,
    connectors,
    spark_session,
)
from spark_abs.spark.versions import (
    AZURE_CONNECTOR,
    DELTA_CONNECTOR,
    GOOGLE_CONNECTOR,
    KAFKA_CONNECTOR,
    S3_CONNECTOR,
)
from spark_abs.store.options import S3, Azure
from spark_abs.store.storage import DATABRICKS, Storage
from tests.jvm import java_options

IN_AZURE, IN_GOOGLE = "abfss://box@account.dfs.core.windows.net/x", "gs://bucket/x"


def test_a_delta_table_can_be_written_and_read(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(3).write.format("delta").save(str(tmp_path / "t"))
    assert spark.read.format("delta").load(str(tmp_path / "t")).count() == 3


def test_connectors_have_the_version_of_the_hadoop_that_pyspark_brings() -> None:
    (jar,) = Path(pyspark.__file__).parent.glob("jars/hadoop-client-api-*.jar")
    found = connectors(["/a", "s3a://bucket/a", "abfss://box@account.dfs.core.windows.net/a"])
    assert found == [S3_CONNECTOR, AZURE_CONNECTOR]
    assert {c.rpartition(":")[2] for c in found} == {jar.stem.removeprefix("hadoop-client-api-")}
    assert connectors(["gs://bucket/a"]) == [GOOGLE_CONNECTOR]
    assert connectors(["/a"]) == []


def test_a_session_that_is_told_of_a_store_tells_no_other_and_says_what_it_keeps(
    spark: SparkSession,
) -> None:
    own = spark.newSession()
    storage = Storage(S3("https://store.example", "r", "who", "SeCrEt"), Azure("SeCrEt"))
    places = ["s3a://bucket/x", IN_AZURE, IN_GOOGLE]
    assert {"fs.s3a.secret.key", "fs.s3a.endpoint"} <= {*apply_storage_conf(own, storage, places)}
    assert apply_storage_conf(own, storage, places) == []
    assert own.conf.get("fs.s3a.endpoint") == "https://store.example"
    assert own.conf.get("fs.azure.account.auth.type") == "SharedKey"
    assert own.conf.get("fs.gs.auth.type") == "APPLICATION_DEFAULT"
    assert str(own.conf.get("spark.sql.redaction.options.regex")).count("account") == 1
    shown = {row.key: row.value for row in own.sql("SET").collect()}
    assert "redacted" in shown["fs.azure.account.key"]
    assert not [name for name, value in shown.items() if "SeCrEt" in value]
    assert spark.conf.get("fs.s3a.endpoint", None) is None


def test_a_session_finds_credentials_as_usual_only_for_stores_that_a_job_uses_and_where_it_has_none(
    spark: SparkSession,
) -> None:
    own = spark.newSession()
    assert apply_storage_conf(own, Storage(), ["/x", "s3a://bucket/x"]) == []
    own.conf.set("fs.azure.account.auth.type", "SharedKey")
    assert apply_storage_conf(own, Storage(), [IN_AZURE]) == []
    assert apply_storage_conf(own, Storage(), [IN_AZURE, IN_GOOGLE]) == ["fs.gs.auth.type"]
    job = Job("stores", root="/x", spark=own, native_root="s3://bucket/native")
    ticks = job.source("ticks", own.readStream.format("rate").load())
    job.sink("out", ticks, table=f"{IN_GOOGLE}/out")
    assert job.spec().locations == ("/x", "s3a://bucket/native", f"{IN_GOOGLE}/out")


def test_a_job_hears_its_settings_of_a_session(spark: SparkSession, tmp_path: Path) -> None:
    own = spark.newSession()
    ours = {"spark.abs.checkpoint.interval": "7s", "spark.abs.storage.region": "a, b]"}
    for name, value in ours.items():
        own.conf.set(name, value)
    assert session_settings(own) == ours
    assert session_settings(spark) == {}
    assert Job("heard", root=str(tmp_path), spark=own).spec().settings.interval_ms == 7000
    own.conf.set("spark.abs.checkpoint.intervall", "7s")
    with pytest.raises(ConfigError, match=r"the nearest is 'spark\.abs\.checkpoint\.interval'"):
        Job("heard", root=str(tmp_path), spark=own)


@pytest.mark.parametrize("ask", [Job.check, Job.explain])
def test_check_and_explain_reach_a_store_with_the_settings_of_the_job(
    spark: SparkSession, tmp_path: Path, ask: Callable[[Job], object]
) -> None:
    own = spark.newSession()
    job = Job("asked", root=str(tmp_path / "root"), spark=own, region="r")
    job.sink("out", job.source("ticks", own.readStream.format("rate").load()), table=str(tmp_path / "out"))
    ask(job)
    assert own.conf.get("fs.s3a.endpoint.region") == "r"
    own.conf.set("spark.sql.streaming.asyncProgressTracking.enabled", "true")
    with pytest.raises(UsageError, match="asyncProgressTracking"):
        ask(job)
    assert not (tmp_path / "root").exists()


def test_workers_run_the_interpreter_of_the_driver(spark: SparkSession) -> None:
    executable = F.udf(lambda _: sys.executable)
    assert [row[0] for row in spark.range(1).select(executable("id")).collect()] == [sys.executable]


def test_the_session_passes_its_own_check(spark: SparkSession) -> None:
    check_session(spark)


PLAIN = """
import sys
import spark_abs
from pyspark.sql import SparkSession
from spark_abs.spark.session import SESSION_CONF

root, *given = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
for setting in given:
    builder = builder.config(*setting.split("=", 1))
plain = builder.getOrCreate()
before = {key: plain.conf.get(key, None) for key in SESSION_CONF}
for ask in (
    lambda: spark_abs.spark_session("own"),
    lambda: spark_abs.Job("j", root=root, spark=plain).start(),
):
    try:
        ask()
    except spark_abs.UsageError as error:
        print(f"{error}\\n====")
assert plain.range(3).count() == 3
assert before == {key: plain.conf.get(key, None) for key in before}
plain.stop()
"""


@pytest.mark.parametrize("theirs", [(), ("org.example.Theirs",)], ids=["no jar", "jar and another extension"])
def test_a_plain_session_is_told_what_it_lacks_and_where_to_set_it(
    spark: SparkSession, tmp_path: Path, theirs: tuple[str, ...]
) -> None:
    """It was there before anybody asked for ours: it stays as it is, and goes on."""
    jars = spark.sparkContext.getConf().get("spark.jars", "") or ""
    given = [f"spark.jars={jars}", f"spark.sql.extensions={theirs[0]}"] if theirs else []
    root = tmp_path / "root"
    env = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_SUBMIT_OPTS": java_options()}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(root), *given], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    own, start = [text.strip() for text in done.stdout.split("====")][:-1]
    assert own == start
    lines = [line.strip() for line in own.splitlines()]
    extension, catalog = (session_module.SESSION_CONF[name] for name in session_module.OF_DELTA)
    settings = {
        "spark.sql.extensions": ",".join((*theirs, extension)),
        "spark.sql.catalog.spark_catalog": catalog,
    }
    (submit,) = [line for line in lines if line.startswith("spark-submit ")]
    for name, value in settings.items():
        assert f"{name} {value}" in lines
        assert f"--conf {name}={value}" in submit
    packages = f"spark.jars.packages {DELTA_CONNECTOR}" in lines, f"--packages {DELTA_CONNECTOR}" in submit
    assert packages == ((False, False) if theirs else (True, True))
    assert "spark_session" not in own
    assert not root.exists()


STRUCTURED = """
import logging
import spark_abs
from spark_abs.logs import speak

conf = {"spark.log.structuredLogging.enabled": "true", "spark.ui.enabled": "false"}
session = spark_abs.spark_session("json", "local[1]", **conf)
speak(session)
log = logging.getLogger("spark_abs.run.run")
log.info("checkpoint %d is complete", 7)
try:
    raise ValueError("no rows")
except ValueError:
    log.exception("stage %s failed", "match")
session._jvm.org.apache.logging.log4j.LogManager.getLogger("theirs").warn("of the JVM")
session.stop()
"""


def test_a_session_with_structured_logs_has_ours_in_the_same_schema(spark: SparkSession) -> None:
    """Spark reads the lines of both, written in another zone, and their times are those of now."""
    env = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}  # Java 25 writes lines about an option of other tests
    command = [sys.executable, "-W", "ignore::FutureWarning", "-c", STRUCTURED]  # PySpark's, about pandas 3
    before = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env={**env, "TZ": "Asia/Tokyo"})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING: ")]  # of java
    read = spark.read.schema(SPARK_LOG_SCHEMA).json(spark.sparkContext.parallelize(lines))
    assert read.where("level IS NULL OR ts IS NULL").count() == 0
    rows = read.where("logger = 'theirs' OR level <> 'WARN'").collect()
    assert [(row.level, row.logger, row.msg) for row in rows] == [
        ("INFO", "spark_abs.run.run", "checkpoint 7 is complete"),
        ("ERROR", "spark_abs.run.run", "stage match failed"),
        ("WARN", "theirs", "of the JVM"),
    ]
    assert (rows[1].exception["class"], rows[1].exception.msg) == ("ValueError", "no rows")
    assert all(before - 1 <= row.ts.timestamp() <= time.time() for row in rows)


def test_a_session_that_is_there_takes_what_can_be_set_while_it_runs(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    """What decides is Spark: every setting of ours outside of `AT_START` must reach a session that runs."""
    ours = {n: v for n, v in session_module.SESSION_CONF.items() if n not in session_module.AT_START}
    before = {name: spark.conf.get(name, None) for name in (*ours, "spark.sql.shuffle.partitions")}
    polling, provider = "spark.sql.streaming.pollingDelay", "spark.sql.streaming.stateStore.providerClass"
    try:
        for name in ours:
            spark.conf.unset(name)
        spark.conf.set(polling, "70ms")
        given = {
            "spark.sql.shuffle.partitions": "3",
            "spark.executor.memory": "3g",
            "spark.app.name": "other",
        }
        assert spark_session("again", "local[7]", **given) is spark
        found = {name: spark.conf.get(name) for name in ours}
        assert found == {**ours, polling: "70ms"}, "what somebody has set stays"
        assert str(found[provider]).endswith(".RocksDBStateStoreProvider")
        assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
        assert "['spark.executor.memory'" in caplog.text
        assert spark.sparkContext.defaultParallelism == 2
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def test_packages_that_the_session_lacks_are_named_before_anything_is_done(
    spark: SparkSession, tmp_path: Path
) -> None:
    other = "org.example:other_2.13:1.0"
    with pytest.raises(UsageError, match="lacks ") as said:
        spark_session(
            "again", packages=[DELTA_CONNECTOR, S3_CONNECTOR, GOOGLE_CONNECTOR, KAFKA_CONNECTOR, other]
        )
    wanted = f"{S3_CONNECTOR},{GOOGLE_CONNECTOR},{KAFKA_CONNECTOR},{other}"
    assert f"  spark.jars.packages {wanted}\n" in str(said.value)
    assert DELTA_CONNECTOR not in str(said.value)
    assert spark_session("again", packages=[DELTA_CONNECTOR]) is spark
    job = Job("far", root="s3://bucket/root", spark=spark)
    job.sink("out", job.source("ticks", spark.readStream.format("rate").load()), table=str(tmp_path))
    with pytest.raises(UsageError, match=f"lacks {S3_CONNECTOR}, and Spark loads it only at its start"):
        job.start()


def test_the_session_of_the_thread_is_taken_before_the_first_of_the_process(spark: SparkSession) -> None:
    own = spark.newSession()
    with as_active(own):
        found = spark_session("again", **{"spark.sql.shuffle.partitions": "7"})
    assert own.conf.get("spark.sql.shuffle.partitions") == "7"
    assert found.conf.get("spark.sql.shuffle.partitions") == "7"
    assert spark.conf.get("spark.sql.shuffle.partitions") != "7"


def test_the_sessions_of_databricks_have_delta_in_their_own_way(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "OF_DELTA", ("spark.sql.extensions", "spark.example.catalog"))
    wanted = {**session_module.SESSION_CONF, "spark.example.catalog": "a.Catalog"}
    monkeypatch.setattr(session_module, "SESSION_CONF", wanted)
    with pytest.raises(UsageError, match=r"spark\.example\.catalog a\.Catalog"):
        check_session(spark)
    monkeypatch.setenv(DATABRICKS, "17.3")
    check_session(spark)


def test_what_is_set_on_the_builder_afterwards_wins(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.scheduler.mode") == "FAIR"


@pytest.mark.parametrize(
    ("name", "value"),
    [("SPARK_REMOTE", "sc://host"), ("SPARK_CONNECT_MODE_ENABLED", "1"), ("SPARK_API_MODE", "Connect")],
)
def test_spark_connect_is_refused_before_anything_starts(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="dedicated access mode"):
        configure(SparkSession.builder)
    with pytest.raises(UsageError, match="dedicated access mode"):
        spark_session("asked")


def test_a_session_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a job needs the driver's JVM.*dedicated access mode"):
        check_session(cast(SparkSession, object()))


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pandas, "__version__", "1.5.3")
    with pytest.raises(UsageError, match=r"needs pandas 2 or 3, found 1\.5\.3: install it with pip"):
        configure(SparkSession.builder)


def test_state_stores_are_closed_while_their_maintenance_is_at_work(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Where maintenance does not end before, closing waits for it for six minutes, more often than not."""
    own = spark.newSession()
    own.conf.set("spark.sql.streaming.stateStore.maintenanceInterval", "1ms")
    own.conf.set("spark.sql.shuffle.partitions", "8")
    close_state_stores(spark._jvm)  # the next ones have the interval of their session
    own.range(100).write.parquet(str(tmp_path / "rows"))
    counted = own.readStream.schema("id long").parquet(str(tmp_path / "rows")).groupBy("id").count()
    writer = counted.writeStream.format("noop").outputMode("update").trigger(availableNow=True)
    for turn in range(3):
        query = writer.option("checkpointLocation", str(tmp_path / f"{turn}")).start()
        query.awaitTermination()
        closing = Thread(target=close_state_stores, args=(spark._jvm,), daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
