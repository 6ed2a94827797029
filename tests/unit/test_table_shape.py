"""Which tables take files as Spark writes them, and which no sink at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_abs.sinks.native_writable import why_not_plain, why_not_sink
from spark_abs.sinks.table_shape import Column, TableShape

PLAIN = TableShape("id", (Column("n", "long", nullable=True),), (), (), 1, 2, frozenset())


def has(**properties: str) -> TableShape:
    return replace(
        PLAIN, properties=tuple((key.replace("__", "."), value) for key, value in properties.items())
    )


def column(type_: str = "string", nullable: bool = True, path: str = "c", **metadata: str) -> TableShape:
    return replace(PLAIN, columns=(*PLAIN.columns, Column(path, type_, nullable, tuple(metadata.items()))))


@pytest.mark.parametrize(
    "shape",
    [
        PLAIN,
        has(delta__logRetentionDuration="interval 7 days", delta__appendOnly="true"),
        has(delta__enableChangeDataFeed="FALSE", delta__columnMapping__mode="none"),
        column(comment='"for people"'),
        column('{"type": "struct"}'),
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
