"""Which files make a cut, on directories written without Spark."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from pyarrow import fs

from spark_abs.errors import DamageError, Refused
from spark_abs.model import NO_BATCH, BatchId, Provider
from spark_abs.snapshots import capture as module
from spark_abs.snapshots.capture import Captured, CapturedFile, CaptureIncomplete, capture
from spark_abs.snapshots.lineage import HEAD_BYTES
from tests.native_support import Native

LOCAL = fs.LocalFileSystem()


def take(native: Native, batch: int, kept: Collection[CapturedFile] = ()) -> Captured:
    return capture(LOCAL, str(native.directory), BatchId(batch), kept)


def state_of(captured: Captured) -> list[str]:
    names = [f.path.removeprefix("state/0/0/") for f in captured.files if f.path.startswith("state/0/0/")]
    return [name for name in names if "_metadata" not in name]


def test_no_batch_is_nothing(tmp_path: Path) -> None:
    assert capture(LOCAL, str(tmp_path / "none"), NO_BATCH) == Captured(NO_BATCH)


def test_the_cut_of_a_stateless_stage(tmp_path: Path) -> None:
    """The id, two offset files, two commit files; sidecars stay behind."""
    native = Native(tmp_path, stores=())
    for batch in range(4):
        native.batch(batch, ['{"x":1}'])
    native.put("offsets/.2.crc", "crc")
    for path in (tmp_path / "state/0/_metadata").iterdir():
        path.unlink()
    found = take(native, 2)
    assert [f.path for f in found.files] == ["commits/1", "commits/2", "metadata", "offsets/1", "offsets/2"]
    assert (found.provider, found.shuffle_partitions, found.operators) == ("", 0, ())
    assert found.offsets_text.endswith('{"x":1}')


def test_rocksdb_takes_the_newest_snapshot_and_what_came_after(tmp_path: Path) -> None:
    """With the SST files that it names; no file of a later version."""
    native = Native(tmp_path)
    for batch in range(7):
        native.batch(batch)
        native.changes(batch + 1)
    native.snapshot(2, ["a.sst"])
    native.snapshot(4, ["b.sst", "c.sst"])
    native.snapshot(7, ["d.sst"])
    assert state_of(take(native, 5)) == ["4.zip", "5.changelog", "6.changelog", "SSTs/b.sst", "SSTs/c.sst"]
    assert state_of(take(native, 3)) == ["4.zip", "SSTs/b.sst", "SSTs/c.sst"]
    assert state_of(take(native, 2)) == ["2.zip", "3.changelog", "SSTs/a.sst"]


def test_without_a_snapshot_all_changes_are_taken(tmp_path: Path) -> None:
    native = Native(tmp_path)
    for batch in range(3):
        native.batch(batch)
        native.changes(batch + 1)
    assert state_of(take(native, 1)) == ["1.changelog", "2.changelog"]


@pytest.fixture
def compacted(tmp_path: Path) -> tuple[Native, Captured]:
    """A cut that was copied, and after it a snapshot with none of its files: a compaction rewrote them."""
    native = Native(tmp_path)
    for batch in range(7):
        native.batch(batch)
        native.changes(batch + 1)
    native.snapshot(2, ["a.sst"])
    copied = take(native, 3)
    native.snapshot(5, ["b.sst"])
    return native, copied


NEWEST = ["5.zip", "6.changelog", "SSTs/b.sst"]
SINCE = ["2.zip", "3.changelog", "4.changelog", "5.changelog", "6.changelog", "SSTs/a.sst"]


def test_a_snapshot_that_is_kept_is_gone_on_from(compacted: tuple[Native, Captured]) -> None:
    """Only what has changed since is copied, though a newer snapshot is there (P12)."""
    native, copied = compacted
    assert state_of(take(native, 5)) == NEWEST
    assert state_of(take(native, 5, copied.files)) == SINCE
    newest = take(native, 5)
    assert state_of(take(native, 5, [*copied.files, *newest.files])) == NEWEST


def replaced(native: Native) -> None:
    native.snapshot(2, ["c.sst"])


def purged(native: Native) -> None:
    (native.directory / "state/0/0/4.changelog").unlink()


def unnamed(native: Native) -> None:
    (native.directory / "state/0/0/SSTs/a.sst").unlink()


@pytest.mark.parametrize("change", [replaced, purged, unnamed])
def test_the_newest_snapshot_is_taken_where_the_one_that_is_kept_does_not_do(
    compacted: tuple[Native, Captured], change: Callable[[Native], None]
) -> None:
    """It is not the one that was copied, or something is gone."""
    native, copied = compacted
    change(native)
    assert state_of(take(native, 5, copied.files)) == NEWEST


def test_what_has_changed_since_does_not_grow_beyond_half_of_a_snapshot(
    compacted: tuple[Native, Captured],
) -> None:
    """Though it is kept as well: a start has to go through it."""
    native, _ = compacted
    native.put("state/0/0/4.changelog", bytes(1000))
    copied = take(native, 3, take(native, 2).files)
    assert state_of(take(native, 5, copied.files)) == NEWEST


def test_the_newest_snapshot_is_taken_where_less_is_to_be_copied_with_it(
    compacted: tuple[Native, Captured],
) -> None:
    """Most of it is kept, and what has changed since the older one is more than the rest."""
    native, copied = compacted
    native.put("state/0/0/5.changelog", bytes(60))
    native.put("state/0/0/6.changelog", b"")
    native.put("state/0/0/5.zip", (native.directory / "state/0/0/2.zip").read_bytes())
    newest = take(native, 5)
    kept = [*copied.files, *(f for f in newest.files if "changelog" not in f.path)]
    assert state_of(take(native, 5, copied.files)) == SINCE
    assert state_of(take(native, 5, kept)) == ["5.zip", "6.changelog", "SSTs/a.sst"]


def test_hdfs_backed(tmp_path: Path) -> None:
    native = Native(tmp_path, provider=Provider.HDFS)
    for batch in range(6):
        native.batch(batch)
        native.changes(batch + 1, "{}.delta")
    native.changes(3, "{}.snapshot")
    native.changes(6, "{}.snapshot")
    assert state_of(take(native, 4)) == ["3.snapshot", "4.delta", "5.delta"]


def test_every_store_of_every_partition(tmp_path: Path) -> None:
    native = Native(tmp_path, provider=Provider.HDFS, partitions=2, stores=("left", "right"))
    native.batch(0)
    for partition in range(2):
        for store in ("left", "right"):
            native.put(f"state/0/{partition}/{store}/1.delta", "x")
    found = take(native, 0)
    assert sum(f.path.endswith("1.delta") for f in found.files) == 4
    assert (found.shuffle_partitions, found.operators[0].stores) == (2, ("left", "right"))
    (tmp_path / "state/0/1/left/1.delta").unlink()
    with pytest.raises(
        CaptureIncomplete, match=r"state/0/1/left: version \d+ cannot be loaded: 1\.changelog"
    ):
        take(native, 0)


def test_an_operator_may_bring_all_rows_together(tmp_path: Path) -> None:
    """A limit or an aggregation without keys has one partition; its metadata gives the query's number."""
    native = Native(tmp_path, partitions=3)
    native.batch(0)
    native.changes(1)
    found = take(native, 0)
    assert (found.operators[0].partitions, found.shuffle_partitions) == (1, 3)


