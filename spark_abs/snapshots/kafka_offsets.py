"""Offsets of Kafka sources: where a stage resumes, and whether the brokers still have those records."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from spark_abs.model import is_number

Partition = tuple[str, int]
"""A topic, and the number of one of its partitions."""
KAFKA = "kafka"
"""The name of Spark's source, as a `SourceShape` has it."""
_PROVIDER = "org.apache.spark.sql.kafka010"


@dataclass(frozen=True, slots=True)
class Available:
    """The records that a partition has now."""

    earliest: int
    """The offset of the first record."""
    end: int
    """The offset of the next record to come."""


def is_kafka(source: str) -> bool:
    """Say whether a format is Kafka's, in any case, as a package or class too."""
    return source.lower() == KAFKA or source in (_PROVIDER, f"{_PROVIDER}.KafkaSourceProvider")


def kafka_offsets(offset: str | None) -> Mapping[Partition, int]:
    """Parse a source's line of an offset file: partition to next offset; empty if it is not Kafka's."""
    try:
        plain = json.loads(offset or "")
    except ValueError:
        return {}
    if not isinstance(plain, dict) or not all(isinstance(parts, dict) for parts in plain.values()):
        return {}
    return {
        (topic, int(number)): at
        for topic, parts in plain.items()
        for number, at in parts.items()
        if is_number(number) and type(at) is int
    }


def missing(wanted: Mapping[Partition, int], available: Mapping[Partition, Available]) -> Iterator[str]:
    """Iterate the partitions that lack records of a stage, with the wanted and the available offsets."""
    for (topic, number), at in sorted(wanted.items()):
        found = available.get((topic, number))
        if found is None:
            yield f"{topic}[{number}] from {at}, but the partition does not exist"
        elif at < found.earliest:
            yield f"{topic}[{number}] from {at}, but its records begin at {found.earliest}"
        elif at > found.end:
            yield f"{topic}[{number}] from {at}, but it ends at {found.end}: the topic was recreated"


def topics_of(wanted: Collection[Partition]) -> list[str]:
    """Return the topics of partitions."""
    return sorted({topic for topic, _ in wanted})
