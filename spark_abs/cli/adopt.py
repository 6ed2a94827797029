"""`spark-abs adopt`: plain queries, with tables between them, become the job of a script."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import click

from spark_abs.cli.check import plain_comparison, show_comparison
from spark_abs.cli.lists import Lists, checkpoints_option
from spark_abs.cli.output import Output
from spark_abs.cli.restore import agreed
from spark_abs.cli.root_command import Context, output_option, storage_errors
from spark_abs.cli.script import run_to_start
from spark_abs.errors import AbsError, UsageError
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage

if TYPE_CHECKING:
    from spark_abs.plan.specs import JobSpec
    from spark_abs.protocol.changes import Comparison

SAVEPOINT = "adopted"


@click.command(cls=Lists)
@output_option
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.option("--root", metavar="ROOT", required=True, help="The root of the job in SCRIPT.")
@checkpoints_option
@click.option("--dry-run", is_flag=True, help="Show what the stages adopt, or why not; change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def adopt(
    ctx: Context,
    script: str,
    *,
    root: str,
    checkpoints: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    args: tuple[str, ...],
) -> None:
    """Let the stages of the job in SCRIPT take over plain queries: positions, state, tables.

    Stop the queries first, where each has read all that the others have written. A stage adopts the query
    that has written the table of its sink. The script runs up to the start of its job, with ARGS (after `--`)
    as its arguments; then the job starts, takes the savepoint `adopted` of all its stages, and ends. After
    that run the script: it continues from there. The queries can no longer write their tables.

    If a stage cannot adopt its query, nothing is changed. A call that was interrupted can be repeated.
    """
    # A script's job needs Spark anyway; other verbs must not load it.
    from spark_abs.compatibility.adopted_by import with_adoptions
    from spark_abs.compatibility.inspection import check_job
    from spark_abs.rewind.prepare import checkpoints_at

    out, at = ctx.out, Root(root, Storage.given())
    places = checkpoints_at(checkpoints, at.storage)
    declared: list[JobSpec] = []

    def instead(job: JobSpec, leave: bool) -> Comparison:
        if job.root.uri != at.uri:
            raise UsageError(f"the job of {script} has its root at {job.root.uri}, not at {at.uri}")
        with storage_errors(at.uri):
            declared.append(with_adoptions(job, places))
            return check_job(declared[0], leave)

    with run_to_start(script, args, instead) as found:
        if not found.ok:
            refused = {"applied": False, **plain_comparison(found)}
            out.result(refused, lambda out: show_comparison(out, found))
            click.get_current_context().exit(1)
        if not out.json:
            show_comparison(out, found)
        if agreed(out, plain_comparison(found), dry_run=dry_run, yes=yes):
            taken = _taken(declared[0])
            if taken is None:
                taken = _adopt(out, declared[0])
            out.result(
                {"applied": True, "savepoint": taken},
                lambda out: out.line(
                    f"The queries are adopted, savepoint {SAVEPOINT!r}, checkpoint {taken}, has all: run the "
                    "script"
                ),
            )


def _taken(job: JobSpec) -> int | None:
    """Return the savepoint of an earlier call; None if it took none.

    Raises:
        UsageError: a stage still has a query to adopt.
    """
    from spark_abs.compatibility.adopted_by import savepoint_of, waits_for_query

    taken = savepoint_of(job.root, SAVEPOINT)
    if taken is not None and (stage := waits_for_query(job)) is not None:
        raise UsageError(
            f"savepoint {taken} has the name {SAVEPOINT!r} already, and stage {stage!r} has a query to "
            "adopt: declare it with adopt=CHECKPOINT, and start the script"
        )
    return taken


def _adopt(out: Output, job: JobSpec) -> int:
    from spark_abs.run.start import start_job

    with out.waiting(f"job {job.name!r} starts, takes the savepoint {SAVEPOINT!r}, and ends"):
        run = start_job(
            job, available_now=False, takeover=False, restart="native", allow_non_restored_state=False
        )
        try:
            taken = run.stop(savepoint=SAVEPOINT)
        except BaseException:
            with suppress(AbsError):
                run.stop()
            raise
    assert taken is not None, "a savepoint that was taken has an id"
    return int(taken)
