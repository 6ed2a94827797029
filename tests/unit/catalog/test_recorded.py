"""A name that leads to another table than the recorded one is refused; what a query made is its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from spark_abs.catalog.recorded import refuse_other_table
from spark_abs.catalog.session_catalog import FullName
from spark_abs.catalog.target import TableTarget
from spark_abs.errors import Refused
from spark_abs.model import NO_TABLE, AttemptId, StageId, Version
from spark_abs.protocol.control import AttachedSink, ControlState, attach, begin_job
from spark_abs.store.storage import Storage
from spark_abs.wrapped.tables import attached

FIRST, SECOND = AttemptId(1), AttemptId(2)
STAGE, STORAGE = StageId("daily"), Storage()
NAME = FullName("spark_catalog", ("shop",), "sales")


def make(place: Path) -> str:
    write_deltalake(str(place), pa.table({"id": [1]}))
    return str(DeltaTable(str(place)).metadata().id)


def target(place: Path) -> TableTarget:
    return TableTarget("shop.sales", str(place), NAME)


def record(place: Path, table_id: str, **more: object) -> AttachedSink:
    found = AttachedSink(STAGE, "sales", str(place), table_id, name="spark_catalog.Shop.sales", attempt=FIRST)
    return replace(found, **more)  # type: ignore[arg-type]


def refuse(at: Path, *records: AttachedSink, attempt: AttemptId = FIRST) -> None:
    refuse_other_table(
        "sink 'sales'",
        target(at),
        records=records,
        attempt=attempt,
        storage=STORAGE,
        otherwise="rename the sink",
    )


def test_the_recorded_table_is_taken(tmp_path: Path) -> None:
    table_id = make(tmp_path / "a")
    refuse(tmp_path / "a")
    refuse(tmp_path / "a", record(tmp_path / "a", table_id))
    refuse(tmp_path / "a", record(tmp_path / "b", "other"), record(tmp_path / "a", table_id))
    refuse(tmp_path / "a", record(tmp_path / "b", "other", name=""))
    refuse(tmp_path / "a", record(tmp_path / "b", "", version=NO_TABLE))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    refuse(tmp_path / "link", record(tmp_path / "a", table_id))


def test_another_table_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    """Elsewhere, anew at the same place, or nowhere; by its path it can be written if it is still there."""
    table_id = make(tmp_path / "a")
    make(tmp_path / "b")
    with pytest.raises(Refused, match=f"declare it by its path, {tmp_path}/a; or, .* rename the sink"):
        refuse(tmp_path / "b", record(tmp_path / "a", table_id))
    with pytest.raises(Refused, match="Put the recorded table back under the name; or, if"):
        refuse(tmp_path / "a", record(tmp_path / "a", "gone"))
    with pytest.raises(Refused, match="leads to no table at"):
        refuse(tmp_path / "none", record(tmp_path / "a", table_id))
    with pytest.raises(Refused, match="led to the table of the job at"):
        refuse(tmp_path / "b", record(tmp_path / "a", ""))


def test_after_a_restore_that_left_a_lost_table_be_the_name_may_lead_on(tmp_path: Path) -> None:
    """Not if the recorded one is still there: the restore has brought that back."""
    table_id = make(tmp_path / "a")
    make(tmp_path / "b")
    refuse(tmp_path / "a", record(tmp_path / "a", "gone"), attempt=SECOND)
    refuse(tmp_path / "b", record(tmp_path / "none", "gone"), attempt=SECOND)
    with pytest.raises(Refused, match="led to the table"):
        refuse(tmp_path / "b", record(tmp_path / "a", table_id), attempt=SECOND)


def test_a_table_that_was_made_before_it_was_recorded_had_no_rows_when_the_query_came(tmp_path: Path) -> None:
    """Killed between the function and the record: the next start makes up for it, wherever the table is."""
    state: ControlState = begin_job("queries", 0)
    (before,) = attached(STAGE, [target(tmp_path / "planned")], state, STORAGE)
    assert (before.table_id, before.version) == ("", NO_TABLE)
    state = attach(state, [before])
    table_id = make(tmp_path / "chosen")
    (after,) = attached(STAGE, [target(tmp_path / "chosen")], state, STORAGE)
    assert (after.table_id, after.version, after.name) == (table_id, NO_TABLE, str(NAME))
    state = attach(state, [after])
    table_id = make(tmp_path / "anew")
    (other,) = attached(STAGE, [target(tmp_path / "anew")], state, STORAGE)
    assert (other.table_id, other.version) == (table_id, 0)
    (known,) = attached(STAGE, [target(tmp_path / "chosen")], begin_job("queries", 0), STORAGE)
    assert known.version == 0


def test_the_newest_record_comes_last_and_keeps_its_version(tmp_path: Path) -> None:
    one, two = record(tmp_path, "1"), record(tmp_path, "2")
    state = attach(begin_job("queries", 0), [one, two])
    state = attach(state, [replace(one, version=Version(7), attempt=SECOND)])
    assert state.sinks == (two, replace(one, attempt=SECOND))