@pytest.mark.parametrize(("there", "gone"), [((0, 1), 2), ((1, 2), 0), ((1,), 0)])
def test_a_partition_that_is_gone_is_said(tmp_path: Path, there: tuple[int, ...], gone: int) -> None:
    native = Native(tmp_path, partitions=3)
    native.batch(0)
    for partition in there:
        native.changes(1, partition=partition)
    with pytest.raises(
        CaptureIncomplete, match=rf"state/0/{gone}: version \d+ cannot be loaded: 1\.changelog"
    ):
        take(native, 0)


def test_the_commit_must_have_ids_for_every_operator(tmp_path: Path) -> None:
    native = Native(tmp_path)
    native.batch(0, unique_ids=[])
    native.changelog(1, "u1", [])
    with pytest.raises(CaptureIncomplete, match="lacks stateUniqueIds"):
        take(native, 0)
    native.batch(0, unique_ids=[["u1"], ["u2"]])
    with pytest.raises(CaptureIncomplete, match="state/0/1: the commit has 0 ids for version 1"):
        take(native, 0)


def test_state_format_2_follows_the_ids_of_the_commit(tmp_path: Path) -> None:
    """A crashed batch leaves a second file of one version: only the one that the commit names counts."""
    native = Native(tmp_path)
    for batch in range(4):
        native.batch(batch, unique_ids=[[f"u{batch + 1}"]])
    native.snapshot(1, ["one.sst"], "u1")
    native.snapshot(2, ["dead.sst"], "dead")
    native.changelog(2, "u2", [(1, "u1")])
    native.changelog(3, "u3", [(1, "u1"), (2, "u2")])
    native.changelog(3, "dead", [(1, "u1"), (2, "dead")])
    native.changelog(4, "u4", [(1, "u1"), (2, "u2"), (3, "u3")])
    assert state_of(take(native, 2)) == ["1_u1.zip", "2_u2.changelog", "3_u3.changelog", "SSTs/one.sst"]
    native.snapshot(3, ["three.sst"], "u3")
    assert state_of(take(native, 2)) == ["3_u3.zip", "SSTs/three.sst"]
    assert state_of(take(native, 3)) == ["3_u3.zip", "4_u4.changelog", "SSTs/three.sst"]


