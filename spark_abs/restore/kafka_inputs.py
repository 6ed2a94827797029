"""Kafka sources after a restore: whether the brokers still have the records from a checkpoint on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spark_abs.errors import SinkFailed, SinkUnreachable, UsageError
from spark_abs.manifest import Manifest, SourceShape
from spark_abs.model import StageId
from spark_abs.snapshots.kafka_offsets import KAFKA, Available, Partition, kafka_offsets, missing
from spark_abs.snapshots.layout import parse_offsets

BOOTSTRAP_ENV, CLIENT_ENV = "KAFKA_BOOTSTRAP_SERVERS", "KAFKA_CLIENT_SETTINGS"
"""Where the brokers are if the root does not say it; librdkafka's settings as JSON, as for `Kafka`."""


@dataclass(frozen=True, slots=True)
class KafkaInputs:
    """What the brokers have of what a restore reads again."""

    lost: tuple[str, ...] = ()
    """Partitions from which no stage can go on, a text each."""
    unknown: tuple[str, ...] = ()
    """What could not be asked, a text for each stage."""


def kafka_inputs(manifest: Manifest) -> KafkaInputs:
    """Ask the brokers of all Kafka sources for the records after a checkpoint."""
    lost: list[str] = []
    unknown: list[str] = []
    for stage, source, wanted in _sources(manifest):
        try:
            lost += missing(wanted, _available(source.at, wanted))
        except (UsageError, SinkFailed, SinkUnreachable) as error:
            partitions = ", ".join(
                f"{topic}[{number}] {at}" for (topic, number), at in sorted(wanted.items())
            )
            unknown.append(
                f"stage {stage!r} reads Kafka again from {partitions}; whether the records are there is not "
                f"known: {error}"
            )
    return KafkaInputs(tuple(lost), tuple(unknown))


def _sources(manifest: Manifest) -> Iterator[tuple[StageId, SourceShape, Mapping[Partition, int]]]:
    """Iterate the Kafka sources of stages, with the offsets from which each is read again."""
    shapes = {shape.stage: shape.sources for shape in manifest.graph}
    for stage in manifest.stages:
        declared = shapes.get(stage.stage, ())
        for place, offset in parse_offsets(stage.offsets).offsets.items() if stage.offsets else ():
            if place.isdecimal() and int(place) < len(declared):
                source = declared[int(place)]
                if source.kind == KAFKA and (wanted := kafka_offsets(offset)):
                    yield stage.stage, source, wanted


def _available(at: str, wanted: Mapping[Partition, int]) -> Mapping[Partition, Available]:
    try:
        from spark_abs.sinks.kafka.client import connection
    except ImportError:
        raise UsageError("it needs confluent-kafka: pip install 'spark-abs[kafka]'") from None
    client_env = CLIENT_ENV if CLIENT_ENV in os.environ else None
    return connection(at or None, BOOTSTRAP_ENV, client_env).available(wanted)
