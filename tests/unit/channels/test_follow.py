"""Following a channel costs what is new: one open per entry, and one failed open to find nothing."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import fs

from spark_abs.channels.follow import Follower, Queued
from spark_abs.errors import DamageError
from spark_abs.model import AttemptId, Branch, ChannelId, Version
from spark_abs.store.log import read_commit
from spark_abs.store.root import Root
from tests.channel_support import Log, position

PATH = (Branch(AttemptId(1), None),)


class Counting(fs.FileSystemHandler):  # type: ignore[misc]
    """A local file system that counts what is asked of it, by kind and file name."""

    def __init__(self) -> None:
        self.local = fs.LocalFileSystem()
        self.opened: Counter[str] = Counter()
        self.listings = 0

    def open_input_stream(self, path: str) -> Any:
        self.opened[path.rsplit("/", 1)[-1]] += 1
        return self.local.open_input_stream(path)

    def get_file_info_selector(self, selector: Any) -> Any:
        self.listings += 1
        return self.local.get_file_info(selector)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def get_type_name(self) -> str:
        return "counting"

    def normalize_path(self, path: str) -> str:
        return path

    def _refuse(self, *given: Any) -> Any:
        raise AssertionError("following only reads")

    get_file_info = open_input_file = create_dir = delete_dir = delete_dir_contents = _refuse
    delete_root_dir_contents = delete_file = move = copy_file = _refuse
    open_output_stream = open_append_stream = _refuse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(str(tmp_path))


def versions(follower: Follower, after: int) -> list[int]:
    return [int(entry.version) for entry in follower.after(Version(after))]


def test_each_commit_file_is_opened_once(root: Root) -> None:
    """However often a gate asks again, a commit that was read is not opened again."""
    log, counting, clock = Log(root), Counting(), Clock()
    wanted = [log.batch(n) for n in range(20)]
    follower = Follower(fs.PyFileSystem(counting), root.path("channels/a.main"), PATH, clock=clock)
    assert versions(follower, 0) == wanted
    assert set(counting.opened.values()) == {1}
    counting.opened.clear()
    assert versions(follower, 0) == wanted
    assert versions(follower, wanted[9]) == wanted[10:]
    new = log.batch(99)
    assert versions(follower, wanted[-1]) == [new]
    after_that = f"{new + 1:020d}.json"
    assert counting.opened == {f"{new:020d}.json": 3, after_that: 1}  # twice not there yet, once read
    assert counting.listings == 1  # on opening; the next after ten seconds without anything new


def test_no_further_than_asked(root: Root) -> None:
    """A gate that stops at a barrier reads nothing after it."""
    log, counting = Log(root), Counting()
    first, _ = log.batch(1, barrier_id=1), log.batch(2)
    follower = Follower(fs.PyFileSystem(counting), root.path("channels/a.main"), PATH)
    assert next(follower.after(Version(0))).version == first
    assert list(counting.opened) == [f"{first:020d}.json"]


def test_silent_entries_are_passed_over_for_good(root: Root) -> None:
    """A thousand polls over silent entries cost a thousand failed opens, not a thousand times the entries."""
    log, counting, clock = Log(root), Counting(), Clock()
    for _ in range(10):
        log.batch()
    follower = Follower(fs.PyFileSystem(counting), root.path("channels/a.main"), PATH, clock=clock)
    assert versions(follower, 0) == versions(follower, 0) == []
    assert counting.opened.total() == 12
    last = log.batch(1)
    assert versions(follower, 0) == [last]


def test_nothing_is_asked_of_the_store_before_the_next_poll(root: Root) -> None:
    log, counting, clock = Log(root), Counting(), Clock()
    follower = Follower(fs.PyFileSystem(counting), root.path("channels/a.main"), PATH, 200, clock)
    assert versions(follower, 0) == []
    new = log.batch(1)
    counting.opened.clear()
    assert versions(follower, 0) == []
    assert not counting.opened
    clock.now = 0.2
    assert versions(follower, 0) == [new]


def test_other_attempts_and_commits_of_others_do_not_count(root: Root) -> None:
    """Attempt 2 branched off after the second entry of attempt 1: the third is on nobody's path."""
    log = Log(root)
    kept = [log.batch(1), log.batch(2)]
    log.batch(666)
    second = Log(root, attempt=2, run=2)
    second.writer.begin()  # a fence: an entry of nobody
    kept.append(second.batch(3))
    path = (Branch(AttemptId(1), Version(kept[1])), Branch(AttemptId(2), None))
    assert versions(Follower(root.fs, root.path("channels/a.main"), path), 0) == kept


