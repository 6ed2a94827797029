"""Queries that share a root: starting, stopping and asking them, and what their tables hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deltalake import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

import spark_abs
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.protocol import control as ledger
from spark_abs.store.control import Control
from spark_abs.store.lease import read_lease
from spark_abs.store.root import Root

SCHEMA = "id long"


def wait(condition: Callable[[], object], what: str, query: StreamingQuery | None = None) -> None:
    """Wait until a condition holds; fail at once if the query has."""
    deadline, pause = time.monotonic() + 120, threading.Event()
    while not condition():
        assert query is None or query.isActive or condition(), f"{what}: {query.exception()}"
        assert time.monotonic() < deadline, what
        pause.wait(0.05)


def append_to(table: str, app: str = "") -> Callable[[DataFrame, int], None]:
    """Return a batch function that writes a Delta table as Spark's documentation has it.

    Args:
        table: the table.
        app: its `txnAppId`; empty: that of the attempt.
    """

    def write(batch: DataFrame, number: int) -> None:
        current = app or spark_abs.current().app_id
        writer = batch.write.format("delta").mode("append").option("txnAppId", current)
        writer.option("txnVersion", number).save(table)

    return write


def begin(
    frame: DataFrame,
    root: str,
    stage: str,
    table: str,
    adopt: str | None = None,
    *,
    app: str = "",
    every: str = "0 seconds",
    timeout: str = "10m",
    interval: str = "300ms",
    function: Callable[[DataFrame, int], None] | None = None,
) -> StreamingQuery:
    """Start a query that takes part in the checkpoints of a root.

    Args:
        frame: its rows.
        root: the root.
        stage: its name.
        table: what it writes.
        adopt: its old checkpoint.
        app: its `txnAppId`; empty: that of the attempt.
        every: its trigger.
        timeout: of checkpoints, if it begins the run.
        interval: of checkpoints, if it begins the run.
        function: writes the table; None: appends to it.
    """
    write = append_to(table, app) if function is None else function
    function = spark_abs.foreach_batch(
        write, root=root, stage=stage, interval=interval, timeout=timeout, tables=[table]
    )
    location = spark_abs.checkpoint_location(root, stage, adopt=adopt)
    writer = frame.writeStream.foreachBatch(function).option("checkpointLocation", location)
    return writer.trigger(processingTime=every).start()


def stop(root: str, *queries: StreamingQuery) -> None:
    """Stop the queries of a root while they are idle, and see their run end."""
    for query in queries:
        if query.isActive:
            query.processAllAvailable()
        query.stop()
    wait(lambda: (lease := read_lease(Root(root))) is None or lease.ended, "the run has ended")


@contextmanager
def running(
    frame: DataFrame, root: str, stage: str, table: str, adopt: str | None = None, *, app: str = ""
) -> Iterator[StreamingQuery]:
    """Run the only query of a root; stop it while it is idle, and see its run end."""
    query = begin(frame, root, stage, table, adopt, app=app)
    try:
        yield query
    finally:
        stop(root, query)


def ids(table: str) -> list[int]:
    if not DeltaTable.is_deltatable(table):
        return []
    return sorted(DeltaTable(table).to_pyarrow_table()["id"].to_pylist())


def holds(table: str, expected: list[int]) -> bool:
    return ids(table) == expected


def newest(root: str) -> Manifest | None:
    """Return the newest checkpoint."""
    return next(reversed(Checkpoints.open(Root(root), "queries").load_all()), None)


def covers(root: str, *stages: str, after: int = 0) -> bool:
    """Say whether the newest checkpoint has a part of each of these, and a higher id than `after`."""
    found = newest(root)
    return found is not None and found.id > after and {s.stage for s in found.stages} >= set(stages)


def command(root: str, name: str, query: StreamingQuery) -> ledger.Command:
    """Ask for a savepoint as the command line does, and wait for the answer."""
    control = Control.open(Root(root))
    control.update(lambda s: ledger.ask(s, ledger.Command(name, ledger.CommandKind.SAVEPOINT, name, 0)))

    def answered() -> list[ledger.Command]:
        return [c for c in control.state.commands if c.id == name and c.answered]

    wait(answered, "the savepoint is answered", query)
    return answered()[0]
