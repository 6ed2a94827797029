"""Check that driver and executors share a disk, before native checkpoints are written there."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from spark_abs.errors import UsageError
from spark_abs.spark.plans import executor_count
from spark_abs.store.storage import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROUNDS = 5


def require_shared(spark: SparkSession, directory: Place) -> None:
    """Let every executor read a file of the driver, and the driver read the executors' answers.

    Costs one short Spark job.

    Raises:
        UsageError: the driver cannot write there, or an executor cannot read the file or does not answer.
    """
    token = f"_seen-{uuid.uuid4().hex}"
    try:
        directory.write(f"{token}/driver", token.encode())
    except OSError as error:
        raise UsageError(f"native_root: the driver cannot write to {directory}: {error}") from error
    try:
        answers = _ask(spark, directory, token)
        blind = [host for name, host in answers.items() if directory.read(f"{token}/{name}") is None]
    finally:
        directory.fs.delete_dir(f"{directory.path}/{token}")
    if blind:
        raise UsageError(
            f"native_root: {directory} is not on a shared disk: executors on "
            f"{', '.join(sorted(set(blind)))} cannot read the driver's files there; give a path that driver "
            "and executors share, or leave native_root out: native checkpoints are then below the root"
        )


def _ask(spark: SparkSession, directory: Place, token: str) -> dict[str, str]:
    """Return the host of each executor, by a name that is unique to the executor."""
    context, answers = spark.sparkContext, dict[str, str]()
    for _ in range(_ROUNDS):
        executors = executor_count(spark)
        tasks = max(executors, context.defaultParallelism)
        asked = context.parallelize(range(tasks), tasks)
        answers |= dict(asked.mapPartitions(partial(_answer, directory, token)).collect())
        if len(answers) >= executors:
            return answers
    raise UsageError(
        f"native_root: only {len(answers)} of {executors} executors answered whether they can read "
        f"{directory}: start the job when all executors are free"
    )


def _answer(directory: Place, token: str, _: Iterator[int]) -> Iterator[tuple[str, str]]:
    """Write an answer beside the driver's file if the file exists; runs in an executor."""
    # Each executor has scratch directories of its own.
    name = hashlib.sha256(os.environ["SPARK_LOCAL_DIRS"].encode()).hexdigest()
    if directory.read(f"{token}/driver") == token.encode():
        directory.write(f"{token}/{name}", b"")
    yield name, os.uname().nodename
