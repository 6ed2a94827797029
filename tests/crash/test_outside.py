"""Killed at every step of a send, with a server that crashes too, PostgreSQL has every row once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.crash.facts import check, check_complete, last_totals
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess
from tests.outside.server import PostgresServer

pytestmark = pytest.mark.timeout(900)

KILLED_AT = {
    "before": "send.sent.commit.before@later",
    "within": "send.sent.rows.after@later",
    "behind": "send.sent.commit.after@later",
}
"""Before the transaction; behind its last row, before COMMIT; behind it, before that is recorded."""
TABLES = """
CREATE SCHEMA {0};
CREATE TABLE {0}.sent (id bigint, key text, kind text, amount bigint, token uuid);
CREATE TABLE {0}.last (key text PRIMARY KEY, n bigint, total bigint)
"""


def test_killed_anywhere_in_a_send_every_row_is_outside_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {name: Small(tmp_path / name) for name in KILLED_AT}
    with PostgresServer() as server:
        server.export(monkeypatch)
        for name in jobs:
            server.run(TABLES.format(name))

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

        kill(KILLED_AT, "first")
        held = {name: server.run(f"SELECT count(*) FROM {name}.sent")[0][0] for name in jobs}
        assert [held["before"], held["within"], held["behind"] > 0] == [0, 0, True]
        server.restart()
        kill(dict.fromkeys(jobs, "send.sent.recover.before"), "second")

        with DriverProcess(tmp_path / "third") as driver:
            driver.wait_ready()
            for job in jobs.values():
                job.finish(driver, outside=True)
        for name, job in jobs.items():
            check(job.base)
            check_complete(job.base, job.files)
            sent = server.run(f"SELECT id, key, kind, amount, token::text FROM {name}.sent")
            assert Counter(sent) == Counter(_arrived(job.base))
            last = server.run(f"SELECT key, n, total FROM {name}.last")
            assert sorted(last) == sorted(map(tuple, last_totals(job.base)))


def _arrived(base: Path) -> list[tuple[object, ...]]:
    """The rows of the Delta sink of the same output, with what was drawn for each."""
    columns = ["id", "key", "kind", "amount", "token"]
    rows = DeltaTable(str(base / "arrivals")).to_pyarrow_table(columns=columns)
    return list(zip(*(rows[name].to_pylist() for name in columns), strict=True))
