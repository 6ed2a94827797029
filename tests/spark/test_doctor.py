"""A fault of a job at work, provoked on Spark, and what the doctor says of it."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from spark_abs.diagnosis.diagnoses import diagnoses
from spark_abs.diagnosis.gather import gather
from spark_abs.job import Job
from spark_abs.store.clock import now_ms
from spark_abs.store.root import Root
from tests.job_support import Feed, eventually
from tests.spark.conftest import Start


def test_a_function_that_always_fails_is_named_with_its_error_and_its_restarts(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    feed, repaired, root = Feed(spark, tmp_path / "in"), threading.Event(), Root(str(tmp_path / "root"))
    job = Job(
        "shop",
        root=root.uri,
        spark=spark,
        interval="1h",
        restart_strategy="fixed-delay",
        restart_delay="100ms",
        restart_attempts="unlimited",
    )

    def send(_: DataFrame, __: int) -> None:
        if not repaired.is_set():
            raise OSError("no route to the server")

    job.sink("mail", job.source("clicks", feed.stream()), foreach_batch=send)
    feed.write({"id": 1, "k": 1, "v": 1, "ts": 1})
    run = start(job)

    def said() -> str:
        found = {one.kind: one.said for one in diagnoses(gather(root, now_ms(), 30_000))}
        return found.get("restarts-without-progress", "")

    eventually(run, said, "the doctor names it")
    assert re.match(
        r"stage 'clicks' has been restarted \d+ times without finishing (its first )?batch", said()
    )
    assert "no route to the server" in said()
    repaired.set()
    eventually(run, lambda: not said(), "it has finished its batch")
    run.stop()
