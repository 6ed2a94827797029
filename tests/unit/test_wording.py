"""What `check` and `explain` say of adopted queries and lookups; how an error of Spark's is shortened."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from spark_abs.compatibility.adoption import Adoption
from spark_abs.compatibility.explain import ExplainedStage, looked_up
from spark_abs.compatibility.inspection import noted
from spark_abs.model import BatchId, StageId
from spark_abs.plan.specs import Lookup
from spark_abs.protocol.changes import Comparison, StageChange, Verdict
from spark_abs.sinks.delete_predicate import without_plan
from spark_abs.store.storage import Place

SALES = StageId("sales")


@dataclass(frozen=True)
class Named:
    name: str


@pytest.mark.parametrize(
    ("verdict", "note", "kept"),
    [
        (Verdict.NEW, "json source /in starts where its options say", False),
        (Verdict.REFUSED, "an earlier start removed this stage", True),
    ],
)
def test_the_source_of_an_adopted_query_goes_on_where_the_query_was(
    verdict: Verdict, note: str, kept: bool
) -> None:
    """The position is the query's, whatever a new stage would say; a refusal keeps its reason."""
    adoption = Adoption(SALES, Place("/old"), "q", BatchId(3), BatchId(4))
    other = StageChange(StageId("other"), Verdict.NEW, ("rate source starts where its options say",))
    found = noted(Comparison("a new root", (StageChange(SALES, verdict, (note,)), other)), [adoption])
    adopts = "adopts /old: query q, after batch 3"
    assert [s.notes for s in found.stages] == [(adopts, note) if kept else (adopts,), other.notes]


@pytest.mark.parametrize(
    ("age", "version"),
    [
        (None, "the version of the first start, for ever"),
        (0, "the newest version in each batch"),
        (30_000, "a version that was the newest at most 30000 ms ago"),
    ],
)
def test_a_stage_is_explained_with_its_lookups(age: int | None, version: str) -> None:
    lookup = looked_up(Lookup(Named("job"), "owners", "/owners", age))
    stage = ExplainedStage(SALES, (), (), (lookup,), ("main",), "append", None, (), (), (), None, "/native")
    assert list(stage.lines())[1] == f"  looks up owners, table /owners: {version}"


def test_an_expression_that_cannot_be_read_is_shown_without_the_plan() -> None:
    said = "[UNRESOLVED_COLUMN] `op` cannot be resolved. SQLSTATE: 42703; line 1 pos 1"
    assert without_plan(ValueError(f"{said};\n'Project ['op]\n+- LogicalRDD [item#1]")) == said
    assert without_plan(ValueError("\n[PARSE_SYNTAX_ERROR] at '='\n== SQL ==\na =\n")) == (
        "[PARSE_SYNTAX_ERROR] at '='\n== SQL ==\na ="
    )
