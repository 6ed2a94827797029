"""Clean-up of a channel: what is behind goes, what is ahead stays, wherever it is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyarrow import fs

from spark_abs.channels import trim as room
from spark_abs.channels.follow import Follower
from spark_abs.channels.trim import left_after, trim
from spark_abs.errors import DamageError
from spark_abs.model import AttemptId, BatchId, Branch, ChannelId, Version
from spark_abs.store.root import Root
from tests.channel_support import Log, make_writer, write_table

CHANNEL = ChannelId("a.main")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(str(tmp_path))


def rows(root: Root) -> list[int]:
    return sorted(DeltaTable(root.at("channels/a.main")).to_pyarrow_table()["n"].to_pylist())


def ahead(root: Root, after: int) -> list[int]:
    follower = Follower(root.fs, root.path("channels/a.main"), [Branch(AttemptId(1), None)])
    return [int(e.version) for e in follower.after(Version(after))]


def files(root: Root, where: str) -> set[str]:
    place = Path(root.path(f"channels/a.main/{where}"))
    return {str(p.relative_to(place)) for p in place.rglob("*") if p.is_file()}


def stored(root: Root) -> set[int]:
    """Return the rows of all data files, whether the table names them or not."""
    data = Path(root.path("channels/a.main/data"))
    return {n for name in files(root, "data") for n in pq.read_table(data / name)["n"].to_pylist()}


def test_what_is_behind_goes_and_what_is_ahead_stays(root: Root) -> None:
    log = Log(root)
    commits = [log.batch(n) for n in range(30)]
    floor = commits[20]
    trim(root, CHANNEL, Version(floor))
    assert rows(root) == list(range(20, 30))
    assert ahead(root, floor - 1) == commits[20:]
    assert len(files(root, "data")) == 10
    assert min(int(name[:20]) for name in files(root, "_delta_log") if name[0] == "0") == floor
    with pytest.raises(DamageError, match="missing below newer ones"):
        ahead(root, floor - 2)


def test_rows_that_nobody_needs_go_before_their_entries_and_those_in_flight_stay(root: Root) -> None:
    """An old cut holds the log and what was in flight to it; later its entries go, and these rows, too."""
    log = Log(root)
    c = [Version(log.batch(n)) for n in range(30)]
    in_flight = [(c[5], c[8]), (c[6], c[9])]
    trim(root, CHANNEL, c[5], rows_before=c[20], in_flight=in_flight)
    assert rows(root) == [*range(6, 10), *range(20, 30)]
    assert len(files(root, "data")) == 14
    assert ahead(root, c[5] - 1) == c[5:]
    left = left_after(root, CHANNEL, c[15])
    assert left is not None
    assert left.version == c[20]
    assert left_after(root, CHANNEL, c[19]) is None
    before = files(root, ".")
    for known in (Version(0), c[20]):
        trim(root, CHANNEL, c[5], rows_before=c[20], in_flight=in_flight, known=known)
        assert files(root, ".") == before
    trim(root, CHANNEL, c[5], rows_before=c[25], in_flight=in_flight, known=c[20])
    assert rows(root) == [*range(6, 10), *range(25, 30)]
    trim(root, CHANNEL, c[24], rows_before=c[25])
    assert rows(root) == list(range(25, 30))
    assert ahead(root, c[24] - 1) == c[24:]


def test_rows_that_were_in_flight_go_with_their_cut_though_an_older_one_holds_the_log(root: Root) -> None:
    """A savepoint may hold the log for years."""
    log = Log(root)
    c = [Version(log.batch(n)) for n in range(30)]
    older, newer = (c[5], c[8]), (c[6], c[10])
    trim(root, CHANNEL, c[2], rows_before=c[20], in_flight=[older, newer])
    assert rows(root) == [*range(6, 11), *range(20, 30)]
    trim(root, CHANNEL, c[2], rows_before=c[22], in_flight=[older], released=[newer], known=c[20])
    assert rows(root) == [*range(6, 9), *range(22, 30)]
    trim(root, CHANNEL, c[2], rows_before=c[22], released=[older])
    assert rows(root) == list(range(22, 30))
    assert ahead(root, c[2] - 1) == c[2:]
    before = files(root, ".")
    trim(root, CHANNEL, c[2], rows_before=c[22], released=[older, (c[1], c[29])])
    assert files(root, ".") == before


def test_a_reader_that_was_brought_back_to_an_old_cut_finds_all_rows_of_its_path(root: Root) -> None:
    """It reads what was in flight, passes over what was written after the barrier, and reads on."""
    log = Log(root)
    c = [Version(log.batch(n)) for n in range(30)]
    trim(root, CHANNEL, c[5], rows_before=c[25], in_flight=[(c[5], c[8])])
    later = Log(root, attempt=2, run=2)
    new = [later.batch(n) for n in range(100, 103)]
    path = [Branch(AttemptId(1), c[8]), Branch(AttemptId(2), None)]
    entries = list(Follower(root.fs, root.path("channels/a.main"), path).between(c[5], Version(new[-1])))
    assert [e.version for e in entries] == [*c[6:9], *new]
    data = Path(root.path("channels/a.main"))
    found = [n for e in entries for f in e.files for n in pq.read_table(data / f.path)["n"].to_pylist()]
    assert found == [6, 7, 8, 100, 101, 102]
    assert left_after(root, CHANNEL, c[8]) is not None
    # The clean-up of the new path goes on from there: what the abandoned one has left goes, too.
    trim(root, CHANNEL, c[5], rows_before=new[1], in_flight=[(c[5], c[8])])
    assert rows(root) == [6, 7, 8, 101, 102]


def test_the_oldest_entry_that_is_left_is_named_where_some_are_gone(root: Root) -> None:
    log = Log(root)
    assert left_after(root, CHANNEL, Version(0)) is None
    commits = [log.batch(n) for n in range(5)]
    assert left_after(root, CHANNEL, Version(0)) is None
    trim(root, CHANNEL, Version(commits[3]))
    left = left_after(root, CHANNEL, Version(commits[1]))
    assert left is not None
    assert (left.attempt, left.version) == (1, commits[3])
    assert left_after(root, CHANNEL, Version(commits[2])) is None


def test_the_writer_and_a_stale_handle_go_on(root: Root) -> None:
    """The agent's handle may be hundreds of entries behind when the log below it goes."""
    agent = make_writer(root)
    log = Log(root)
    commits = [log.batch(n) for n in range(30)]
    trim(root, CHANNEL, Version(commits[25]))
    last = log.batch(30)
    assert agent.refresh() == last
    assert agent.newest().batch == 30


