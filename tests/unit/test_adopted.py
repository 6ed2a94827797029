"""The table of a native query that a job goes on with, in its log alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pyarrow as pa
import pytest

from spark_abs.compatibility.adoption import Adoption, refuse_progress, why_too_late
from spark_abs.errors import Refused
from spark_abs.model import FENCED, AttemptId, BatchId, RunId, SinkWriter, StageId
from spark_abs.sinks.delta.adopted import last_written, refuse_running, take_over_query, was_fenced
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Commit, Table

QUERY = "0a1b2c3d"
FIRST = SinkWriter("job", "r00t", StageId("s"), "out", AttemptId(1))


def no_session() -> NoReturn:
    raise AssertionError("a plain table needs no Spark")


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table.ensure(Place(str(tmp_path)), pa.schema([("n", pa.int64())]))


def take_over(table: Table, planned: int, writer: SinkWriter = FIRST) -> None:
    take_over_query(table, writer, run=RunId(1), query=QUERY, planned=BatchId(planned), session=no_session)


def test_the_sink_holds_what_the_query_has_written_which_writes_no_more(table: Table) -> None:
    """In one commit; a repeat changes nothing."""
    table.commit_next(Commit(transactions={QUERY: 6}))
    table.commit_next(Commit(transactions={QUERY: 7}))
    assert last_written(table, QUERY) == 7
    take_over(table, planned=7)
    assert (table.transaction(FIRST.app), table.transaction(QUERY)) == (7, FENCED)
    at = table.version
    take_over(table, planned=7)
    assert table.version == at
    assert was_fenced(table, QUERY)
    assert last_written(table, QUERY) == 7  # by the log, for an attempt that adopts it anew
    again = SinkWriter("job", "r00t", StageId("s"), "out", AttemptId(2))
    take_over(table, planned=7, writer=again)
    assert table.transaction(again.app) == 7


def test_a_query_that_was_fenced_late_is_fenced_by_the_next_start(table: Table) -> None:
    """Delta's own writer takes one id in a commit: the batches first, and may be killed after them."""
    table.commit_next(Commit(transactions={QUERY: 7}))
    table.commit_next(Commit(transactions={FIRST.app: 7}))
    table.commit_next(Commit(transactions={QUERY: 8}))  # the query was started again meanwhile
    with pytest.raises(Refused, match="holds batch 8"):
        take_over(table, planned=7)
    take_over(table, planned=8)  # adopted anew
    assert (table.transaction(FIRST.app), table.transaction(QUERY)) == (8, FENCED)


def test_a_query_that_goes_on_is_refused(table: Table) -> None:
    table.commit_next(Commit(transactions={QUERY: 8}))
    with pytest.raises(
        Refused, match="holds batch 8 of query 0a1b2c3d, and its checkpoint ends with batch 7"
    ):
        take_over(table, planned=7)
    assert not was_fenced(table, QUERY)
    assert refuse_running(table, QUERY, BatchId(8)) == 8


def test_a_table_of_others_is_left_alone(table: Table) -> None:
    take_over(table, planned=7)
    assert table.version == 0
    assert last_written(table, QUERY) is None


@pytest.mark.parametrize(
    ("query_at", "late"),
    [(6, True), (FENCED, False), (None, False)],
    ids=["it still writes", "it was adopted", "the table is another one"],
)
def test_a_stage_that_has_run_without_the_query_is_told_so(
    tmp_path: Path, query_at: int | None, late: bool
) -> None:
    """`adopt` may stay in a script: nothing is said of a query that was adopted, or is gone."""
    uri, old = str(tmp_path / "table"), tmp_path / "old"
    made = Table.ensure(Place(uri), pa.schema([("n", pa.int64())]))
    if query_at is not None:
        made.commit_next(Commit(transactions={QUERY: query_at}))
    old.mkdir()
    (old / "metadata").write_text(f'{{"id":"{QUERY}"}}')
    stage = StageId("s")
    sink = SimpleNamespace(source=SimpleNamespace(stage=stage), table=uri)
    job: Any = SimpleNamespace(stages={stage: SimpleNamespace(adopt=str(old))}, sinks=[sink])
    said = why_too_late(job, Root(str(tmp_path / "root")), stage)
    assert (f"the stage has run already, without the position and the state of query {QUERY}" in said) is late
    assert bool(said) is late
    (old / "metadata").unlink()
    assert why_too_late(job, Root(str(tmp_path / "root")), stage) == ""


def test_a_query_that_goes_on_between_two_looks_is_refused(tmp_path: Path) -> None:
    """It may run in another driver, whose queries this one does not see."""
    looked = Adoption(StageId("a"), Place(str(tmp_path)), QUERY, BatchId(4), BatchId(5))
    refuse_progress([], [looked])
    refuse_progress([looked], [looked])
    for later in (replace(looked, finished=BatchId(5)), replace(looked, planned=BatchId(6))):
        with pytest.raises(Refused, match=f"query {QUERY} runs on {tmp_path}: stop it"):
            refuse_progress([looked], [later])
