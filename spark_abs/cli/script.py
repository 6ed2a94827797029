"""Run a script up to the start of its job."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import click

from spark_abs.cli.output import printable
from spark_abs.errors import AbsError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_abs.compatibility.inspection import Check
    from spark_abs.protocol.changes import Comparison


@contextmanager
def run_to_start(script: str, args: tuple[str, ...], instead: Check) -> Iterator[Comparison]:
    """Run a script up to the start of its job; a session that it made lives as long as the context.

    Args:
        script: its path.
        args: its arguments.
        instead: called in place of the start.

    Raises:
        UsageError: the script failed, or did not start a job.
    """
    from spark_abs.compatibility.inspection import Checked, instead_of_start

    before = _session()
    token = instead_of_start.set(instead)
    try:
        try:
            with _arguments(script, args), _errors_of(script), redirect_stdout(sys.stderr):
                runpy.run_path(script, run_name="__main__")
        except Checked as checked:
            found = checked.comparison
        else:
            raise UsageError(f"{script} ended without a job being started: there is nothing to check")
        finally:
            instead_of_start.reset(token)
        yield found
    finally:
        session = _session()
        if session is not None and before is None:
            session.stop()


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