def test_a_lineage_is_read_from_a_block_that_is_longer_than_the_head(tmp_path: Path) -> None:
    """As with `spark.io.compression.lz4.blockSize=512k`."""
    native = Native(tmp_path)
    for batch in range(2):
        native.batch(batch, unique_ids=[[f"u{batch + 1}"]])
    native.snapshot(1, ["one.sst"], "u1")
    native.changelog(2, "u2", [(1, "u1")], changes=random.Random(7).randbytes(2 * HEAD_BYTES))
    assert state_of(take(native, 1)) == ["1_u1.zip", "2_u2.changelog", "SSTs/one.sst"]


def test_state_format_2_goes_on_from_a_snapshot_that_is_kept_along_its_lineage(tmp_path: Path) -> None:
    """Not from one that a dead batch has left, nor from one that the lineage does not reach."""
    native, one = Native(tmp_path), "one" * 80 + ".sst"
    for batch in range(4):
        native.batch(batch, unique_ids=[[f"u{batch + 1}"]])
    native.snapshot(1, [one], "u1")
    native.snapshot(2, ["dead.sst"], "dead")
    native.changelog(2, "u2", [(1, "u1")])
    native.changelog(3, "u3", [(1, "u1"), (2, "u2")])
    native.changelog(4, "u4", [(1, "u1"), (2, "u2"), (3, "u3")])
    copied = take(native, 1)
    native.snapshot(3, ["three.sst"], "u3")
    every = [
        CapturedFile(str(p.relative_to(tmp_path)), p.stat().st_size, p.stat().st_mtime_ns)
        for p in (tmp_path / "state/0/0").rglob("2_dead.zip")
    ]
    since = ["1_u1.zip", "2_u2.changelog", "3_u3.changelog", "4_u4.changelog", f"SSTs/{one}"]
    assert state_of(take(native, 3, [*copied.files, *every])) == since
    native.changelog(4, "u4", [(3, "u3")])
    assert state_of(take(native, 3, copied.files)) == ["3_u3.zip", "4_u4.changelog", "SSTs/three.sst"]


