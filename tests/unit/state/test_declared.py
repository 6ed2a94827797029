"""What stages declare of their functions: one uid each, kept in manifests, compared at the next start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from spark_abs.codec import from_json, to_json
from spark_abs.errors import GraphError, Refused
from spark_abs.manifest import Manifest, StateFunction
from spark_abs.model import StageId
from spark_abs.runtime.frames import Frames
from spark_abs.runtime.restored import check_functions
from spark_abs.state.declared import Declared, declaring, gathering
from spark_abs.state.evolution import form_digest

SUMS = StateFunction("sums", 16, ("k: int64",), ("total: int64",), "none")
EXAMPLE = Path(__file__).parents[1] / "formats" / "manifest-1.json"


@dataclass
class Count:
    value: int


def declared(*functions: StateFunction) -> Frames:
    stage = Declared("match", functions=list(functions))
    return Frames({}, {}, {StageId("match"): stage})


def manifest(*functions: StateFunction) -> Manifest:
    found = from_json(Manifest, EXAMPLE.read_text())
    (shape,) = found.graph
    stored = replace(found, graph=(replace(shape, functions=functions),))
    again = from_json(Manifest, to_json(stored))
    assert again == stored
    return again


def test_a_stage_starts_on_functions_that_are_what_they_were_and_on_new_ones() -> None:
    check_functions(manifest(SUMS), declared(SUMS))
    check_functions(manifest(SUMS), declared(replace(SUMS, ttl_ms=5), replace(SUMS, uid="new")))
    check_functions(manifest(), declared(SUMS))


@pytest.mark.parametrize(
    "change",
    [
        {"key_groups": 32},
        {"key": ("k: string",)},
        {"state": ("total: string",)},
        {"timeout": "event-time"},
    ],
)
def test_a_function_of_another_form_is_refused_with_both(change: dict[str, Any]) -> None:
    now = replace(SUMS, **change)
    with pytest.raises(
        Refused, match="stage 'match': the state of function 'sums' in checkpoint 7"
    ) as refused:
        check_functions(manifest(SUMS), declared(now))
    for form in (SUMS, now):
        for column in (*form.key, *form.state, str(form.key_groups), form.timeout):
            assert column in str(refused.value)
    assert "write its state in the new form with spark_abs.edit(root, 7).rekey" in str(refused.value)


def test_a_function_that_goes_on_in_another_form_is_recorded_with_its_past() -> None:
    now = replace(SUMS, state=("sum: int64", "n: int64"), renamed={"sum": ("total",)}, defaults={"n": "3"})
    frames = declared(now)
    check_functions(manifest(SUMS), frames)
    (form,) = frames.declared[StageId("match")].functions
    assert form == replace(now, older=(form_digest(SUMS),))
    with pytest.raises(Refused, match=r"'n' is gone(.*\n)+.* n: int64 +-(.*\n)+.*renamed=.*dropped="):
        check_functions(manifest(form), declared(replace(SUMS, state=("sum: int64",))))
    frames = declared(replace(SUMS, state=("sum: int64",), dropped=("n",)))
    check_functions(manifest(form), frames)
    (last,) = frames.declared[StageId("match")].functions
    assert (last.renamed, last.dropped, len(last.older)) == ({"sum": ("total",)}, ("n",), 2)


def test_a_function_that_is_gone_is_refused() -> None:
    with pytest.raises(Refused, match="it is no longer declared"):
        check_functions(manifest(SUMS), declared(replace(SUMS, uid="other")))


def test_functions_are_gathered_where_a_stage_is_built_and_have_one_uid_each() -> None:
    assert declaring() is None
    with gathering(Declared("match")) as found:
        inner = declaring()
        assert inner is found
        inner.add(SUMS, cast("Any", Count(2)))
        inner.add(replace(SUMS, uid="more"), cast("Any", Count(3)))
        with pytest.raises(GraphError, match="stage 'match': two stateful functions have the uid 'sums'"):
            inner.add(SUMS, cast("Any", Count(0)))
    assert declaring() is None
    assert found.dropped() == 5
