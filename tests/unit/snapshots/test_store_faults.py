"""`state/` on a store that loses packs, is full, or opens no more files."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import pytest

from spark_abs.errors import CommitStateUnknown, DamageError
from spark_abs.manifest import StoredFile
from spark_abs.model import CheckpointId, RunId
from spark_abs.snapshots.packs import PackName, PackReader, pack_name
from spark_abs.snapshots.state_storage import StateStorage, locate
from spark_abs.snapshots.sweep import Swept, sweep
from spark_abs.snapshots.verify import verify_packs, verify_state
from spark_abs.store.root import Root
from spark_abs.store.table import AddFile, Commit
from tests.snapshot_support import LOCAL, captured, manifest_of, packs_in, store

ONE, TWO = CheckpointId(1), CheckpointId(2)


def contents_of(root: Root, files: Sequence[StoredFile]) -> dict[str, bytes]:
    with PackReader(root) as reader:
        return {f.path: b"".join(reader.chunks(f.at, f.sha256, f.size)) for f in files}


def taken(kept: StateStorage, tmp_path: Path, checkpoint: int, **contents: bytes) -> tuple[StoredFile, ...]:
    """Store files of a directory of their own, for a checkpoint that is complete."""
    files = store(kept, CheckpointId(checkpoint), tmp_path / f"native{checkpoint}", **contents).files
    kept.unpin(CheckpointId(checkpoint), completed=True)
    return files


def lose(pack: Path, how: str) -> None:
    """Let the file of a pack be gone, short, or, as after a power failure, full of zeros."""
    size = pack.stat().st_size
    pack.unlink()
    if how != "gone":
        pack.write_bytes(bytes(size if how == "zeros" else size // 2))


def pack_of(root: Root, file: StoredFile) -> Path:
    return Path(root.uri, "state", file.at.pack)


@pytest.mark.parametrize("how", ["gone", "short"])
def test_what_a_lost_pack_held_is_copied_anew_after_one_aborted_checkpoint(
    root: Root, kept: StateStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """What needs the lost pack stays damaged, and is said to be."""
    native, data = tmp_path / "native", {"metadata": b"same in every cut", "schema": b"this one, too"}
    first = store(kept, ONE, native, **data).files
    lose(pack_of(root, first[0]), how)
    second = store(kept, TWO, native, **data, more=b"m").files
    assert kept.missing(second) == second[:2]
    kept.unpin(TWO, completed=False)
    assert [m for m in caplog.messages if first[0].at.pack in m and "spark-abs verify" in m]
    assert kept.copied(str(native)) == set(captured(native, more=b"m"))

    third = store(kept, CheckpointId(3), native, **data, more=b"m")
    assert third.size_new == sum(map(len, data.values()))
    assert kept.missing(third.files) == ()
    assert contents_of(root, third.files) == {**data, "more": b"m"}
    assert verify_state(root, [manifest_of(3, third.files)]) == ()
    assert {
        f.checkpoint for f in verify_state(root, [manifest_of(1, first), manifest_of(3, third.files)])
    } == {1}
    with pytest.raises(DamageError, match=first[0].at.pack):
        contents_of(root, first)


@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_start_reuses_nothing_of_a_lost_pack(
    root: Root, kept: StateStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    lost = store(kept, ONE, tmp_path / "native", metadata=b"same").files
    well = store(kept, TWO, tmp_path / "other", x=b"well").files
    retained = [manifest_of(1, lost), manifest_of(2, well)]
    lose(pack_of(root, lost[0]), how)
    later = StateStorage.open(root, "job", RunId(2), retained)
    assert [m for m in caplog.messages if lost[0].at.pack in m and "spark-abs verify" in m]
    again = store(later, CheckpointId(3), tmp_path / "native", metadata=b"same", x=b"well")
    assert again.size_new == len(b"same")
    assert later.missing(again.files) == ()
    assert contents_of(root, again.files) == {"metadata": b"same", "x": b"well"}


@pytest.mark.parametrize("how", ["gone", "short", "zeros"])
def test_a_start_passes_over_a_merged_pack_that_is_lost(
    root: Root, kept: StateStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The native checkpoints are whole, and have all that it held."""
    native = tmp_path / "native"
    files = store(kept, ONE, native, keep=b"k" * 90, gone=b"g" * 900).files
    retained = [manifest_of(1, files[:1])]
    kept.unpin(ONE, completed=True)
    sweep(kept, lambda: retained)
    (merged,) = packs_in(root)
    assert pack_name(merged) == PackName(RunId(1), merged=True)
    lose(Path(root.uri, "state", merged), how)
    later = StateStorage.open(root, "job", RunId(2), retained)
    assert [m for m in caplog.messages if merged in m and "spark-abs verify" in m]
    again = store(later, TWO, native, keep=b"k" * 90)
    assert (again.size_new, later.missing(again.files)) == (90, ())
    assert later.missing(files[:1]) == files[:1]
    assert {f.checkpoint for f in verify_state(root, retained)} == {1}


