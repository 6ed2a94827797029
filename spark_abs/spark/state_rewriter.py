"""Spark's own rewriting of state stores, a private API. Written for Spark 4.2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_abs.model import BatchId

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITION_KEY, KEY, VALUE, FAMILY = "partition_key", "key_bytes", "value_bytes", "column_family_name"
"""The columns of a state store in a rewrite: Spark's partition key, and the bytes of each entry."""


@dataclass(frozen=True, slots=True)
class Store:
    """One state store of a stateful operator, with all its partitions."""

    operator: int
    name: str


Change = Callable[[Store, "DataFrame"], "DataFrame"]


def read_entries(session: SparkSession, source: str, batch: BatchId, store: Store) -> DataFrame:
    """Return the entries of a store in a native checkpoint after a batch, in the store's partitions."""
    _ = session.streams  # makes the coordinator of state stores
    jvm: Any = session._jvm
    options = jvm.org.apache.spark.sql.execution.datasources.v2.state.StateSourceOptions
    reader = session.read.format("statestore").option("batchId", int(batch)).option("storeName", store.name)
    raw = reader.option(options.INTERNAL_ONLY_READ_ALL_COLUMN_FAMILIES(), "true")
    return raw.option("operatorId", store.operator).load(source)


def rewrite_state(session: SparkSession, source: str, target: str, batch: BatchId, change: Change) -> None:
    """Rewrite the state of a native checkpoint after a batch, into a copy that has all files except state.

    Args:
        session: a session.
        source: the native checkpoint to read.
        target: the copy. The settings in its `offsets/<batch>` determine how state is written.
        batch: the batch.
        change: takes a store and a frame of its entries, with a partition for each partition of the store;
            returns the new entries, with the same columns and partitions.
    """
    from pyspark.java_gateway import ensure_callback_server_started

    _ = session.streams  # makes the coordinator of state stores
    context: Any = session.sparkContext
    start: Any = ensure_callback_server_started
    start(context._gateway)
    jvm: Any = session._jvm
    function = _Function(session, change)
    java_session = session._jsparkSession
    option = jvm.scala.Option
    rewriter = jvm.org.apache.spark.sql.execution.streaming.state.StateRewriter(
        java_session,
        int(batch),
        int(batch),
        target,
        java_session.sessionState().newHadoopConf(),
        option.apply(source),
        option.apply(function),
        option.empty(),
    )
    try:
        rewriter.run()
    except Exception:
        if function.error is not None:
            raise function.error from None
        raise


class _Function:
    """A Scala function in Python: Spark calls it for each store, in a callback thread."""

    def __init__(self, session: SparkSession, change: Change) -> None:
        self.error: Exception | None = None
        self._session, self._change = session, change

    def apply(self, frame: Any) -> Any:
        """Return the new entries of a store."""
        from pyspark.sql import DataFrame

        try:
            options = frame.queryExecution().analyzed().options()
            store = Store(int(options.get("operatorId")), str(options.get("storeName")))
            changed: Any = self._change(store, DataFrame(frame, self._session))
            return changed._jdf
        except Exception as error:
            self.error = error
            raise

    class Java:
        """The Java interface, for py4j."""

        implements = ("scala.Function1",)
