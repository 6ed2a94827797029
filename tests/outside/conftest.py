"""One server for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.outside.kafka_server import KafkaServer
from tests.outside.rest_catalog import RestCatalog
from tests.outside.server import PostgresServer


@pytest.fixture(scope="session")
def started() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def server(started: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> PostgresServer:
    """The server, with libpq's environment set and nothing in its schema."""
    started.export(monkeypatch)
    started.run("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return started


@pytest.fixture(scope="session")
def broker() -> Iterator[KafkaServer]:
    with KafkaServer() as server:
        yield server


@pytest.fixture(scope="session")
def rest_catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestCatalog]:
    with RestCatalog(tmp_path_factory.mktemp("rest") / "warehouse") as server:
        yield server
