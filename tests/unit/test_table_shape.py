"""Which tables take files as Spark writes them, and which no sink at all."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from spark_abs.errors import TableChanged
from spark_abs.sinks.delta.fit import Fit, why_unfit
from spark_abs.sinks.delta.native_writable import why_not_plain, why_not_sink
from spark_abs.sinks.delta.table_shape import Column, TableShape
from spark_abs.store.storage import Place
from spark_abs.store.table import Commit, Table

PLAIN = TableShape("id", (Column(("n",), "long", nullable=True),), (), (), 1, 2, frozenset())


def has(**properties: str) -> TableShape:
    return replace(
        PLAIN, properties=tuple((key.replace("__", "."), value) for key, value in properties.items())
    )


def column(type_: str = "string", nullable: bool = True, path: str = "c", **metadata: str) -> TableShape:
    made = Column(tuple(path.split(".")), type_, nullable, tuple(metadata.items()))
    return replace(PLAIN, columns=(*PLAIN.columns, made))


@pytest.mark.parametrize(
    "shape",
    [
        PLAIN,
        has(delta__logRetentionDuration="interval 7 days", delta__appendOnly="true"),
        has(delta__enableChangeDataFeed="FALSE", delta__columnMapping__mode="none"),
        column(comment='"for people"'),
        column("struct"),
        column("decimal(20,4)"),
        replace(PLAIN, reader=3, writer=7, features=frozenset(("timestampNtz", "appendOnly", "invariants"))),
    ],
    ids=str,
)
def test_what_is_known_to_ask_nothing_is_plain(shape: TableShape) -> None:
    assert why_not_plain(shape) is None


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (replace(PLAIN, features=frozenset(("appendOnly", "ofTomorrow"))), "table features ofTomorrow"),
        (replace(PLAIN, writer=4), "protocol 1, 4"),
        (replace(PLAIN, writer=8, features=frozenset(("appendOnly",))), "protocol 1, 8"),
        (replace(PLAIN, partitions=("n",)), "partition columns"),
        (has(delta__ofTomorrow="1"), "table properties delta.ofTomorrow=1"),
        (has(delta__enableChangeDataFeed="true"), "delta.enableChangeDataFeed=true"),
        (has(delta__constraints__small="n < 10"), "delta.constraints.small=n < 10"),
        (has(delta__autoOptimize__optimizeWrite="true"), "delta.autoOptimize.optimizeWrite=true"),
        (has(delta__dataSkippingStatsColumns="n"), "delta.dataSkippingStatsColumns=n"),
        (has(delta__universalFormat__enabledFormats="iceberg"), "universalFormat"),
        (column(nullable=False, path="s.element.a"), "column s.element.a is NOT NULL"),
        (column(__CHAR_VARCHAR_TYPE_STRING='"char(3)"'), "column c has __CHAR_VARCHAR_TYPE_STRING"),
        (column(CURRENT_DEFAULT='"7"'), "column c has CURRENT_DEFAULT"),
        (column(__COLLATIONS='{"c": "ICU.UNICODE_CI"}', comment='"x"'), "column c has __COLLATIONS"),
        (column("variant"), "column c is variant"),
    ],
    ids=str,
)
def test_anything_else_goes_through_deltas_own_writer(shape: TableShape, why: str) -> None:
    found = why_not_plain(shape)
    assert found is not None
    assert why in found


def test_tables_that_no_sink_can_write_are_refused() -> None:
    assert why_not_sink(PLAIN, rewrites=True) is None
    assert why_not_sink(has(delta__appendOnly="true"), rewrites=False) is None
    forgets = why_not_sink(has(delta__setTransactionRetentionDuration="interval 1 hour"), rewrites=False)
    assert forgets is not None
    assert "setTransactionRetentionDuration=interval 1 hour" in forgets
    fixed = why_not_sink(has(delta__appendOnly="true"), rewrites=True)
    assert fixed is not None
    assert "delta.appendOnly=true" in fixed
    elsewhere = why_not_sink(replace(PLAIN, features=frozenset(("catalogManaged",))), rewrites=False)
    assert elsewhere is not None
    assert "catalogManaged" in elsewhere


ROWS = pa.schema([("n", pa.int64()), ("s", pa.struct([("a", pa.list_(pa.string()))]))])
TAKES = replace(
    PLAIN,
    columns=(
        Column(("extra",), "double", nullable=True),
        Column(("s",), "struct", nullable=True),
        Column(("s", "a"), "array", nullable=True),
        Column(("s", "a", "element"), "string", nullable=False, metadata=(("comment", '"x"'),)),
        Column(("n",), "long", nullable=False),
    ),
)


def unfit(now: TableShape, rows: pa.Schema | None = ROWS) -> str:
    return "; ".join(why_unfit(PLAIN, now, rows, rewrites=False))


def test_rows_fit_a_table_that_has_their_columns() -> None:
    """Order, nullability, properties and what the table has beside them are for its writers to see to."""
    assert unfit(TAKES) == ""
    assert unfit(replace(TAKES, partitions=("n",), properties=(("delta.constraints.c", "n > 0"),))) == ""
    assert unfit(PLAIN, None) == ""


def test_rows_do_not_fit_another_table_or_other_columns() -> None:
    assert unfit(replace(TAKES, id="other")) == "it is another table: its id is other, and was id"
    assert unfit(replace(TAKES, columns=TAKES.columns[:-1])) == "it has no column n"
    other = (*TAKES.columns[:-1], Column(("n",), "string", nullable=True))
    assert unfit(replace(TAKES, columns=other)) == "column n is string in it, and long in the rows"
    inside = (*TAKES.columns[:3], Column(("s", "a", "element"), "long", nullable=True), TAKES.columns[-1])
    assert unfit(replace(TAKES, columns=inside)) == (
        "column s is struct<a array, a.element long> in it, and struct<a array, a.element string> in the rows"
    )
    assert "delta.setTransactionRetentionDuration" in unfit(
        replace(TAKES, properties=(("delta.setTransactionRetentionDuration", "interval 1 day"),))
    )


@pytest.mark.parametrize("commits", [0, 4, 9])
def test_a_table_made_anew_is_noticed_however_many_commits_it_has(tmp_path: Path, commits: int) -> None:
    """Also where its log goes on after the commit that was read last, as that of the same table would."""
    schema, place = pa.schema([("n", pa.int64())]), Place(str(tmp_path / "t"))
    table = Table.ensure(place, schema, {})
    table.commit_next(Commit())
    fit = Fit(table, rewrites=False)
    for number in range(3):
        fit.require(None)
        other = Table.open(place)
        other.commit_next(Commit())
        if number:  # as a clean-up of the log leaves it, behind a checkpoint
            other.delta.create_checkpoint()
            other.trim_log(0)
        table.refresh()
    fit.require(None)
    shutil.rmtree(tmp_path / "t")
    anew = Table.ensure(place, schema, {})
    for _ in range(commits):
        anew.commit_next(Commit())
    table.refresh()
    for _ in range(2):
        with pytest.raises(TableChanged, match="it was made anew"):
            fit.require(None)
