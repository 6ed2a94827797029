"""The command `spark-abs`: the group of verbs, and how it fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import click

from spark_abs.advice import command_line
from spark_abs.cli.adopt import adopt
from spark_abs.cli.bisect import bisect
from spark_abs.cli.check import check
from spark_abs.cli.doctor import doctor
from spark_abs.cli.examples import COMPLETION, examples
from spark_abs.cli.guide import guide
from spark_abs.cli.health import health, metrics
from spark_abs.cli.observe import history, list_checkpoints, show, verify
from spark_abs.cli.report import report, serve
from spark_abs.cli.restore import dispose, forget, restore
from spark_abs.cli.rewind import rewind
from spark_abs.cli.root_command import Context, output_option, storage_errors
from spark_abs.cli.running import (
    cancel,
    checkpoint,
    pause,
    restart,
    resume,
    savepoint,
    set_settings,
    skip_file,
    stop,
)
from spark_abs.cli.state import state
from spark_abs.cli.status import status
from spark_abs.cli.traces import traces
from spark_abs.cli.watch import watch
from spark_abs.errors import AbsError, UsageError, get_spark, lacks_spark


class Verbs(click.Group):
    """A group whose errors are one line, or one JSON object, and an exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read first in which form errors are wanted: wrong arguments are then reported in this form."""
        context = ctx.ensure_object(Context)  # before there is a command: it takes over what is there
        context.out.json = context.out.json or _wants_json(args)
        with _wrong_calls(ctx, context):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours or of storage ends it with its exit code and no traceback."""
        context = ctx.ensure_object(Context)
        try:
            with command_line(), storage_errors(), _spark_needed(), _wrong_calls(ctx, context):
                return super().invoke(ctx)
        except AbsError as error:
            context.out.error(error)
            ctx.exit(error.exit_code)


@contextmanager
def _spark_needed() -> Iterator[None]:
    """Name the package to install if a command needs Spark and it is missing."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if not lacks_spark(missing):
            raise
        raise UsageError(f"this needs Spark, and {get_spark()}") from missing


@contextmanager
def _wrong_calls(ctx: click.Context, context: Context) -> Iterator[None]:
    """Print errors of click as JSON if that is wanted; click itself prints them as text."""
    try:
        yield
    except click.UsageError as error:
        if not context.out.json:
            raise
        context.out.error(UsageError(error.format_message()))
        ctx.exit(error.exit_code)


def _wants_json(args: Sequence[str]) -> bool:
    """Say whether arguments ask for JSON, even if others among them are wrong."""
    ours = args[: args.index("--")] if "--" in args else args
    return "--output=json" in ours or ("--output", "json") in pairwise(ours)


@click.group(cls=Verbs, epilog=COMPLETION)
@output_option
def main() -> None:
    """Look at the checkpoints of a job, talk to it while it runs, and go back.

    Every command but `adopt`, `check`, `doctor`, `guide` and `rewind` takes the root of the job first: the
    directory or URI given as `root=` to the job. `bisect` takes it, or plain queries as `rewind` does.

    Exit codes: 0 done, 1 refused or failed, 2 wrong call or not confirmed, 3 damage found, 4 a savepoint that
    may still complete.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


for command in (
    list_checkpoints,
    show,
    state,
    status,
    health,
    metrics,
    traces,
    history,
    report,
    serve,
    savepoint,
    checkpoint,
    cancel,
    pause,
    resume,
    restart,
    skip_file,
    set_settings,
    stop,
    forget,
    dispose,
    restore,
    rewind,
    bisect,
    watch,
    verify,
    check,
    adopt,
    doctor,
    guide,
):
    command.epilog = examples(str(command.name))
    main.add_command(command)
