"""Single promises of the PostgreSQL sink, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from spark_abs.model import AttemptId, CheckpointId, RunId, Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.postgres import Postgres, PostgresSink
from spark_abs.sinks.two_phase import Rows
from tests.outside.server import PostgresServer


class Some(Rows):
    """The rows of a batch."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._batch = pa.RecordBatch.from_pydict(columns)
        self.schema, self.count = self._batch.schema, self._batch.num_rows

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        yield self._batch


def mark(number: int) -> Mark:
    """Checkpoint `number`, whose cut is the entry of ten times that."""
    return Mark(AttemptId(1), CheckpointId(number), Version(10 * number))


class Sending:
    """A run that sends to a table, epoch by epoch."""

    def __init__(self, config: Postgres, run: int = 1, name: str = "sent") -> None:
        self.owner = Owner("0123456789abcdef0123456789abcdef", "job", name, RunId(run))
        self.sink = PostgresSink(config)
        self.mark = self.sink.recover(self.owner)

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: object) -> None:
        self.sink.close()

    def send(self, rows: Rows, floor: int = 0) -> None:
        number = 1 if self.mark is None else self.mark.checkpoint + 1
        before, first = self.mark or mark(0), self.mark is None
        self.mark = mark(number)
        self.sink.commit(Epoch(self.owner, before, self.mark, CheckpointId(floor), first=first), rows)

    def back(self, number: int, *, keep: bool = False) -> None:
        self.sink.abort(self.owner, mark(number), keep=keep)
        self.mark = mark(number)


def test_names_with_quotes_and_percent_signs_are_names(server: PostgresServer) -> None:
    server.run('CREATE TABLE "a""b%t%%(root)s;" ("k%" bigint PRIMARY KEY, "%s ""v" text)')
    config = Postgres('a"b%t%%(root)s;', key=("k%",), mode="upsert", history=True)
    rows = Some({"k%": [1], '%s "v': ["one"]})
    PostgresSink(config).check(rows.schema)
    with Sending(config) as sending:
        sending.send(rows)
        sending.send(Some({"k%": [1, 2], '%s "v': ["new", "two"]}))
        sending.back(1)
    assert server.run('SELECT * FROM "a""b%t%%(root)s;"') == [(1, "one")]
