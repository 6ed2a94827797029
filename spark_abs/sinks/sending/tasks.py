"""Work on the rows of a sink outside in tasks of Spark, beside the queries of the job."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_abs.errors import SinkFailed, SinkUnreachable
from spark_abs.sinks.two_phase import Rows
from spark_abs.spark.causes import cause_of
from spark_abs.spark.driver import make_pool

T = TypeVar("T")


class SendTasks:
    """Runs jobs of one sink, in a scheduler pool of their own. `cancel`: from any thread."""

    def __init__(self, spark: SparkSession, name: str) -> None:
        self._spark, self._name = spark, name
        self._tag = f"spark-abs-send-{uuid.uuid4().hex}"
        self._cancelled = threading.Event()

    def __call__(self, work: Callable[[Rows], T], parts: Sequence[Rows]) -> list[T]:
        """Call `work` with each part in a task; return the results in the order of the parts.

        Raises:
            SinkUnreachable: a task failed, or they were cancelled.
            SinkFailed: an executor lacks a module.
        """
        if self._cancelled.is_set():
            raise SinkUnreachable("the run has stopped sending")
        context = self._spark.sparkContext
        try:
            make_pool(self._spark, self._name)
            # Of this thread: it is the sender's own.
            context.setLocalProperty("spark.scheduler.pool", self._name)
            context.setJobDescription(self._name)
            context.addJobTag(self._tag)
            return context.parallelize(parts, len(parts)).map(work).collect()
        except (
            Py4JError,
            PySparkException,
            AttributeError,
        ) as error:  # of a context that was stopped there is no JVM
            cause = cause_of(error)
            if "ModuleNotFoundError" in cause or "ImportError" in cause:
                raise SinkFailed(
                    f"an executor cannot do the work of {self._name}: {cause}. Install there what the driver "
                    "has: spark-abs, with the extra of the sink, as spark-abs[iceberg]"
                ) from None
            raise SinkUnreachable(f"tasks of {self._name} failed or were lost: {cause}") from None

    def cancel(self) -> None:
        """Cancel the jobs that run, and begin no other."""
        self._cancelled.set()
        try:
            self._spark.sparkContext.cancelJobsWithTag(self._tag)
        except (Py4JError, AttributeError):
            return  # the session was stopped, and its tasks with it
