"""The grammar of the checkpoint directory."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from spark_abs.errors import DamageError, Refused
from spark_abs.snapshots.layout import (
    SourceLogFile,
    StateFile,
    StateFileKind,
    file_source_logs,
    file_source_offset,
    is_file_source_log,
    is_ignored,
    later_compact,
    parse_commit,
    parse_offsets,
    parse_operator,
    relocate_operator,
    source_log_file,
    state_file,
)
from spark_abs.snapshots.lineage import LineageItem, decompress_head, parse_lineage
from tests.native_support import compress

METADATA = json.dumps({"batchWatermarkMs": 7, "batchTimestampMs": 8, "conf": {"a": "b"}})


def test_offset_log_version_1_names_sources_by_place() -> None:
    """A source without an offset keeps its place and has no offset."""
    offsets = parse_offsets(f'v1\n{METADATA}\n{{"logOffset":3}}\n-\n{{"x":1}}')
    assert offsets.offsets == {"0": '{"logOffset":3}', "2": '{"x":1}'}
    assert (offsets.watermark_ms, offsets.timestamp_ms, dict(offsets.conf)) == (7, 8, {"a": "b"})


def test_offset_log_version_2_names_sources() -> None:
    offsets = parse_offsets(f'v2\n{METADATA}\nclicks:{{"a":"b:c"}}\n1:-')
    assert offsets.offsets == {"clicks": '{"a":"b:c"}'}
    assert offsets.lines == ('{"a":"b:c"}',)


def test_an_offset_file_without_metadata_is_read() -> None:
    assert parse_offsets("v1\n\n{}").watermark_ms == 0


@pytest.mark.parametrize("version", [1, 2, 3])
def test_commit_logs(version: int) -> None:
    """All three versions give the next watermark; the ids of state files where there are any."""
    assert parse_commit(f'v{version}\n{{"nextBatchWatermarkMs":5}}').watermark_ms == 5
    ids = parse_commit('v2\n{"nextBatchWatermarkMs":5,"stateUniqueIds":{"0":[["a","b"],["c"]]}}').unique_ids
    assert ids == {0: (("a", "b"), ("c",))}


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_offsets, f"v3\n{METADATA}"),
        (parse_commit, "v4\n{}"),
        (parse_operator, "v3\n{}"),
    ],
)
def test_newer_versions_are_refused(parse: Callable[[str], object], text: str) -> None:
    """A guess would end in a silent loss of state."""
    with pytest.raises(Refused, match="is not supported, only"):
        parse(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_offsets, ""),
        (parse_offsets, "v1\n{"),
        (parse_offsets, 'v1\n{"batchWatermarkMs":"soon"}'),
        (parse_offsets, "v2\n{}\nno colon"),
        (parse_commit, "1\n{}"),
        (parse_commit, "v2\n[]"),
        (parse_commit, 'v2\n{"stateUniqueIds":[1]}'),
        (parse_operator, "v1\n{}"),
        (parse_operator, 'v1\n{"operatorInfo":3,"stateStoreInfo":[]}'),
    ],
)
def test_what_spark_would_not_write_is_damage(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(DamageError):
        parse(text)


@pytest.mark.parametrize("text", ["", "v9\n{}", "v1\n{", 'v1\n{"batchWatermarkMs":"soon"}', "v1\n[]"])
def test_a_log_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises((DamageError, Refused), match=r"^file:/c/offsets/5: "):
        parse_offsets(text, "file:/c/offsets/5")
    with pytest.raises((DamageError, Refused), match=r"^file:/c/commits/5: "):
        parse_commit(text.replace("batchW", "nextBatchW"), "file:/c/commits/5")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("12.zip", (12, StateFileKind.SNAPSHOT, None)),
        ("12.changelog", (12, StateFileKind.CHANGES, None)),
        ("12.delta", (12, StateFileKind.CHANGES, None)),
        ("12.snapshot", (12, StateFileKind.SNAPSHOT, None)),
        ("3_a-1.zip", (3, StateFileKind.SNAPSHOT, "a-1")),
        ("3_a-1.changelog", (3, StateFileKind.CHANGES, "a-1")),
        ("SSTs/000008-x.sst", None),
        ("_metadata/schema", None),
        ("12.zip.crc", None),
        ("x12.zip", None),
    ],
)
def test_names_of_state_files(name: str, file: tuple[int, StateFileKind, str | None] | None) -> None:
    assert state_file(name) == (None if file is None else StateFile(name, *file))


def test_sidecars_and_temporary_files_are_never_part_of_a_cut() -> None:
    assert [n for n in (".1.crc", "1.zip.crc", ".1.zip.tmp", "1.tmp", "1", "1.zip") if not is_ignored(n)] == [
        "1",
        "1.zip",
    ]


def test_a_file_source_is_known_by_its_offset_and_by_its_log() -> None:
    assert file_source_offset('{"logOffset":4}') == 4
    assert [file_source_offset(o) for o in (None, "4", "{", '{"logOffset":4,"x":1}')] == [None] * 4
    assert is_file_source_log('v1\n{"path":"file:/x","timestamp":1,"batchId":0}')
    assert not is_file_source_log('v1\n{"topic":{"0":1}}')
    assert not is_file_source_log("v1")


def logs(*names: str) -> dict[str, SourceLogFile]:
    return {name: log for name in names if (log := source_log_file(name)) is not None}


def test_file_source_logs_end_at_the_cut() -> None:
    """Files that the source has listed since are not of this cut."""
    assert file_source_logs(logs("0", "1", "2", "3"), 1) == ("0", "1")


def test_file_source_logs_begin_at_the_newest_compact_file() -> None:
    """Two compact files stay, since Spark reads the interval off them; one past the cut does not."""
    there = logs("8", "9.compact", "18", "19.compact", "20", "21", "22", "29.compact")
    assert file_source_logs(there, 21) == ("19.compact", "9.compact", "20", "21")


def test_a_purged_file_source_log_is_said() -> None:
    with pytest.raises(LookupError, match=r"file 1 of 0 to 2 is missing"):
        file_source_logs(logs("0", "2", "9.compact"), 2)


def test_the_first_compact_file_after_an_offset_has_its_entries() -> None:
    there = logs("0", "2", "9.compact", "19.compact", "20")
    assert [later_compact(there, offset) for offset in (2, 9, 19)] == ["9.compact", "19.compact", None]


def test_schema_paths_are_moved_below_the_new_state_directory() -> None:
    """Whatever the old place was called; nothing else changes."""
    old = "file:/old/state/place/state/0/_stateSchema/default/0_x"
    text = (
        'v2\n{"operatorInfo":{"operatorId":0,"operatorName":"transformWithStateInPandasExec"},"stateStoreInfo":'
        f'[{{"storeName":"default","numPartitions":2,"stateSchemaFilePaths":["{old}"]}}],"p":"{{}}"}}'
    )
    new = "file:/new/state/0/_stateSchema/default/0_x"
    assert relocate_operator(text, "file:/new/state") == text.replace(old, new)
    assert parse_operator(text).stores[0].schema_paths == (old,)
    with pytest.raises(DamageError, match="is not a schema file"):
        relocate_operator(text.replace("_stateSchema", "elsewhere"), "file:/new/state")


@pytest.mark.parametrize("codec", ["lz4", "zstd", "snappy"])
def test_the_lineage_is_read_whatever_the_codec(codec: str) -> None:
    """Also off a head that ends within the changelog."""
    items = json.dumps([{"version": v, "checkpointUniqueId": f"u{v}"} for v in (3, 4)]).encode()
    head = b"\x00\x02v4" + len(items).to_bytes(2, "big") + items
    data = compress(head, codec) if codec != "zstd" else compress(head + bytes(range(256)) * 999, codec)
    data += b"" if codec == "zstd" else compress(b"x" * 99, codec)[:15] if codec == "lz4" else b"\0\0\0\x09x"
    assert parse_lineage(decompress_head(data, codec)) == (LineageItem(3, "u3"), LineageItem(4, "u4"))


def test_unknown_codecs_and_changelogs_are_refused() -> None:
    with pytest.raises(Refused, match="'lzf'"):
        decompress_head(b"ZV", "lzf")
    with pytest.raises(Refused, match="'v9'"):
        parse_lineage(b"\x00\x02v9")
    for codec in ("lz4", "zstd", "snappy"):
        with pytest.raises(DamageError):
            decompress_head(b"nothing of the kind, long enough", codec)
    with pytest.raises(DamageError):
        parse_lineage(b"\x00\x02v3\x00\x09[")