def test_state_format_2_from_its_first_version(tmp_path: Path) -> None:
    native = Native(tmp_path, codec="zstd")
    native.batch(0, unique_ids=[["u1"]])
    native.batch(1, unique_ids=[["u2"]])
    native.changelog(1, "u1", [])
    native.changelog(2, "u2", [(1, "u1")])
    assert state_of(take(native, 1)) == ["1_u1.changelog", "2_u2.changelog"]


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("offsets/2", "the offsets of batch 2"),
        ("offsets/1", "the offsets of the batch before"),
        ("commits/2", "the commit of batch 2"),
        ("metadata", "the query's id"),
        ("state/0/0/3.changelog", "3.changelog or 3.delta"),
        ("state/0/0/2.changelog", "2.changelog or 2.delta"),
        ("state/0/0/SSTs/a.sst", "snapshot 1.zip needs SSTs/a.sst, which is missing"),
        ("state/0/_metadata/metadata", "no operator metadata"),
    ],
)
def test_a_set_that_does_not_close_is_an_error(tmp_path: Path, gone: str, said: str) -> None:
    native = Native(tmp_path)
    for batch in range(3):
        native.batch(batch)
        native.changes(batch + 1)
    native.snapshot(1, ["a.sst"])
    take(native, 2)
    (tmp_path / gone).unlink()
    with pytest.raises(CaptureIncomplete, match=said):
        take(native, 2)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda n: n.changelog(2, "u2", [(1, "other")]),
            "version 1_other has neither a changelog nor a snapshot",
        ),
        (lambda n: n.changelog(2, "v2", [(1, "u1")]).rename(n.directory / "x"), "has 0 ids for version 2"),
    ],
)
def test_a_lineage_that_does_not_close_is_an_error(
    tmp_path: Path, spoil: Callable[[Native], object], said: str
) -> None:
    native = Native(tmp_path)
    native.batch(0, unique_ids=[["u1"]])
    native.batch(1, unique_ids=[["u2"]])
    native.changelog(1, "u1", [])
    spoil(native)
    with pytest.raises(CaptureIncomplete, match=said):
        take(native, 1)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    native = Native(tmp_path / "provider", provider="com.example.Store")
    native.batch(0)
    with pytest.raises(Refused, match=r"com\.example\.Store"):
        take(native, 0)
    native = Native(tmp_path / "codec", codec="lzf")
    native.batch(0, unique_ids=[["u1"]])
    native.changelog(1, "u1", [])
    with pytest.raises(Refused, match="lzf"):
        take(native, 0)


def test_damage_is_said(tmp_path: Path) -> None:
    native = Native(tmp_path)
    native.batch(0)
    native.snapshot(1, ["a.sst"])
    (tmp_path / "state/0/0/SSTs/a.sst").write_bytes(b"short")
    with pytest.raises(DamageError, match=r"SSTs/a.sst has 5 bytes"):
        take(native, 0)
    (tmp_path / "state/0/0/1.zip").write_bytes(b"not a zip")
    with pytest.raises(DamageError, match=r"1\.zip"):
        take(native, 0)


def test_sources_end_at_the_offsets_of_the_cut(tmp_path: Path) -> None:
    """A file source by its log offset; one that has begun no batch not at all; others whole."""
    native = Native(tmp_path)
    listed = 'v1\n{"path":"file:/x","timestamp":1,"batchId":0}'
    native.batch(0, ['{"logOffset":1}', "-", '{"kafka":{"0":3}}', "-"])
    native.changes(1)
    for number in range(4):
        native.put(f"sources/0/{number}", listed)
    native.put("sources/1/0", listed)
    native.put("sources/2/0", 'v1\n{"kafka":{"0":0}}')
    native.put("sources/3/0", 'v1\n{"kafka":{"0":0}}')
    native.put("sources/2/extra/log", "x")
    found = [f.path for f in take(native, 0).files if f.path.startswith("sources")]
    assert found == ["sources/0/0", "sources/0/1", "sources/2/0", "sources/2/extra/log", "sources/3/0"]


def test_a_later_compact_file_stands_for_files_of_a_source_that_are_gone(tmp_path: Path) -> None:
    """For a cut that only a rewind goes back to, which cuts it; nothing else takes it."""
    native = Native(tmp_path)
    native.batch(0, ['{"logOffset":1}'])
    native.changes(1)
    for name in ("1", "9.compact", "10", "19.compact"):
        native.put(f"sources/0/{name}", 'v1\n{"path":"file:/x","timestamp":1,"batchId":0}')
    found = capture(LOCAL, str(native.directory), BatchId(0), later_logs=True)
    assert [f.path for f in found.files if f.path.startswith("sources")] == ["sources/0/9.compact"]
    with pytest.raises(CaptureIncomplete, match="file 0 of 0 to 1 is missing"):
        take(native, 0)


def test_named_sources_of_offset_log_2(tmp_path: Path) -> None:
    native = Native(tmp_path)
    native.batch(0, ['{"logOffset":0}'], version=2)
    native.changes(1)
    native.put("sources/0/0", 'v1\n{"path":"file:/x","timestamp":1,"batchId":0}')
    native.put("sources/0/1", 'v1\n{"path":"file:/y","timestamp":1,"batchId":1}')
    assert [f.path for f in take(native, 0).files if f.path.startswith("sources")] == ["sources/0/0"]


