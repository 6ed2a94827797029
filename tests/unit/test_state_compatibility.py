"""Of two long texts a message shows what they differ in."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from spark_abs.manifest import OperatorShape
from spark_abs.protocol.state_compatibility import contrasted, moved, operators_fit, recounted

COLUMNS = [f"coalesce(column_{n}, CAST(NULL AS STRING)) AS key_{n} string" for n in range(14)]


def test_one_column_among_many_is_seen_at_once() -> None:
    before = f"Aggregate(by {', '.join(COLUMNS)}; sum(value))"
    now = before.replace("key_7 string", "key_7 bigint")
    assert min(len(before), len(now)) > 700
    was, are = contrasted(before, now)
    assert max(len(was), len(are)) < 160
    assert "key_7 string" in was
    assert "key_7 bigint" in are
    assert was.startswith("Aggregate(by ")


def test_the_part_in_which_they_differ_is_named() -> None:
    sides = [f"{', '.join(COLUMNS[:4])}, {number}" for number in (0, 1)]
    was, are = contrasted(
        *(f"Join(on a; left: {one}; right: {other})" for one, other in (sides, sides[::-1]))
    )
    assert re.fullmatch(r"Join\(on a; left: .* 0; right: .* 1\)", was)
    assert re.fullmatch(r"Join\(on a; left: .* 1; right: .* 0\)", are)


def test_spark_s_count_of_common_expressions_is_not_part_of_an_expression() -> None:
    """It counts over the whole process: another job before this one, and the numbers differ."""
    was, now = (f"f(_common_expr_{n}, _common_expr_{n + 1}, _common_expr_{n})" for n in (3, 34))
    assert recounted(was) == recounted(now) == "f(_common_expr_0, _common_expr_1, _common_expr_0)"


def test_the_seed_of_a_random_column_is_not_part_of_the_state() -> None:
    before, now, other = (
        OperatorShape("Deduplicate", (f"by {salt} bigint",), computed=(salt,))
        for salt in ("floor((rand(7L) * 4))", "floor((rand(-12L) * 4))", "floor((rand(7L) * 5))")
    )
    assert operators_fit([before], [now])
    assert not operators_fit([before], [other])
    assert not moved([before.parts], [now.parts])
    assert moved([before.parts], [other.parts])


def test_short_texts_are_shown_whole() -> None:
    assert contrasted("by a int", "by b int") == ("by a int", "by b int")


texts = st.lists(st.sampled_from([*COLUMNS[:5], "a", ", ", "sum(v)"]), max_size=30).map("".join)


@given(texts, texts)
def test_what_differs_is_never_left_out(before: str, now: str) -> None:
    was, are = contrasted(before, now)
    assert (was == are) == (before == now)
