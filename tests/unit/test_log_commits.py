"""What a commit of a Delta log says of the files that streams read of it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import fs

from spark_abs.store.log import LogCommit, log_file, read_commit

Action = dict[str, dict[str, Any]]
FILE = {"path": "f", "size": 1}
ADD: Action = {"add": {**FILE, "dataChange": True}}
MOVED: Action = {"add": {**FILE, "dataChange": False}}
REMOVE: Action = {"remove": {"path": "f", "dataChange": True}}
MOVED_AWAY: Action = {"remove": {"path": "f", "dataChange": False}}
CHANGE: Action = {"cdc": {**FILE, "dataChange": False}}
TRANSACTION: Action = {"txn": {"appId": "a", "version": 1}}


def committed(actions: list[Action]) -> LogCommit:
    with tempfile.TemporaryDirectory() as table:
        file = Path(table, log_file(3))
        file.parent.mkdir()
        file.write_text("\n".join(map(json.dumps, actions)))
        commit = read_commit(fs.LocalFileSystem(), table, 3)
    assert commit is not None
    return commit


def plain_files(actions: list[Action]) -> list[Action]:
    """Return the files of a commit as `DeltaSource.filterAndGetIndexedFiles` counts them."""
    return [a for a in actions if a.get("add", {}).get("dataChange")]


def feed_files(actions: list[Action]) -> list[Action]:
    """Return the files of a commit as `DeltaSourceCDCSupport.filterCDCActions` counts them."""
    if any("cdc" in a for a in actions):
        return [a for a in actions if "cdc" in a]
    return [a for a in actions if (a.get("add") or a.get("remove") or {}).get("dataChange")]


@given(
    st.lists(st.sampled_from([ADD, MOVED, REMOVE, MOVED_AWAY, CHANGE, TRANSACTION]), max_size=8),
    st.integers(0, 8),
)
@example([CHANGE, REMOVE, ADD], 0)
@example([CHANGE, REMOVE, ADD, ADD], 0)
def test_a_commit_is_read_whole_where_neither_kind_of_stream_has_a_file_left(
    actions: list[Action], index: int
) -> None:
    left = [files[index + 1 :] for files in (plain_files(actions), feed_files(actions))]
    assert committed(actions).is_last(index) == (left == [[], []])
    assert committed(actions).is_last(index, feed=True) == (left[1] == [])


@pytest.mark.parametrize(
    ("actions", "last"),
    [
        ([REMOVE, ADD, CHANGE], 0),
        ([REMOVE, ADD], 1),
        ([ADD, ADD, ADD], 2),
        ([CHANGE, CHANGE, REMOVE], 1),
        # A plain source that ignores changes may stand between the two files.
        ([CHANGE, REMOVE, ADD, ADD], 1),
        ([MOVED, MOVED_AWAY], 0),
    ],
)
def test_the_first_index_at_which_a_commit_is_read_whole(actions: list[Action], last: int) -> None:
    commit = committed(actions)
    assert [commit.is_last(index) for index in range(4)] == [index >= last for index in range(4)]


def test_rows_change_if_files_come_or_go_that_change_them() -> None:
    assert [committed([a]).data_change for a in (ADD, REMOVE, MOVED, MOVED_AWAY, CHANGE)] == [
        True,
        True,
        False,
        False,
        False,
    ]