def test_a_gap_is_damage_at_the_first_look_and_every_ten_seconds(root: Root) -> None:
    """A commit missing below a newer one would otherwise read as "nothing new" for ever."""
    log, clock = Log(root), Clock()
    commits = [log.batch(n) for n in range(4)]
    missing = Path(root.path("channels/a.main/_delta_log")) / f"{commits[2]:020d}.json"
    follower = Follower(root.fs, root.path("channels/a.main"), PATH, clock=clock)
    assert versions(follower, 0) == commits
    later = Follower(root.fs, root.path("channels/a.main"), PATH, clock=clock)
    held = missing.read_bytes()
    missing.unlink()
    with pytest.raises(DamageError, match=f"commit {commits[2]} .* is missing below newer ones"):
        versions(later, 0)
    with pytest.raises(DamageError, match="missing"):
        list(Follower(root.fs, root.path("channels/a.main"), PATH).between(Version(0), Version(commits[3])))
    missing.write_bytes(held)
    assert versions(later, 0) == commits
    gone = [log.batch(5), log.batch(6)]
    (missing.parent / f"{gone[0]:020d}.json").unlink()
    assert versions(follower, commits[-1]) == []
    clock.now = 10.0
    with pytest.raises(DamageError, match="missing"):
        versions(follower, commits[-1])


def test_a_torn_commit_is_damage(root: Root) -> None:
    log = Log(root)
    file = Path(root.path("channels/a.main/_delta_log")) / f"{log.batch(1):020d}.json"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DamageError, match="is not a Delta commit"):
        versions(Follower(root.fs, root.path("channels/a.main"), PATH), 0)


def test_between_gives_a_planned_batch_again_also_after_it_was_forgotten(root: Root) -> None:
    """Spark plans a batch again after a restart; `forget` saves memory and loses nothing."""
    log = Log(root)
    a, b, c = log.batch(1), log.batch(2), log.batch(3)
    follower = Follower(root.fs, root.path("channels/a.main"), PATH)
    assert versions(follower, 0) == [a, b, c]
    follower.forget(Version(b))
    assert [e.version for e in follower.between(Version(b), Version(c))] == [c]
    assert [e.version for e in follower.between(Version(a), Version(b))] == [b]
    assert versions(follower, a) == [b, c]


def test_what_is_queued_is_counted_as_it_comes_each_entry_opened_once(tmp_path: Path) -> None:
    """What measures an alignment never reads the log from the start again (P6)."""
    counting = Counting()
    root = Root(str(tmp_path))
    log = Log(root)
    at = log.batch(1, barrier_id=1)
    watched: Any = SimpleNamespace(fs=fs.PyFileSystem(counting), path=root.path, channel=root.channel)
    queued = Queued(watched, position("a.main", at, 1, at_barrier=True))
    assert queued.read(10) == 0
    sizes = []
    for _ in range(4):
        log.batch(*range(100))
        sizes.append(queued.read(10))
    assert sizes == [sizes[0] * n for n in (1, 2, 3, 4)]
    assert sizes[0] > 0
    entries = {name: times for name, times in counting.opened.items() if int(name.split(".")[0]) > at}
    assert all(entries[f"{at + n:020}.json"] <= 2 for n in (1, 2, 3, 4))  # found once, missed once before
    log.batch(1)
    log.batch(2)
    assert queued.read(1) < queued.read(1) < queued.read(1) + 1


def test_what_came_after_the_alignment_is_not_counted(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    log = Log(root)
    at = log.batch(1, barrier_id=1)
    log.batch(*range(50))
    ended = read_commit(root.fs, root.path(root.channel(ChannelId("a.main"))), at + 1)
    assert ended is not None
    time.sleep(0.002)
    log.batch(*range(50))
    queued = Queued(root, position("a.main", at, 1, at_barrier=True))
    first = queued.read(10, until_ms=ended.at_ms)
    assert (queued.read(10, until_ms=ended.at_ms), queued.read(10)) == (first, 2 * first)