def test_a_second_call_changes_nothing(root: Root) -> None:
    log = Log(root)
    commits = [log.batch(n) for n in range(5)]
    trim(root, CHANNEL, Version(commits[3]))
    before = files(root, ".")
    trim(root, CHANNEL, Version(commits[3]))
    assert files(root, ".") == before


@pytest.mark.parametrize("survive", range(1, 14))
def test_killed_anywhere_the_next_call_finishes(
    root: Root, monkeypatch: pytest.MonkeyPatch, survive: int
) -> None:
    """Killed at the n-th deletion: readers ahead notice nothing, and the repeat ends in the same state."""
    log = Log(root)
    commits = [Version(log.batch(n)) for n in range(8)]
    in_flight = [(commits[2], commits[3])]
    left = [survive]

    def dying(original: Any) -> Any:
        def act(*given: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            original(*given)

        return act

    with monkeypatch.context() as patched:
        for name in ("_delete_directory", "_delete_file", "_forget_missing"):
            patched.setattr(room, name, dying(getattr(room, name)))
        try:
            trim(root, CHANNEL, commits[2], rows_before=commits[6], in_flight=in_flight)
        except KeyboardInterrupt:
            assert ahead(root, commits[2] - 1) == commits[2:]
            assert {3, 6, 7} <= stored(root)
    commits.append(Version(log.batch(8)))
    trim(root, CHANNEL, commits[2], rows_before=commits[7], in_flight=in_flight)
    assert rows(root) == [3, 7, 8]
    assert len(files(root, "data")) == 3


def test_files_of_nobody_go_once_a_later_batch_is_in(root: Root) -> None:
    """A crash between writing and committing leaves files; those of the batch under way stay."""
    log = Log(root)
    log.batch(0)
    table = pa.table({"n": pa.array([666], pa.int64())})
    write_table(root, "a.main", table, "1-1-1-aaaaaaaaaaaa")  # batch 1, killed before its commit
    trim(root, CHANNEL, Version(0))
    assert "1-1-1-aaaaaaaaaaaa/part-0.parquet" in files(root, "data")
    log.batch(1)
    written = write_table(root, "a.main", pa.table({"n": pa.array([2], pa.int64())}), "1-1-9-bbbbbbbbbbbb")
    log.writer.commit_batch(written, BatchId(9))
    write_table(root, "a.main", table, "1-1-10-cccccccccccc")  # the batch under way
    write_table(root, "a.main", table, "somebody-elses")
    trim(root, CHANNEL, Version(0))
    left = {name.split("/")[0] for name in files(root, "data")}
    assert "1-1-1-aaaaaaaaaaaa" not in left
    assert {"1-1-9-bbbbbbbbbbbb", "1-1-10-cccccccccccc", "somebody-elses"} <= left


def test_what_optimize_replaced_is_still_read_through_the_log(root: Root) -> None:
    """The table lists the compacted file only; the entries still name the ones that batches wrote."""
    log = Log(root)
    commits = [log.batch(n) for n in range(4)]
    DeltaTable(root.at("channels/a.main")).optimize.compact()
    log.batch(4)
    trim(root, CHANNEL, Version(commits[0]))
    follower = Follower(root.fs, root.path("channels/a.main"), [Branch(AttemptId(1), None)])
    for entry in follower.after(Version(0)):
        for file in entry.files:
            info = root.fs.get_file_info(root.path(f"channels/a.main/{file.path}"))
            assert info.type is fs.FileType.File
