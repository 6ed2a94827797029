"""A function goes on with state of an earlier form: fields are new, gone, renamed or wider."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from spark_abs.codec import from_json, to_json
from spark_abs.errors import StateFunctionFailed, UsageError
from spark_abs.manifest import StateFunction
from spark_abs.state.evolution import difference, evolve, form_digest, widens
from spark_abs.testing.state import StateDriver

ROWS = pa.schema([("k", pa.int64()), ("v", pa.int64())])
OUT = pa.schema([("k", pa.int64()), ("seen", pa.string())])
FIRST = {"a": pa.int32(), "b": pa.int64()}


def see(key: tuple[Any, ...], rows: Any, state: Any) -> tuple[Any, ...]:
    """Put out what is kept; a row replaces it by its value in every field, 0 leaves it."""
    values = [row.v for row in rows]
    said = repr(state.get) if state.exists else "nothing"
    if any(values):
        width = max(values) % 10
        state.update(tuple([max(values)] * width))
    return key[0], said


def form(fields: Mapping[str, pa.DataType], **options: Any) -> StateDriver:
    return StateDriver.per_key(
        see, key=["k"], rows=ROWS, state=pa.schema(list(fields.items())), output=OUT, key_groups=2, **options
    )


def written(fields: Mapping[str, pa.DataType] = FIRST, key: int = 1, **options: Any) -> StateDriver:
    """Keep one value, 10 and as many as there are fields, for a key."""
    run = form(fields, **options)
    run.batch([(key, 10 + len(fields))])
    return run


def seen(run: StateDriver, key: int = 1) -> str:
    ((_, said),) = run.batch([(key, 0)])
    return str(said)


def after(before: StateDriver, fields: Mapping[str, pa.DataType], **options: Any) -> StateDriver:
    run = form(fields, **options)
    run.go_on_from(before)
    return run


def test_a_new_field_is_null_or_its_default_in_states_that_are_there() -> None:
    run = after(
        written(), FIRST | {"n": pa.int64(), "d": pa.float64(), "l": pa.list_(pa.int64())},
        defaults={"d": 0.5, "l": [1, 2]},
    )  # fmt: skip
    assert seen(run) == "(12, 12, None, 0.5, [1, 2])"
    only_d = after(run, {"d": pa.float64()}, defaults={"d": 9}, dropped=("a", "b", "n", "l"))
    assert seen(only_d) == "(0.5,)"


def test_a_default_stays_what_it_was_when_its_field_came() -> None:
    second = after(written(), FIRST | {"n": pa.int64()}, defaults={"n": 1})
    assert seen(after(second, FIRST | {"n": pa.int64()}, defaults={"n": 2})) == "(12, 12, 1)"
    assert seen(after(second, FIRST | {"n": pa.int64()})) == "(12, 12, 1)"


def test_a_field_may_go_change_its_place_its_name_and_be_wider() -> None:
    assert seen(after(written(), {"b": pa.int64()}, dropped=("a",))) == "(12,)"
    assert seen(after(written(), {"b": pa.int64(), "a": pa.int64()})) == "(12, 12)"
    run = after(written(), {"c": pa.float64(), "b": pa.int64()}, renamed={"c": ("a",)})
    assert seen(run) == "(12.0, 12)"
    again = after(run, {"e": pa.float64()}, renamed={"e": ("c",)}, dropped=("b",))
    assert seen(again) == "(12.0,)"
    assert again.operator.form.renamed == {"e": ("c", "a")}
    assert again.operator.form.dropped == ("b",)


def test_segments_of_every_form_are_read_in_the_newest_and_merged() -> None:
    """Keys that no batch touched keep the bytes of their form; merging brings all into one."""
    run = written(key=1)
    forms: list[tuple[dict[str, pa.DataType], dict[str, Any]]] = [
        ({"a": pa.int64(), "c": pa.int64()}, {"renamed": {"c": ("b",)}}),
        ({"a": pa.int64(), "c": pa.int64(), "n": pa.int64()}, {"defaults": {"n": 7}}),
        ({"x": pa.int64(), "n": pa.int64()}, {"renamed": {"x": ("a",)}, "dropped": ("c",)}),
    ]
    for number, (fields, options) in enumerate(forms, 2):
        run = after(run, fields, **options)
        run.batch([(number, 10 + len(fields))])
    expected = {(1,): (12, 7), (2,): (12, 7), (3,): (13, 13), (4,): (12, 12)}
    assert run.states == expected
    assert len(run.operator.form.older) == 3
    for key in range(100, 140):
        run.batch([(key, 12)])
    run.restart()
    assert {key: run.states[key] for key in expected} == expected


def test_a_process_that_holds_groups_of_the_old_form_reads_them_anew() -> None:
    before = written()
    seen(before)
    run = after(before, FIRST | {"n": pa.int64()})
    assert seen(run) == "(12, 12, None)"
    assert run.operator.digest != before.operator.digest


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ({"a": pa.int16(), "b": pa.int64()}, {}, "field 'a' changes from int32 to int16"),
        ({"a": pa.string(), "b": pa.int64()}, {}, "field 'a' changes from int32 to string"),
        ({"a": pa.float32(), "b": pa.int64()}, {}, "field 'a' changes from int32 to float"),
        ({"c": pa.int32()}, {"renamed": {"c": ("d",)}}, "field 'c' was 'd', which the state does not have"),
        ({"a": pa.int32(), "c": pa.int32()}, {"renamed": {"c": ("a",)}}, "two fields of field 'a'"),
        ({"a": pa.int32()}, {"renamed": {"a": ("b",)}}, "field 'a' was 'b', and the state has both"),
        (
            FIRST,
            {"timeout": "processing-time"},
            "timeout was none when the state was written and is now processing-time",
        ),
    ],
)
def test_what_would_lose_or_mix_values_is_refused_and_nothing_has_changed(
    fields: dict[str, pa.DataType], options: dict[str, Any], said: str
) -> None:
    before = written()
    if "timeout" in options:
        from spark_abs.state.operator import Timeout

        options = {"timeout": Timeout.PROCESSING_TIME}
    with pytest.raises(StateFunctionFailed, match=said):
        after(before, fields, **options)
    assert seen(before) == "(12, 12)"


PAIR = pa.struct([("x", pa.int64()), ("y", pa.int64())])


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ({"a": pa.int32()}, {}, "field 'b' is no longer .*renamed={'<its new name>': 'b'}.* or dropped='b'"),
        ({"a": pa.int32(), "c": pa.int64()}, {}, "field 'b' is no longer .*give renamed={'c': 'b'} if"),
        ({"a": pa.int32(), "c": pa.string()}, {}, "field 'b' is no longer .*give renamed={'<its new name>'"),
        ({"c": pa.int32()}, {"renamed": {"c": ("a",)}}, "field 'b' is no longer declared"),
        ({"c": pa.int32()}, {"dropped": ("b",)}, "field 'a' is no longer .*give renamed={'c': 'a'}"),
    ],
)
def test_a_field_that_disappears_is_missed(
    fields: dict[str, pa.DataType], options: dict[str, Any], said: str
) -> None:
    before = written()
    with pytest.raises(StateFunctionFailed, match=said):
        after(before, fields, **options)
    assert seen(before) == "(12, 12)"


def test_a_field_within_a_struct_does_not_disappear_either() -> None:
    before = form({"s": PAIR})
    for other in ({"x": pa.int64()}, {"x": pa.int64(), "z": pa.int64()}, {"x": pa.int32(), "y": pa.int64()}):
        with pytest.raises(StateFunctionFailed, match="field 's' changes from struct<x: int64, y: int64> to"):
            after(before, {"s": pa.struct(list(other.items()))}, dropped=("y",))


def test_a_field_is_given_up_by_a_name_that_it_had_before() -> None:
    """Then the argument that gave it up may stay, whatever forms were skipped."""
    moved = after(written(), {"c": pa.int32(), "b": pa.int64()}, renamed={"c": ("a",)})
    assert after(moved, {"b": pa.int64()}, dropped=("a",)).operator.form.dropped == ("c", "a")


def test_a_name_that_was_given_up_is_not_taken_again() -> None:
    """An old segment may still hold the values that it stood for."""
    dropped = after(written(), {"b": pa.int64()}, dropped=("a",))
    with pytest.raises(StateFunctionFailed, match="had a field 'a': give the new field another name"):
        after(dropped, {"b": pa.int64(), "a": pa.string()})
    with pytest.raises(StateFunctionFailed, match="had a field 'a': give the renamed field another name"):
        after(dropped, {"a": pa.int64()}, renamed={"a": ("b",)})
    moved = after(written(), {"c": pa.int32(), "b": pa.int64()}, renamed={"c": ("a",)})
    with pytest.raises(StateFunctionFailed, match="had a field 'a': give"):
        after(moved, {"c": pa.int32(), "a": pa.int64()})
    back = after(moved, FIRST, renamed={"a": ("c",)})
    assert seen(back) == "(12, 12)"


def test_going_on_again_changes_nothing_and_old_arguments_may_stay() -> None:
    given: dict[str, Any] = {"renamed": {"c": ("a",)}, "defaults": {"c": 4}, "dropped": ("b", "never-there")}
    second = after(written(), {"c": pa.int32()}, **given)
    assert second.operator.form.dropped == ("b",)
    again = after(second, {"c": pa.int32()}, **given)
    assert again.operator.form == second.operator.form
    assert after(second, {"c": pa.int32()}).operator.form == second.operator.form
    fresh = form({"c": pa.int32()}, renamed={"c": ("a",)})
    assert after(fresh, {"c": pa.int32()}, renamed={"c": ("a",)}).operator.form == fresh.operator.form


def test_a_form_of_which_nothing_is_known_is_not_read() -> None:
    before, run = written(), form(FIRST | {"n": pa.int64()})
    run.groups = before.groups
    with pytest.raises(StateFunctionFailed, match="was written by a definition of this function of which"):
        seen(run)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"renamed": {"x": ("a",)}}, "the state has no field 'x'"),
        ({"defaults": {"x": 1}}, "the state has no field 'x'"),
        ({"dropped": ("a",)}, "dropped= names field 'a'"),
        ({"defaults": {"a": "text"}}, "the default of 'a' must be a number"),
        ({"defaults": {"a": {1}}}, "the default of 'a' must be a number"),
    ],
)
def test_arguments_that_cannot_be_are_wrong_calls(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        form(FIRST, **options)


def test_both_forms_stand_side_by_side() -> None:
    stored = StateFunction("sums", 16, ("k: int64",), ("a: int32", "b: int64"), "none")
    declared = replace(
        stored, key_groups=32, state=("c: int64", "n: string"), renamed={"c": ("a",)}, dropped=("b",)
    )
    evolved = evolve(stored, declared)
    assert difference(stored, declared, evolved.obstacles).splitlines() == [
        "the state has 16 key groups, 32 are declared: the number decides where a key is kept",
        "              stored    declared",
        "  uid         sums      sums",
        "  key groups  16        32",
        "  timeout     none      none",
        "  key         k: int64  k: int64",
        "  state       a: int32  c: int64",
        "  state       -         n: string",
        "  state       b: int64  -",
    ]


def test_wider_is_what_holds_every_value() -> None:
    assert widens("int8", "int64")
    assert widens("int32", "double")
    assert widens("float", "double")
    assert widens("decimal128(5, 2)", "decimal128(8, 3)")
    for old, new in (
        ("int64", "int32"),
        ("int64", "double"),
        ("double", "float"),
        ("string", "binary"),
        ("decimal128(5, 2)", "decimal128(5, 3)"),
        ("decimal128(5, 2)", "decimal128(8, 1)"),
    ):
        assert not widens(old, new)


def test_a_form_from_before_forms_had_a_past_has_the_digest_that_its_heads_carry() -> None:
    old = (
        '{"uid":"sums","key_groups":16,"key":["k: int64"],"state":["total: int64"],"timeout":"none",'
        '"ttl_ms":5}'
    )
    stored = from_json(StateFunction, old)
    assert form_digest(stored) == "36145580843355f2"
    assert form_digest(replace(stored, ttl_ms=None, older=("x",))) == form_digest(stored)
    assert from_json(StateFunction, to_json(stored)) == stored
