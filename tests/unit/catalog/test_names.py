"""A text is a path, a name, or neither; what a name is in SQL."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_abs.catalog.names import TableName, parse

PATHS = {
    "/data/sales": "/data/sales",
    "data/sales": "data/sales",
    "./sales": "./sales",
    "../sales": "../sales",
    "~/sales": "~/sales",
    ".sales": ".sales",
    "s3://bucket/sales": "s3://bucket/sales",
    "file:/data/sales": "file:/data/sales",
    "hdfs:sales": "hdfs:sales",
    "/data/o`clock": "/data/o`clock",
    "/data/`a`.b": "/data/`a`.b",
    "delta.`/data/sales`": "/data/sales",
    "DELTA . `/data/o``clock`": "/data/o`clock",
    "delta.`sales`": "sales",
    "": "",
}
NAMES = {
    "sales": ("sales",),
    "default.sales": ("default", "sales"),
    "lake.shop.sales": ("lake", "shop", "sales"),
    "my-lake.shop.sales": ("my-lake", "shop", "sales"),
    "`default`.`sales`": ("default", "sales"),
    "`a.b`.`c/d`": ("a.b", "c/d"),
    "default.`o``clock`": ("default", "o`clock"),
    "delta.sales": ("delta", "sales"),
    "parquet.`/data/x`": ("parquet", "/data/x"),
}
NEITHER = ["a..b", "a.", "a.b.c.d", "my sales", "a`b", "`a", "`a`b", "``", "a.``", "a`b/c`"]


@pytest.mark.parametrize(("text", "path"), PATHS.items())
def test_a_path(text: str, path: str) -> None:
    assert parse(text) == path


@pytest.mark.parametrize(("text", "parts"), NAMES.items())
def test_a_name(text: str, parts: tuple[str, ...]) -> None:
    assert parse(text) == TableName(parts)


@pytest.mark.parametrize("text", NEITHER)
def test_neither(text: str) -> None:
    assert parse(text) is None


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3))
def test_a_name_is_read_again_as_it_is_written(parts: list[str]) -> None:
    """Whatever is in its parts: quoted they are never SQL of their own."""
    name = TableName(tuple(parts))
    for text in (name.sql, str(name)):
        if parts[0].lower() != "delta" or len(parts) != 2:
            assert parse(text) == name
