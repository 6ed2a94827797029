"""The output of the command: text for people through rich, or JSON for programs.

Results go to stdout; errors, questions and progress go to stderr.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from spark_abs.codec import to_plain
from spark_abs.errors import AbsError
from spark_abs.model import NO_BATCH, BatchId
from spark_abs.quantities import duration_said, size_said, time_said
from spark_abs.snapshots.layout import END_OF_TIME_MS

WIDE = 200
"""Columns for output that no terminal wraps."""


@dataclass(slots=True)
class Output:
    """Prints the results, errors and progress of a command."""

    json: bool = False

    def result(self, value: object, text: Callable[[Output], None]) -> None:
        """Print a result: `value` (dataclasses and plain values) as JSON, or as text by calling `text`."""
        if self.json:
            click.echo(json.dumps(plain_result(value), indent=2))
        else:
            text(self)

    def line(self, text: str, style: str = "") -> None:
        """Print one line of a text result."""
        console().print(Text(printable(text), style), soft_wrap=True)

    def table(self, columns: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]]) -> None:
        """Print rows under (title, whether it is a number) columns."""
        drawn = Table(box=None, pad_edge=False, header_style="bold")
        for title, number in columns:
            drawn.add_column(title, justify="right" if number else "left", overflow="fold")
        for row in rows:
            drawn.add_row(*(Text(printable(cell)) for cell in row))
        console().print(drawn)

    def pairs(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print names and values in two columns."""
        drawn = Table(box=None, pad_edge=False, show_header=False)
        drawn.add_column(style="bold")
        drawn.add_column(overflow="fold")
        for name, value in rows:
            drawn.add_row(Text(name), Text(printable(value)))
        console().print(drawn)

    def say(self, text: str) -> None:
        """Report progress of long work on stderr; nothing if the result is JSON."""
        if not self.json:
            console(stderr=True).print(Text(printable(text), "dim"), soft_wrap=True)

    @contextmanager
    def count(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """Report the start of long work on stderr, at a terminal with a bar of its bytes."""
        terminal = console(stderr=True)
        self.say(text)
        if self.json or not total or not terminal.is_terminal:
            yield lambda _: None
            return
        columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=terminal, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.advance(task, done)

    @contextmanager
    def waiting(self, text: str, told: bool = True) -> Iterator[None]:
        """Show on stderr that the command waits; without a terminal one line, or none if not `told`."""
        terminal = console(stderr=True)
        if not self.json and terminal.is_terminal:
            with terminal.status(Text(printable(text))):
                yield
        else:
            if told:
                self.say(text)
            yield

    def error(self, error: AbsError) -> None:
        """Print an error as one line, or one JSON object, on stderr."""
        message = one_line(str(error))
        if self.json:
            plain = {"error": type(error).__name__, "message": message, "exit_code": error.exit_code}
            click.echo(json.dumps(plain), err=True)
        else:
            click.echo(f"spark-abs: {message}", err=True)


TIMES = frozenset(
    f"{name}_ms"
    for name in (
        "acked",
        "asked",
        "at",
        "began",
        "completed",
        "ended",
        "finished",
        "first",
        "last_completed",
        "moment",
        "moved",
        "oldest",
        "planned",
        "since",
        "started",
        "timestamp",
        "triggered",
        "watermark",
        "watermark_since",
    )
)
"""Fields of results that are times; others with this end are lengths of time."""


def plain_result(value: object) -> Any:
    """Return a result as plain values, each time also in ISO's form: `completed_at` by `completed_ms`."""
    if isinstance(value, (tuple, list)):
        return [plain_result(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): plain_result(item) for name, item in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return to_plain(value)
    found: dict[str, Any] = {}
    for field in fields(value):
        content = getattr(value, field.name)
        found[field.name] = plain_result(content)
        if field.name in TIMES:
            name = "at" if field.name == "at_ms" else f"{field.name.removesuffix('_ms')}_at"
            found[name] = None if content in (None, END_OF_TIME_MS) else time_said(content, "T")
    return found


def console(stderr: bool = False) -> Console:
    """Return a console on the current stream; without a terminal it is wide and plain."""
    made = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    return (
        made
        if made.is_terminal
        else Console(stderr=stderr, markup=False, emoji=False, highlight=False, width=WIDE)
    )


def one_line(text: str) -> str:
    """Return the first line of a text: libraries add their stack below it."""
    return printable(text.strip().partition("\n")[0].strip())


def printable(text: str) -> str:
    """Replace control characters: names and paths come from storage, and must not command a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def moment(ms: int | None) -> str:
    """Return a time in the zone of this machine with its offset, `-` for None."""
    return "-" if ms is None else time_said(ms)


def duration(ms: int | None) -> str:
    """Return a duration in the unit that suits it, `-` for None."""
    return "-" if ms is None else duration_said(ms)


def size(count: int | None) -> str:
    """Return a number of bytes in the unit that suits it, `-` for None."""
    return "-" if count is None else size_said(count)


def batch_number(batch: BatchId | None) -> str:
    """Return a batch for a cell: `-` before the first, `?` if it is not known."""
    return "?" if batch is None else "-" if batch == NO_BATCH else str(batch)


def watermark(ms: int | None) -> str:
    """Return a watermark for a cell."""
    return "end of time" if ms == END_OF_TIME_MS else moment(ms)


def text_of(value: object) -> str:
    """Return a cell, `-` for None."""
    return "-" if value is None else str(value)
