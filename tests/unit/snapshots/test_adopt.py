"""The checkpoint of a query is copied as it is at one moment, though Spark may still clean up in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spark_abs.errors import Refused
from spark_abs.snapshots import adopt as module
from spark_abs.snapshots.adopt import adopt_native
from spark_abs.store.storage import Place


@pytest.fixture
def source(tmp_path: Path) -> Path:
    at = tmp_path / "query"
    for name in ("metadata", "offsets/0", "state/0/0/1.changelog"):
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(name)
    return at


def copy(source: Path, target: Path, meanwhile: Callable[[], None]) -> set[str]:
    adopt_native(Place(str(source)), Place(str(target)), meanwhile)
    return names(target)


def names(at: Path) -> set[str]:
    return {str(p.relative_to(at)) for p in at.rglob("*") if p.is_file()}


def test_a_snapshot_that_is_uploaded_meanwhile_is_copied_whole(source: Path, tmp_path: Path) -> None:
    """Of a snapshot the zip must not be there without the files that it names."""

    def upload() -> None:
        (source / "state/0/0/1.zip").write_text("names SSTs/a")
        (source / "state/0/0/SSTs").mkdir(exist_ok=True)
        (source / "state/0/0/SSTs/a").write_text("a")

    later = iter([upload])
    found = copy(source, tmp_path / "native", lambda: next(later, lambda: None)())
    assert found == names(source)
    assert "state/0/0/SSTs/a" in found


def test_a_file_that_is_deleted_meanwhile_is_not_missed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = module._files
    later = iter([(source / "state/0/0/1.changelog").unlink])

    def after_listing(infos: object) -> object:
        found = listed(infos)  # type: ignore[arg-type]
        next(later, lambda: None)()
        return found

    monkeypatch.setattr(module, "_files", after_listing)
    assert copy(source, tmp_path / "native", lambda: None) == {"metadata", "offsets/0"}


def test_a_query_that_runs_on_is_not_copied(source: Path, tmp_path: Path) -> None:
    numbers = iter(range(1, 100))

    def run_on() -> None:
        (source / f"offsets/{next(numbers)}").write_text("more")

    with pytest.raises(
        Refused, match="changed during each attempt to copy it, so its query is still running"
    ):
        copy(source, tmp_path / "native", run_on)
    assert not (tmp_path / "native/metadata").exists()
