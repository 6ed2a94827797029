"""A root, and its `state/` as run 1 writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_abs.model import RunId
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.store.root import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(str(tmp_path / "root"))


@pytest.fixture
def kept(root: Root) -> StateStorage:
    return StateStorage.open(root, "job", RunId(1))
