"""One S3-compatible server for all tests here, and a prefix of its own for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spark_abs.store.root import Root
from tests.s3.server import BUCKET, Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def root(server: Server, request: pytest.FixtureRequest) -> Root:
    return Root(f"s3://{BUCKET}/{request.node.name}/root", server.storage)
