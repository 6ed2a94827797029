"""Every kind of sinks in the registry keeps the contract of two-phase sinks, on its real system."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from spark_abs.codec import to_json
from spark_abs.sinks import marked
from spark_abs.sinks.delta.options import EpochTable
from spark_abs.sinks.iceberg.config import Iceberg
from spark_abs.sinks.kafka.config import Kafka
from spark_abs.sinks.kafka.sink import KafkaSink
from spark_abs.sinks.postgres.config import Postgres
from spark_abs.sinks.registry import kinds, made_again
from spark_abs.sinks.two_phase import Rows, TwoPhaseSink
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Table
from spark_abs.testing.two_phase import SCHEMA, Row, check
from tests.outside.kafka_server import KafkaServer, Reader
from tests.outside.server import PostgresServer

PACKAGE = Path(marked.__file__).parent


class Target(NamedTuple):
    """A place for the rows of the check, empty."""

    config: object
    read: Callable[[], list[Row]]
    steps: tuple[str, ...]
    """The modules of the kind whose lines are steps."""
    every: int
    """How many steps there are from a stop to the next: one takes hundredths of a second."""


@pytest.fixture
def postgres(server: PostgresServer) -> Iterator[Target]:
    server.run("CREATE TABLE orders (id bigint PRIMARY KEY, text text)")
    with server.connect() as connection:

        def read() -> list[Row]:
            return connection.execute("SELECT id, text FROM orders").fetchall()

        yield Target(Postgres("orders"), read, ("sink", "write"), 7)


@pytest.fixture
def kafka(broker: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    broker.make("conformance")
    add, there = KafkaSink.commit, list[Row]()
    monkeypatch.setattr(KafkaSink, "commit", lambda sink, epoch, rows: add(sink, epoch, Records(rows)))
    with Reader(broker, "conformance") as reader:

        def read() -> list[Row]:
            messages, deadline = reader.read(), time.monotonic() + 60
            while not reader.at_end:
                assert time.monotonic() < deadline, "a transaction stays open"
                messages += reader.read()
            for message in messages:
                key, value = message.key(), message.value()
                assert isinstance(key, bytes)
                there.append((int(key), value.decode() if isinstance(value, bytes) else None))
            return there

        yield Target(Kafka("conformance", bootstrap=broker.bootstrap), read, ("sink",), 41)


class Records(Rows):
    """The rows of the check, as records."""

    def __init__(self, rows: Rows) -> None:
        self.schema = pa.schema([("key", pa.string()), ("value", pa.string())])
        self.count, self._rows = rows.count, rows

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._rows:
            columns = [batch.column("id").cast(pa.string()), batch.column("text")]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


@pytest.fixture
def iceberg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    settings = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/w"}
    monkeypatch.setenv("CATALOG", json.dumps(settings))
    catalog = load_catalog("default", **settings)
    catalog.create_namespace("shop")
    catalog.create_table("shop.orders", SCHEMA)

    def read() -> list[Row]:
        return _pairs(catalog.load_table("shop.orders").scan().to_arrow())

    yield Target(Iceberg("shop.orders", catalog_env="CATALOG"), read, ("sink", "files"), 31)
    catalog.close()


@pytest.fixture
def delta(tmp_path: Path) -> Target:
    """A table that needs no Spark; the layouts that do are in the tests on Spark."""
    uri = str(tmp_path / "orders")
    Table.ensure(Place(uri), SCHEMA, {})
    steps = ("epoch_sink", "rollback", "marks", "epoch_files")
    return Target(EpochTable(uri), lambda: _pairs(DeltaTable(uri).to_pyarrow_table()), steps, 9)


def _pairs(rows: pa.Table) -> list[Row]:
    return list(zip(rows["id"].to_pylist(), rows["text"].to_pylist(), strict=True))


CASES = [
    *(pytest.param(kind, None, id=kind) for kind in kinds()),
    pytest.param("kafka", 17, id="kafka, stopped more often", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("kind", "every"), CASES)
def test_every_kind_has_every_row_once(
    kind: str, every: int | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target: Target = request.getfixturevalue(kind)
    settings, root = to_json(target.config), Root(str(tmp_path / "root"))

    def sink() -> TwoPhaseSink:
        made = made_again(kind, settings, root)
        assert made is not None
        return made

    steps = [*(str(PACKAGE / kind / f"{name}.py") for name in target.steps), marked.__file__]
    check(sink, target.read, modules=steps, every=every or target.every)
