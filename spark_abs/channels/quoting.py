"""Names of columns in what Spark reads as an expression; imports no Spark."""

from __future__ import annotations


def quoted(column: str) -> str:
    """Return the name of a column as an expression of Spark's names it, whatever is in it."""
    return f"`{column.replace('`', '``')}`"
