"""What is damaged is named, and what a live job does under our eyes is not damage."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_abs.errors import DamageError
from spark_abs.model import BatchId, ChannelId, CheckpointId, Version
from spark_abs.snapshots import state_storage as kept_module
from spark_abs.snapshots import verify as module
from spark_abs.snapshots.capture import capture
from spark_abs.snapshots.materialise import materialise
from spark_abs.snapshots.packs import PackReader
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.snapshots.sweep import sweep
from spark_abs.snapshots.take import snapshot_stage
from spark_abs.snapshots.verify import (
    verify_channel,
    verify_native,
    verify_packs,
    verify_state,
    verify_table,
    written_once,
)
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import AddFile, Commit, Table
from tests.failing_storage import fail_reads
from tests.native_support import Native
from tests.snapshot_support import manifest_of, store

ONE = CheckpointId(1)


def altered(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_every_checkpoint_that_needs_altered_bytes_is_named(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    """With the pack, the file and the stage; the bytes are read once."""
    shared = os.urandom(300)
    one = store(kept, ONE, tmp_path / "a", x=shared, y=b"well").files
    two = store(kept, CheckpointId(2), tmp_path / "b", z=shared).files
    manifests = [manifest_of(1, one), manifest_of(2, two)]
    told: list[int] = []
    assert verify_state(root, manifests, told.append) == ()
    assert sum(told) == 304
    pack = Path(root.uri, "state", one[0].at.pack)
    altered(pack, pack.read_bytes().index(shared))
    found = verify_state(root, manifests)
    assert [(f.path, f.checkpoint, f.stage) for f in found] == [
        (f"state/{pack.name}", 1, "match"),
        (f"state/{pack.name}", 2, "match"),
    ]
    assert "(x)" in found[0].problem
    pack.unlink()
    assert len(verify_state(root, manifests)) == 3
    Path(root.uri, "state").rename(Path(root.uri, "elsewhere"))
    assert {f.problem for f in verify_state(root, manifests)} == {"missing (x)", "missing (y)", "missing (z)"}


def test_every_byte_that_is_named_is_read(
    root: Root, kept: StateStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is altered in turn; what no manifest names is not read."""
    monkeypatch.setattr(kept_module, "CHUNK", 8)
    data = {"a": os.urandom(20), "b": os.urandom(8), "dead": os.urandom(20)}
    files = {f.path: f for f in store(kept, ONE, tmp_path / "native", **data).files}
    pack = Path(root.uri, "state", files["a"].at.pack)
    whole, retained = pack.read_bytes(), [manifest_of(1, [files["a"], files["b"]])]
    for path, content in data.items():
        parts = [content[at : at + 8] for at in range(0, len(content), 8)]
        for at in [whole.index(part) + i for part in parts for i in range(len(part))]:
            pack.write_bytes(whole)
            altered(pack, at)
            problems = [f.problem for f in verify_state(root, retained)]
            assert [p for p in problems if p.endswith(f"({path})")] == problems
            assert len(problems) == (path != "dead")


