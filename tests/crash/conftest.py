"""Two driver processes that the tests share which do not kill theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.process import DriverProcess


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverProcess]:
    with DriverProcess(tmp_path_factory.mktemp("first")) as driver:
        driver.wait_ready()
        yield driver


@pytest.fixture(scope="session")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverProcess]:
    with DriverProcess(tmp_path_factory.mktemp("second")) as driver:
        driver.wait_ready()
        yield driver
