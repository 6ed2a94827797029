"""`spark-abs bisect`: the first checkpoint at which the tables hold wrong data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from spark_abs.cli.lists import Lists
from spark_abs.cli.output import Output, moment
from spark_abs.cli.root_command import Context, output_option, storage_errors
from spark_abs.errors import UsageError
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage

if TYPE_CHECKING:
    from spark_abs.bisection.moments import Found, Moments

_FILES_SHOWN = 20


@click.command(cls=Lists)
@output_option
@click.argument("given", metavar="[ROOT] CONDITION", nargs=-1, required=True)
@click.option(
    "--checkpoints",
    metavar="DIR...",
    multiple=True,
    help="In place of ROOT: checkpoint directories of plain queries, or patterns, as for rewind.",
)
@click.option(
    "--tables", metavar="TABLE...", multiple=True, help="Delta tables that those queries write, or patterns."
)
@click.pass_obj
def bisect(
    ctx: Context, given: tuple[str, ...], checkpoints: tuple[str, ...], tables: tuple[str, ...]
) -> None:
    """Find the first checkpoint at which a condition is true, and what came in since the one before.

    The condition says in SQL what makes the data bad: a boolean expression over the tables of the job by the
    names of their sinks, as "(SELECT max(cents) FROM sales) > 9999", or a query that returns rows if they
    are bad. It may contain any functions of DataFusion. Names are case-sensitive; put one with a hyphen in
    double quotes. Plain queries have no sinks: there a table has the last part of its path as its name.

    The tables are read at the newest and the oldest checkpoint, and at most ten times for a thousand
    checkpoints in between. It is assumed that data stay bad once they are bad; otherwise the result is one of
    several changes. Nothing is changed, and the job may run.
    """
    root, condition = _split(given, bool(checkpoints))
    if tables and not checkpoints:
        raise UsageError("--tables needs --checkpoints: a root knows its tables")
    with storage_errors(root):
        # Reading of Delta tables loads libraries that other commands do without.
        from spark_abs.bisection.moments import bisect as search

        found = search(_moments(root, checkpoints, tables), condition, ctx.out)
    ctx.out.result(found, lambda out: _text(out, found))


def _split(given: tuple[str, ...], of_queries: bool) -> tuple[str, str]:
    if len(given) != (1 if of_queries else 2):
        form = '"CONDITION" --checkpoints ... --tables ...' if of_queries else 'ROOT "CONDITION"'
        raise UsageError(f"give spark-abs bisect {form}, the condition as one argument in quotes")
    return ("" if of_queries else given[0]), given[-1]


def _moments(root: str, checkpoints: tuple[str, ...], tables: tuple[str, ...]) -> Moments:
    storage = Storage.given()
    if not checkpoints:
        from spark_abs.bisection.job import JobMoments

        return JobMoments.of(Root(root, storage))
    from spark_abs.bisection.queries import QueryMoments
    from spark_abs.rewind.prepare import checkpoints_at, tables_at

    return QueryMoments.of(checkpoints_at(checkpoints, storage), tables_at(tables, storage))


def _text(out: Output, found: Found) -> None:
    out.line(f"Bad since {found.bad.said}, {moment(found.bad.at_ms)}", "bold")
    out.line(f"Good until {found.good.said}, {moment(found.good.at_ms)}")
    for skipped in found.skipped:
        out.line(f"Not known: {skipped.moment.said} cannot be read: {skipped.reason}")
    for note in found.notes:
        out.line(f"Note: {note}")
    out.line("Between them:", "bold")
    for run in found.between.began:
        out.line(
            f"  run {run.run} of attempt {run.attempt} began at {moment(run.started_ms)}, as process "
            f"{run.pid} on {run.host}"
        )
    for stage in found.between.declared:
        out.line(f"  stage {stage!r} is declared differently")
    for ran in found.between.ran:
        if ran.since == ran.until:
            continue
        out.line(f"  {ran.name!r} ran batches {ran.since + 1} to {ran.until}")
        for source in ran.inputs:
            out.line(f"    source {source.source}: from {source.since} to {source.until}")
            for file in source.files[:_FILES_SHOWN]:
                out.line(f"      {file}")
            if (more := len(source.files) - _FILES_SHOWN) > 0:
                out.line(f"      and {more} more, see --output json")
    out.line(f"Tables were read {found.reads} times, of {found.moments} moments. To go back:")
    out.line(f"  {found.back}")
