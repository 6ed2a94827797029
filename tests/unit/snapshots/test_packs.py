"""`state/`: packs, what is written once, what is pinned, what is found again."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from spark_abs.errors import DamageError, Fenced
from spark_abs.manifest import StoredFile
from spark_abs.model import CheckpointId, RunId
from spark_abs.snapshots import state_storage as module
from spark_abs.snapshots.capture import CapturedFile
from spark_abs.snapshots.packs import PackReader, pack_name
from spark_abs.snapshots.state_storage import StaleCapture, StateStorage, Stored, active_packs
from spark_abs.snapshots.sweep import sweep
from spark_abs.snapshots.verify import verify_state
from spark_abs.store.root import Root
from spark_abs.store.table import Commit, Table
from tests.snapshot_support import LOCAL, captured, manifest_of, packs_in, store

ONE, TWO = CheckpointId(1), CheckpointId(2)


def contents_of(root: Root, files: Sequence[StoredFile]) -> dict[str, bytes]:
    with PackReader(root) as reader:
        found = {f.path: b"".join(reader.chunks(f.at, f.sha256, f.size)) for f in files}
        assert found == {f.path: b"".join(reader.pieces(f.at, f.sha256, f.size)) for f in files}
        return found


def test_bytes_come_back_in_chunks(
    root: Root, kept: StateStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of no chunk's length, of one, of several; one row group per row."""
    monkeypatch.setattr(module, "CHUNK", 10)
    data = {"empty": b"", "small": b"abc", "exact": b"0123456789", "large": os.urandom(35)}
    stored = store(kept, ONE, tmp_path / "native", **data)
    assert contents_of(root, stored.files) == data
    assert stored.size_new == 48
    assert [f.at.chunks for f in stored.files] == [1, 1, 1, 4]
    (name,) = packs_in(root)
    metadata = pq.ParquetFile(Path(root.uri, "state", name)).metadata
    assert (metadata.num_rows, metadata.num_row_groups) == (7, 7)
    with PackReader(root) as reader:
        index = reader.index(name)
    assert {sha: packed.at for sha, packed in index.items()} == {f.sha256: f.at for f in stored.files}


