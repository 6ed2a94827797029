"""PostgreSQL in the registry of kinds."""

from __future__ import annotations

from spark_abs.codec import parsed
from spark_abs.errors import UsageError
from spark_abs.sinks.kind import Kind, Session
from spark_abs.sinks.postgres.config import Postgres
from spark_abs.sinks.two_phase import TwoPhaseSink


def _sink(config: Postgres, _: object, session: Session) -> TwoPhaseSink:
    from spark_abs.sinks.postgres.sink import PostgresSink

    return PostgresSink(config, session)


def _refuse_prepared(settings: str) -> None:
    """Refuse a sink that an earlier version ran with prepared transactions.

    A crash may have left a prepared transaction. It holds locks, and the mark may count its rows as
    committed; only a version that prepares transactions can end it.

    Raises:
        UsageError: it is one.
    """
    stored = parsed(settings, dict, "settings of a PostgreSQL sink")
    if stored.get("prepared", False) is not False:
        raise UsageError(
            f"the sink of PostgreSQL table {stored.get('table')!r} ran with prepared=True, which this "
            "version does not have, and its last run may have left a prepared transaction on the server: "
            "start the job, with this sink, once with the earlier version and prepared=False, which ends "
            "that transaction, then with this version and without prepared="
        )


KIND = Kind("PostgreSQL", Postgres, _sink, require_supported=_refuse_prepared)
