"""Whether Kafka still has the next records of each stage."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError  # type: ignore[import-untyped]

from spark_abs.compatibility.restored import Past
from spark_abs.errors import Refused
from spark_abs.manifest import SourceShape
from spark_abs.model import NO_BATCH, StageId
from spark_abs.snapshots.kafka_offsets import Partition, kafka_offsets, missing
from spark_abs.snapshots.layout import parse_offsets
from spark_abs.spark.kafka_source import KafkaSource, available
from spark_abs.stages.native import NativeLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def require_records(
    spark: SparkSession, stage: StageId, sources: Sequence[KafkaSource], past: Past, at_checkpoint: bool
) -> None:
    """Refuse to continue a stage whose next Kafka records are gone.

    Args:
        spark: the job's session.
        stage: the stage.
        sources: its Kafka sources.
        past: the recorded positions.
        at_checkpoint: whether the stage continues from the checkpoint instead of its last batch.

    Raises:
        Refused: the message names partitions, the offsets needed and the offsets that exist.
    """
    positions = _positions(stage, past, at_checkpoint)
    for source, wanted in by_source(sources, _recorded(stage, past, at_checkpoint), positions):
        try:
            gone = tuple(missing(wanted, available(spark, source, wanted)))
        except (Py4JError, TypeError) as error:  # TypeError: a JVM that has Kafka's client under another name
            log.warning(
                "stage %s: could not check whether Kafka still has its next records: %s",
                stage,
                _cause(error),
            )
            continue
        if gone and source.goes_on_without:
            log.warning("stage %s skips records that Kafka no longer has: %s", stage, "; ".join(gone))
        elif gone:
            raise Refused(
                f"stage {stage!r} needs records that Kafka no longer has: {'; '.join(gone)}. Restore "
                'a later checkpoint; or accept their loss: read with .option("failOnDataLoss", "false")'
            )


def by_source(
    sources: Sequence[KafkaSource], recorded: Sequence[SourceShape], positions: Mapping[str, str]
) -> Iterator[tuple[KafkaSource, Mapping[Partition, int]]]:
    """Iterate the Kafka sources of a stage that continue, each with the next offset of each partition.

    Equal sources are distinguished by their brokers, then by their order. Without a record, as before the
    first checkpoint, sources and positions are matched in order if their numbers are equal.

    Args:
        sources: the declared sources, in the order of the plan.
        recorded: all sources of the stage, in the order of an offset file.
        positions: the lines of an offset file.
    """
    free = {place: found for place, offset in positions.items() if (found := kafka_offsets(offset))}
    named = dict(zip(map(str, range(len(recorded))), recorded, strict=True))
    if not recorded and len(free) == len(sources):
        yield from zip(sources, free.values(), strict=True)
        return
    for same_brokers in (True, False):
        left = []
        for source in sources:
            shape = source.shape
            places = (
                p for p in free if named.get(p) == shape and (not same_brokers or named[p].at == shape.at)
            )
            place = next(places, None)
            if place is None:
                left.append(source)
            else:
                yield source, free.pop(place)
        sources = left


def _recorded(stage: StageId, past: Past, at_checkpoint: bool) -> Sequence[SourceShape]:
    """Return the sources of a stage in the order of `_positions`: a later start may have rearranged them."""
    now = past.control.attempt.shapes
    shape = past.shape(stage)
    if now and not at_checkpoint:
        shape = next((found for found in now if found.stage == stage), None)
    return shape.sources if shape is not None else ()


def _positions(stage: StageId, past: Past, at_checkpoint: bool) -> Mapping[str, str]:
    if at_checkpoint:
        snapshot = past.manifest.stage(stage) if past.manifest is not None else None
        text = snapshot.offsets if snapshot is not None else None
        return parse_offsets(text).offsets if text else {}
    attempt = past.control.attempt
    native = NativeLog(past.root.native(attempt.natives, attempt.id, attempt.directory(stage)))
    newest = native.newest_committed()
    text = native.find_offsets(newest) if newest != NO_BATCH else None
    return native.parsed(newest, text).offsets if text else {}


def _cause(error: Exception) -> str:
    """Return the class of an error in the JVM, without its text: the text may contain settings."""
    raised = getattr(error, "java_exception", None)
    if raised is None:
        return type(error).__name__
    cause = raised.getCause()
    return str((raised if cause is None else cause).getClass().getName())
