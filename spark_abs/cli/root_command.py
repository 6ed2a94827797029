"""The root and the context that every command gets."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Concatenate, ParamSpec, TypeVar

import click

from spark_abs.cli.output import Output
from spark_abs.errors import StoreFailed, UsageError
from spark_abs.quantities import duration_ms
from spark_abs.store.clock import now_ms
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage, remedy, told

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Context:
    """The output, the clock and the pause of a command; tests replace them."""

    out: Output = field(default_factory=Output)
    now_ms: Callable[[], int] = now_ms
    pause: Callable[[float], None] = time.sleep
    """Called with seconds between two looks at a running job."""


def to_moment(_: click.Context, __: click.Parameter, value: str | None) -> datetime | None:
    """Parse a time in ISO form, of this machine's zone unless it has an offset: the callback of an option.

    Raises:
        BadParameter: it is anything else.
    """
    if value is None:
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is no time such as 2026-01-31T20:15 or 2026-01-31T20:15+01:00"
        ) from None
    return found.astimezone()


def milliseconds(text: str, said: str) -> int:
    """Parse the duration of an option.

    Args:
        text: such as `5m`.
        said: the option with the text, for the error.

    Raises:
        UsageError: it is no duration.
    """
    try:
        return duration_ms(text)
    except ValueError as error:
        raise UsageError(f"{said}: {error}") from None


def to_milliseconds(_: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Parse a duration in milliseconds: the callback of an option.

    Raises:
        UsageError: it is no duration.
    """
    return None if value is None else milliseconds(value, f"{option.opts[0]} {value!r}")


def _choose_output(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.ensure_object(Context).out.json = value == "json"


output_option = click.option(
    "--output",
    type=click.Choice(["text", "json"]),
    callback=_choose_output,
    expose_value=False,
    help="How to print results and errors.",
)


def root_command(function: Callable[Concatenate[Context, Root, P], R]) -> Callable[..., R]:
    """Give a command its context and, as first argument on the command line, the root."""

    @functools.wraps(function)
    def called(root: str, *args: P.args, **kwargs: P.kwargs) -> R:
        context = click.get_current_context().ensure_object(Context)
        at = Root(root, Storage.given())
        with storage_errors(at.uri):
            return function(context, at, *args, **kwargs)

    return click.argument("root")(output_option(called))


@contextmanager
def storage_errors(location: str = "") -> Iterator[None]:
    """Turn an error of storage into an error of the command, which has no traceback.

    Args:
        location: the root that the command reads.

    Raises:
        StoreFailed: storage could not be read or written.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of the output has ended
        raise
    except OSError as error:
        raise StoreFailed(
            f"storage cannot be read or written now, {remedy(location)}: {told(error)}"
        ) from error
