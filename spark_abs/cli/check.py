"""`spark-abs check`: what a start of a changed job would do, without starting it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from spark_abs.cli.output import Output
from spark_abs.cli.root_command import Context, output_option
from spark_abs.errors import UsageError
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    """Say what a start of the job in SCRIPT would do with each of its stages: kept, new, left or refused.

    The script runs up to the start of its job, with ARGS (after `--`) as its arguments; nothing is started
    and nothing is written. Exit code 0: it would start; 1: it would be refused.
    """
    # A script's job needs Spark anyway; other verbs must not load it.
    from spark_abs.compatibility.inspection import Checked, check_job, instead_of_start

    out = click.get_current_context().ensure_object(Context).out

    def instead(job: JobSpec, leave: bool) -> Comparison:
        return check_job(job, leave or allow_non_restored_state, root=Root(root, Storage.given()), to=to)

    before = _session()
    token = instead_of_start.set(instead)
    try:
        with _arguments(script, args):
            runpy.run_path(script, run_name="__main__")
    except Checked as checked:
        found = checked.comparison
    else:
        raise UsageError(f"{script} ended without a job being started: there is nothing to check")
    finally:
        instead_of_start.reset(token)
        session = _session()
        if session is not None and before is None:
            session.stop()
    out.result(_plain(found), lambda out: _show(out, found))
    if not found.ok:
        click.get_current_context().exit(1)


@contextmanager
def _arguments(script: str, args: tuple[str, ...]) -> Iterator[None]:
    before, sys.argv = sys.argv, [script, *args]
    try:
        yield
    finally:
        sys.argv = before


def _session() -> SparkSession | None:
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()


def _plain(found: Comparison) -> dict[str, object]:
    return {
        "ok": found.ok,
        "compared_with": found.where,
        "stages": [
            {"stage": s.stage, "verdict": s.verdict.value, "notes": list(s.notes)} for s in found.stages
        ],
        "obstacles": list(found.obstacles),
    }


def _show(out: Output, found: Comparison) -> None:
    for line in str(found).splitlines():
        out.line(line)
