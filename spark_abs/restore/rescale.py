"""Repartition the state of stages: which state can be, and how Spark does it.

`adr/005-rescale.md` says why a restore does it, and not the start after it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from spark_abs.advice import way
from spark_abs.errors import AbsError, DamageError, Refused, UsageError
from spark_abs.manifest import Manifest, OperatorState, StageSnapshot
from spark_abs.model import NO_BATCH, BatchId, Provider
from spark_abs.snapshots.capture import capture
from spark_abs.snapshots.layout import PARTITIONS_KEY, parse_offsets, state_file
from spark_abs.snapshots.operators import JOIN, TRANSFORM
from spark_abs.store.storage import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Wanted = int | Mapping[str, int]
"""A number for every stage that keeps state, or numbers by stage."""

_LOOK_EVERY_S = 1.0
_OPERATORS = TRANSFORM | {
    "stateStoreSave",
    "dedupe",
    "dedupeWithinWatermark",
    "sessionWindowStateStoreSaveExec",
    JOIN,
    "flatMapGroupsWithState",
    "applyInPandasWithState",
}
"""The operators whose state Spark 4.2 repartitions."""


def changes(manifest: Manifest, wanted: Wanted | None) -> Mapping[str, int]:
    """Return the stages whose state gets another number of partitions, with the number.

    Args:
        manifest: the checkpoint that is restored.
        wanted: the numbers; None for no change. A stage that has its number already is left out.

    Raises:
        UsageError: a number is below 1, or there is no such stage.
        Refused: the state of a stage cannot be repartitioned, or not by the installed Spark.
    """
    if wanted is None:
        return {}
    if isinstance(wanted, Mapping):
        numbers = dict(wanted)
        known = [str(snapshot.stage) for snapshot in manifest.stages]
        if unknown := sorted(set(numbers) - set(known)):
            raise UsageError(
                f"shuffle partitions for stage {unknown[0]!r}: checkpoint {manifest.id} has no such stage, "
                f"it has {', '.join(known)}"
            )
    else:
        numbers = {s.stage: wanted for s in manifest.stages if s.operators}
    for stage, number in numbers.items():
        if number < 1:
            raise UsageError(f"shuffle partitions for stage {stage!r}: {number} is below 1")
    found = {}
    for snapshot in manifest.stages:
        number = numbers.get(snapshot.stage, snapshot.shuffle_partitions)
        if number != snapshot.shuffle_partitions:
            _check(manifest, snapshot, number)
            found[str(snapshot.stage)] = number
    if found:
        from spark_abs.spark.versions import require_state_rewriter  # a plan without this needs no Spark

        require_state_rewriter(f"another number of shuffle partitions for stage {next(iter(found))!r}")
    return found


def _check(manifest: Manifest, snapshot: StageSnapshot, number: int) -> None:
    why = _obstacle(manifest, snapshot)
    if why:
        option = way("shuffle_partitions={STAGE: N, …}", "--shuffle-partitions STAGE=N for each")
        raise Refused(
            f"stage {snapshot.stage!r} cannot go from {snapshot.shuffle_partitions} to {number} shuffle "
            f"partitions at checkpoint {manifest.id}: {why}; nothing was changed. Name the stages that can, "
            f"with {option}, or restore without it"
        )


def _obstacle(manifest: Manifest, snapshot: StageSnapshot) -> str:
    """Say why the state of a stage cannot be repartitioned, empty if it can."""
    if snapshot.cut_batch == NO_BATCH:
        return "it had run no batch, and starts with the number that its declaration says"
    if not snapshot.operators:
        return "it keeps no state: its partitions are not part of a checkpoint"
    if snapshot.provider != Provider.ROCKSDB:
        name = snapshot.provider.rpartition(".")[2] or "another store"
        return (
            f"its state is in {name}, and Spark repartitions state in RocksDB only: move it there first, "
            f"with spark_abs.open(root).edit({manifest.id}).keep_in({str(snapshot.stage)!r}, 'rocksdb'), and "
            "restore what that wrote"
        )
    if any(_has_ids(file.path) for file in snapshot.files):
        return "its state has the format with an id for each file, of which Spark does not record new ones"
    for operator in snapshot.operators:
        if operator.name not in _OPERATORS:
            return f"Spark does not repartition the state of its operator {operator.name}"
        if operator.partitions < snapshot.shuffle_partitions or _is_keyless(operator):
            return f"its operator {operator.name} has no key: all of its state is in one partition"
    return ""


def _has_ids(path: str) -> bool:
    file = state_file(path.rpartition("/")[2]) if path.startswith("state/") else None
    return file is not None and file.unique_id is not None


def _is_keyless(operator: OperatorState) -> bool:
    """Say whether an operator has no key: the struct of its key has no fields."""
    schemas = json.loads(operator.schema).values() if operator.schema else ()
    return any(b'"fields":[]' in base64.b64decode(text) for text in schemas)


def is_rescaled(place: Place, batch: BatchId, partitions: int) -> bool:
    """Say whether a native checkpoint is completely repartitioned: Spark records that last."""
    offsets = place.read_text(f"offsets/{int(batch)}")
    if offsets is None or not place.below(f"commits/{int(batch)}").exists():
        return False
    return parse_offsets(offsets).conf.get(PARTITIONS_KEY) == str(partitions)


def rescale(
    spark: SparkSession, place: Place, batch: BatchId, partitions: int, meanwhile: Callable[[], None]
) -> None:
    """Let Spark repartition a native checkpoint that ends with the batch before `batch`.

    Spark rewrites the state in a batch that reads no rows. After a kill in the middle the directory must be
    written again from the checkpoint before this call is repeated.

    Args:
        spark: the session that runs the batch.
        place: the native checkpoint; no query runs there.
        batch: the number of the batch.
        partitions: the new number of partitions.
        meanwhile: called every second from this thread; its error is raised here, once Spark is done.

    Raises:
        DamageError: Spark failed, or the directory is no checkpoint afterwards.
    """
    _ = spark.streams  # makes the coordinator of state stores, which a session without queries lacks
    try:
        with ThreadPoolExecutor(1, "rescale") as pool:
            done = pool.submit(spark._streamingCheckpointManager.repartition, place.uri, partitions)
            while not wait([done], _LOOK_EVERY_S).done:
                meanwhile()
            done.result()
        found = capture(place.fs, place.path, batch).shuffle_partitions
    except AbsError:
        raise
    except Exception as error:
        said = str(error).splitlines()[0]
        raise DamageError(f"{place}: Spark could not repartition it: {said}") from error
    if found != partitions:
        raise DamageError(f"{place}: it has {found} partitions, and {partitions} were asked for")
