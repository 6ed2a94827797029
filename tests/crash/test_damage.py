"""Bytes that are torn, truncated, altered or missing are named and refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spark_abs.cli.main import main
from spark_abs.manifest import Manifest
from spark_abs.protocol.control import ControlState
from spark_abs.store.control import Control
from tests.crash.expected import write_file
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def job(first: DriverProcess, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A job that has ended twice, each time with a checkpoint of what was new."""
    small = Small(tmp_path_factory.mktemp("damage"))
    for _ in range(2):
        for _ in range(2):
            write_file(small.base, small.files)
            small.files += 1
        small.finish(first, checkpoint={"interval": "1h"})
    return small


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "torn": lambda data: data[: len(data) // 2],
    "truncated": lambda data: data[:-1],
    "altered": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "missing": lambda data: None,
}


@contextmanager
def damaged(file: Path, how: str) -> Iterator[None]:
    """Damage a file, and bring it back."""
    data = file.read_bytes()
    spoiled = DAMAGE[how](data)
    file.unlink()
    if spoiled is not None:
        file.write_bytes(spoiled)
    try:
        yield
    finally:
        file.write_bytes(data)


@pytest.mark.parametrize("how", ["torn", "truncated", "missing"])
def test_damage_in_state_is_named_and_refused(job: Small, how: str) -> None:
    newest = job.completed()[-1]
    pack = own_pack(job)
    with damaged(pack, how):
        assert pack.name in verified(job, "latest")
        assert pack.name in verified(job)
        refused = call("restore", job, "--to", "latest", "--yes")
        assert (refused.exit_code, pack.name in refused.output) == (3, True)
        planned = call("restore", job, "--to", "latest", "--fallback", "--dry-run")
        assert planned.exit_code == 0, planned.output
        assert f"this restores {job.completed()[-2].id}, the newest intact" in planned.output
    assert call("verify", job, str(newest.id)).exit_code == 0


@pytest.mark.parametrize("how", ["torn", "truncated", "missing"])
def test_damage_in_checkpoints_is_named_and_refused(job: Small, how: str) -> None:
    newest = job.completed()[-1]
    (row,) = (job.base / "root" / "checkpoints").glob(f"{newest.id:08d}-*.parquet")
    before = job.completed()[-2]
    with damaged(row, how):
        assert row.name in verified(job)
        refused = call("restore", job, "--to", "latest", "--yes")
        assert (refused.exit_code, row.name in refused.output) == (3, True)
        planned = call("restore", job, "--to", "latest", "--fallback", "--dry-run")
        assert planned.exit_code == 0, planned.output
        assert f"this restores {before.id}, the newest intact" in planned.output
    assert call("verify", job).exit_code == 0


@pytest.mark.parametrize("log", ["offsets", "commits"])
@pytest.mark.parametrize("how", DAMAGE)
def test_damage_in_a_native_log_is_named(job: Small, log: str, how: str) -> None:
    directory = native(job) / log
    newest = max((p for p in directory.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    with damaged(newest, how):
        assert str(newest.relative_to(job.base / "root").parent.parent) in verified(job)
    assert call("verify", job).exit_code == 0


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_in_native_state_is_named(job: Small, how: str) -> None:
    states = [p for p in (native(job) / "state").rglob("*") if p.is_file() and not p.name.startswith(".")]
    newest = max(states, key=lambda p: p.stat().st_mtime_ns)
    with damaged(newest, how):
        assert newest.name in verified(job)
    assert call("verify", job).exit_code == 0


def verified(job: Small, *checkpoint: str) -> str:
    """Run verify, which must find something, and return what it says."""
    done = call("verify", job, *checkpoint)
    assert done.exit_code == 3, done.output
    return done.output


def call(command: str, job: Small, *arguments: str) -> Result:
    return CliRunner().invoke(main, [command, job.root.uri, *arguments])


def native(job: Small) -> Path:
    return job.base / "root" / "native" / str(_state(job).attempt.id) / "pair"


def own_pack(job: Small) -> Path:
    """Return a pack that the newest checkpoint needs and the one before does not."""
    *_, before, newest = job.completed()
    (name, *_) = sorted(_packs(newest) - _packs(before))
    return job.base / "root" / "state" / name


def _packs(manifest: Manifest) -> set[str]:
    return {file.at.pack for stage in manifest.stages for file in stage.files}


def _state(job: Small) -> ControlState:
    return Control.open(job.root).state