def test_a_pack_whose_footer_forgets_what_is_needed_is_said_and_not_swept(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    """The bytes can still be read: a restore works, and sweeping must not take them for dead."""
    files = store(kept, ONE, tmp_path / "a", x=b"x" * 10, y=b"y" * 100).files
    retained = [manifest_of(1, files)]
    kept.unpin(ONE, completed=True)
    assert verify_packs(root, retained) == ()
    pack = Path(root.uri, "state", files[0].at.pack)
    data = pack.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    forgotten = data[footer:].replace(files[0].sha256.encode(), b"0" * 64)
    pack.write_bytes(data[:footer] + forgotten)
    (found,) = verify_packs(root, retained)
    assert (found.path, found.checkpoint, found.stage) == (f"state/{pack.name}", 1, "match")
    assert verify_state(root, retained) == ()
    with pytest.raises(DamageError, match=rf"{pack.name} lacks sha256 {files[0].sha256}"):
        sweep(kept, lambda: retained)
    materialise(root, files, target=Place(str(tmp_path / "new")), query_id="query")


def test_bytes_that_sweeping_moves_meanwhile_are_not_damage(
    root: Root, kept: StateStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = store(kept, ONE, tmp_path / "a", x=b"x" * 10, y=b"y" * 100).files
    retained = [manifest_of(1, files[:1])]
    pieces, swept = PackReader.pieces, False

    def sweeping(*args: object) -> object:
        nonlocal swept
        if not swept:
            swept = True
            kept.unpin(ONE, completed=True)
            sweep(kept, lambda: retained)
        return pieces(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(PackReader, "pieces", sweeping)
    assert verify_state(root, retained) == ()
    assert swept


def with_sidecar(path: Path) -> Path:
    """Add the checksum file that Hadoop's local file system leaves."""
    data = path.read_bytes()
    sums = [zlib.crc32(data[i : i + 512]) for i in range(0, len(data), 512)]
    sidecar = path.parent / f".{path.name}.crc"
    sidecar.write_bytes(b"crc\0" + struct.pack(">i", 512) + struct.pack(f">{len(sums)}I", *sums))
    return path


@pytest.fixture
def native(tmp_path: Path) -> Native:
    made = Native(tmp_path / "native")
    for batch in range(2):
        made.batch(batch)
        made.changes(batch + 1)
    made.put("state/0/0/SSTs/unused.sst", os.urandom(1500))
    for path in list(made.directory.rglob("*")):
        if path.is_file():
            with_sidecar(path)
    return made


def flip(path: Path) -> None:
    altered(path, 700)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1024])


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(flip, "bytes 512 to 1024"), (truncate, "torn"), (remove, "missing")],
)
def test_a_native_file_is_held_against_its_checksum_file(
    native: Native, spoil: Callable[[Path], None], said: str
) -> None:
    """Whether it is needed to start or not."""
    assert verify_native(Place(str(native.directory))) == ()
    path = native.directory / "state/0/0/SSTs/unused.sst"
    spoil(path)
    (found,) = verify_native(Place(str(native.directory)))
    assert found.path == str(path)
    assert said in found.problem


def test_a_torn_checksum_file_is_said(native: Native) -> None:
    (native.directory / "offsets/.1.crc").write_bytes(b"crc")
    (found,) = verify_native(Place(str(native.directory)))
    assert "checksum file is torn" in found.problem


def test_a_native_directory_that_cannot_start_is_said(native: Native) -> None:
    """Also where no checksum is left: what the last batch needs is not there."""
    for name in ("2.changelog", ".2.changelog.crc"):
        (native.directory / "state/0/0" / name).unlink()
    (found,) = verify_native(Place(str(native.directory)))
    assert "2.changelog or 2.delta" in found.problem
    (missing,) = verify_native(Place(str(native.directory / "none")))
    assert missing.problem == "missing"


def test_what_a_restore_wrote_is_held_against_the_manifest(
    root: Root, kept: StateStorage, native: Native, tmp_path: Path
) -> None:
    """It has no checksum files until Spark writes its own."""
    files = snapshot_stage(kept, ONE, Place(str(native.directory)), BatchId(1)).files
    materialise(root, files, target=Place(str(tmp_path / "new")), query_id="query")
    assert verify_native(Place(str(tmp_path / "new")), files) == ()
    altered(tmp_path / "new/state/0/0/1.changelog")
    (found,) = verify_native(Place(str(tmp_path / "new")), files)
    assert found.path.endswith("state/0/0/1.changelog")


def test_what_was_captured_is_held_against_the_manifest_where_spark_writes_it_once(
    kept: StateStorage, native: Native
) -> None:
    """Without checksum files: altered bytes, a batch that had ended and has not, a torn snapshot."""
    for path in native.directory.rglob(".*.crc"):
        path.unlink()
    place = Place(str(native.directory))
    captured = snapshot_stage(kept, ONE, place, BatchId(1)).files
    once = [file for file in captured if written_once(file.path)]
    assert {"offsets/1", "commits/1", "state/0/0/2.changelog"} <= {file.path for file in once}
    assert not any(file.path.endswith((".zip", "metadata", "schema")) for file in once)
    native.snapshot(2, [])
    assert verify_native(place, once) == ()

    commits, changes = native.directory / "commits/1", native.directory / "state/0/0/2.changelog"
    altered(changes)
    (found,) = verify_native(place, once)
    assert (found.path, "altered" in found.problem) == (str(changes), True)
    altered(changes)
    altered(native.directory / "state/0/0/2.zip", 45)
    found, *_ = verify_native(place, once)
    assert "2.zip" in found.path
    altered(native.directory / "state/0/0/2.zip", 45)
    commits.unlink()
    (found,) = verify_native(place, once)
    assert (found.path, found.problem) == (str(commits), "missing")


