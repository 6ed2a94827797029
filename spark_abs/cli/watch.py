"""`spark-abs watch`: keep cuts of plain streaming queries before Spark deletes their files."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

import click
from deltalake.exceptions import DeltaError

from spark_abs.cli.lists import Lists, checkpoints_option
from spark_abs.cli.output import Output, moment, size
from spark_abs.cli.root_command import Context, milliseconds, root_command
from spark_abs.cuts.cut import NoAlignedCut
from spark_abs.errors import CommitStateUnknown, DamageError, Refused, UsageError
from spark_abs.keep import Keep, keep_words
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.watch.watcher import Round, look, newest_kept, require_apart, was_killed, watching

KEEP = ("24h:all", "7d:1h")
"""Delta's VACUUM leaves the files of a week."""
_NEXT_LOOK = (NoAlignedCut, Refused, DamageError, UsageError, CommitStateUnknown, DeltaError, OSError)
"""Errors of a look that the next one may not meet."""


@click.command(cls=Lists)
@root_command
@checkpoints_option
@click.option(
    "--tables",
    metavar="TABLE...",
    multiple=True,
    help="Delta tables that the queries write, by path or URI, or patterns.",
)
@click.option(
    "--keep",
    metavar="WORD...",
    multiple=True,
    help="How long cuts are kept. By default 24h:all 7d:1h: of a day all that were taken, of a week one for "
    "each hour.",
)
@click.option(
    "--every", metavar="DURATION", default="10m", show_default=True, help="The time between two looks."
)
@click.option("--once", is_flag=True, help="Look once and end, for a timer such as cron.")
def watch(
    ctx: Context,
    root: Root,
    *,
    checkpoints: tuple[str, ...],
    tables: tuple[str, ...],
    keep: tuple[str, ...],
    every: str,
    once: bool,
) -> None:
    """Keep cuts of streaming queries that use nothing of spark_abs, for `spark-abs rewind --root ROOT`.

    At each look the newest moment at which all queries and tables fit together is copied to ROOT: offsets,
    state, and the logs of sources, each content once. Spark itself deletes them after 100 batches. The
    queries run on and are not changed. ROOT is a directory of its own; `list`, `show`, `status`, `state` and
    `verify` work on it.

    Without --once it works until it is stopped by a signal.
    """
    # Reading of Delta tables loads libraries that other commands do without.
    from spark_abs.rewind.prepare import checkpoints_at, tables_at
    from spark_abs.watch.pins import warnings

    out, words, pause_s = ctx.out, _words(keep or KEEP), milliseconds(every, f"--every {every}") / 1000
    if not pause_s:
        raise UsageError(f"--every {every}: a look needs time; give 1s or more")

    def given() -> tuple[tuple[Place, ...], tuple[Place, ...]]:
        return checkpoints_at(checkpoints, root.storage), tables_at(tables, root.storage)

    places = given()
    require_apart(root, [*places[0], *places[1]])
    for said in warnings(places[1], words):
        out.say(f"Warning: {said}")
    if once:
        with _signals_stop():
            found, done = look(*places, newest_kept(root)), Round(None)
            if found is not None or was_killed(root):
                with watching(root, *places, words) as watcher:
                    done = watcher.round(found)
        out.result(done, partial(_show, done))
        return
    with suppress(KeyboardInterrupt), _signals_stop(), watching(root, *places, words, every=every) as watcher:
        while True:
            try:
                places = given()
                watcher.given(*places)
                found = look(*places, watcher.newest)
                if found is not None:
                    done = watcher.round(found)
                    out.result(done, partial(_show, done))
            except _NEXT_LOOK as error:
                out.say(f"nothing was kept at this look, the next is in {every}: {error}")
            ctx.pause(pause_s)


@contextmanager
def _signals_stop() -> Iterator[None]:
    """Let SIGTERM stop the block as Ctrl-C does."""

    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(done: Round, out: Output) -> None:
    for said in done.passed:
        out.line(f"A newer cut was passed over: {said}")
    if done.kept is None:
        out.line("There is no newer cut to keep.")
        return
    batches = ", ".join(f"{query} {batch}" for query, batch in done.batches)
    out.line(
        f"Kept cut {done.kept}, of {moment(done.moment_ms)}, {size(done.size_full)}, of which "
        f"{size(done.size_new)} are new: {batches}"
    )
    if done.unfinished is not None:
        out.line(f"What comes after a kept cut has failed, a later look makes up for it: {done.unfinished}")


def _words(keep: tuple[str, ...]) -> Keep:
    if not "".join(keep).strip():
        raise UsageError("--keep '' says nothing: leave it out for the default, or give words as 24h:all")
    try:
        return keep_words(" ".join(keep))
    except ValueError as error:
        raise UsageError(f"--keep {' '.join(keep)}: {error}") from None
