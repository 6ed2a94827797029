"""A Delta table under exact commits."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import Transaction

from spark_abs.errors import CommitConflict, CommitStateUnknown, DamageError
from spark_abs.store.log import log_file
from spark_abs.store.storage import Place
from spark_abs.store.table import AddFile, Commit, Table

SCHEMA = pa.schema([("a", pa.int64())])


def file_of(table: Table, value: int) -> AddFile:
    path = Path(table.uri, f"{value}.parquet")
    pq.write_table(pa.table({"a": [value]}), path)
    return AddFile(path.name, path.stat().st_size, '{"numRecords": 1}')


def rows(table: Table) -> list[int]:
    table.refresh()
    return sorted(table.read()["a"].to_pylist())


def test_a_commit_takes_the_version_after_the_one_read_or_none(tmp_path: Path) -> None:
    """By itself deltalake would rebase the second commit onto the first."""
    first = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    second = Table.open(first.place)
    assert first.commit_next(Commit([file_of(first, 1)], {"app": 1})) == 1
    with pytest.raises(CommitConflict):
        second.commit_next(Commit([file_of(second, 2)], {"other": 1}))
    assert rows(first) == [1]


def test_a_decision_is_made_again_on_what_came_in_between(tmp_path: Path) -> None:
    one = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    two = Table.open(one.place)
    seen: list[int] = []

    def decide(table: Table) -> Commit | None:
        seen.append(table.version)
        if len(seen) == 1:
            one.commit_next(Commit([file_of(one, 1)], {"app": 7}))
        return None if table.transaction("app") == 7 else Commit([file_of(table, 2)], {"app": 7})

    assert two.commit(decide) is None
    assert seen == [0, 1]
    assert rows(two) == [1]


def test_a_replacing_commit_leaves_only_its_own_files_and_a_sweep_the_newest(tmp_path: Path) -> None:
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    for value in (1, 2, 3):
        table.commit_next(Commit([file_of(table, value)], {}, None, replace=True))
    assert rows(table) == [3]
    table.sweep(0, 0, 0)
    assert rows(table) == [3]
    assert sorted(p.name for p in (tmp_path / "t").glob("*.parquet")) == ["3.parquet"]


def test_a_log_with_many_removals_forgets_them_after_a_time(tmp_path: Path) -> None:
    """Each checkpoint of the log would name them for a week."""
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)

    def replace(*values: int) -> None:
        for value in values:
            table.commit_next(Commit([file_of(table, value)], {}, None, replace=True))

    def named() -> int:
        return len(Table.open(table.place)._left(0, []))

    replace(*range(5))
    table.forget_removals(0, most=4)
    assert (named(), table.version) == (4, 5)
    replace(5)
    for _ in range(2):
        table.forget_removals(0, most=4)
        assert (named(), table.version) == (5, 7)
    replace(*range(6, 10))
    assert named() < 5
    assert rows(Table.open(table.place)) == rows(table) == [9]


def test_a_sweep_knows_by_the_log_alone_what_is_due(tmp_path: Path) -> None:
    """Files that have just left stay while they are few, then those of some versions; others' files stay."""
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    Path(table.uri, "stray.parquet").touch()

    def step(value: int) -> list[int]:
        table.commit_next(Commit([file_of(table, value)], {}, None, replace=True))
        Table.open(table.place).sweep(1, 5, 2)
        return sorted(int(p.stem) for p in Path(table.uri).glob("[0-9]*.parquet"))

    found = [step(value) for value in range(30)]
    assert found[7] == list(range(8))  # five are not many, and two versions before the newest are kept
    assert found[8] == [6, 7, 8]
    assert max(map(len, found)) == 8
    assert Path(table.uri, "stray.parquet").exists()
    assert rows(Table.open(table.place)) == [29]
    at = table.version
    Table.open(table.place).sweep(0, 5, 2)
    assert sorted(int(p.stem) for p in Path(table.uri).glob("[0-9]*.parquet")) == [29]
    assert Table.open(table.place).version == at


