"""The log of a source's schemas: which entries belong to a cut, and where they say that their source is."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest

from spark_abs.errors import DamageError, Refused
from spark_abs.snapshots.materialise import is_relocated, relocated
from spark_abs.snapshots.schema_log import SCHEMA_LOGS, entries_at, is_schema_entry
from spark_abs.store.storage import Place


def entry(version: int, source: str = "0") -> str:
    plain = {"tableId": "4f", "deltaCommitVersion": version, "dataSchemaJson": "{}", "extra": [1]}
    return "v1\n" + json.dumps({**plain, "sourceMetadataPath": f"file:/r/native/1/notes/sources/{source}"})


def offset(version: int, index: int) -> str:
    return json.dumps(
        {"reservoirId": "4f", "reservoirVersion": version, "index": index, "isStartingVersion": False}
    )


NOTHING: dict[str, str] = {}
LOG: dict[int, Callable[[], str]] = {n: partial(entry, version) for n, version in enumerate((0, 3, 7))}


@pytest.mark.parametrize(
    ("at", "kept"),
    [
        (offset(9, -100), {0, 1, 2}),
        (offset(7, -20), {0, 1, 2}),  # the batch that ends at the change has ended
        (offset(7, -100), {0, 1}),  # everything before it was read, and nothing of it
        (offset(7, -1), {0, 1}),  # the same, as older sources write it
        (offset(3, -19), {0, 1}),
        (offset(2, 5), {0}),
        (None, set()),
    ],
)
def test_the_entries_that_were_there_at_a_cut(at: str | None, kept: set[int]) -> None:
    assert entries_at(LOG, {"0": at}.get) == kept


def test_no_entry_older_than_the_newest_that_counts_is_read() -> None:
    def unread() -> str:
        raise AssertionError

    assert entries_at({0: unread, 1: partial(entry, 3)}, {"0": offset(4, 0)}.get) == {0, 1}


def test_an_entry_names_its_source_in_the_checkpoint_where_it_lies() -> None:
    path = f"{SCHEMA_LOGS}/_schema_log_4f/0"
    assert is_schema_entry(path)
    assert is_relocated(path)
    text = relocated(path, entry(3), Place("/r/native/2/notes"), "1")
    head, _, body = text.partition("\n")
    assert head == "v1"
    before = json.loads(entry(3).partition("\n")[2])
    assert json.loads(body) == {**before, "sourceMetadataPath": "file:/r/native/2/notes/sources/1"}
    assert relocated(path, text, Place("/r/native/1/notes"), "0").partition("\n")[2] == json.dumps(
        before, separators=(",", ":")
    )


def test_what_delta_does_not_write_is_refused() -> None:
    with pytest.raises(Refused, match="version 'v2'"):
        entries_at({0: lambda: "v2\n{}"}, NOTHING.get)
    for body in ("{", "[]", "{}", '{"deltaCommitVersion":1,"sourceMetadataPath":"/elsewhere"}'):
        with pytest.raises(DamageError, match="schema tracking log"):
            entries_at({0: partial(str, f"v1\n{body}")}, NOTHING.get)
