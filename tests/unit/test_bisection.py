"""The search for the first bad moment, pure, and the condition over real tables."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from spark_abs.bisection.condition import CannotAsk, Condition
from spark_abs.bisection.files import files_between
from spark_abs.bisection.search import Change, first_change
from spark_abs.errors import DamageError, Refused, UsageError


class Asked:
    """Moments with their answers, None for one that cannot be read; counts the questions."""

    def __init__(self, answers: list[bool | None]) -> None:
        self.answers = answers
        self.questions: list[int] = []
        self.looks: list[int] = []

    def is_readable(self, at: int) -> bool:
        assert at not in self.looks
        self.looks.append(at)
        return self.answers[at] is not None

    def is_bad(self, at: int) -> bool:
        answer = self.answers[at]
        assert answer is not None
        assert at not in self.questions
        self.questions.append(at)
        return answer

    def change(self) -> Change:
        return first_change(len(self.answers), self.is_readable, self.is_bad)


@given(st.integers(0, 1200), st.integers(1, 1200))
def test_the_first_bad_moment_is_found_with_a_question_for_each_halving(bad: int, count: int) -> None:
    asked = Asked([at >= bad for at in range(count)])
    change = asked.change()
    if bad >= count:
        assert change == Change(count - 1, None)
    elif bad == 0:
        assert change == Change(None, 0)
    else:
        assert change == Change(bad - 1, bad)
    assert len(asked.questions) <= 2 + (math.ceil(math.log2(count - 1)) if count > 2 else 0)


@pytest.mark.parametrize("bad", [1, 2, 499, 500, 501, 998, 999])
def test_of_a_thousand_ten_and_the_two_ends_are_asked(bad: int) -> None:
    asked = Asked([at >= bad for at in range(1000)])
    assert asked.change() == Change(bad - 1, bad)
    assert len(set(asked.questions) - {0, 999}) <= 10


@given(st.lists(st.sampled_from([True, False, None]), max_size=60))
def test_whatever_the_answers_are_the_result_is_a_change_between_neighbours(
    answers: list[bool | None],
) -> None:
    """Moments that cannot be read may be anywhere, and data may become good again."""
    asked = Asked(answers)
    change = asked.change()
    readable = [at for at, answer in enumerate(answers) if answer is not None]
    if not readable:
        assert change == Change(None, None)
    elif not answers[readable[-1]]:
        assert change == Change(readable[-1], None)
    elif change.good is None:
        assert change.bad is not None
        assert answers[change.bad]
        assert change.bad == 0 or answers[change.bad - 1] is None or change.bad == readable[-1]
    else:
        assert change.bad is not None
        assert (answers[change.good], answers[change.bad]) == (False, True)
        assert all(answers[at] is None for at in range(change.good + 1, change.bad))


@given(st.integers(0, 400), st.integers(0, 400), st.integers(1, 400))
def test_versions_that_are_gone_are_looked_at_by_halving_too(gone: int, good: int, bad: int) -> None:
    """A clean-up takes the oldest away; hundreds of them are not tried one by one."""
    answers: list[bool | None] = [None] * gone + [False] * good + [True] * bad
    asked = Asked(answers)
    assert asked.change() == (Change(gone + good - 1, gone + good) if good else Change(None, gone))
    assert len(asked.looks) <= 2 + 2 * math.ceil(math.log2(len(answers) + 1))


@pytest.fixture
def sales(tmp_path: Path) -> DeltaTable:
    table = str(tmp_path / "sales")
    write_deltalake(table, pa.table({"itemId": ["a", "b"], "cents": [250, None]}))
    write_deltalake(table, pa.table({"itemId": ["c"], "cents": [-4]}), mode="append")
    return DeltaTable(table)


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("(SELECT min(cents) FROM sales) < 0", False, True),
        ("EXISTS (SELECT 1 FROM sales WHERE cents < 0) -- a sum cannot be", False, True),
        ("SELECT * FROM sales WHERE cents < 0;", False, True),
        ("select count(*) > 2 from sales", False, True),
        ("WITH bad AS (SELECT itemId FROM sales WHERE cents < 0) SELECT itemId FROM bad", False, True),
        ("SELECT cents < 0 FROM sales", False, True),
        ("(SELECT cents FROM sales WHERE itemId = 'b') > 0", False, False),
        ("SELECT count(*) FROM sales WHERE cents < 0", True, True),
        ('(SELECT count(*) FROM "sales") < (SELECT count(*) FROM "my-sink")', True, False),
    ],
)
def test_a_condition_is_an_expression_or_a_query(
    sales: DeltaTable, text: str, before: bool, after: bool
) -> None:
    condition = Condition(text)
    for version, bad in ((0, before), (1, after)):
        then = {"sales": DeltaTable(sales.table_uri, version=version), "my-sink": sales}
        condition.check(then)
        assert condition.is_true(then) == bad


_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def _z85(data: bytes) -> str:
    words = (number for (number,) in struct.iter_unpack(">I", data))
    return "".join(_DIGITS[word // 85**place % 85] for word in words for place in range(4, -1, -1))


def _log(table: Path, version: int, *actions: dict[str, Any]) -> None:
    file = table / "_delta_log" / f"{version:020}.json"
    file.write_text("\n".join(json.dumps(action) for action in actions))


def _actions(table: Path) -> dict[str, Any]:
    lines = (table / "_delta_log" / f"{0:020}.json").read_text().splitlines()
    return {name: action for line in lines for name, action in json.loads(line).items()}


def test_rows_that_a_deletion_vector_removes_are_not_read(tmp_path: Path) -> None:
    """As Delta's DELETE writes it: a bitmap with row 3, in the log."""
    write_deltalake(str(tmp_path), pa.table({"id": range(10)}))
    add = _actions(tmp_path)["add"]
    bitmap = struct.pack("<iqi", 1681511377, 1, 0) + struct.pack("<IIHHIH", 12346, 1, 0, 0, 16, 3)
    vector = {"storageType": "i", "pathOrInlineDv": _z85(bitmap + bytes(-len(bitmap) % 4))}
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    _log(
        tmp_path,
        1,
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"remove": {"path": add["path"], "dataChange": True, "deletionTimestamp": 1}},
        {"add": {**add, "deletionVector": {**vector, "sizeInBytes": len(bitmap), "cardinality": 1}}},
    )
    condition = Condition("SELECT id FROM t WHERE id = 3")
    assert condition.is_true({"t": DeltaTable(str(tmp_path), version=0)})
    assert not condition.is_true({"t": DeltaTable(str(tmp_path))})
    assert Condition("(SELECT sum(id) FROM t) = 42").is_true({"t": DeltaTable(str(tmp_path))})