def test_a_sweep_finds_what_checkpoints_of_the_log_have_forgotten(tmp_path: Path) -> None:
    """A root has rested for a day, and the first commits of a run write a checkpoint of the log."""
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    Path(table.uri, "stray.parquet").touch()
    for value in range(6):
        table.commit_next(Commit([file_of(table, value)], {}, None, replace=True))
    table.forget_removals(0, most=4)
    for value in range(6, 20):
        table.commit_next(Commit([file_of(table, value)], {}, None, replace=True))

    def left(hours: int) -> list[str]:
        Table.open(table.place).sweep(hours, 99, 9)
        return sorted(p.stem for p in Path(table.uri).glob("*.parquet"))

    assert len(left(hours=1)) == 21
    assert left(hours=0) == ["19", "stray"]
    assert rows(Table.open(table.place)) == [19]


@pytest.mark.parametrize("behind", [5, 60])
def test_a_trimmed_log_stays_short_and_a_handle_from_before_goes_on(tmp_path: Path, behind: int) -> None:
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    old = table
    for number in range(100):
        if number == 100 - behind:
            old = Table.open(table.place)
            assert old.transaction("app") == number - 1
        table.commit_next(Commit([file_of(table, number)], {"app": number}))
        table.trim_log(20)
    log = [int(p.name[:20]) for p in Path(table.uri, "_delta_log").glob("*.json")]
    assert 70 <= min(log) <= 80  # a checkpoint of the log is at most ten commits old
    assert rows(Table.open(table.place)) == list(range(100))
    assert rows(old) == list(range(100))
    assert old.transaction("app") == 99
    old.commit_next(Commit([file_of(table, 100)], {"app": 100}))
    assert rows(table) == list(range(101))


def test_a_table_that_never_wrote_a_checkpoint_keeps_its_log(tmp_path: Path) -> None:
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    table.commit_next(Commit([file_of(table, 1)], {"app": 1}))
    table.trim_log(0)
    assert rows(Table.open(table.place)) == [1]


@pytest.mark.parametrize("hint", [b"", b"{torn", b"\xff", b"[]", b"{}", b'{"version":"x"}'])
def test_a_log_is_trimmed_again_once_its_hint_of_the_newest_checkpoint_can_be_read(
    tmp_path: Path, hint: bytes
) -> None:
    """Readers do without the hint, too, and the next checkpoint writes it anew."""
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    for number in range(15):
        table.commit_next(Commit([file_of(table, number)]))
    log = Path(table.uri, "_delta_log")
    (log / "_last_checkpoint").write_bytes(hint)
    table.trim_log(0)
    assert (log / f"{0:020d}.json").exists()
    assert rows(Table.open(table.place)) == list(range(15))
    for number in range(15, 25):
        table.commit_next(Commit([file_of(table, number)]))
    table.trim_log(0)
    assert not (log / f"{0:020d}.json").exists()
    assert rows(Table.open(table.place)) == list(range(25))


def test_a_missing_table_and_a_torn_log_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Table.open(Place(str(tmp_path / "none")))
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    Path(table.uri, "_delta_log", f"{0:020d}.json").write_text("{torn")
    with pytest.raises(DamageError, match="cannot be read"):
        Table.open(table.place)


@pytest.mark.parametrize("read_before", [True, False])
def test_a_kept_handle_survives_a_clean_up_of_the_log(tmp_path: Path, read_before: bool) -> None:
    """The handle is ahead of the checkpoint after which the log files go that it was opened with."""
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    table.commit_next(Commit(transactions={"fence": 3}))
    if read_before:
        assert table.transaction("fence") == 3
    cleaner = Table.open(table.place)
    table.commit_next(Commit(transactions={"app": 1}))
    cleaner.delta.create_checkpoint()
    for version in (0, 1):
        Path(table.uri, f"_delta_log/{version:020d}.json").unlink()
    table.refresh()
    assert (table.transaction("fence"), table.transaction("app"), table.version) == (3, 1, 2)
    Table.open(table.place).commit_next(Commit(transactions={"fence": 4}))
    assert table.transaction("fence") == 3
    table.refresh()
    assert table.transaction("fence") == 4


def test_a_log_without_news_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    table.commit_next(Commit([file_of(table, 1)]))
    other = Table.open(table.place)
    listed: list[int] = []
    update = type(table.delta).update_incremental

    def counted(delta: DeltaTable) -> None:
        listed.append(delta.version())
        update(delta)

    monkeypatch.setattr(type(table.delta), "update_incremental", counted)
    table.refresh()
    assert listed == []
    other.commit_next(Commit([file_of(table, 2)]))
    listed.clear()
    assert rows(table) == [1, 2]
    table.refresh()
    assert listed == [1]


