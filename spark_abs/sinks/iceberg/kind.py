"""Iceberg in the registry of kinds."""

from __future__ import annotations

from spark_abs.sinks.iceberg.config import Iceberg
from spark_abs.sinks.kind import Kind
from spark_abs.sinks.two_phase import TwoPhaseSink


def _sink(config: Iceberg, *_: object) -> TwoPhaseSink:
    from spark_abs.sinks.iceberg.sink import IcebergSink

    return IcebergSink(config)


KIND = Kind("Iceberg", Iceberg, _sink)
