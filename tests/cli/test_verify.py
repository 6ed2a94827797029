"""Damage is named, whatever kind it is, and ends in exit code 3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import CheckpointId
from spark_abs.store.storage import Place
from spark_abs.store.table import Table
from tests.cli.conftest import Cli
from tests.root_support import SmallJob, offsets_of


def missing(file: Path) -> None:
    file.unlink()


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-30])


def altered(file: Path) -> None:
    """Flip one bit of what the file is there for."""
    data = bytearray(file.read_bytes())
    at = data.find(b"offsets/") + 20 if b"offsets/" in data else len(data) // 2
    data[at] ^= 1
    file.write_bytes(bytes(data))


def altered_in_a_pack(file: Path) -> None:
    data = file.read_bytes()
    assert data.count(b'"batch": 0') == 1
    file.write_bytes(data.replace(b'"batch": 0', b'"batch": 1'))


DAMAGES = [
    ("state", "pack-*.parquet", missing),
    ("state", "pack-*.parquet", truncated),
    ("state", "pack-*.parquet", altered_in_a_pack),
    ("checkpoints", "00000001-*.parquet", missing),
    ("checkpoints", "00000001-*.parquet", truncated),
    ("checkpoints", "00000001-*.parquet", altered),
]


@pytest.mark.parametrize(
    ("where", "name", "damage"), DAMAGES, ids=lambda v: v.__name__ if callable(v) else str(v)
)
def test_damage_is_named_and_refused(
    job: SmallJob, cli: Cli, where: str, name: str, damage: Callable[[Path], None]
) -> None:
    job.checkpoint(1)
    cli("verify")
    cli("verify", "1")
    files = sorted(Path(job.root.path(where)).glob(name))
    assert files
    for file in files:
        damage(file)
    found = cli.json("verify", exits=3)["findings"]
    assert any(finding["path"].startswith(f"{where}/") for finding in found)
    assert {finding["checkpoint"] for finding in found} == {1}
    cli("verify", "1", exits=3)
    assert "damaged" in cli("restore", "--to", "1", "--yes", "--force", exits=3).stderr
    assert job.state.attempt.id == 1


def test_a_lost_native_directory_is_named(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    for file in Path(job.root.path("native/1/b")).rglob("*"):
        if file.is_file():
            file.unlink()
    native = Path(job.root.path("native/1/b"))
    native.rename(native.with_name("elsewhere"))
    (finding,) = cli.json("verify", exits=3)["findings"]
    assert (finding["path"], finding["problem"]) == ("native/1/b", "missing")
    assert "native/1/b" in cli("verify", exits=3).stdout


def test_a_restored_native_directory_is_compared_with_the_manifest(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    cli("restore", "--to", "1", "--yes")
    cli("verify")
    Path(job.root.path("native/2/a/offsets/0")).write_text(offsets_of("a", 9))
    found = cli.json("verify", exits=3)["findings"]
    assert found[0]["path"] == "native/2/a/offsets/0"


def test_a_log_with_a_hole_is_damage(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    Path(job.root.path("channels/a.main/_delta_log/00000000000000000001.json")).unlink()
    found = cli.json("verify", "1", exits=3)["findings"]
    assert found[0]["path"] == "channels/a.main"
    Path(job.root.path("checkpoints/_delta_log/00000000000000000001.json")).unlink()
    result = cli("list", exits=3)
    assert result.stderr.count("\n") == 1


def test_a_checkpoint_may_retire_meanwhile_beside_a_damaged_one(
    job: SmallJob, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in (1, 2, 3):
        job.checkpoint(n)
    (row,) = Path(job.root.path("checkpoints")).glob("00000003-*.parquet")
    truncated(row)
    load, retired = Checkpoints.load, list[bool]()

    def while_retiring(self: Checkpoints, checkpoint: CheckpointId) -> Manifest:
        if not retired:
            retired.append(job.checkpoints.retire([CheckpointId(2)], job.run))
        return load(self, checkpoint)

    monkeypatch.setattr(Checkpoints, "load", while_retiring)
    (found,) = cli.json("verify", exits=3)["findings"]
    assert found["path"] == f"checkpoints/{row.name}"
    assert retired == [True]


def test_the_checkpoints_beside_a_damaged_one_are_opened_together(
    job: SmallJob, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.checkpoint(1)
    (row,) = Path(job.root.path("checkpoints")).glob("00000001-*.parquet")
    truncated(row)
    opened, counts, found = list[str](), list[int](), Table.open

    def counted(place: Place) -> Table:
        opened.append(place.uri)
        return found(place)

    for n in (2, 3, 4):
        job.checkpoint(n)
        with monkeypatch.context() as patched:
            patched.setattr(Table, "open", counted)
            cli("verify", exits=3)
        counts.append(opened.count(job.root.place("checkpoints").uri))
        opened.clear()
    assert counts[0] > 0
    assert set(counts) == {counts[0]}