@pytest.mark.parametrize("trimmed", range(1, 10))
def test_news_are_seen_however_far_the_log_was_trimmed(tmp_path: Path, trimmed: int) -> None:
    """A frozen process continues while the clean-up of a newer run deletes the log under its handle."""
    frozen = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    frozen.commit_next(Commit([file_of(frozen, 1)]))
    newer = Table.open(frozen.place)
    for value in range(2, 13):
        newer.commit_next(Commit([file_of(newer, value)]))
    for version in range(trimmed):
        Path(frozen.uri, log_file(version)).unlink()
    assert rows(frozen) == list(range(1, 13))


def test_news_are_seen_after_a_commit_into_a_log_that_was_trimmed_beyond_it(tmp_path: Path) -> None:
    """A process frozen before it writes the file of its commit finds the version free: it was trimmed."""
    frozen = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    for value in (1, 2):
        frozen.commit_next(Commit([file_of(frozen, value)]))
    newer = Table.open(frozen.place)
    for value in range(3, 13):
        newer.commit_next(Commit([file_of(newer, value)]))
    for version in (0, 1, *range(3, 9)):  # the file of version 2 came after the others had gone
        Path(frozen.uri, log_file(version)).unlink()
    assert rows(frozen) == list(range(1, 13))


def test_a_table_of_others_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cleans its log up may delete newer files first."""
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA, {})
    monkeypatch.delattr(type(table.delta), "update_incremental")
    with pytest.raises(AttributeError):
        table.refresh()


def test_transactions_are_followed_when_the_handle_moves_by_itself(tmp_path: Path) -> None:
    """RESTORE and the like move a handle on without a refresh."""
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    table.commit_next(Commit([file_of(table, 1)], {"app": 1}))
    assert table.transaction("restored") is None
    table.delta.restore(0, commit_properties=CommitProperties(app_transactions=[Transaction("restored", 5)]))
    assert (table.version, table.transaction("restored")) == (2, 5)


def test_a_store_that_does_not_answer_is_not_damage(tmp_path: Path) -> None:
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)
    log = Path(table.uri, "_delta_log", f"{0:020d}.json")
    log.unlink()
    log.symlink_to(log)
    with pytest.raises(OSError, match="IO error"):
        Table.open(table.place)


def test_a_commit_that_stands_is_never_said_to_have_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails right after it: whoever commits must not take the files of the commit away."""
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)

    def away(_: Table) -> None:
        raise OSError("503")

    with monkeypatch.context() as patched:
        patched.setattr(Table, "refresh", away)
        with pytest.raises(CommitStateUnknown, match=r"version 1 of .* was committed"):
            table.commit_next(Commit([file_of(table, 1)], {"app": 1}))
    assert rows(table) == [1]
    assert table.transaction("app") == 1


@pytest.mark.parametrize(
    ("error", "damage"),
    [
        (OSError(116, "Stale file handle"), False),
        (OSError("When reading 'x': AWS Error NETWORK_CONNECTION during HeadObject"), False),
        (OSError("GetProperties failed for 'x'. Azure Error: [] Could not connect to server"), False),
        (OSError("google::cloud::Status(UNAVAILABLE: Retry policy exhausted: CURL error [7])"), False),
        (FileNotFoundError(2, "No such file"), True),
        (FileNotFoundError(2, "google::cloud::Status(NOT_FOUND: Permanent error)"), True),
        (OSError("Couldn't deserialize thrift"), True),
        (pa.ArrowInvalid("Parquet magic bytes not found"), True),
    ],
)
def test_a_read_that_fails_is_damage_only_if_the_bytes_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, damage: bool
) -> None:
    table = Table.ensure(Place(str(tmp_path / "t")), SCHEMA)

    def fails(*_: object, **__: object) -> pa.Table:
        raise error

    monkeypatch.setattr(type(table.delta), "to_pyarrow_table", fails)
    with pytest.raises(DamageError if damage else OSError):
        table.read()
