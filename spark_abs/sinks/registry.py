"""The kinds of sinks outside, and how one is made again from what `control/` keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_abs.codec import from_json, parsed, to_json
from spark_abs.errors import UsageError
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.store.root import Root

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_abs.sinks.iceberg.sink import Iceberg
    from spark_abs.sinks.kafka.sink import Kafka
    from spark_abs.sinks.postgres.sink import Postgres

OWN, POSTGRES, KAFKA, ICEBERG, DELTA = "own", "postgres", "kafka", "iceberg", "delta"
NAMES: Mapping[str, str] = {POSTGRES: "PostgreSQL", KAFKA: "Kafka", ICEBERG: "Iceberg", DELTA: "Delta"}
"""Kinds that can be made again, as people call them."""


def no_session() -> SparkSession:
    """Stand for a session where none is needed, because nothing is changed."""
    raise UsageError("this sink needs a Spark session, and there is none")


def spark_table(sink: TwoPhaseSink) -> str:
    """Return the table of a sink if only Spark can write it, else nothing. Needs no Spark itself."""
    from spark_abs.sinks.delta.epoch_sink import DeltaEpochSink

    return sink.spark_table() if isinstance(sink, DeltaEpochSink) else ""


@contextmanager
def extra_needed() -> Iterator[None]:
    """Say of an import which extra of the package it needs.

    Raises:
        UsageError: it is not installed.
    """
    try:
        yield
    except ImportError as missing:
        raise UsageError(str(missing)) from missing


@extra_needed()
def kind_of(
    postgres: Postgres | str | None, kafka: Kafka | str | None, iceberg: Iceberg | str | None
) -> tuple[str, str]:
    """Return the kind of a sink outside, and as JSON what makes it again; `OWN` and nothing for any other.

    Raises:
        UsageError: the extra of the package that the kind needs is not installed.
    """
    if postgres is not None:
        from spark_abs.sinks.postgres.sink import Postgres

        return POSTGRES, _settings(POSTGRES, postgres, Postgres)
    if kafka is not None:
        from spark_abs.sinks.kafka.sink import Kafka

        return KAFKA, _settings(KAFKA, kafka, Kafka)
    if iceberg is not None:
        from spark_abs.sinks.iceberg.sink import Iceberg

        return ICEBERG, _settings(ICEBERG, iceberg, Iceberg)
    return OWN, ""


def _settings(kind: str, given: object, made: Callable[[str], object]) -> str:
    """Return what makes a sink again; a text stands for its settings with no more than that name.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(given, str):
        given = made(given)
    if type(given) is not made:
        raise UsageError(f"{kind}= takes a name as text or a spark_abs.{kind.capitalize()}, not {given!r}")
    return to_json(given)


def refuse_prepared(kind: str, settings: str) -> None:
    """Refuse a PostgreSQL sink that an earlier version ran with prepared transactions.

    A crash may have left a prepared transaction. It holds locks, and the mark may count its rows as
    committed; only a version that prepares transactions can end it.

    Args:
        kind: the kind of a sink.
        settings: its settings, as `control/` has them.

    Raises:
        UsageError: it is one.
    """
    if kind != POSTGRES:
        return
    stored = parsed(settings, dict, "settings of a PostgreSQL sink")
    if stored.get("prepared", False) is not False:
        raise UsageError(
            f"the sink of PostgreSQL table {stored.get('table')!r} ran with prepared=True, which this "
            "version does not have, and its last run may have left a prepared transaction on the server: "
            "start the job once with the earlier version and prepared=False, which ends that transaction, "
            "then with this version"
        )


@extra_needed()
def made_again(
    kind: str, settings: str, root: Root, session: Callable[[], SparkSession] = no_session
) -> TwoPhaseSink | None:
    """Make a sink of a kind; None for one of the user's own.

    Args:
        kind: which one.
        settings: what `control/` keeps of it.
        root: the job's root.
        session: called only where Spark is needed: a table of Delta is changed that is not plain, or a
            predicate says which rows delete.

    Raises:
        UsageError: the extra of the package that the kind needs is not installed, or the sink prepared its
            transactions, which this version does not.
    """
    match kind:
        case "postgres":
            from spark_abs.sinks.postgres.sink import Postgres, PostgresSink

            refuse_prepared(kind, settings)
            return PostgresSink(from_json(Postgres, settings), session)
        case "kafka":
            from spark_abs.sinks.kafka.sink import Kafka, KafkaSink

            return KafkaSink(from_json(Kafka, settings))
        case "iceberg":
            from spark_abs.sinks.iceberg.sink import Iceberg, IcebergSink

            return IcebergSink(from_json(Iceberg, settings))
        case "delta":
            from spark_abs.sinks.delta.epoch_sink import DeltaEpochSink, EpochTable

            return DeltaEpochSink(from_json(EpochTable, settings), root, session)
        case _:
            return None
