"""Entries of a channel as they are written into commits and read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_abs.channels.entries import EntryMetadata, encode_note, entry_of, note_of
from spark_abs.errors import DamageError
from spark_abs.model import (
    AttemptId,
    Barrier,
    BatchId,
    CheckpointId,
    CheckpointKind,
    DataFile,
    RunId,
    Version,
)
from spark_abs.store.log import LogCommit

barriers = st.builds(
    Barrier,
    st.integers(1, 2**40).map(CheckpointId),
    st.sampled_from(CheckpointKind),
    st.integers(0, 2**50),
    st.none() | st.text(),
)
notes = st.builds(
    EntryMetadata,
    st.integers(1, 9).map(AttemptId),
    st.integers(1, 9).map(RunId),
    st.integers(-1, 2**40).map(BatchId),
    st.none() | barriers,
    st.none() | st.integers(1, 2**40).map(CheckpointId),
    st.booleans(),
    st.none() | st.integers(0, 2**50),
    st.none() | st.text(),
    uncompressed=st.none() | st.integers(1, 2**50),
)


def commit(metadata: str | None, token: str | None = "t", *files: DataFile) -> LogCommit:
    return LogCommit(Version(7), files, (), bool(files), {}, "WRITE", metadata, token)


@given(notes)
def test_a_note_comes_back_as_it_was_written(note: EntryMetadata) -> None:
    assert note_of(commit(encode_note(note))) == note


@pytest.mark.parametrize(("uncompressed", "size"), [(None, 400), (80_000, 80_000), (7, 400)])
def test_bytes_of_an_entry_are_those_before_compression(uncompressed: int | None, size: int) -> None:
    """What an earlier version wrote does not say: the sizes of the files count, and never less than those."""
    note = EntryMetadata(AttemptId(1), RunId(1), BatchId(0), uncompressed=uncompressed)
    files = DataFile("a.parquet", 300, 1), DataFile("b.parquet", 100, 1)
    entry = entry_of(commit(encode_note(note), "t", *files))
    assert entry.size == size
    assert [file.uncompressed for file in entry.files] == [size * 3 // 4, size // 4]


def test_what_is_not_said_is_not_stored() -> None:
    stored = json.loads(encode_note(EntryMetadata(AttemptId(1), RunId(2), BatchId(0))))
    assert stored == {"attempt": 1, "run": 2, "batch": 0, "v": 1}


@pytest.mark.parametrize(
    "foreign",
    [
        commit(None),
        commit(None, None),
        commit("a note of somebody else's", None),
        commit('{"v": 1, "attempt": 1, "run": 1, "batch": 3}', None, DataFile("x.parquet", 1, 1)),
    ],
    ids=["a fence", "OPTIMIZE", "free text", "somebody who writes like us"],
)
def test_commits_of_others_are_empty_entries(foreign: LogCommit) -> None:
    entry = entry_of(foreign)
    assert (entry.version, entry.attempt, entry.silent) == (7, 0, True)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ("{", "not JSON"),
        ('{"attempt": 1}', "'run' is missing"),
        ('{"attempt": "1", "run": 1, "v": 1}', "expected"),
        ('{"attempt": 1, "run": 1, "v": 2}', "upgrade spark_abs"),
    ],
)
def test_a_note_of_ours_that_cannot_be_read_is_damage(metadata: str, says: str) -> None:
    with pytest.raises(DamageError, match=says):
        entry_of(commit(metadata))


@pytest.mark.parametrize("path", ["/etc/passwd", "../x.parquet", "data/../../x", ""])
def test_a_path_that_leaves_the_channel_is_damage(path: str) -> None:
    note = encode_note(EntryMetadata(AttemptId(1), RunId(1), BatchId(0)))
    with pytest.raises(DamageError, match="leaves its root"):
        entry_of(commit(note, "t", DataFile(path, 1, 1)))
