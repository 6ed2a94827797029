"""Killed at every step of a send, PostgreSQL and Iceberg have every row once, and a restore goes back."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

import spark_abs
from spark_abs.errors import Refused
from tests.crash.facts import check, check_complete, last_totals
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess
from tests.outside.server import PostgresServer

pytestmark = pytest.mark.timeout(900)

KILLED_AT = {
    "before": "send.{}.commit.before@later",
    "within": "send.{}.rows.after@later",
    "after": "send.{}.commit.after@later",
}
"""Before the transaction; after its last row, before COMMIT; after it, before that is recorded."""
COLUMNS = ["id", "key", "kind", "amount", "token"]
Row = tuple[Any, ...]
TABLES = """
CREATE SCHEMA {0};
CREATE TABLE {0}.sent (id bigint, key text, kind text, amount bigint, token uuid);
CREATE TABLE {0}.quick (id bigint, key text, kind text, amount bigint, token uuid, PRIMARY KEY (id, kind));
CREATE TABLE {0}.last (key text PRIMARY KEY, n bigint, total bigint)
"""


def test_killed_anywhere_in_a_send_every_row_is_outside_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {name: Small(tmp_path / name) for name in KILLED_AT}
    with PostgresServer() as server:
        server.export(monkeypatch)
        lakes = {}
        for name, job in jobs.items():
            server.run(TABLES.format(name))
            lakes[name] = _lake(job.base, monkeypatch)

        def sends(sink: str) -> dict[str, str]:
            return {name: point.format(sink) for name, point in KILLED_AT.items()}

        def kill(which: dict[str, str], scratch: str) -> None:
            with DriverProcess(tmp_path / scratch) as driver:
                driver.wait_ready()
                for job in jobs.values():
                    job.feed()
                starts = [
                    {"base": str(jobs[name].base), "points": [point], "outside": True}
                    for name, point in which.items()
                ]
                driver.start(*starts, then="kill")

                def feed() -> None:
                    for job in jobs.values():
                        driver.require_running(job.base)
                        job.feed()

                driver.wait_for_end("all sends at their points", feed)

        kill(sends("sent"), "first")
        held = {name: server.run(f"SELECT count(*) FROM {name}.sent")[0][0] for name in jobs}
        assert [held["before"], held["within"], held["after"] > 0] == [0, 0, True]
        server.restart()
        kill(dict.fromkeys(jobs, "send.sent.recover.before"), "second")
        kill(sends("lake"), "third")
        server.restart()
        kill(sends("quick"), "quick")

        def last(name: str) -> list[tuple[Any, ...]]:
            return sorted(server.run(f"SELECT key, n, total FROM {name}.last"))

        def sent(name: str, table: str = "sent") -> Counter[Row]:
            return Counter(server.run(f"SELECT id, key, kind, amount, token::text FROM {name}.{table}"))

        with DriverProcess(tmp_path / "fourth") as driver:
            driver.wait_ready()
            for name, job in jobs.items():
                job.finish(driver, outside=True)
                check_complete(job.base, job.files)
                assert sent(name) == _rows_in(lakes[name]) == _arrived(job.base)
                assert sent(name, "quick") == _arrived(job.base)
                assert last(name) == sorted(map(tuple, last_totals(job.base)))

            # Back to a checkpoint: what PostgreSQL was given by append stays, as is said, and comes again.
            # One job does so: all have sent everything by now.
            name, job = "within", jobs["within"]
            back = max(manifest.id for manifest in job.completed())
            arrived, totals = _arrived(job.base), last_totals(job.base)
            job.feed()
            job.finish(driver, outside=True, checkpoint={"keep": 100})
            twice = _arrived(job.base) - arrived
            assert twice
            with pytest.raises(Refused, match=r"sink sent \(PostgreSQL\) has committed") as refused:
                spark_abs.open(str(job.base / "root")).restore(back)
            assert "sink lake" not in str(refused.value)
            spark_abs.open(str(job.base / "root")).restore(back, force=["outside"])
            assert _rows_in(lakes[name]) == sent(name, "quick") == arrived
            assert last(name) == sorted(map(tuple, totals))

            job.finish(driver, outside=True)
            check_complete(job.base, job.files)
            assert _rows_in(lakes[name]) == sent(name, "quick") == _arrived(job.base)
            assert last(name) == sorted(map(tuple, last_totals(job.base)))
            assert _as_read(sent(name)) == _as_read(_arrived(job.base) + twice)
        for job in jobs.values():
            check(job.base)


def _lake(base: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    """Make the table of a job, in a catalog of its own that processes find too."""
    place = {"type": "sql", "uri": f"sqlite:///{base}.db", "warehouse": f"file://{base}-lake"}
    monkeypatch.setenv(f"CATALOG_{base.name}", json.dumps(place))
    catalog = load_catalog("default", **place)
    catalog.create_namespace("shop")
    whole, text = pa.int64(), pa.string()
    return catalog.create_table(
        "shop.rows", pa.schema(zip(COLUMNS, (whole, text, text, whole, text), strict=True))
    )


def _rows_in(lake: Table) -> Counter[Row]:
    return _counted(lake.refresh().scan().to_arrow())


def _arrived(base: Path) -> Counter[Row]:
    """The rows of the Delta sink of the same output, with what was drawn for each."""
    return _counted(DeltaTable(str(base / "arrivals")).to_pyarrow_table())


def _counted(rows: pa.Table) -> Counter[Row]:
    return Counter(zip(*(rows[name].to_pylist() for name in COLUMNS), strict=True))


def _as_read(rows: Counter[Row]) -> Counter[Row]:
    """The rows without what is drawn anew when they are read again."""
    return Counter(row[:-1] for row in rows.elements())
