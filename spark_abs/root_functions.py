"""Methods of `JobRoot` for whoever needs one of them: the root first, then the arguments of the method."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Unpack

from spark_abs.job_root import open as open_root
from spark_abs.observe.progress import SILENT, Progress
from spark_abs.restore.outside import NO_SINKS, Own
from spark_abs.restore.refusals import ForceName
from spark_abs.settings import StorageSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_abs.restore.apply import RestoreResult
    from spark_abs.restore.edit import Edit
    from spark_abs.restore.rescale import Wanted


def read(
    root: str,
    name: str,
    checkpoint: str | int = "latest",
    spark: SparkSession | None = None,
    **storage: Unpack[StorageSettings],
) -> DataFrame:
    """Read a Delta sink as it was at a checkpoint; see `JobRoot.read`."""
    return open_root(root, spark, **storage).read(name, checkpoint)


def state(
    root: str,
    stage: str,
    checkpoint: str | int = "latest",
    spark: SparkSession | None = None,
    *,
    operator: int | str | None = None,
    store: str | None = None,
    diff: str | int | None = None,
    **storage: Unpack[StorageSettings],
) -> DataFrame:
    """Return the state of a stage at a checkpoint; see `JobRoot.state`."""
    found = open_root(root, spark, **storage)
    return found.state(stage, checkpoint, operator=operator, store=store, diff=diff)


def restore(
    root: str,
    to: str | int,
    *,
    force: bool | Collection[ForceName] = False,
    fallback: bool = False,
    dry_run: bool = False,
    native_root: str | None = None,
    shuffle_partitions: Wanted | None = None,
    sinks: Own = NO_SINKS,
    spark: SparkSession | None = None,
    progress: Progress = SILENT,
    **storage: Unpack[StorageSettings],
) -> RestoreResult:
    """Bring a job back to a checkpoint: state, positions, channels and Delta sinks; see `JobRoot.restore`."""
    return open_root(root, spark, **storage).restore(
        to,
        force=force,
        fallback=fallback,
        dry_run=dry_run,
        native_root=native_root,
        shuffle_partitions=shuffle_partitions,
        sinks=sinks,
        progress=progress,
    )


def edit(
    root: str,
    from_: str | int = "latest",
    spark: SparkSession | None = None,
    **storage: Unpack[StorageSettings],
) -> Edit:
    """Begin to change what a checkpoint or savepoint holds; see `JobRoot.edit`."""
    return open_root(root, spark, **storage).edit(from_)


def forget(root: str, stage: str, **storage: Unpack[StorageSettings]) -> None:
    """Do without a wrapped query that is gone for good; see `JobRoot.forget`."""
    open_root(root, **storage).forget(stage)