def test_a_chunk_comes_in_small_pieces_from_a_local_disk_and_whole_into_another_pack(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    """Buffers are small and used again; another pack has as many rows as the first."""
    data = {"small": b"abc", "large": os.urandom(9 * 2**20)}
    stored = store(kept, ONE, tmp_path / "native", **data)
    with PackReader(root) as reader:
        for file in stored.files:
            pieces = list(reader.pieces(file.at, file.sha256, file.size))
            assert b"".join(pieces) == data[file.path]
            assert max(len(piece) for piece in pieces) <= 2**18
            chunks = reader.chunks(file.at, file.sha256, file.size)
            assert [len(c) for c in chunks] == ([3] if file.path == "small" else [8 * 2**20, 2**20])


def test_a_hash_that_is_there_is_not_written_again(root: Root, kept: StateStorage, tmp_path: Path) -> None:
    """Neither within a capture, nor of another stage, nor after a restart that knows the manifests."""
    first = store(kept, ONE, tmp_path / "a", x=b"same", y=b"same", z=b"other")
    assert first.size_new == 9
    assert first.files[0].at == first.files[1].at
    second = store(kept, TWO, tmp_path / "b", q=b"same")
    assert (second.size_new, second.files[0].at) == (0, first.files[0].at)
    assert len(packs_in(root)) == 1
    later = StateStorage.open(root, "job", RunId(2), [manifest_of(1, first.files)])
    assert store(later, TWO, tmp_path / "c", q=b"other", r=b"fresh").size_new == 5


def test_a_file_that_was_copied_is_not_read_again(
    kept: StateStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path, size and time of change stand for its bytes, in one process."""
    first = store(kept, ONE, tmp_path / "a", x=b"same")

    def forbidden(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(module, "_chunks", forbidden)
    assert store(kept, TWO, tmp_path / "a", x=b"same").files == first.files


def test_a_file_that_changes_while_it_is_written_spoils_the_pack(
    root: Root, kept: StateStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is committed, and nothing of it is left."""
    monkeypatch.setattr(module, "CHUNK", 10)
    monkeypatch.setattr(module, "HELD", 10)
    reads = iter(([b"0123456789", b"ab"], [b"0123456789", b"xy"]))
    monkeypatch.setattr(module, "_chunks", lambda *_: next(reads))
    with pytest.raises(StaleCapture, match="b changed"):
        kept.store(ONE, LOCAL, str(tmp_path / "native"), captured(tmp_path / "native", b=b"0123456789ab"))
    assert (kept.active(), packs_in(root)) == ({}, [])


def test_a_file_that_changes_or_goes_makes_the_capture_stale(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    """And leaves no commit."""
    native = tmp_path / "native"
    files = captured(native, b=b"before")
    (native / "b").write_bytes(b"after!")
    os.utime(native / "b", ns=(1, 1))
    with pytest.raises(StaleCapture, match="b changed"):
        kept.store(ONE, LOCAL, str(native), files)
    (native / "b").unlink()
    with pytest.raises(StaleCapture, match="b was purged"):
        kept.store(ONE, LOCAL, str(native), files)
    assert (kept.active(), packs_in(root)) == ({}, [])


def test_what_was_copied_before_a_file_was_purged_is_not_copied_again(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    """The checkpoint is declined; the next capture of the stage copies only what is new to it."""
    native = tmp_path / "native"
    files = captured(native, a=b"first", b=b"before")
    (native / "b").unlink()
    with pytest.raises(StaleCapture, match="b was purged"):
        kept.store(ONE, LOCAL, str(native), files)
    kept.unpin(ONE, completed=False)
    assert kept.leftovers() == ()
    again = store(kept, TWO, native, a=b"first", c=b"more")
    assert (again.size_new, len(packs_in(root))) == (4, 2)
    assert contents_of(root, again.files) == {"a": b"first", "c": b"more"}


def test_what_an_aborted_checkpoint_has_packed_waits_for_the_next_capture_of_its_stage(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    """Sweeping spares it until then, and takes what the next capture did not use (P3)."""
    native, other = tmp_path / "native", tmp_path / "other"
    store(kept, ONE, native, used=b"u" * 300, unused=b"n" * 700)
    kept.unpin(ONE, completed=False)
    store(kept, TWO, other, theirs=b"t")
    assert sweep(kept, list).bytes_freed == 0
    again = store(kept, TWO, native, used=b"u" * 300, more=b"m" * 50)
    assert again.size_new == 50
    sweep(kept, list)
    with PackReader(root) as reader:
        held = {sha256 for pack in kept.active() for sha256 in reader.index(pack)}
    assert held == {hashlib.sha256(data).hexdigest() for data in (b"u" * 300, b"m" * 50, b"t")}
    assert verify_state(root, [manifest_of(2, again.files)]) == ()


def test_what_was_left_for_a_capture_that_never_came_is_swept_after_a_restart(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    store(kept, ONE, tmp_path / "native", x=b"x")
    kept.unpin(ONE, completed=False)
    sweep(kept, list)
    assert len(packs_in(root)) == 1
    sweep(StateStorage.open(root, "job", RunId(2)), list)
    assert packs_in(root) == []


def test_an_older_run_writes_nothing_more(root: Root, kept: StateStorage, tmp_path: Path) -> None:
    """Its pack stays without a commit; the newer run takes it for a leftover, never the other way round."""
    newer = StateStorage.open(root, "job", RunId(2))
    with pytest.raises(Fenced, match="replaced by run 2"):
        store(kept, ONE, tmp_path / "a", x=b"late")
    with pytest.raises(Fenced):
        StateStorage.open(root, "job", RunId(1))
    assert newer.active() == {}
    assert list(newer.leftovers()) == packs_in(root) != []
    left = newer.leftovers()[0]
    Path(root.uri, "state", left).rename(Path(root.uri, "state", left.replace("pack-1", "pack-3")))
    assert newer.leftovers() == ()


def test_missing_names_what_went(root: Root, kept: StateStorage, tmp_path: Path) -> None:
    """Asked before a manifest is committed."""
    a = store(kept, ONE, tmp_path / "a", x=b"one").files
    b = store(kept, ONE, tmp_path / "b", y=b"two", z=b"three").files
    assert kept.missing([*a, *b]) == ()
    Path(root.uri, "state", b[0].at.pack).write_bytes(b"torn")
    assert kept.missing([*a, *b]) == b
    Path(root.uri, "state", a[0].at.pack).unlink()
    assert kept.missing([*a, *b]) == (*a, *b)


def test_stages_copy_at_the_same_time(root: Root, kept: StateStorage, tmp_path: Path) -> None:
    """Each gets its own commit; nobody loses bytes to another."""
    found: dict[str, module.Stored] = {}

    def work(name: str) -> None:
        found[name] = store(kept, ONE, tmp_path / name, own=name.encode() * 999, common=b"shared" * 999)

    threads = [threading.Thread(target=work, args=(f"stage{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for name, stored in found.items():
        assert contents_of(root, stored.files) == {"own": name.encode() * 999, "common": b"shared" * 999}
    assert kept.leftovers() == ()


@pytest.mark.parametrize("spoil", ["flip", "truncate", "remove"])
def test_damaged_bytes_are_not_given_out(root: Root, kept: StateStorage, tmp_path: Path, spoil: str) -> None:
    data = os.urandom(5000)
    stored = store(kept, ONE, tmp_path / "a", x=data)
    pack = Path(root.uri, "state", stored.files[0].at.pack)
    whole = pack.read_bytes()
    at = whole.index(data) + 2500
    match spoil:
        case "flip":
            pack.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        case "truncate":
            pack.write_bytes(whole[:at])
        case _:
            pack.unlink()
    with pytest.raises(DamageError, match=stored.files[0].at.pack):
        contents_of(root, stored.files)


def test_names_from_storage_are_checked(root: Root, kept: StateStorage) -> None:
    with PackReader(root) as reader, pytest.raises(DamageError, match="is not the name of a pack"):
        reader.index("../../etc/passwd")
    assert pack_name("part-00000.parquet") is None
    name = pack_name(f"merged-7-{'0' * 32}.parquet")
    assert name is not None
    assert (name.run, name.merged) == (7, True)
    assert kept.run == 1


def test_a_stored_hash_is_that_of_the_bytes(kept: StateStorage, tmp_path: Path) -> None:
    stored = store(kept, ONE, tmp_path / "a", x=b"abc")
    assert stored.files[0].sha256 == hashlib.sha256(b"abc").hexdigest()


def test_a_file_is_read_once_while_it_is_copied(
    root: Root, kept: StateStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is more than can be held: then what the second look finds must be what the first one did."""
    monkeypatch.setattr(module, "CHUNK", 10)
    monkeypatch.setattr(module, "HELD", 40)
    chunks, read = module._chunks, list[str]()

    def reading(filesystem: Any, directory: str, file: CapturedFile) -> object:
        read.append(file.path)
        return chunks(filesystem, directory, file)

    monkeypatch.setattr(module, "_chunks", reading)
    data = {"empty": b"", "held": os.urandom(40), "large": os.urandom(41)}
    stored = store(kept, ONE, tmp_path / "a", **data)
    assert read == ["empty", "held", "large", "large"]
    assert contents_of(root, stored.files) == data

    def changing(filesystem: Any, directory: str, file: CapturedFile) -> object:
        if file.path in read:
            return iter([b"x" * file.size])
        return reading(filesystem, directory, file)

    read.clear()
    monkeypatch.setattr(module, "_chunks", changing)
    with pytest.raises(StaleCapture, match="other changed"):
        store(kept, TWO, tmp_path / "b", other=os.urandom(50))


@pytest.mark.parametrize(
    "options", [{"data_page_version": "2.0"}, {"compression": "snappy"}, {"use_dictionary": True}]
)
def test_a_pack_of_another_layout_is_read_all_the_same(
    root: Root, kept: StateStorage, tmp_path: Path, options: dict[str, object]
) -> None:
    """Packs are Parquet files, whoever has written them."""
    data = {"empty": b"", "small": b"abc", "large": b"ab" * 70_000}
    files = store(kept, ONE, tmp_path / "a", **data).files
    (name,) = packs_in(root)
    path = Path(root.uri, "state", name)
    rows = pq.read_table(path)
    pq.write_table(
        rows, path, row_group_size=1, **{"compression": "none", "use_dictionary": False, **options}
    )
    assert contents_of(root, files) == data


@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 65_536, 131_064, 131_072, 262_080, 262_144, 2**21])
def test_a_value_is_found_whatever_its_length(
    root: Root, kept: StateStorage, tmp_path: Path, size: int
) -> None:
    """The length stands before the value, after bytes that look like lengths themselves."""
    data = {"zeros": bytes(size), "levels": b"\x02\0\0\0\x02\x01" * (size // 6 + 1)}
    assert contents_of(root, store(kept, ONE, tmp_path / "a", **data).files) == data


class Together:
    """Copies of four stages whose packs are all written before the first of them is committed."""

    STAGES = ("a", "b", "c", "d")

    def __init__(self, root: Root) -> None:
        self.written, self.held = threading.Barrier(5), threading.Barrier(5)
        self.kept = StateStorage.open(root, "job", RunId(1), failpoint=self.pause)

    def pause(self, name: str) -> None:
        assert name == "capture.pack.commit.before"
        self.written.wait(30)
        self.held.wait(30)

    def store(self, directory: Path) -> list[Future[Stored]]:
        with ThreadPoolExecutor(len(self.STAGES)) as pool:
            found = [
                pool.submit(store, self.kept, ONE, directory / stage, **{stage: stage.encode()})
                for stage in self.STAGES
            ]
            self.written.wait(30)
            with self.kept.lock:
                self.held.wait(30)
                while len(self.kept._new) < len(self.STAGES):
                    threading.Event().wait(0.01)
        return found


def test_packs_that_wait_for_their_commit_are_committed_together(root: Root, tmp_path: Path) -> None:
    together = Together(root)
    version = together.kept._table.version
    stored = [copy.result() for copy in together.store(tmp_path)]
    table = Table.open(root.place("state"))
    assert table.version == version + 1
    assert len(active_packs(table)) == len(Together.STAGES)
    for stage, copy in zip(Together.STAGES, stored, strict=True):
        assert contents_of(root, copy.files) == {stage: stage.encode()}
        assert together.kept.missing(copy.files) == ()
    sweep(together.kept, lambda: ())
    assert len(packs_in(root)) == len(Together.STAGES), "all of them are pinned"


def test_a_fence_stops_all_packs_that_wait_for_their_commit(root: Root, tmp_path: Path) -> None:
    together = Together(root)
    StateStorage.open(root, "job", RunId(2))
    for copy in together.store(tmp_path):
        with pytest.raises(Fenced):
            copy.result()
    assert active_packs(Table.open(root.place("state"))) == {}


class Panic(BaseException):
    """As deltalake raises one: it is no Exception."""


def test_a_panic_is_told_to_all_packs_that_wait_for_their_commit(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, panics = Together(root), [Panic()]
    commit = together.kept._table.commit

    def panic_once(decide: Callable[[Table], Commit | None]) -> object:
        if panics:
            raise panics.pop()
        return commit(decide)

    monkeypatch.setattr(together.kept._table, "commit", panic_once)
    for copy in together.store(tmp_path):
        with pytest.raises(Panic):
            copy.result()
