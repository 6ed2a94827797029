"""The Kafka sources of a plan, and the offsets of their brokers, read with the client of Spark's source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_abs.manifest import SourceShape
from spark_abs.snapshots.kafka_offsets import Available, Partition, topics_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BROKERS = "kafka.bootstrap.servers"
_PATIENCE_MS = 15_000
"""Timeout of the brokers' answer."""


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """A stream from Kafka, as declared."""

    shape: SourceShape
    """Its shape, by which a later start recognises it."""
    options: Mapping[str, str] = field(repr=False)
    """Its options, with names in lower case. They may hold secrets."""

    @property
    def goes_on_without(self) -> bool:
        """Whether Spark continues although the brokers have dropped records that it has not read."""
        return self.options.get("failondataloss", "true").lower() == "false"


def available(
    spark: SparkSession, source: KafkaSource, wanted: Mapping[Partition, int]
) -> Mapping[Partition, Available]:
    """Ask the brokers of a source for the records of partitions; missing partitions are left out.

    Raises:
        Py4JError: the brokers do not answer, or refuse to.
    """
    jvm: Any = spark._jvm
    settings = jvm.java.util.Properties()
    for name, value in source.options.items():
        if name.startswith("kafka."):
            settings.setProperty(name.removeprefix("kafka."), value)
    settings.setProperty("default.api.timeout.ms", str(_PATIENCE_MS))
    settings.setProperty("request.timeout.ms", str(_PATIENCE_MS // 3))
    admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(settings)
    try:
        partitions = [p for p in _partitions(jvm, admin, topics_of(wanted)) if p in wanted]
        earliest = _offsets(jvm, admin, partitions, jvm.org.apache.kafka.clients.admin.OffsetSpec.earliest())
        ends = _offsets(jvm, admin, partitions, jvm.org.apache.kafka.clients.admin.OffsetSpec.latest())
    finally:
        admin.close(jvm.java.time.Duration.ZERO)
    return {p: Available(earliest[p], ends[p]) for p in partitions}


def _partitions(jvm: Any, admin: Any, topics: list[str]) -> Iterator[Partition]:
    # One that is not there would be asked for until the time is over.
    every = jvm.org.apache.kafka.clients.admin.ListTopicsOptions().listInternal(True)
    known = admin.listTopics(every).names().get()
    there = jvm.java.util.ArrayList()
    for topic in topics:
        if known.contains(topic):
            there.add(topic)
    described = admin.describeTopics(there).allTopicNames().get()
    for topic in there:
        for number in range(described.get(topic).partitions().size()):
            yield topic, number


def _offsets(jvm: Any, admin: Any, partitions: list[Partition], which: Any) -> dict[Partition, int]:
    asked = jvm.java.util.HashMap()
    named = {p: jvm.org.apache.kafka.common.TopicPartition(*p) for p in partitions}
    for partition in named.values():
        asked.put(partition, which)
    answer = admin.listOffsets(asked)
    return {p: int(answer.partitionResult(named[p]).get().offset()) for p in partitions}
