"""Kafka in the registry of kinds."""

from __future__ import annotations

from spark_abs.sinks.kafka.config import Kafka
from spark_abs.sinks.kind import Kind
from spark_abs.sinks.two_phase import TwoPhaseSink


def _sink(config: Kafka, *_: object) -> TwoPhaseSink:
    from spark_abs.sinks.kafka.sink import KafkaSink

    return KafkaSink(config)


KIND = Kind("Kafka", Kafka, _sink)
