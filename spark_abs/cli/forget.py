"""`spark-abs forget`: do without a query that is gone for good."""

from __future__ import annotations

import click

from spark_abs.cli.root_command import Context, root_command
from spark_abs.restore.forget import forget_query
from spark_abs.store.root import Root


@click.command
@root_command
@click.argument("query")
def forget(ctx: Context, root: Root, query: str) -> None:
    """Leave a wrapped query that is gone for good out of later checkpoints; its tables stay as they are.

    While a query does not run, each checkpoint carries its last part over, until it runs again or is
    forgotten.
    """
    done = forget_query(root, query, ctx.now_ms, ctx.pause)
    ctx.out.result(done, lambda out: out.line(f"query {query!r} is forgotten: no later checkpoint has it"))
