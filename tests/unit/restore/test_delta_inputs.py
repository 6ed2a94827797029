"""Delta tables that a restore would read again: what their logs and files still hand out."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from spark_abs.manifest import SourceShape
from spark_abs.model import StageId
from spark_abs.restore import delta_inputs
from spark_abs.restore.delta_inputs import DeltaInputs, asked, why_not_from
from spark_abs.snapshots.delta_offsets import DELTA, DeltaOffset, delta_offset
from spark_abs.store.root import Root
from spark_abs.store.storage import Place

SEVERAL = "files that it reads are gone"


@dataclass
class Table:
    """A table to which each commit adds a file for each of two days."""

    path: Path

    def append(self, *numbers: int) -> None:
        for number in numbers:
            rows = pa.table({"n": pa.array([number, number], pa.int64()), "day": ["a b%", "c:d"]})
            write_deltalake(str(self.path), rows, mode="append", partition_by=["day"])

    @property
    def delta(self) -> DeltaTable:
        return DeltaTable(str(self.path))

    def compact_and_vacuum(self) -> None:
        self.delta.optimize.compact()
        self.delta.vacuum(0, dry_run=False, enforce_retention_duration=False)

    def at(self, version: int, index: int = -100, initial: bool = False) -> DeltaOffset:
        return DeltaOffset(str(self.delta.metadata().id), version, index, initial)

    def why_not(self, offset: DeltaOffset, feed: bool = False) -> str:
        return why_not_from(Place(str(self.path)), offset, feed)

    def log(self, version: int) -> Path:
        return self.path / "_delta_log" / f"{version:020}.json"

    def files(self, version: int) -> list[str]:
        actions = map(json.loads, self.log(version).read_text().splitlines())
        return [action["add"]["path"] for action in actions if "add" in action]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    found = Table(tmp_path / "in put")
    found.append(0, 1, 2, 3)
    return found


def test_what_a_vacuum_has_taken_is_counted_from_the_recorded_version_on(table: Table) -> None:
    """Versions 0 to 3 have two files each, version 4 is an OPTIMIZE, whose files no stream reads."""
    assert table.why_not(table.at(0)) == ""
    table.delta.optimize.compact()
    assert table.why_not(table.at(0)) == ""  # deleted are they by VACUUM only
    table.append(4)
    table.delta.vacuum(0, dry_run=False, enforce_retention_duration=False)
    assert table.why_not(table.at(0)).startswith(
        f"8 of 10 {SEVERAL}, those of version 0 to 3, the first day="
    )
    assert table.why_not(table.at(3)).startswith(f"2 of 4 {SEVERAL}, those of version 3, the first day=")
    assert table.why_not(table.at(4)) == ""
    assert table.why_not(table.at(6)) == ""  # the next commit, which is not there yet


def test_of_a_version_that_was_read_in_part_the_rest_counts(table: Table) -> None:
    first, second = (table.path / file.replace("%20", " ").replace("%25", "%") for file in table.files(3))
    first.unlink()
    assert table.why_not(table.at(3, 0)) == ""
    assert table.why_not(table.at(3)).startswith(f"1 of 2 {SEVERAL}")
    second.unlink()
    assert table.why_not(table.at(3, 0)).startswith(f"1 of 1 {SEVERAL}")
    assert table.why_not(table.at(3, 1)) == ""


def test_a_stream_that_is_among_the_first_rows_needs_them_as_of_that_version(table: Table) -> None:
    """After it come the commits from the next version on."""
    assert table.why_not(table.at(2, 3, initial=True)) == ""
    table.compact_and_vacuum()
    assert table.why_not(table.at(2, 3, initial=True)).startswith(
        f"4 of 4 {SEVERAL}, those of version 2 to 3"
    )
    assert table.why_not(table.at(2, 5, initial=True)).startswith(f"2 of 2 {SEVERAL}, those of version 3")
    assert table.why_not(table.at(4, 1, initial=True)) == ""


def test_a_log_that_was_cleaned_up(table: Table) -> None:
    table.delta.create_checkpoint()
    table.append(4)
    for version in (0, 1):
        table.log(version).unlink()
    assert table.why_not(table.at(0)) == "versions 0 to 1 are gone from its log"
    assert table.why_not(table.at(1)) == "versions 1 to 1 are gone from its log"
    assert table.why_not(table.at(2)) == ""
    assert why_not_from(Place(str(table.path)), table.at(2), planned=table.at(2)) == ""
    again = why_not_from(Place(str(table.path)), table.at(4), planned=table.at(1))
    assert again == "versions 1 to 1 are gone from its log"  # Spark plans the last batch once more
    assert "version 1, whose rows it reads first, can no longer be opened" in table.why_not(
        table.at(1, 1, True)
    )


def test_another_table_and_an_older_copy(table: Table, tmp_path: Path) -> None:
    other = replace(table.at(0), table_id="another")
    assert "it is another table now" in table.why_not(other)
    assert table.why_not(table.at(5)) == "it ends with version 3: an older copy was put back"
    assert Table(tmp_path / "gone").path.exists() is False
    assert why_not_from(Place(str(tmp_path / "gone")), other) == "the table is gone"


def test_columns_that_came_are_read_and_those_that_changed_are_not(table: Table) -> None:
    more = pa.table({"n": pa.array([9], pa.int64()), "day": ["e"], "new": [1]})
    write_deltalake(str(table.path), more, mode="append", schema_mode="merge")
    assert table.why_not(table.at(0)) == ""
    other = pa.table({"n": ["text"], "day": ["e"]})
    write_deltalake(str(table.path), other, mode="overwrite", schema_mode="overwrite")
    said = "its columns have changed since version 0, which Delta's stream refuses: n had another type"
    assert table.why_not(table.at(0)).startswith(said)
    assert table.why_not(table.at(5)) == ""


N, TEXT = pa.int64(), pa.string()
SHORT, LONG = pa.struct([("a", N)]), pa.struct([("a", N), ("b", TEXT)])


@pytest.mark.parametrize(
    ("then", "now", "reads"),
    [
        (SHORT, LONG, True),
        (LONG, SHORT, False),
        (pa.list_(SHORT), pa.list_(LONG), True),
        (pa.map_(TEXT, SHORT), pa.map_(TEXT, LONG), True),
        (pa.map_(TEXT, LONG), pa.map_(TEXT, SHORT), False),
        (pa.map_(TEXT, N), pa.map_(N, N), False),
        (pa.list_(N), pa.list_(TEXT), False),
        (pa.list_(N), N, False),
    ],
)
def test_a_struct_may_have_got_fields_since(
    tmp_path: Path, then: pa.DataType, now: pa.DataType, reads: bool
) -> None:
    """As Delta's stream has it: fields that are new are null in older rows, others must stay."""
    uri = str(tmp_path / "in")
    write_deltalake(uri, pa.table({"s": pa.array([None], then)}))
    write_deltalake(uri, pa.table({"s": pa.array([None], now)}), mode="overwrite", schema_mode="overwrite")
    said = why_not_from(Place(uri), DeltaOffset(str(DeltaTable(uri).metadata().id), 0, -100, False))
    assert said.startswith("its columns have changed since version 0") is not reads


