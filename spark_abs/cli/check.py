"""`spark-abs check`: the plan of a start of a changed job, without the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from spark_abs.cli.output import Output
from spark_abs.cli.root_command import Context, output_option, storage_errors
from spark_abs.cli.script import run_to_start
from spark_abs.errors import GraphError
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage

if TYPE_CHECKING:
    from spark_abs.plan.specs import JobSpec
    from spark_abs.protocol.changes import Comparison


@click.command
@output_option
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.option("--root", metavar="ROOT", required=True, help="The root to compare with.")
@click.option(
    "--from",
    "to",
    metavar="ID|NAME|latest",
    help="Compare with this checkpoint, as if the job had been restored to it.",
)
@click.option(
    "--allow-non-restored-state", is_flag=True, help="As `allow_non_restored_state=True` in `Job.start`."
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def check(
    script: str, root: str, to: str | None, allow_non_restored_state: bool, args: tuple[str, ...]
) -> None:
    """Show how a start of the job in SCRIPT would treat each stage: kept, new, left or refused.

    The script runs up to the start of its job, with ARGS (after `--`) as its arguments. Nothing is started
    and nothing is written. The script's own output goes to stderr. Exit code 0: the job would start; 1: it
    would be refused, or its graph cannot run; 2: the script failed before it started a job; 3: records of the
    root are damaged. The command does not check whether a run is alive or native checkpoints are lost.
    """
    # A script's job needs Spark anyway; other verbs must not load it.
    from spark_abs.compatibility.inspection import check_job
    from spark_abs.protocol.changes import Comparison

    out = click.get_current_context().ensure_object(Context).out
    at = Root(root, Storage.given())

    def instead(job: JobSpec, leave: bool) -> Comparison:
        try:
            with storage_errors(at.uri):
                return check_job(job, leave or allow_non_restored_state, root=at, to=to)
        except GraphError as error:  # the script is in order, its job is not
            return Comparison(at.uri, (), (str(error),))

    with run_to_start(script, args, instead) as found:
        pass
    out.result(plain_comparison(found), lambda out: show_comparison(out, found))
    if not found.ok:
        click.get_current_context().exit(1)


def plain_comparison(found: Comparison) -> dict[str, object]:
    """Return a comparison for programs."""
    return {
        "ok": found.ok,
        "compared_with": found.where,
        "stages": [
            {"stage": s.stage, "verdict": s.verdict.value, "notes": list(s.notes)} for s in found.stages
        ],
        "obstacles": list(found.obstacles),
    }


def show_comparison(out: Output, found: Comparison) -> None:
    """Print a comparison."""
    for line in str(found).splitlines():
        out.line(line)
