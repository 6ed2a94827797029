"""`spark-abs rewind`: plain streaming queries and their tables back to one consistent moment."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import combinations, islice
from typing import Any

import click

from spark_abs.cli.lists import Lists, checkpoints_option
from spark_abs.cli.output import Output, duration, moment, size
from spark_abs.cli.restore import agreed, confirmed
from spark_abs.cli.root_command import Context, output_option, to_milliseconds, to_moment
from spark_abs.errors import UsageError
from spark_abs.model import is_number
from spark_abs.quantities import time_ms, time_said
from spark_abs.rewind.plan import RewindPlan
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.root import Root
from spark_abs.store.storage import Place, Storage

_MOST = 1000
"""How many moments are listed."""
Given = tuple[tuple[Place, ...], tuple[Place, ...]]
"""Checkpoint directories, and tables."""


@click.command(cls=Lists)
@output_option
@checkpoints_option
@click.option(
    "--tables",
    metavar="TABLE...",
    multiple=True,
    help="Delta tables that the queries write, by path or URI, or patterns, not by names in a catalog. "
    "Tables that are only read stay.",
)
@click.option(
    "--before",
    metavar="TIME",
    callback=to_moment,
    help="The latest moment, as 2026-01-31T20:15, in the zone of this machine or with an offset.",
)
@click.option(
    "--at", metavar="QUERY=BATCH", multiple=True, help="The newest batch of one query. May be repeated."
)
@click.option(
    "--root",
    metavar="ROOT",
    help="Where `spark-abs watch` has kept cuts: go back to one of these if Spark has none so far back.",
)
@click.option("--list", "only_list", is_flag=True, help="List the moments to which one can go back.")
@click.option(
    "--undo", "take_back", is_flag=True, help="Take the newest rewind back; no query may have run since."
)
@click.option(
    "--purge",
    "delete_kept",
    is_flag=True,
    help="Delete the files that rewinds have kept: they can no longer be undone.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and change nothing; the queries may run.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--wait",
    metavar="DURATION",
    default="5s",
    show_default=True,
    callback=to_milliseconds,
    help="How long to look whether a query still runs; longer than a batch takes, or its trigger waits.",
)
@click.option(
    "--force",
    type=click.Choice(["rows", "tables", "inputs"]),
    multiple=True,
    help="Override an obstacle: `rows` that others have written to a table since (they are undone); `tables` "
    "that stay and were changed by commits that name no batch (none of the queries made them); `inputs` that "
    "would be read again and are gone (their rows are lost). May be repeated.",
)
@click.pass_obj
def rewind(
    ctx: Context,
    *,
    checkpoints: tuple[str, ...],
    tables: tuple[str, ...],
    before: datetime | None,
    at: tuple[str, ...],
    root: str | None,
    only_list: bool,
    take_back: bool,
    delete_kept: bool,
    dry_run: bool,
    yes: bool,
    wait: int,
    force: tuple[str, ...],
) -> None:
    """Bring streaming queries that use nothing of spark_abs, and their tables, back to one moment.

    Stop the queries first; start them again afterwards, unchanged. Each goes back to the end of one of its
    batches, such that every query has read exactly what the tables hold. Spark keeps the last 100 batches of
    a query, `spark-abs watch` older ones. Files that are changed or taken away are kept in _rewind/ of each
    checkpoint directory.

    A rewind that was interrupted is finished, or withdrawn if nothing had been changed, by the next call
    with the same directories and tables.
    """
    moments: dict[str, object] = {"--before": before, "--at": at}
    _refuse_both(
        {"--list": only_list, "--undo": take_back, "--purge": delete_kept},
        {"--list": {**moments, "--dry-run": dry_run, "--yes": yes}, "--undo": moments, "--purge": moments},
    )
    # Reading of Delta tables loads libraries that other commands do without.
    from spark_abs.rewind.prepare import checkpoints_at, tables_at

    out, storage = ctx.out, Storage.given()
    kept = None if root is None else Root(root, storage)
    queries, written = checkpoints_at(checkpoints, storage), tables_at(tables, storage)
    if not dry_run and not only_list and _unfinished(out, (queries, written), yes, "rows" in force):
        return
    if delete_kept:
        _purge(ctx, queries, dry_run=dry_run, yes=yes)
        return
    if only_list:
        _list(out, (queries, written), kept)
        return
    if take_back:
        lose = "inputs" in force
        _undo(ctx, (queries, written), lose_inputs=lose, dry_run=dry_run, yes=yes, wait_ms=wait)
        return
    from spark_abs.rewind.apply import apply
    from spark_abs.rewind.prepare import prepare

    prepared = prepare(
        queries,
        written,
        storage=storage,
        now_ms=ctx.now_ms(),
        before_ms=None if before is None else time_ms(before),
        at=dict(map(_batch, at)),
        undo_others="rows" in force,
        others_stay="tables" in force,
        lose_inputs="inputs" in force,
        kept=kept,
    )
    plan = prepared.plan
    if not out.json:
        _show(out, plan, ctx.now_ms())
    if not plan.changes:
        out.result(
            {"applied": False, "plan": _plain(plan)}, lambda out: out.line("There is nothing to change.")
        )
        return
    if not agreed(out, {"plan": _plain(plan)}, dry_run=dry_run, yes=yes):
        return
    with out.waiting(f"looking for {duration(wait)} whether a query still runs"):
        ctx.pause(wait / 1000)
    prepared.require_still()
    apply(plan, storage, require_still=prepared.require_still, at=no_failpoint)
    prepared.require_back()
    out.result(
        {"applied": True, "plan": _plain(plan)},
        lambda out: out.line("The queries and tables are back: start the queries as they are"),
    )


def _refuse_both(verbs: Mapping[str, bool], others: Mapping[str, Mapping[str, object]]) -> None:
    """Refuse options of which one would be ignored.

    Args:
        verbs: options that exclude each other, with whether they are given.
        others: such an option to options that mean nothing beside it, with what is given of them.

    Raises:
        UsageError: two of them are given.
    """
    chosen = [verb for verb, given in verbs.items() if given]
    pairs = [*combinations(chosen, 2)]
    pairs += [(verb, name) for verb in chosen for name, given in others[verb].items() if given]
    for one, other in pairs:
        raise UsageError(f"give either {one} or {other}")


def _undo(ctx: Context, given: Given, *, lose_inputs: bool, dry_run: bool, yes: bool, wait_ms: int) -> None:
    from spark_abs.rewind.prepare import new_id
    from spark_abs.rewind.undo import find_undo, undo

    out, found = ctx.out, find_undo(*given)
    plain = {"undoes": found.journal.rewind, "steps": found.steps}
    if not out.json:
        out.line(f"Undo of rewind {found.journal.rewind}", "bold")
        for number, step in enumerate(found.steps, 1):
            out.line(f"{number:3}. {step}")
    if not agreed(out, plain, dry_run=dry_run, yes=yes):
        return
    ctx.pause(wait_ms / 1000)
    now_ms = ctx.now_ms()
    undo(found, given[1], rewind=new_id(now_ms), now_ms=now_ms, lose_inputs=lose_inputs, at=no_failpoint)
    out.result({"applied": True, **plain}, lambda out: out.line("The rewind is undone: start the queries"))


def _purge(ctx: Context, queries: tuple[Place, ...], *, dry_run: bool, yes: bool) -> None:
    from spark_abs.rewind.prepare import new_id
    from spark_abs.rewind.purge import kept_files, purge

    out, found = ctx.out, kept_files(queries)
    plain = [
        {"rewind": k.rewind, "checkpoint": k.place.uri, "files": k.files, "bytes": k.size} for k in found
    ]
    if not out.json:
        for kept in found:
            out.line(f"rewind {kept.rewind}: {kept.files} files, {size(kept.size)}, kept in {kept.place}")
    if not found:
        out.result({"applied": False, "kept": []}, lambda out: out.line("No rewind has kept files."))
        return
    if not agreed(out, {"kept": plain}, dry_run=dry_run, yes=yes):
        return
    purge(queries, call=new_id(ctx.now_ms()), at=no_failpoint)
    out.result(
        {"applied": True, "kept": plain},
        lambda out: out.line("The files are deleted: these rewinds can no longer be undone"),
    )


def _unfinished(out: Output, given: Given, yes: bool, undo_others: bool) -> bool:
    """Finish or withdraw a rewind or a purge that was interrupted, if there is one; say whether there was."""
    from spark_abs.rewind.claim import Claim
    from spark_abs.rewind.query import unfinished
    from spark_abs.rewind.undo import finish

    held = unfinished(given[0])
    if held is None:
        return False
    purges = isinstance(held, Claim) and held.purges
    what = "purge" if purges else "rewind"
    if not (yes or confirmed(out, f"{what.capitalize()} {held.rewind} is not finished. Finish it?")):
        raise UsageError(f"{what} {held.rewind} is not finished: give --yes to finish it")
    done = finish(*given, at=no_failpoint, undo_others=undo_others)
    assert done is not None
    said = "finished" if done.finished else "withdrawn: it had changed nothing"
    line = f"Rewind {done.rewind} is {said}. Run the command again to go elsewhere"
    if purges:
        line = (
            "The purge is over: rewinds of which it had begun to delete files cannot be undone. Say --purge "
            "again to delete the others"
        )
    out.result(done, lambda out: out.line(line))
    return True


def _list(out: Output, given: Given, kept: Root | None) -> None:
    from spark_abs.rewind.prepare import kept_moments, listed

    rows = [(at, batches, False) for at, batches in islice(listed(*given), _MOST)]
    known = [batches for _, batches, _ in rows]
    older = () if kept is None else islice(kept_moments(kept, given[0]), _MOST)
    rows += [(at, batches, True) for at, batches in older if batches not in known]
    rows.sort(key=lambda row: row[0], reverse=True)
    names = sorted(rows[0][1]) if rows else []
    plain = [
        {"at_ms": at, "at": time_said(at, "T"), "batches": batches, "kept": is_kept}
        for at, batches, is_kept in rows
    ]
    columns = (("time", False), *((name, True) for name in names), ("", False))
    cells = [
        (moment(at), *(str(batches[name]) for name in names), "kept" if is_kept else "")
        for at, batches, is_kept in rows
    ]
    out.result(plain, lambda out: out.table(columns, cells))


def _show(out: Output, plan: RewindPlan, now_ms: int) -> None:
    ago = duration(now_ms - plan.moment_ms)
    out.line(f"Rewind to {moment(plan.moment_ms)}, {ago} ago", "bold")
    for note in plan.notes:
        out.line(f"Note: {note}")
    for number, step in enumerate(plan.steps, 1):
        out.line(f"{number:3}. {step}")
    if plan.kept is not None:
        out.line(f"The files come from cut {plan.kept.checkpoint}, kept at {plan.kept.root.uri}.")
    if plan.changes:
        out.line("Readers of these tables that were not given see the way back as a change of rows.")


def _plain(plan: RewindPlan) -> Mapping[str, Any]:
    return {
        "rewind": plan.journal.rewind,
        "moment_ms": plan.moment_ms,
        "moment_at": time_said(plan.moment_ms, "T"),
        "queries": [{"name": q.name, "from": q.before, "to": q.batch} for q in plan.journal.queries],
        "tables": [{"table": t.uri, "from": t.before, "to": t.version} for t in plan.journal.tables],
        "steps": plan.steps,
        "notes": plan.notes,
        "kept": None if plan.kept is None else int(plan.kept.checkpoint),
    }


def _batch(text: str) -> tuple[str, int]:
    query, _, batch = text.rpartition("=")
    if not query or not is_number(batch):
        raise UsageError(f"--at {text}: give QUERY=BATCH")
    return query, int(batch)