def test_schemas_from_behind_the_cut_stay_behind(tmp_path: Path) -> None:
    """Operator metadata 2 is dated by batch."""
    native = Native(tmp_path)
    native.put("state/0/_metadata/metadata", "x").unlink()
    for batch in range(3):
        native.batch(batch)
        native.changes(batch + 1)
    for batch in (0, 2):
        path = native.put(f"state/0/_stateSchema/default/{batch}_s{batch}", f"schema {batch}")
        operator = json.dumps(native.operator([f"file:{path}"]))
        native.put(f"state/0/_metadata/v2/{batch}", f"v2\n{operator}")
    found = take(native, 1)
    dated = [f.path for f in found.files if "v2" in f.path or "_stateSchema" in f.path]
    assert dated == ["state/0/_metadata/v2/0", "state/0/_stateSchema/default/0_s0"]


def test_a_file_purged_under_the_listing_starts_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark takes a snapshot away between listing and reading: the newer one is found on the second look."""
    native = Native(tmp_path)
    for batch in range(3):
        native.batch(batch)
        native.changes(batch + 1)
    native.snapshot(1, ["a.sst"])
    looks = 0

    class Reader(module._Reader):
        def __init__(self, *args: object) -> None:
            nonlocal looks
            super().__init__(*args)  # type: ignore[arg-type]
            looks += 1
            if looks == 1:
                (tmp_path / "state/0/0/1.zip").unlink()
                native.snapshot(2, ["b.sst"])

    monkeypatch.setattr(module, "_Reader", Reader)
    assert state_of(take(native, 2)) == ["2.zip", "3.changelog", "SSTs/b.sst"]
    assert looks == 2


def test_an_operator_that_was_repartitioned_has_the_partitions_of_the_cut(tmp_path: Path) -> None:
    """Metadata of version 1 keeps the first number: the offset log says what holds."""
    native = Native(tmp_path, partitions=2)
    native.batch(0)
    native.partitions = 3
    native.batch(1)
    for partition in range(3):
        native.snapshot(2, [], partition=partition)
    for partition in range(2):
        native.changes(1, partition=partition)
    before, after = take(native, 0), take(native, 1)
    assert ([o.partitions for o in before.operators], before.shuffle_partitions) == ([2], 2)
    assert ([o.partitions for o in after.operators], after.shuffle_partitions) == ([3], 3)
    assert [f.path for f in after.files if f.path.endswith(".zip")] == [
        f"state/0/{n}/2.zip" for n in range(3)
    ]


def test_the_cut_of_a_spark_that_writes_no_operator_metadata() -> None:
    """A checkpoint of Spark 3.5.9: an aggregation in HDFS-backed stores."""
    sample = Path(__file__).parent / "spark-3.5" / "totals"
    found = capture(LOCAL, str(sample), BatchId(3))
    (operator,) = found.operators
    assert (operator.operator_id, operator.name, operator.partitions) == (0, "", 2)
    assert (operator.stores, found.shuffle_partitions) == (("default",), 2)
    names = {f.path for f in found.files if f.path.startswith("state/")}
    deltas = {f"state/0/{part}/{version}.delta" for part in (0, 1) for version in (1, 2, 3, 4)}
    assert names == deltas | {"state/0/0/_metadata/schema"}


def test_a_join_of_a_spark_that_writes_no_operator_metadata_has_all_its_stores(tmp_path: Path) -> None:
    """No other store is known there; one that is gone is said."""
    sides = (
        "left-keyToNumValues",
        "left-keyWithIndexToValue",
        "right-keyToNumValues",
        "right-keyWithIndexToValue",
    )
    native = Native(tmp_path, provider=Provider.HDFS, partitions=2, stores=sides, encoding="")
    (tmp_path / "state/0/_metadata/metadata").unlink()
    native.batch(0)
    for partition in (0, 1):
        for side in sides:
            native.put(f"{native.store(partition, side)}/1.delta", "changes")
    assert set(take(native, 0).operators[0].stores) == set(sides)
    for partition in (0, 1):
        (tmp_path / native.store(partition, sides[3]) / "1.delta").unlink()
        with pytest.raises(CaptureIncomplete, match="state"):
            take(native, 0)