def test_columns_have_the_names_of_the_table_and_not_of_its_files(tmp_path: Path) -> None:
    """With column mapping, as after a column was renamed."""
    write_deltalake(str(tmp_path), pa.table({"col-1": range(10)}))
    actions = _actions(tmp_path)
    schema = json.loads(actions["metaData"]["schemaString"])
    mapped = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}
    schema["fields"] = [{**schema["fields"][0], "name": "id", "metadata": mapped}]
    configuration = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"}
    metadata = {"schemaString": json.dumps(schema), "configuration": configuration}
    _log(
        tmp_path,
        0,
        {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}},
        {"metaData": {**actions["metaData"], **metadata}},
        {"add": actions["add"]},
    )
    assert Condition("(SELECT sum(id) FROM t WHERE id > 2) = 42").is_true({"t": DeltaTable(str(tmp_path))})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(SELECT min(price) FROM sales) < 0", "No field named price"),
        ("(SELECT min(cents) FROM Sales) < 0", "'datafusion.public.Sales' not found"),
        ("SELECT * FROM other, sales", "'datafusion.public.other' not found"),
        ("DROP TABLE sales", "SQL error"),
        ("COPY sales TO 'out.parquet'", "SQL error"),
        ("SELECT 1 FROM sales; SELECT 2", "SQL error"),
        ("SELECT 1) AS asked; COPY (SELECT * FROM sales) TO ('out.parquet'", "SQL"),
        ("(SELECT min(cents) FROM sales)", "non-boolean"),
    ],
)
def test_what_is_no_condition_over_the_tables_is_refused_before_rows_are_read(
    sales: DeltaTable, text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor can one write."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotAsk, match=said):
        Condition(text).check({"sales": sales})
    assert [path.name for path in tmp_path.iterdir()] == ["sales"]
    assert DeltaTable(sales.table_uri).version() == 1


def test_a_computation_that_fails_is_no_answer(sales: DeltaTable) -> None:
    with pytest.raises(Refused, match=r"cannot be computed: .*[Dd]ivide by zero"):
        Condition("SELECT cents / 0 > 1 FROM sales").is_true({"sales": sales})


def test_a_condition_names_its_tables() -> None:
    assert Condition('SELECT * FROM "my-sink"').names_in(["sink", "my-sink", "a"]) == ("my-sink", "sink")
    with pytest.raises(UsageError, match="names none of the tables, which are a, b"):
        Condition("1 > 0").names_in(["b", "a"])
    with pytest.raises(UsageError, match="empty"):
        Condition(" ; ")


def _source_log(*batches: int) -> str:
    lines = [json.dumps({"path": f"file:///in/{b}%20.json", "timestamp": 1, "batchId": b}) for b in batches]
    return "\n".join(["v1", *lines])


LOGS = {
    "8": _source_log(8),
    "9.compact": _source_log(*range(10)),
    "10": _source_log(10),
    "11": _source_log(11, 11),
    "12": _source_log(12),
}


@pytest.mark.parametrize(
    ("after", "until", "read", "found"),
    [
        (9, 11, ["10", "11"], [10, 11]),
        (7, 8, ["8"], [8]),
        (5, 10, ["10", "8", "9.compact"], [6, 7, 8, 9, 10]),
        (-1, 1, ["9.compact"], [0, 1]),
        (11, 11, [], []),
        (12, 14, [], []),
        (8, 10, ["10", "9.compact"], [9, 10]),
    ],
)
def test_files_are_read_from_the_logs_of_their_batches(
    after: int, until: int, read: list[str], found: list[int]
) -> None:
    opened: list[str] = []

    def opening(name: str) -> str:
        opened.append(name)
        return LOGS[name]

    files = files_between([*LOGS, ".8.crc"], after, until, opening)
    assert list(files) == [f"file:///in/{batch} .json" for batch in found]
    assert sorted(opened) == sorted(read)


def test_a_log_that_is_damaged_is_said() -> None:
    with pytest.raises(DamageError, match="no entry"):
        files_between(["1"], 0, 1, lambda _: "v1\nno entry")
