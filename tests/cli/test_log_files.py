"""What `list` costs: files of Delta logs that it opens, as the kernel counts them."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import AttemptId, CheckpointId, CheckpointKind, RunId
from spark_abs.observe.listing import checkpoint_rows
from spark_abs.protocol import control as ledger
from spark_abs.store.control import Control
from spark_abs.store.root import Root

IN_OPEN, IN_ISDIR, IN_Q_OVERFLOW = 0x20, 0x40000000, 0x4000
DELTA_CHECKPOINT_INTERVAL = 10


@contextmanager
def opened_in(*directories: str) -> Iterator[list[str]]:
    """Collect the paths of files opened in directories, one for each opening, by any code of the process.

    The kernel tells (inotify): the logs are read by compiled code, which no hook of Python sees.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert watch >= 0
    names: list[str] = []
    try:
        watched = {libc.inotify_add_watch(watch, os.fsencode(d), IN_OPEN): d for d in directories}
        assert min(watched) >= 0
        yield names
        names += (f"{watched[number]}/{name}" for number, name in _drain(watch))
    finally:
        os.close(watch)


def _drain(watch: int) -> Iterator[tuple[int, str]]:
    while True:
        try:
            data = os.read(watch, 1 << 20)
        except BlockingIOError:
            return
        at = 0
        while at < len(data):
            number, mask, _, length = struct.unpack_from("iIII", data, at)
            assert not mask & IN_Q_OVERFLOW, "more openings than the kernel keeps"
            if not mask & IN_ISDIR:
                yield number, data[at + 16 : at + 16 + length].rstrip(b"\0").decode()
            at += 16 + length


def root_with(path: Path, count: int) -> Root:
    """Complete `count` savepoints, bookkeeping in `control/` included.

    Ten at each end come about the way a run makes them; those between are copies of a real commit.
    """
    root = Root(str(path))
    control = Control.create(root, "job", 0)
    control.update(lambda s: ledger.begin_run(s, "here", 1, 0))
    checkpoints = Checkpoints.open(root, "job")
    complete(control, checkpoints, range(1, 11))
    if count > 10:
        repeat_newest_commit(root, "checkpoints", count - 20)
        repeat_newest_commit(root, "control", 2 * (count - 20))
        complete(control, checkpoints, range(count - 9, count + 1))
    return root


def complete(control: Control, checkpoints: Checkpoints, numbers: range) -> None:
    for number in numbers:
        control.update(settle_and_claim)
        checkpoint, kind = CheckpointId(number), CheckpointKind.SAVEPOINT
        assert checkpoints.complete(
            Manifest(checkpoint, AttemptId(1), RunId(1), "job", kind, None, 0, 1, 2, (), ())
        )


def repeat_newest_commit(root: Root, table: str, times: int) -> None:
    """Commit what the newest commit did again and again, each time with a data file of its own."""
    directory = Path(root.path(table))
    newest = max((directory / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for line in newest.read_text().splitlines()]
    adds = [action["add"] for action in actions if "add" in action]
    removes = [action["remove"] for action in actions if "remove" in action]
    (add,) = adds
    for version in range(int(newest.stem) + 1, int(newest.stem) + times + 1):
        for remove in removes:
            remove["path"] = add["path"]
        fresh = f"{version:08d}-{uuid.uuid4().hex}.parquet"
        shutil.copyfile(directory / add["path"], directory / fresh)
        add["path"] = fresh
        log = "".join(json.dumps(action) + "\n" for action in actions)
        (directory / "_delta_log" / f"{version:020d}.json").write_text(log)


def settle_and_claim(state: ledger.ControlState) -> ledger.ControlState:
    state = ledger.settle(state, completed=tuple(c.barrier.id for c in state.claims))
    return ledger.claim(state, RunId(1), kind=CheckpointKind.SAVEPOINT, name=None, now_ms=0)[0]


def log_files_of_list(root: Root, rows: int) -> list[str]:
    with opened_in(root.path("checkpoints/_delta_log"), root.path("control/_delta_log")) as names:
        assert len(checkpoint_rows(root, 0)) == rows
    return names


def test_a_thousand_checkpoints_open_no_more_log_files_than_ten(tmp_path: Path) -> None:
    few = log_files_of_list(root_with(tmp_path / "few", 10), 10)
    many = log_files_of_list(root_with(tmp_path / "many", 1000), 1000)
    # Each table: what came since Delta's own checkpoint (10 commits apart), and that checkpoint itself.
    assert few
    assert len(set(many)) <= len(set(few)) + 2 * (DELTA_CHECKPOINT_INTERVAL + 2)


def test_the_count_would_tell(tmp_path: Path) -> None:
    """Without Delta's checkpoint every commit has to be opened: the way of counting sees it."""
    root = root_with(tmp_path, 60)
    for log in ("checkpoints", "control"):
        for file in Path(root.path(f"{log}/_delta_log")).iterdir():
            if "checkpoint" in file.name:
                file.unlink()
    assert len(set(log_files_of_list(root, 60))) > 2 * 60


@pytest.mark.parametrize("opened", [("a",), ("a", "b")])
def test_the_kernel_counts(tmp_path: Path, opened: tuple[str, ...]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).touch()
    with opened_in(str(tmp_path)) as names:
        for name in opened:
            (tmp_path / name).read_bytes()
    assert names == [f"{tmp_path}/{name}" for name in opened]