def test_a_change_data_feed_needs_its_own_files(table: Table) -> None:
    """Those of a commit with some; else what it has added and removed. Others read none of them."""
    changed = [
        {"cdc": {"path": "_change_data/gone.parquet", "partitionValues": {}, "size": 1, "dataChange": False}}
    ]
    table.log(4).write_text("\n".join(map(json.dumps, changed)))
    assert table.why_not(table.at(4)) == ""
    assert table.why_not(table.at(4), feed=True).startswith(f"1 of 1 {SEVERAL}, those of version 4")
    table.delta.delete("n = 3")
    for file in table.files(3):
        (table.path / file.replace("%20", " ").replace("%25", "%")).unlink()
    assert table.why_not(table.at(5)) == ""
    assert table.why_not(table.at(5), feed=True).startswith(f"2 of 2 {SEVERAL}, those of version 5")


def test_windows_and_listings_find_the_same(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.append(*range(4, 12))
    table.compact_and_vacuum()
    whole = table.why_not(table.at(2))
    monkeypatch.setattr(delta_inputs, "_COMMITS", 2)
    monkeypatch.setattr(delta_inputs, "_FILES", 3)
    assert table.why_not(table.at(2)) == whole
    monkeypatch.setattr(delta_inputs, "_LISTED", 1)
    monkeypatch.setattr(Place, "local", property(lambda _: False))
    assert table.why_not(table.at(2)) == whole
    assert whole.startswith(f"20 of 20 {SEVERAL}, those of version 2 to 11")


def test_each_source_of_a_stage_is_asked_by_its_place(table: Table, tmp_path: Path) -> None:
    line = json.dumps(
        {
            "sourceVersion": 1,
            "reservoirId": table.delta.metadata().id,
            "reservoirVersion": 2,
            "index": -1,
            "isStartingVersion": False,
        }
    )
    assert delta_offset(line) == table.at(2)
    assert delta_offset('{"logOffset":3}') is None
    assert delta_offset("7") is None
    offsets = f'v1\n{{"batchWatermarkMs":0}}\n{{"logOffset":2}}\n{line}'
    shapes = (SourceShape("json", "/x"), SourceShape(DELTA, str(table.path)))
    root = Root(str(tmp_path / "root"))
    assert asked(root, StageId("s"), offsets=offsets, declared=shapes) == DeltaInputs()
    table.compact_and_vacuum()
    (lost,) = asked(root, StageId("s"), offsets=offsets, declared=shapes).lost
    assert lost.startswith(f"stage 's' resumes at version 2 of {table.path}, and 4 of 4 {SEVERAL}")
    (unknown,) = asked(root, StageId("s"), offsets=offsets, declared=()).unknown
    assert "its location is not recorded" in unknown
    assert asked(root, StageId("s"), offsets="", declared=shapes) == DeltaInputs()
