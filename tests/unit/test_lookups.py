"""At which version a batch reads a lookup: pure decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from spark_abs.errors import DamageError, Fenced
from spark_abs.model import LookupVersion, RunId, Version
from spark_abs.plan.lookups import LookupTable
from spark_abs.plan.specs import Lookup
from spark_abs.protocol.attempt_changes import pin_lookups
from spark_abs.protocol.control import begin_job, begin_run
from spark_abs.protocol.lookups import following, is_due, version_of
from spark_abs.stages.lookups import StageLookups
from spark_abs.store.storage import Storage

LAST = LookupVersion("customers", "/data/customers", "4f", Version(7), 10_000)


@pytest.mark.parametrize(
    ("max_age_ms", "now_ms", "due"),
    [
        (0, 10_000, True),  # refresh="batch", in the same millisecond
        (30_000, 39_999, False),
        (30_000, 40_000, True),
        (30_000, 9_999, True),  # the clock was put back
        (None, 10**12, False),  # refresh="never"
    ],
)
def test_when_a_batch_looks_for_a_newer_version(max_age_ms: int | None, now_ms: int, due: bool) -> None:
    assert is_due(LAST, max_age_ms, now_ms) is due
    assert is_due(None, max_age_ms, now_ms)


def test_no_batch_goes_back_behind_the_one_before_it_or_to_another_table() -> None:
    newer = replace(LAST, version=Version(8))
    assert following(LAST, newer) is newer
    assert following(None, LAST) is LAST
    with pytest.raises(DamageError, match=r"is at version 7, but a batch has read version 8"):
        following(newer, LAST)
    with pytest.raises(
        DamageError,
        match=r"its table id is 5e, but earlier batches have read the table with id 4f at version 7",
    ):
        following(LAST, replace(newer, table_id="5e"))


def test_what_is_recorded_counts_for_the_same_name_and_table() -> None:
    assert version_of("customers", LAST.table, [LAST]) is LAST
    assert version_of("people", LAST.table, [LAST]) is None
    assert version_of("customers", "/data/others", [LAST]) is None


@pytest.mark.parametrize(("max_age_ms", "way"), [(0, "restart='checkpoint'"), (None, "under a new name")])
def test_the_way_on_from_a_version_that_is_gone(max_age_ms: int | None, way: str) -> None:
    """A restore keeps a version for ever, so going back is no way on from that."""
    table: Any = LookupTable.__new__(LookupTable)
    table.lookup = Lookup(SimpleNamespace(name="job"), "customers", LAST.table, max_age_ms)
    assert way in table.way_on
    assert ("restart=" in table.way_on) is (max_age_ms is not None)


@pytest.mark.parametrize("directory", ["customers", "our customers"])
def test_a_file_of_a_version_is_missed_only_if_it_is_gone(tmp_path: Path, directory: str) -> None:
    write_deltalake(tmp_path / directory, pa.table({"id": [1, 2]}))
    table: Any = LookupTable.__new__(LookupTable)
    table._place = Storage.given({}, {}).place(str(tmp_path / directory))
    assert table.lacks_file(Version(0)) is None
    (file,) = (tmp_path / directory).glob("*.parquet")
    file.unlink()
    assert table.lacks_file(Version(0)).endswith(file.name)


def test_a_version_for_ever_outlives_a_start_without_the_lookup() -> None:
    """A restore may go back to the stage that reads it; what is declared is as it is declared."""
    state = begin_run(begin_job("job", 0), "here", 1, 0)
    state = pin_lookups(state, RunId(1), [LAST], {"customers"})
    other = replace(LAST, lookup="people")
    state = pin_lookups(state, RunId(1), [other], {"people"})
    assert state.attempt.lookups == (LAST, other)
    assert pin_lookups(state, RunId(1), [], {"customers"}).attempt.lookups == (other,)


@pytest.mark.parametrize(
    ("error", "looks"),
    [
        (RuntimeError("[FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error while reading file a"), True),
        (RuntimeError("java.io.FileNotFoundException: No such file or directory: s3a://b/a"), True),
        (RuntimeError("NoSuchKey: The specified key does not exist."), True),
        (RuntimeError("division by zero"), False),
        (Fenced("run 2 has taken over: run 1 is not found"), False),
    ],
)
def test_files_of_a_lookup_are_looked_for_only_if_one_is_missed(error: Exception, looks: bool) -> None:
    """It is a look at each file of the table: a batch that fails for another reason does not wait for it."""
    asked: list[Version] = []
    lookups: Any = StageLookups.__new__(StageLookups)
    lookups._tables = {"customers": SimpleNamespace(lacks_file=asked.append, way_on="")}
    with pytest.raises(type(error)), lookups.explaining([LAST]):
        raise error
    assert bool(asked) is looks
