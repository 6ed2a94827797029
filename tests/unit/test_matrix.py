"""The support matrix: what outcomes of tests make of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spark_abs.spark.versions import SUPPORTED
from tests.markdown_support import HERE
from tests.versions import matrix
from tests.versions.features import FEATURES, feature_of
from tests.versions.matrix import (
    FAILS,
    NOT_TESTED,
    NOT_THERE,
    PAGE,
    YES,
    Environment,
    Outcomes,
    Result,
)

GATE, EDIT = "channels and barriers", "edits of state"
ONE, OTHER = "tests/spark/test_gate.py::test_one", "tests/spark/test_gate.py::test_other[1]"
EDITED = "tests/spark/test_edit.py::test_edited"
PAGE_OF_EDITS = (
    "tests/spark/test_guide_code.py::test_the_code_of_a_page_runs[spark_abs/guide/state-as-data.md]"
)
SHAPES, CARRIED = "tests/spark/test_stored_shapes.py::test_it", "tests/versions/test_carried_root.py::test_it"


def outcomes(
    release: str, one: str = "", other: str = "", edited: str = "", rewrites_state: bool = False
) -> Outcomes:
    line = matrix.line_of(release)
    given = {ONE: one, OTHER: other, EDITED: edited, PAGE_OF_EDITS: edited}
    results = {test: Result(outcome, (line,)) for test, outcome in given.items() if outcome}
    return Outcomes(Environment(release, "3.11.7", "2.3.3", "17.0.15"), "digest", rewrites_state, results)


def cells(feature: str, *runs: Outcomes) -> tuple[str, ...]:
    return tuple(matrix.matrix(runs)[feature].values())


def test_a_feature_is_claimed_where_every_one_of_its_tests_passed() -> None:
    runs = [outcomes(release, one="passed", other="passed") for release in ("4.0.5", "4.2.0")]
    assert cells(GATE, *runs) == (YES, NOT_TESTED, YES)


def test_without_a_run_nothing_is_claimed() -> None:
    assert cells(GATE) == (NOT_TESTED,) * 3
    assert set(matrix.matrix([]).keys()) == {feature.name for feature in FEATURES}


@pytest.mark.parametrize(("outcome", "cell"), [("failed", FAILS), ("not run", NOT_TESTED)])
def test_a_test_that_did_not_pass_takes_the_claim_away(outcome: str, cell: str) -> None:
    runs = [outcomes("4.1.4", one="passed", other=outcome), outcomes("4.2.0", one="passed", other="passed")]
    assert cells(GATE, *runs) == (NOT_TESTED, cell, YES)


def test_a_test_that_only_ran_on_another_version_takes_the_claim_away() -> None:
    runs = [outcomes("4.0.5", one="passed"), outcomes("4.2.0", one="passed", other="passed")]
    assert cells(GATE, *runs) == (NOT_TESTED, NOT_TESTED, YES)


def test_a_failure_in_any_environment_of_a_version_counts() -> None:
    runs = [outcomes("4.2.0", one="passed", other="passed"), outcomes("4.2.1", one="failed")]
    assert cells(GATE, *runs)[-1] == FAILS


def test_a_feature_that_a_spark_lacks_says_which_has_it() -> None:
    newest = outcomes("4.2.0", rewrites_state=True, edited="passed")
    assert cells(EDIT, outcomes("4.0.5", one="passed"), newest) == (NOT_THERE, NOT_TESTED, YES)
    # A platform may have it earlier: then its tests must have run.
    assert cells(EDIT, outcomes("4.0.5", rewrites_state=True), newest) == (NOT_TESTED, NOT_TESTED, YES)


def test_a_test_may_say_that_it_ran_on_several_versions_and_each_entry_needs_one() -> None:
    run, moves = outcomes("4.2.0"), "a root moves between these versions, after a kill, too"
    tests = {CARRIED: Result("passed", SUPPORTED)}
    assert cells(moves, replace(run, tests=tests)) == (NOT_TESTED, NOT_TESTED, NOT_TESTED)
    tests[SHAPES] = Result("passed", ("4.1", "4.2"))
    assert cells(moves, replace(run, tests=tests)) == (NOT_TESTED, YES, YES)


def test_the_short_table_has_the_worst_of_each_version() -> None:
    yes = dict.fromkeys(SUPPORTED, YES)
    cells = {feature.name: yes for feature in FEATURES}
    cells[EDIT] = {"4.0": NOT_THERE, "4.1": FAILS, "4.2": YES}
    cells[GATE] = {"4.0": YES, "4.1": NOT_TESTED, "4.2": YES}
    rewriting, others = matrix.short(cells).values()
    assert tuple(rewriting.values()) == (NOT_THERE, FAILS, YES)
    assert tuple(others.values()) == (YES, NOT_TESTED, YES)


def test_a_test_counts_for_the_feature_with_the_longest_entry() -> None:
    page = "tests/spark/test_guide_code.py::test_the_code_of_a_page_runs[{}]"
    found = [feature_of(page.format(name)) for name in ("spark_abs/guide/rescaling.md", "README.md")]
    assert [feature and feature.rewrites_state for feature in found] == [True, False]
    assert feature_of("tests/spark/test_gate_of_others.py::test_one") is None


def test_environments_have_the_number_of_tests_that_passed() -> None:
    runs = [outcomes("4.0.5", one="passed", other="failed"), outcomes("4.2.0", one="passed")]
    assert matrix.environments(runs).splitlines()[2:] == [
        "| 4.0.5 | 3.11.7 | 2.3.3 | 17.0.15 | 1 of 2 |",
        "| 4.2.0 | 3.11.7 | 2.3.3 | 17.0.15 | 1 of 1 |",
    ]


def test_outcomes_are_read_as_they_were_written() -> None:
    run = outcomes("4.2.0", rewrites_state=True, one="passed", edited="failed")
    assert Outcomes.from_json(run.to_json()) == run


def test_runs_of_another_code_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "4.2.json").write_text(outcomes("4.2.0", one="passed").to_json())
    assert matrix.main([str(file)]) == 1
    assert "another code" in capsys.readouterr().err


def test_a_part_of_a_page_is_replaced() -> None:
    text = "a\n<!-- matrix -->\nold\n<!-- end of matrix -->\nb"
    assert matrix.with_part(text, "matrix", r"\1") == text.replace("old", r"\1")


def test_the_guide_has_a_row_for_each_feature() -> None:
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    assert [row for row in rows if row in {feature.name for feature in FEATURES}] == [
        f.name for f in FEATURES
    ]


def test_features_name_tests_that_exist() -> None:
    for feature in FEATURES:
        for entry in feature.tests:
            module, _, test = entry.partition("[")[0].partition("::")
            assert (HERE / module).is_file(), entry
            assert not test or f"def {test}(" in (HERE / module).read_text(encoding="utf-8"), entry
