"""Functions of a stage go on with their own state wherever the plan has them, or the stage does not start."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_abs.codec import from_json
from spark_abs.manifest import Manifest, OperatorState, StateFunction
from spark_abs.model import NO_BATCH, CheckpointId, StageId
from spark_abs.state.assignment import Fate, Functions, function_obstacles, held_at, match_functions, placed

EXAMPLE = Path(__file__).parents[1] / "formats" / "manifest-1.json"
MATCH = StageId("match")
A, B, C = (StateFunction(uid, 16, ("k: int64",), ("n: int64",), "none") for uid in "abc")


def held(*places: str) -> Functions:
    return Functions(tuple(f for f in (A, B, C) if f.uid in places), places)


declared = held


def changed(form: StateFunction, **change: Any) -> Functions:
    return Functions((replace(form, **change),), (form.uid,))


@pytest.mark.parametrize(
    ("before", "now", "fates"),
    [
        (None, declared("a", "b"), {"a": Fate.NEW, "b": Fate.NEW}),
        (None, declared(), {}),
        (held("b", "a"), declared("b", "a"), {"a": Fate.KEPT, "b": Fate.KEPT}),
        (held("a", "", "b"), declared("a", "", "b"), {"a": Fate.KEPT, "b": Fate.KEPT}),
        (held("a", "a"), declared("a", "a"), {"a": Fate.KEPT}),
        (Functions((A, B), None), declared("b", "a"), {"a": Fate.KEPT, "b": Fate.KEPT}),
        # An edit has removed the state at a place: whatever stands there begins without.
        (held("", "a"), declared("b", "a"), {"a": Fate.KEPT, "b": Fate.EMPTY}),
        (held("", "a"), declared("c", "a"), {"a": Fate.KEPT, "c": Fate.EMPTY}),
        (held("", ""), declared("b", "a"), {"a": Fate.EMPTY, "b": Fate.EMPTY}),
        # Forms that a state fits.
        (held("a"), changed(A, state=("n: int64", "m: int64")), {"a": Fate.KEPT}),
        (held("a"), changed(A, state=("m: int64",), renamed={"m": ("n",)}), {"a": Fate.KEPT}),
        (held("a"), changed(A, state=("m: int64",), dropped=("n",)), {"a": Fate.KEPT}),
        (held("a"), changed(A, ttl_ms=5), {"a": Fate.KEPT}),
    ],
)
def test_what_becomes_of_functions(before: Functions | None, now: Functions, fates: dict[str, Fate]) -> None:
    found = match_functions(before, now)
    assert (found.fates, found.obstacles) == (fates, ())
    assert function_obstacles(MATCH, before, now, CheckpointId(7)) == ()
    assert [f.uid for f in found.forms] == [f.uid for f in now.forms]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (held("b", "a"), declared("a", "b"), ["'a', 'b' changed places.* 'b', 'a', this plan has 'a', 'b'"]),
        (held("a", "b"), declared("b"), ["'a' has state and is no", "'b' changed.* 'a', 'b', this plan"]),
        (held("a", "b"), declared("a"), ["'b' has state and is no longer declared$"]),
        (held("a"), declared("a", "b"), ["'b' is new, and a stage that has run"]),
        (held("a"), declared("b", "a"), ["'a' changed places.* with 'a', this plan has 'b', 'a'"]),
        (held(), declared("a"), ["'a' is new, and a stage that has run"]),
        (held("a"), declared("b"), ["'a' .* no longer .*'b' takes its place in the plan: .* uid='a'"]),
        (held("b", "a"), declared("c", "a"), ["'b' .* and 'c' takes its place in the plan: .* uid='b'"]),
        (Functions((A,), None), declared("b"), ["'a' .* and 'b' takes its place"]),
        (Functions((A, B), None), declared("a", "c"), ["'b' has state and is no longer declared"]),
        # One was removed by an edit, and the other does not stand where its state is.
        (held("", "a"), declared("a", "b"), ["'a' changed places.* \\(none\\), 'a', this plan has 'a', 'b'"]),
        (held("", "a"), declared("a"), ["'a' changed places"]),
        (held("a", "a"), declared("a"), ["'a' changed places"]),
        # Other forms.
        (held("a"), changed(A, key=("k: string",)), ["'a' does not fit .*the key columns changed"]),
        (held("a"), changed(A, key_groups=8), ["the state has 16 key groups, 8 are declared"]),
        (held("a"), changed(A, timeout="event-time"), ["timeout was none"]),
        (held("a"), changed(A, state=("n: int32",)), ["field 'n' changes from int64 to int32"]),
        (held("a"), changed(A, state=("m: int64",)), ["field 'n' is no longer .*renamed={'m': 'n'}"]),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(before: Functions, now: Functions, said: list[str]) -> None:
    found = match_functions(before, now)
    assert found.fates == {}
    for words in said:
        assert any(re.search(words, one, re.S) for one in found.obstacles), found.obstacles
    *sentences, ways = function_obstacles(MATCH, before, now, CheckpointId(7))
    assert len(sentences) == len(found.obstacles)
    assert all(s.startswith("stage 'match': ") for s in sentences)
    for way in ("their earlier uids", "open(root).edit(7).rekey", ".remove", "allow_non_restored"):
        assert way in ways
    assert "edit" not in function_obstacles(MATCH, before, now, None)[-1]


def test_a_function_of_another_form_is_shown_with_both() -> None:
    (said,) = match_functions(held("a"), changed(A, state=("m: string",), key_groups=8)).obstacles
    for column in ("n: int64", "m: string", "16", "8"):
        assert column in said


def test_a_checkpoint_says_which_operator_holds_the_state_of_which_function() -> None:
    operators = (
        OperatorState(0, "transformWithStateInPySparkExec", 2, (), ""),
        OperatorState(1, "stateStoreSave", 2, (), ""),
        OperatorState(2, "transformWithStateExec", 2, (), ""),
        OperatorState(3, "transformWithStateInPySparkExec", 2, (), ""),
    )
    named = placed(operators, ("b", "", "a"))
    assert [o.function for o in named] == ["b", "", "", "a"]
    assert placed(operators, ("b",)) == operators  # not what the plan had: nothing is said
    manifest = from_json(Manifest, EXAMPLE.read_text())
    (shape,), snapshot = manifest.graph, manifest.stages[0]
    graph = (replace(shape, functions=(B, A)),)
    before = replace(manifest, graph=graph, stages=(replace(snapshot, operators=named),))
    assert held_at(before, MATCH) == Functions((B, A), ("b", "", "a"))
    # Written by an earlier version.
    older = replace(before, stages=(replace(snapshot, operators=operators),))
    assert held_at(older, MATCH) == Functions((B, A), None)
    one = replace(older, graph=(replace(shape, functions=(A,)),))
    assert held_at(one, MATCH) == Functions((A,), None)
    alone = replace(one, stages=(replace(snapshot, operators=operators[:2]),))
    assert held_at(alone, MATCH) == Functions((A,), ("a",))
    assert held_at(replace(older, graph=()), MATCH) == Functions((), ("", "", ""))
    idle = replace(before, stages=(replace(snapshot, cut_batch=NO_BATCH),))
    assert (held_at(idle, MATCH), held_at(before, StageId("other"))) == (None, None)
