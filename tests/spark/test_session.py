"""A session that `spark_session` built can run a job; what cannot run one is refused in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import cast

import pyspark
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_abs.errors import ConfigError, UsageError
from spark_abs.job import Job
from spark_abs.settings import session_settings
from spark_abs.spark import session as session_module
from spark_abs.spark.driver import close_state_stores
from spark_abs.spark.session import apply_storage_conf, check_session, configure
from spark_abs.spark.versions import DELTA_CONNECTOR, S3_CONNECTOR
from spark_abs.store.storage import Storage


def test_a_delta_table_can_be_written_and_read(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(3).write.format("delta").save(str(tmp_path / "t"))
    assert spark.read.format("delta").load(str(tmp_path / "t")).count() == 3


def test_the_s3_connector_has_the_version_of_the_hadoop_that_pyspark_brings() -> None:
    (jar,) = Path(pyspark.__file__).parent.glob("jars/hadoop-client-api-*.jar")
    assert S3_CONNECTOR.rpartition(":")[2] == jar.stem.removeprefix("hadoop-client-api-")


def test_a_session_that_is_told_of_a_store_tells_no_other(spark: SparkSession) -> None:
    own = spark.newSession()
    apply_storage_conf(own, Storage("https://store.example", "r", "who", "secret"))
    assert own.conf.get("fs.s3a.endpoint") == "https://store.example"
    assert spark.conf.get("fs.s3a.endpoint", None) is None


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


def test_a_session_is_told_what_it_lacks_and_where_to_set_it(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a one was there before anybody asked for ours: advice to ask again would lead nowhere."""
    wanted = {**session_module.SESSION_CONF, "spark.sql.catalog.spark_catalog": "a.Catalog"}
    monkeypatch.setattr(session_module, "SESSION_CONF", wanted)
    with pytest.raises(UsageError) as refused:
        check_session(spark)
    said = str(refused.value)
    assert "\n  spark.sql.catalog.spark_catalog=a.Catalog\n" in said
    assert f"\n  spark.jars.packages={DELTA_CONNECTOR} " in said
    assert "spark.sql.extensions=" not in said  # that one it has
    assert "spark.stop()" in said
    assert "--conf" in said


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
    with pytest.raises(UsageError, match="Spark Connect is not supported"):
        configure(SparkSession.builder)


def test_a_session_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="Spark Connect is not supported"):
        check_session(cast(SparkSession, object()))


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "version", lambda package: "1.5.3")
    with pytest.raises(UsageError, match=r"needs pandas 2\.\*, found 1\.5\.3: install it with pip"):
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