def test_a_lost_merged_pack_stands_in_the_way_only_of_what_it_held(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    files = {}
    for number, letter in enumerate("ab", 1):
        data = {letter: letter.encode() * 90, "gone": letter.encode() * 900}
        stored = store(kept, CheckpointId(number), tmp_path / letter, **data).files
        kept.unpin(CheckpointId(number), completed=True)
        files[letter] = next(f for f in stored if f.path == letter)
        sweep(kept, lambda: [manifest_of(n, [f]) for n, f in enumerate(files.values(), 1)])
    with PackReader(root) as reader:
        held = {
            pack: files[letter]
            for pack in packs_in(root)
            for letter in files
            if files[letter].sha256 in reader.index(pack)
        }
    assert len(held) == 2
    lost, whole = sorted(held)
    lose(Path(root.uri, "state", lost), "zeros")
    with PackReader(root) as reader:
        assert locate(root, reader, [held[whole]])[held[whole].sha256, held[whole].at.pack].pack == whole
        with pytest.raises(DamageError, match=lost):
            locate(root, reader, [held[lost]])
    assert verify_state(root, [manifest_of(1, [held[whole]])]) == ()


def test_a_lost_pack_stays_while_a_manifest_names_it_and_others_are_swept(
    root: Root, kept: StateStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if only a small part of it is needed: there is nothing to move."""
    lost = taken(kept, tmp_path, 1, needed=b"n" * 10, rest=b"r" * 90)
    taken(kept, tmp_path, 2, dead=b"d")
    thin = taken(kept, tmp_path, 3, needed=b"t" * 10, rest=b"u" * 90)
    retained = [manifest_of(1, lost[:1]), manifest_of(3, thin[:1])]
    lose(pack_of(root, lost[0]), "short")
    swept = sweep(kept, lambda: retained)
    assert (swept.packs, swept.rewritten, swept.leftovers) == (2, 1, 0)
    assert lost[0].at.pack in kept.active()
    assert {f.checkpoint for f in verify_state(root, retained)} == {1}
    assert sweep(kept, lambda: retained) == Swept()
    assert len([m for m in caplog.messages if lost[0].at.pack in m]) == 1

    later = StateStorage.open(root, "job", RunId(2), retained)
    assert sweep(later, lambda: retained) == Swept()
    assert sweep(later, lambda: retained[1:]).packs == 1
    assert later.active().keys() == set(packs_in(root))
    assert verify_state(root, retained[1:]) == ()


def test_a_lost_merged_pack_stays_while_bytes_that_it_may_hold_are_sought(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    one = taken(kept, tmp_path, 1, keep=b"k" * 90, gone=b"g" * 900)
    retained = [manifest_of(1, one[:1])]
    sweep(kept, lambda: retained)
    (merged,) = packs_in(root)
    lose(Path(root.uri, "state", merged), "zeros")
    later = StateStorage.open(root, "job", RunId(2), retained)
    taken(later, tmp_path, 2, dead=b"d")
    assert sweep(later, lambda: retained).packs == 1
    assert later.active().keys() == {merged}
    two = taken(later, tmp_path, 3, keep=b"k" * 90)
    assert sweep(later, lambda: [manifest_of(3, two)]).packs == 1
    assert later.active().keys() == {two[0].at.pack} == set(packs_in(root))


def test_nothing_is_swept_if_the_log_names_what_is_no_pack(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    """Somebody has rewritten the table, by OPTIMIZE say: its packs come back by going back to a version."""
    (file,) = taken(kept, tmp_path, 1, x=b"x" * 90)
    pack = pack_of(root, file)
    foreign = "part-00000.parquet"
    pack.with_name(foreign).write_bytes(pack.read_bytes())
    there = AddFile(foreign, pack.stat().st_size, '{"numRecords": 1}')
    kept._table.commit(lambda _: Commit([there], removes=[pack.name]))
    for run in (1, 2):
        if run == 2:
            kept = StateStorage.open(root, "job", RunId(2), [manifest_of(1, [file])])
        assert kept.missing([file]) == (file,)
        again = taken(kept, tmp_path, 1 + run, x=b"x" * 90)
        assert kept.missing(again) == ()
        with pytest.raises(DamageError, match=f"{foreign}' is not the name of a pack"):
            sweep(kept, lambda: [manifest_of(1, [file])])
    assert pack.exists()


@contextmanager
def few_open_files(more: int) -> Iterator[None]:
    """Let this process open only some files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (number for number in count() if not Path(f"/proc/self/fd/{number}").exists())
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, more, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """Let writing fail as on a full disk, once a file has so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_there_may_be_more_packs_than_files_can_be_open(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    """Of a pack that is listed nothing stays open, of packs that are read a few do."""
    stored = [store(kept, ONE, tmp_path / "native", **{f"f{n}": b"%d" % n}).files for n in range(60)]
    retained = [manifest_of(n, files) for n, files in enumerate(stored, 1)]
    kept.unpin(ONE, completed=True)
    with few_open_files(40):
        assert sweep(kept, lambda: retained) == Swept()
        assert verify_packs(root, retained) == ()
        assert verify_state(root, retained) == ()
        everything = tuple(f for files in stored for f in files)
        assert len(contents_of(root, everything)) == 60


def test_what_keeps_a_pack_from_being_opened_is_not_damage(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    (file,) = store(kept, ONE, tmp_path / "native", x=b"x").files
    with PackReader(root) as reader, few_open_files(0):
        with pytest.raises(OSError, match="Too many open files"):
            reader.index(file.at.pack)
        with pytest.raises(OSError, match="Too many open files"):
            list(reader.chunks(file.at, file.sha256, file.size))
    assert contents_of(root, [file]) == {"x": b"x"}


def test_a_footer_larger_than_the_first_look_is_read(root: Root, kept: StateStorage, tmp_path: Path) -> None:
    data = {f"f{n}": b"%d" % n for n in range(400)}
    files = store(kept, ONE, tmp_path / "native", **data).files
    pack = pack_of(root, files[0]).read_bytes()
    assert int.from_bytes(pack[-8:-4], "little") > 64 * 2**10
    with PackReader(root) as reader:
        assert reader.index(files[0].at.pack).keys() == {f.sha256 for f in files}
    assert contents_of(root, files) == data


def test_what_was_listed_before_an_error_is_not_listed_again(
    root: Root, kept: StateStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retained = [manifest_of(n, taken(kept, tmp_path, n, x=b"%d" % n)) for n in range(1, 6)]
    index, read = PackReader.index, list[str]()

    def tired(reader: PackReader, pack: str) -> object:
        read.append(pack)
        if len(read) == 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return index(reader, pack)

    monkeypatch.setattr(PackReader, "index", tired)
    with pytest.raises(OSError, match="Too many open files"):
        sweep(kept, lambda: retained)
    assert sweep(kept, lambda: retained) == Swept()
    assert sorted(read) == sorted([*packs_in(root), read[2]])


def test_a_sweep_that_fails_leaves_nothing(root: Root, kept: StateStorage, tmp_path: Path) -> None:
    """Neither on a full disk nor at bytes that are altered."""
    data = os.urandom(2**20)
    files = taken(kept, tmp_path, 1, keep=data, gone=bytes(3 * 2**20))
    retained, before = [manifest_of(1, files[:1])], packs_in(root)
    with small_disk(2**18), pytest.raises(OSError, match="File too large"):
        sweep(kept, lambda: retained)
    assert packs_in(root) == before
    pack = pack_of(root, files[0])
    whole = pack.read_bytes()
    pack.write_bytes(whole.replace(data[:100], bytes(100)))
    assert sweep(kept, lambda: retained) == Swept()
    assert packs_in(root) == before
    pack.write_bytes(whole)
    later = StateStorage.open(root, "job", RunId(2), retained)
    assert sweep(later, lambda: retained).rewritten == 1
    assert verify_state(root, retained) == ()


def test_a_copy_that_fails_leaves_nothing(root: Root, kept: StateStorage, tmp_path: Path) -> None:
    """However often it is tried; where there is room again, it is made."""
    native, data = tmp_path / "native", {"small": b"s", "large": os.urandom(2**20)}
    files = captured(native, **data)
    for size in (2**18, 0):
        with small_disk(size), pytest.raises(OSError, match="File too large"):
            kept.store(ONE, LOCAL, str(native), files)
        assert (packs_in(root), kept.active()) == ([], {})
    stored = store(kept, ONE, native, **data)
    assert contents_of(root, stored.files) == data
    assert kept.leftovers() == ()


def test_a_pack_whose_commit_may_stand_is_left(
    root: Root, kept: StateStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store did not say: it may be in the log."""

    def unknown(*_: object) -> None:
        raise CommitStateUnknown("no reply")

    native = tmp_path / "native"
    files = captured(native, a=b"a", b=b"b")
    monkeypatch.setattr(kept._table, "commit", unknown)
    with pytest.raises(CommitStateUnknown):
        kept.store(ONE, LOCAL, str(native), files)
    (native / "b").unlink()
    with pytest.raises(CommitStateUnknown):
        kept.store(ONE, LOCAL, str(native), files)
    monkeypatch.undo()
    assert len(packs_in(root)) == 2
    assert list(kept.leftovers()) == packs_in(root)


def test_bytes_that_a_sweep_has_moved_without_an_answer_stay_pinned(
    root: Root, kept: StateStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit stands, and the store did not say so: pins of open captures name the pack that is gone."""
    taken = store(kept, CheckpointId(1), tmp_path / "a", small=b"s" * 100, big=b"b" * 10_000)
    kept.unpin(CheckpointId(1), completed=True)
    open_ = store(kept, CheckpointId(2), tmp_path / "a", small=b"s" * 100, new=b"n" * 50)
    assert open_.files[0].at == taken.files[0].at
    commit = kept._table.commit

    def unanswered(decide: object) -> None:
        commit(decide)  # type: ignore[arg-type]
        raise CommitStateUnknown("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(kept._table, "commit", unanswered)
        with pytest.raises(CommitStateUnknown):
            sweep(kept, list)
    for _ in range(2):
        sweep(kept, list)
        assert kept.missing(open_.files) == ()
    assert verify_state(root, [manifest_of(2, open_.files)]) == ()
