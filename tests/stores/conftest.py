"""One server of each kind for all tests here, and a prefix of its own for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spark_abs.store.root import Root
from tests.stores.server import KINDS, Server


@pytest.fixture(scope="session", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with KINDS[request.param](tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(autouse=True)
def usual_variables(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's libraries are told where their credentials are by nothing else."""
    for name, value in server.environment.items():
        if not name.startswith("SPARK_ABS_"):
            monkeypatch.setenv(name, value)


@pytest.fixture
def root(server: Server, request: pytest.FixtureRequest) -> Root:
    return Root(f"{server.top}/{request.node.originalname}/root", server.storage)
