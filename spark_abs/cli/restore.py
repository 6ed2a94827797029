"""Commands that change a root without its run: `restore`, `dispose`, `forget`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

import click

from spark_abs.cli.output import Output
from spark_abs.cli.root_command import Context, root_command, to_moment
from spark_abs.errors import UsageError
from spark_abs.model import is_number
from spark_abs.restore.dispose import dispose_savepoint
from spark_abs.restore.forget import forget_query
from spark_abs.restore.refusals import Force
from spark_abs.restore.rescale import Wanted
from spark_abs.store.root import Root

if TYPE_CHECKING:
    from spark_abs.restore.restoring import RestorePlan


@click.command
@root_command
@click.option("--to", metavar="ID|NAME|latest", help="The checkpoint to go back to.")
@click.option(
    "--before",
    metavar="TIME",
    callback=to_moment,
    help="In place of --to: the newest checkpoint on the current path whose cut was made by a time.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and change nothing; the job may run.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--force",
    type=click.Choice([*(each.value for each in Force), "all"]),
    is_flag=False,
    flag_value="all",
    multiple=True,
    help="Override an obstacle: a live `run` (it is fenced), `rows` of sinks that others have changed (they "
    "are undone; a table that was replaced stays), `inputs` that are gone (their rows are lost), rows "
    "`outside` that cannot be taken back (they stay and are sent again). Without a value: all. May be "
    "repeated.",
)
@click.option(
    "--fallback",
    is_flag=True,
    help="If the checkpoint is damaged, restore the newest intact one before it on the current path.",
)
@click.option(
    "--native-root",
    metavar="DIR",
    help="The new place of Spark's own checkpoints; by default it does not change.",
)
@click.option(
    "--shuffle-partitions",
    metavar="N|STAGE=N",
    multiple=True,
    help="Divide state in RocksDB into N partitions, of all stages or of one; starts a JVM. May be repeated.",
)
def restore(
    ctx: Context,
    root: Root,
    *,
    to: str | None,
    before: datetime | None,
    dry_run: bool,
    yes: bool,
    force: tuple[str, ...],
    fallback: bool,
    native_root: str | None,
    shuffle_partitions: tuple[str, ...],
) -> None:
    """Bring state, positions, channels and Delta sinks back to one checkpoint; start the job afterwards.

    The plan is shown before anything is changed; with --yes each step is shown once, when it is carried out.
    Without a terminal and without --yes the command only shows the plan, with exit code 2. If a restore is
    interrupted, run the same command again: it finishes the restore.
    """
    # Sinks know Spark's types; verbs that only read must not load them.
    from spark_abs.restore.apply import apply
    from spark_abs.restore.prepare import prepare

    out, chosen = ctx.out, to or before
    if chosen is None or (to and before):
        raise UsageError("give either --to or --before")
    prepared = prepare(
        root,
        chosen,
        force=frozenset(Force) if "all" in force else frozenset(map(Force, force)),
        fallback=fallback,
        native_root=native_root,
        shuffle_partitions=_partitions(shuffle_partitions),
        writing=yes and not dry_run,
        dry_run=dry_run,
        progress=out,
    )
    plan = prepared.plan
    if not out.json:
        _show(out, plan, steps=dry_run or not yes)
    if not agreed(out, {"plan": plan.plain()}, dry_run=dry_run, yes=yes):
        return
    done = apply(root, prepared, progress=out)
    out.result(
        {"applied": True, "run": done.run, "plan": plan.plain()},
        lambda out: out.line(
            f"restored to checkpoint {plan.checkpoint} as attempt {plan.attempt}: start the job"
        ),
    )


def _partitions(given: tuple[str, ...]) -> Wanted | None:
    """Parse one `N`, or one or more `STAGE=N`; None if the option is not given."""
    numbers = {}
    for text in given:
        stage, _, number = text.rpartition("=")
        if not is_number(number) or stage in numbers or (not stage and len(given) > 1):
            raise UsageError(
                f"--shuffle-partitions {' '.join(given)}: give one number for all stages that keep state, "
                "or STAGE=N once for each stage"
            )
        numbers[stage] = int(number)
    return numbers.get("", numbers) if numbers else None


def _show(out: Output, plan: RestorePlan, steps: bool) -> None:
    """Print the plan; its steps only if `steps`: with --yes each is printed when it is carried out."""
    name = f" {plan.name!r}" if plan.name else ""
    out.line(f"Restore of job {plan.job!r} to checkpoint {plan.checkpoint}{name}", "bold")
    for note in plan.notes:
        out.line(f"Note: {note}")
    if plan.continues:
        out.line("This resumes a restore that was not finished.")
    if plan.abandons:
        out.line(f"Checkpoints left behind: {', '.join(map(str, plan.abandons))}")
    for number, step in enumerate(plan.steps if steps else (), 1):
        out.line(f"{number:3}. {step.sentence()}")


def at_terminal() -> bool:
    """Say whether there is a person at a terminal to ask."""
    return sys.stdin.isatty()


def confirmed(out: Output, question: str) -> bool:
    """Ask a question at the terminal; False with JSON, or without a terminal."""
    return not out.json and at_terminal() and click.confirm(question, err=True)


def agreed(out: Output, plan: Mapping[str, object], *, dry_run: bool, yes: bool) -> bool:
    """Say whether a plan that was shown is to be carried out; for programs it is printed here if it is not.

    Raises:
        UsageError: nobody has agreed, and nobody wanted only to see it.
    """
    if not dry_run and (yes or confirmed(out, "Carry out this plan?")):
        return True
    if out.json:
        out.result({"applied": False, **plan}, lambda _: None)
    if not dry_run:
        raise UsageError("nothing was changed: give --yes to carry the plan out")
    return False


@click.command
@root_command
@click.argument("savepoint", metavar="ID|NAME")
@click.option("--yes", is_flag=True, help="Do not ask.")
def dispose(ctx: Context, root: Root, savepoint: str, yes: bool) -> None:
    """Remove a savepoint for good. The job may run.

    The next clean-up of a run deletes state and channel entries that only this savepoint needed. Do not use
    its name again: its tag in an Iceberg table stays.
    """
    if not (yes or confirmed(ctx.out, f"Remove savepoint {savepoint!r} for good?")):
        raise UsageError("nothing was changed: give --yes to remove it")
    gone = dispose_savepoint(root, savepoint, ctx.now_ms)
    ctx.out.result(
        {"checkpoint": gone.id, "name": gone.name},
        lambda out: out.line(f"savepoint {gone.name!r}, checkpoint {gone.id}, is removed"),
    )


@click.command
@root_command
@click.argument("query")
def forget(ctx: Context, root: Root, query: str) -> None:
    """Leave a wrapped query that is gone for good out of later checkpoints; its tables stay as they are.

    While a query does not run, each checkpoint repeats the query's last snapshot, until the query runs again
    or is forgotten.
    """
    done = forget_query(root, query, ctx.now_ms, ctx.pause)
    ctx.out.result(
        done, lambda out: out.line(f"query {query!r} is forgotten: later checkpoints leave it out")
    )