def test_a_purge_under_verify_is_not_damage(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch that was newest is purged while it is looked at, and a newer one has ended."""

    def purging(*args: object) -> object:
        if not (native.directory / "commits/2").exists():
            native.batch(2)
            native.changes(3)
            native.snapshot(3, ["b.sst"])
            for path in native.directory.glob("state/0/0/[12].changelog"):
                path.unlink()
        return capture(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "capture", purging)
    for path in native.directory.rglob(".*.crc"):
        path.unlink()
    assert verify_native(Place(str(native.directory))) == ()


def add(root: Root, relative: str, number: int) -> AddFile:
    buffer = io.BytesIO()
    rows = pa.table({"n": pa.array([number] * 1000)})
    pq.write_table(rows, buffer, write_page_checksum=True, use_dictionary=False, compression="NONE")
    name = f"{number}.parquet"
    Path(root.uri, relative, name).write_bytes(buffer.getvalue())
    return AddFile(name, buffer.tell(), json.dumps({"numRecords": 1000}))


def table_of(root: Root, relative: str) -> Table:
    """A table of three commits, a file each."""
    table = Table.ensure(root.place(relative), pa.schema([("n", pa.int64())]))
    for number in range(1, 4):
        table.commit_next(Commit([add(root, relative, number)]))
    return table


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(lambda p: altered(p, 1000), "altered"), (truncate, "torn: it has 1024 bytes"), (remove, "missing")],
)
def test_a_table_of_ours(root: Root, spoil: Callable[[Path], None], said: str) -> None:
    table_of(root, "checkpoints")
    assert verify_table(root, "checkpoints") == ()
    spoil(Path(root.uri, "checkpoints/2.parquet"))
    (found,) = verify_table(root, "checkpoints")
    assert found.path == "checkpoints/2.parquet"
    assert said in found.problem


def test_a_table_without_a_log(root: Root) -> None:
    assert verify_table(root, "checkpoints")[0].problem == "missing"
    table_of(root, "checkpoints")
    Path(root.uri, "checkpoints/_delta_log/00000000000000000002.json").write_text("{")
    assert verify_table(root, "checkpoints")[0].path == "checkpoints"


def test_a_channel_is_whole_behind_its_slowest_reader(root: Root) -> None:
    """What lies before does not matter: it may have been trimmed."""
    channel = ChannelId("a.main")
    assert verify_channel(root, channel, Version(0))[0].problem == "missing"
    table = table_of(root, "channels/a.main")
    files = Path(root.uri, "channels/a.main")
    assert verify_channel(root, channel, Version(0)) == ()
    altered(files / "2.parquet", 1000)
    (page,) = verify_channel(root, channel, Version(0))
    assert (page.path, page.problem.partition(":")[0]) == ("channels/a.main/2.parquet", "altered")
    altered(files / "2.parquet", 1000)
    (files / "1.parquet").unlink()
    assert [f.path for f in verify_channel(root, channel, Version(0))] == ["channels/a.main/1.parquet"]
    assert verify_channel(root, channel, Version(1)) == ()
    # An entry that an abandoned attempt wrote is passed over.
    assert verify_channel(root, channel, Version(0), lambda commit: commit.version > 1) == ()
    table.delta.create_checkpoint()
    (files / "_delta_log/00000000000000000002.json").unlink()
    found = verify_channel(root, channel, Version(1))
    assert [(f.path[-6:], f.problem) for f in found] == [("2.json", "missing")]


def test_a_store_that_does_not_answer_is_not_damage(
    root: Root, kept: StateStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a table, a channel or a pack."""
    table_of(root, "channels/a.main")
    retained = [manifest_of(1, store(kept, ONE, tmp_path / "a", x=b"x" * 10).files)]
    fail_reads(monkeypatch, lambda path: path.endswith("parquet"))
    with pytest.raises(OSError, match="Stale file handle"):
        verify_table(root, "channels/a.main")
    with pytest.raises(OSError, match="Stale file handle"):
        verify_channel(root, ChannelId("a.main"), Version(0))
    with pytest.raises(OSError, match="Stale file handle"):
        verify_state(root, retained)
