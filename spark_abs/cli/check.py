"""`spark-abs check`: the plan of a start of a changed job, without the start."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import click

from spark_abs.cli.output import Output, printable
from spark_abs.cli.root_command import Context, output_option, storage_errors
from spark_abs.errors import AbsError, GraphError, UsageError
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
    """Show how a start of the job in SCRIPT would treat each stage: kept, new, left or refused.

    The script runs up to the start of its job, with ARGS (after `--`) as its arguments. Nothing is started
    and nothing is written. The script's own output goes to stderr. Exit code 0: the job would start; 1: it
    would be refused, or its graph cannot run; 2: the script failed before it started a job; 3: records of the
    root are damaged. The command does not check whether a run is alive or native checkpoints are lost.
    """
    # A script's job needs Spark anyway; other verbs must not load it.
    from spark_abs.compatibility.inspection import Checked, check_job, instead_of_start
    from spark_abs.protocol.changes import Comparison

    out = click.get_current_context().ensure_object(Context).out
    at = Root(root, Storage.given())

    def instead(job: JobSpec, leave: bool) -> Comparison:
        try:
            with storage_errors(at.uri):
                return check_job(job, leave or allow_non_restored_state, root=at, to=to)
        except GraphError as error:  # the script is in order, its job is not
            return Comparison(at.uri, (), (str(error),))

    before = _session()
    token = instead_of_start.set(instead)
    try:
        with _arguments(script, args), _errors_of(script), redirect_stdout(sys.stderr):
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
    """Give a script its arguments, and modules from its own directory, as `python SCRIPT ARGS` does."""
    before, path = sys.argv, sys.path
    sys.argv, sys.path = [script, *args], [os.path.dirname(os.path.realpath(script)), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = before, path


@contextmanager
def _errors_of(script: str) -> Iterator[None]:
    """Print the traceback of a script that fails, and name the line; errors of this package pass unchanged.

    Raises:
        UsageError: the script failed, or ended the process.
    """
    try:
        yield
    except AbsError:
        raise
    except SystemExit as error:
        raise UsageError(
            f"{script} ended with sys.exit({error.code!r}) and no job was started: there is nothing to check"
        ) from error
    except Exception as error:
        found = error.__traceback__
        while found is not None and found.tb_frame.f_code.co_filename != script:
            found = found.tb_next
        told = "".join(traceback.format_exception(type(error), error, found)).rstrip()
        click.echo(printable(told), err=True)
        said = f"{type(error).__name__}: {str(error).strip()}".removesuffix(": ")
        raise UsageError(f"{script}{_line(script, error)}: {said}") from error


def _line(script: str, error: Exception) -> str:
    """Return the line of a script that an error comes from as text, empty if it is not known."""
    if isinstance(error, SyntaxError) and error.filename == script:
        return f", line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == script]
    return f", line {lines[-1]}" if lines else ""


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
