"""The kinds of sinks outside, and how one is made again from what `control/` keeps of it."""

from __future__ import annotations

from collections.abc import Mapping

from spark_abs.codec import from_json
from spark_abs.sinks.two_phase import TwoPhaseSink

OWN, POSTGRES, KAFKA, ICEBERG = "own", "postgres", "kafka", "iceberg"
NAMES: Mapping[str, str] = {POSTGRES: "PostgreSQL", KAFKA: "Kafka", ICEBERG: "Iceberg"}
"""Kinds that can be made again, as people call them."""


def made_again(kind: str, settings: str) -> TwoPhaseSink | None:
    """Make a sink of a kind; None for one of the user's own."""
    match kind:
        case "postgres":
            from spark_abs.sinks.postgres import Postgres, PostgresSink

            return PostgresSink(from_json(Postgres, settings))
        case "kafka":
            from spark_abs.sinks.kafka import Kafka, KafkaSink

            return KafkaSink(from_json(Kafka, settings))
        case "iceberg":
            from spark_abs.sinks.iceberg import Iceberg, IcebergSink

            return IcebergSink(from_json(Iceberg, settings))
        case _:
            return None
