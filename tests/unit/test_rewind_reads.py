"""What a rewind reads to be planned: each file of a log once, so that the reads grow with the batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from bench import planning

from tests.failing_storage import fail_reads


def reads(monkeypatch: pytest.MonkeyPatch, base: Path, batches: int) -> Counter[str]:
    """Plan a rewind; return how often each file was opened by this package, which deltalake does not show."""
    moment_ms, opened = planning.write_queries(base, batches), Counter[str]()

    def note(path: str) -> bool:
        opened[path] += 1
        return False

    with monkeypatch.context() as patch:
        fail_reads(patch, note)
        assert planning.plan(base, moment_ms).changes
    return opened


def test_each_log_file_is_read_once_to_plan_a_rewind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ten queries: a file of each batch and one of each commit; equally many more for more batches."""
    opened = [reads(monkeypatch, tmp_path / str(batches), batches) for batches in (6, 12, 18)]
    for batches, found in zip((6, 12, 18), opened, strict=True):
        logs = {p: n for p, n in found.items() if "/offsets/" in p or "/_delta_log/" in p}
        assert set(logs.values()) == {1}
        assert len(logs) == len(planning.SOURCES) * (batches + batches + 1)
    first, second, third = (found.total() for found in opened)
    assert third - second == second - first
