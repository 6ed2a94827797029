"""What changes of a key end with: compared with a look at the whole input."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem

from spark_abs.channels.files import read_written
from spark_abs.codec import from_json, to_json
from spark_abs.errors import UsageError
from spark_abs.protocol.change_data import (
    END_AT,
    LAST_WINS,
    START_AT,
    Change,
    ChangeOptions,
    History,
    Newest,
    arrive,
    change_options,
    enter,
    listed,
    versions,
)
from spark_abs.sinks.delta.commit_metadata import TombstoneFile, Tombstones
from spark_abs.sinks.delta.tombstones import TombstoneStore
from spark_abs.sinks.postgres.config import Postgres
from spark_abs.store.root import Root
from spark_abs.store.row_batches import BATCH_ROWS

VALUE = st.one_of(st.none(), st.integers(0, 3))
CHANGES = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.tuples(VALUE, VALUE))))
Input = list[tuple[int, tuple[int | None, int | None] | None]]
BY_SEQUENCE = ChangeOptions(sequence_by=("at",), apply_as_deletes="gone")


def made(changes: Input, *, sequenced: bool = True) -> list[Change]:
    return [
        Change((at,) if sequenced else (), None if values is None else dict(zip("ab", values, strict=True)))
        for at, values in changes
    ]


def applied(changes: Sequence[Change], options: ChangeOptions) -> dict[str, Any] | None:
    known: Newest | None = None
    for change in changes:
        known = arrive(known, change, options)
    return None if known is None or known.values is None else dict(known.values)


@given(CHANGES)
def test_the_newest_by_sequence_wins_the_later_one_of_two(changes: Input) -> None:
    """Late changes lose, also against a delete that came before them."""
    best = max(enumerate(changes), key=lambda one: (one[1][0], one[0]), default=(0, (0, None)))[1][1]
    expected = None if best is None else dict(zip("ab", best, strict=True))
    assert applied(made(changes), BY_SEQUENCE) == expected


@given(CHANGES)
def test_without_a_sequence_the_last_that_arrives_wins(changes: Input) -> None:
    last = changes[-1][1] if changes else None
    expected = None if last is None else dict(zip("ab", last, strict=True))
    assert applied(made(changes, sequenced=False), LAST_WINS) == expected


@given(CHANGES)
def test_nulls_keep_what_changes_that_were_not_late_have_set(changes: Input) -> None:
    """Of those that were newest when they came, after the last delete: each column's last value."""
    fresh = [one for i, one in enumerate(changes) if one[0] == max(at for at, _ in changes[: i + 1])]
    gone = max((i for i, one in enumerate(fresh) if one[1] is None), default=-1)
    rest = [values for _, values in fresh[gone + 1 :] if values is not None]
    expected = None
    if rest:
        columns = ([v[i] for v in rest if v[i] is not None] for i in range(2))
        expected = {name: set_[-1] if set_ else None for name, set_ in zip("ab", columns, strict=True)}
    options = ChangeOptions(("at",), "gone", ignore_null_updates=True)
    assert applied(made(changes), options) == expected


@given(CHANGES)
def test_a_history_has_the_row_of_every_moment(changes: Input) -> None:
    """At each moment that of the newest change up to it; late changes split what was there."""
    empty: History = {}
    rows = versions(reduce(enter, made(changes), empty))
    for moment in range(7):
        before = [(at, i) for i, (at, _) in enumerate(changes) if at <= moment]
        expected = changes[max(before)[1]][1] if before else None
        found = [
            (row["a"], row["b"])
            for row in rows
            if row[START_AT] <= (moment,) and (row[END_AT] is None or (moment,) < row[END_AT])
        ]
        assert found == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ChangeOptions(("a", "A")), "sequence_by names a column twice: a, A"),
        (ChangeOptions(scd_type=3), "scd_type=3 is neither 1 nor 2"),
        (ChangeOptions(scd_type=2), "scd_type=2 needs sequence_by="),
        (ChangeOptions(("at",), scd_type=2, ignore_null_updates=True), "cannot be combined with scd_type=2"),
        (ChangeOptions(("at",), except_columns=("AT",)), "except_columns names AT"),
        (ChangeOptions(except_columns=("id",)), "except_columns names id"),
        (ChangeOptions(tombstones_ms=0), "must be remembered for some time"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: ChangeOptions, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        change_options("table t", ("id",), options)


def test_changes_need_a_key() -> None:
    assert change_options("t", (), LAST_WINS) == LAST_WINS
    with pytest.raises(UsageError, match="name the key columns with key="):
        change_options("t", (), BY_SEQUENCE)
    history = ChangeOptions(listed("at"), scd_type=2, except_columns=listed(["at", "op"]))
    assert change_options("t", listed("id"), history).stored(["id", "OP", "at", "n"]) == ("id", "n")
    assert listed(None) == ()
    assert BY_SEQUENCE.keeps_tombstones
    assert not history.keeps_tombstones


def test_postgresql_keeps_no_histories() -> None:
    with pytest.raises(UsageError, match="scd_type=2 is for Delta tables"):
        Postgres("sums", key="id", mode="upsert", sequence_by="at", scd_type=2)
    config = Postgres("sums", key="id", mode="upsert", scd_type=1)
    assert from_json(Postgres, to_json(config)) == config


def test_a_key_that_is_spelled_otherwise_forgets_nothing(tmp_path: Path) -> None:
    store = TombstoneStore(Root(str(tmp_path)), "s.out", 60_000)
    old, new = (TombstoneFile(f"tombstones/s.out/{at}-0-a", at) for at in (0, int(time.time() * 1000)))
    before = Tombstones(("id",), ("at",), (old, new))
    assert store.live(before, Tombstones(("ID",), ("At",))) == Tombstones(("ID",), ("At",), (new,))
    assert store.live(before, Tombstones(("id",), ("then",))) == Tombstones(("id",), ("then",))


def test_tombstones_are_written_anew_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_abs.sinks.delta.tombstones._FILES", 2)
    files = [TombstoneFile(f"tombstones/s.out/{at}-0-a", at) for at in (1, 2)]
    rows = 2 * BATCH_ROWS
    for file in files:
        (tmp_path / file.directory).mkdir(parents=True)
        keys = pa.array(range(file.newest_ms * rows, (file.newest_ms + 1) * rows))
        pq.write_table(pa.table({"k0": keys}), tmp_path / file.directory / "part-0.parquet")
    (found,) = TombstoneStore(Root(str(tmp_path)), "s.out", 60_000).compacted(files)
    assert (found.newest_ms, found.level) == (2, 1)
    written = pq.ParquetFile(tmp_path / found.directory / "part-0.parquet")
    assert written.read()["k0"].to_pylist() == list(range(rows, 3 * rows))
    groups = [written.metadata.row_group(i).num_rows for i in range(written.metadata.num_row_groups)]
    assert max(groups) == BATCH_ROWS


def test_files_are_listed_as_their_partition_has_written_them(tmp_path: Path) -> None:
    """The thousandth file of a partition has one digit more."""
    (tmp_path / "d").mkdir()
    names = [f"part-00007-u-c{number:03}.parquet" for number in (0, 999, 1000)]
    for name in reversed(names):
        pq.write_table(pa.table({"n": [1]}), tmp_path / "d" / name)
    found = read_written(LocalFileSystem(), str(tmp_path), "d")
    assert [file.path for file in found.files] == [file.path for file in found.entry_files]
    assert [file.path for file in found.files] == [f"d/{name}" for name in names]
