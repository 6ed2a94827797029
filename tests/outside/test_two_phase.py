"""The contract of two-phase sinks, held by the guide's example and by merges, and broken by others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from spark_abs.sinks.postgres import sink as postgres
from spark_abs.sinks.postgres import write as postgres_write
from spark_abs.sinks.postgres.sink import Postgres, PostgresSink
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.testing.two_phase import NotOnce, Row, check
from tests.markdown_support import GUIDE, blocks
from tests.outside.server import PostgresServer

PAGE = GUIDE / "sinks-of-your-own.md"


def example(
    tmp_path: Path, change: Callable[[str], str] = lambda text: text
) -> Callable[[Path], TwoPhaseSink]:
    """Load the sink that the guide shows, changed."""
    (shown,) = (block.code for block in blocks(PAGE) if block.code.startswith("import fcntl"))
    changed = change(shown)
    module = tmp_path / "example.py"
    module.write_text(changed)
    names: dict[str, Any] = {}
    exec(compile(changed, str(module), "exec"), names)
    made: Callable[[Path], TwoPhaseSink] = names["Directory"]
    return made


def run(tmp_path: Path, made: Callable[[Path], TwoPhaseSink]) -> None:
    place = tmp_path / "place"
    place.mkdir()

    @cache
    def rows_in(_: int, file: Path) -> list[Row]:
        return [(row["id"], row["text"]) for row in pq.read_table(file).to_pylist()]

    def read() -> list[Row]:
        return [row for file in place.glob("*.parquet") for row in rows_in(file.stat().st_mtime_ns, file)]

    check(lambda: made(place), read, modules=[str(tmp_path / "example.py")])


def test_the_example_of_the_guide_has_every_row_once(tmp_path: Path) -> None:
    run(tmp_path, example(tmp_path))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if newest > owner.run:", "if False:"),  # lets a replaced run in
        (
            "os.replace(unseen, ",
            "os.replace(unseen, self.place / 'x.parquet') or os.replace(self.place / 'x.parquet', ",
        ),
        ("if self.mark(epoch.owner) != (None if epoch.first else epoch.after):", "if False:"),
        ("for file in self._behind(back):", "for file in ():"),
        ("if self.mark(owner) is None:", "if False:"),
    ],
    ids=["no fence", "seen before its mark", "no look at the mark", "takes nothing back", "mark of nothing"],
)
def test_a_sink_that_does_less_is_caught(tmp_path: Path, before: str, after: str) -> None:
    def change(text: str) -> str:
        assert not text or before in text
        return text.replace(before, after)

    with pytest.raises(NotOnce):
        run(tmp_path, example(tmp_path, change))


@pytest.mark.parametrize(
    "config",
    [
        Postgres("orders", key=("id",), mode="upsert", history=True),
        Postgres("orders", key="id", mode="upsert", history=True, sequence_by="id", ignore_null_updates=True),
    ],
    ids=["upsert with history", "changes"],
)
def test_a_table_of_postgres_with_a_key_has_every_row_once(server: PostgresServer, config: Postgres) -> None:
    server.run("CREATE TABLE orders (id bigint PRIMARY KEY, text text)")
    with server.connect() as connection:

        def read() -> list[Row]:
            return connection.execute("SELECT id, text FROM orders").fetchall()

        modules = [postgres.__file__, postgres_write.__file__]
        check(lambda: PostgresSink(config), read, modules=modules, every=19)


def test_without_a_lock_on_its_mark_postgres_is_caught(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.run("CREATE TABLE orders (id bigint, text text)")
    monkeypatch.setattr(PostgresSink, "_lock", lambda *given: given[-1])
    monkeypatch.setattr(PostgresSink, "_end_others", lambda *_: None)  # nor is a late run's connection ended
    with server.connect() as connection:

        def read() -> list[Row]:
            return connection.execute("SELECT id, text FROM orders").fetchall()

        with pytest.raises((NotOnce, psycopg.Error)):
            check(lambda: PostgresSink(Postgres("orders")), read, modules=[postgres.__file__], every=7)
