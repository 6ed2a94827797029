"""A disk that is full, and permissions that are taken away: what cannot be written is named, nothing is lost.

| what                                         | promised                                                |
|----------------------------------------------|---------------------------------------------------------|
| no room where root and sinks are             | the job ends and says what failed; the next run goes on |
| `state/` cannot be written                   | the checkpoint is declined and says so; rows keep coming|
| a channel cannot be written                  | the job ends and names it; the next run goes on         |
| `checkpoints/` or `control/` cannot          | the job ends and names it; the next run goes on         |
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from spark_abs.errors import AbortReason
from spark_abs.store.history import History, HistoryEvent
from tests.crash.facts import check, check_complete
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess, processes_of

pytestmark = pytest.mark.timeout(900)

DISK_MB = 64
AGAIN = {"takeover": True, "config": {"run": {"leaseTimeout": "1s"}}}
"""The run that ended could not give its lease back, and its process is alive: the next one takes over."""

NoRoom = Callable[[], AbstractContextManager[None]]


@contextmanager
def limited_files(driver: DriverProcess) -> Iterator[None]:
    """Let no process of the driver write another byte to any file: EFBIG, for whoever runs the test."""
    set_file_limit(driver, 0)
    try:
        yield
    finally:
        set_file_limit(driver, resource.RLIM_INFINITY)


def set_file_limit(driver: DriverProcess, size: int) -> None:
    for process in list(processes_of(driver.pid)):
        with suppress(ProcessLookupError):
            resource.prlimit(process, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextmanager
def filled_disk(place: Path) -> Iterator[None]:
    """Take all that is left of a small file system: ENOSPC."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        ballast.unlink()


def may_mount() -> bool:
    """Say whether this process may mount a file system: root may, but not in every container."""
    with tempfile.TemporaryDirectory() as place:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True, check=False)
        if mounted.returncode == 0:
            subprocess.run(["umount", place], check=True)
    return mounted.returncode == 0


@pytest.fixture(params=["limit", "disk"] if os.geteuid() == 0 and may_mount() else ["limit"])
def no_room(request: pytest.FixtureRequest, first: DriverProcess, tmp_path: Path) -> Iterator[NoRoom]:
    """The root lies on a file system of its own where one can be mounted."""
    if request.param == "limit":
        yield lambda: limited_files(first)
        return
    place = tmp_path / "root"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", place], check=True)
    try:
        yield lambda: filled_disk(place)
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_without_room_the_job_ends_and_with_room_it_goes_on(
    first: DriverProcess, tmp_path: Path, no_room: NoRoom
) -> None:
    job = Small(tmp_path)
    job.start(first)
    job.run_until(first, lambda: bool(job.completed()), "a checkpoint")
    with no_room():
        first.wait_for(lambda: first.ended(job.base) is not None, "the end", job.feed)
    said = first.message(job.base)
    assert first.ended(job.base) in ("StageFailed", "StoreFailed"), said
    assert any(reason in said for reason in ("No space left on device", "File too large")), said
    check(job.base)
    job.finish(first, **AGAIN)
    check_complete(job.base, job.files)


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    """Take away the permission to write in a directory and in all below it."""
    modes = dict[Path, int]()
    for path in [place, *(path for path in place.rglob("*") if path.is_dir())]:
        with suppress(FileNotFoundError):  # Spark removes directories of its own meanwhile
            modes[path] = path.stat().st_mode
            path.chmod(0o555)
    try:
        yield
    finally:
        for path, mode in modes.items():
            with suppress(FileNotFoundError):
                path.chmod(mode)


def test_without_permission_to_write_state_a_checkpoint_is_declined_and_rows_keep_coming(
    first: DriverProcess, tmp_path: Path
) -> None:
    job = Small(tmp_path)
    job.start(first)
    job.run_until(first, lambda: bool(job.completed()), "a checkpoint")
    with read_only(tmp_path / "root" / "state"):
        job.run_until(first, lambda: len(declined(job)) >= 2, "checkpoints that are declined")
        files = job.files
        job.run_until(first, lambda: job.files > files + 2, "rows to keep coming")
    assert all("Permission denied" in detail for detail in declined(job)), declined(job)
    newest = job.newest()
    job.run_until(first, lambda: job.newest() > newest, "a checkpoint")
    job.stop(first)
    check(job.base)
    job.finish(first)
    check_complete(job.base, job.files)


@pytest.mark.parametrize(
    ("place", "errors"),
    [
        # A batch of the stage fails, or, while it is idle, the commit of its barrier by the coordinator.
        ("channels/pair.main", ("StageFailed", "StoreFailed")),
        ("checkpoints", ("StoreFailed",)),
        ("control", ("StoreFailed",)),
    ],
)
def test_without_permission_to_write_elsewhere_the_job_ends_and_says_where(
    first: DriverProcess, tmp_path: Path, place: str, errors: tuple[str, ...]
) -> None:
    job = Small(tmp_path)
    job.start(first)
    job.run_until(first, lambda: bool(job.completed()), "a checkpoint")
    with read_only(tmp_path / "root" / place):
        first.wait_for(lambda: first.ended(job.base) is not None, "the end", job.feed)
    said = first.message(job.base)
    assert first.ended(job.base) in errors, said
    # The others are what Hadoop's local file system says, before a file is written and after it.
    denials = ("Permission denied", "Mkdirs failed to create", "Could not rename")
    assert any(denial in said for denial in denials), said
    assert place.split("/")[-1] in said
    check(job.base)
    job.finish(first, **AGAIN)
    check_complete(job.base, job.files)


def declined(job: Small) -> list[str]:
    rows = History(job.root).read().to_pylist()
    reason = AbortReason.DECLINED.value
    return [r["detail"] for r in rows if r["event"] == HistoryEvent.ABORTED and r["reason"] == reason]
