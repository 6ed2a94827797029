"""The state of a batch under a later number."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

import pytest

from spark_abs.errors import Refused
from spark_abs.model import Provider
from spark_abs.rewind.state import chains, copies, empty_base, raised_lineage, with_lineage_of
from spark_abs.snapshots.lineage import (
    LineageItem,
    compress,
    decompress,
    parse_lineage,
    with_lineage,
    xxh32,
)
from spark_abs.snapshots.stores import Wanted, files_of_version

ROCKSDB = Provider.ROCKSDB.value
HDFS = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"


def loaded(there: Mapping[str, bytes], version: int, ids: frozenset[str] | None = None) -> tuple[str, ...]:
    """Return the files by which a store is loaded, as the restores of jobs choose them."""
    wanted = Wanted(Provider.ROCKSDB, version, ids, "lz4")
    sizes = {name: len(data) for name, data in there.items()}
    return files_of_version(wanted, sizes, there.__getitem__, there.__getitem__)


def test_a_chain_begins_at_its_snapshot_and_keeps_its_order() -> None:
    paths = [
        "state/0/0/20.snapshot",
        "state/0/0/21.delta",
        "state/0/0/22.delta",
        "state/0/1/1.delta",
        "metadata",
    ]
    first, second = chains(paths)
    assert (first.base, second.base) == (20, 0)
    assert copies(first, 15) == {
        "state/0/0/35.snapshot": "state/0/0/20.snapshot",
        "state/0/0/36.delta": "state/0/0/21.delta",
        "state/0/0/37.delta": "state/0/0/22.delta",
    }
    assert empty_base(first, 15, HDFS, "lz4") == {}
    assert list(empty_base(second, 15, HDFS, "lz4")) == ["state/0/1/15.snapshot"]


@pytest.mark.parametrize("codec", ["lz4", "zstd", "snappy"])
def test_an_empty_snapshot_ends_at_once(codec: str) -> None:
    (chain,) = chains(["state/0/0/1.delta"])
    (content,) = empty_base(chain, 9, HDFS, codec).values()
    assert decompress(content, codec) == b"\xff\xff\xff\xff"


def test_an_empty_rocksdb_has_no_files() -> None:
    (chain,) = chains(["state/0/0/1.changelog", "state/0/0/2.changelog"])
    ((path, content),) = empty_base(chain, 9, ROCKSDB, "lz4").items()
    assert path == "state/0/0/9.zip"
    assert zipfile.ZipFile(io.BytesIO(content)).read("metadata") == b'v1\n{"sstFiles": [], "numKeys": 0}'
    made = {"9.zip": content, **dict.fromkeys(["10.changelog", "11.changelog"], b"")}
    assert sorted(loaded(made, 11)) == ["10.changelog", "11.changelog", "9.zip"]


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_lineage_names_the_raised_versions(snapshot: bool) -> None:
    """Also where a store was never stored whole: its lineage begins with the empty snapshot."""
    texts = {}
    for version in range(1, 4):
        before = [LineageItem(n, f"id{n}") for n in range(1, version)]
        head = with_lineage(b"\0\2v3\0\2[]" + b"rows", before)
        texts[f"state/0/0/{version}_id{version}.changelog"] = compress(head, "lz4")
    if snapshot:
        del texts["state/0/0/1_id1.changelog"]
    base = empty_base(chains(["state/1/0/1.changelog"])[0], 1, ROCKSDB, "lz4")
    whole = {"state/0/0/1_id1.zip": next(iter(base.values()))} if snapshot else {}
    (chain,) = chains([*texts, *whole])
    newest = with_lineage_of(chain)
    assert newest == "state/0/0/3_id3.changelog"
    there = {**empty_base(chain, 50, ROCKSDB, "lz4")}
    for to, path in copies(chain, 50).items():
        content = {**texts, **whole}[path]
        there[to] = raised_lineage(chain, 50, "lz4", content) if path == newest else content
    text = decompress(there["state/0/0/53_id3.changelog"], "lz4")
    assert text.endswith(b"rows")
    versions = [item.version for item in parse_lineage(text)]
    assert versions == ([51, 52] if snapshot else [50, 51, 52])
    names = {path.removeprefix("state/0/0/"): data for path, data in there.items()}
    assert set(loaded(names, 53, frozenset(["id3"]))) == set(names)


def test_a_hash_is_that_of_the_specification() -> None:
    assert xxh32(b"", 0) == 0x02CC5D05
    assert xxh32(b"abc", 0) == 0x32D153FF
    assert xxh32(b"Nobody inspects the spammish repetition", 0) == 0xE2293B2F


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 2**16, 2**16 + 1])
@pytest.mark.parametrize("codec", ["lz4", "zstd", "snappy"])
def test_what_is_compressed_is_read_again(codec: str, size: int) -> None:
    data = bytes(n % 251 for n in range(size))
    assert decompress(compress(data, codec), codec) == data


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(Refused, match=r"set spark\.sql\.streaming\.stateStore\.compression\.codec to lz4"):
        compress(b"", "lzf")
