"""The manifests of a root, as one handle reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import CheckpointId, RunId
from spark_abs.store.root import Root
from spark_abs.store.table import Table
from tests.snapshot_support import manifest_of


def test_manifests_are_read_again_only_when_others_stand_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever completed or retired them."""
    root = Root(str(tmp_path / "root"))
    mine, other = Checkpoints.open(root, "job"), Checkpoints.open(root, "job")
    read, times = Table.read, list[int]()

    def counted(*args: Any) -> Any:
        times.append(1)
        return read(*args)

    monkeypatch.setattr(Table, "read", counted)

    def ids() -> tuple[list[int], int]:
        times.clear()
        return [m.id for m in mine.load_all()], len(times)

    assert ids() == ([], 1)
    other.complete(manifest_of(1))
    assert ids() == ([1], 1)
    assert ids() == ([1], 0)
    mine.complete(manifest_of(2))
    assert ids() == ([1, 2], 1)
    assert other.retire((CheckpointId(1),), RunId(1))
    assert ids() == ([2], 1)
    assert ids() == ([2], 0)
