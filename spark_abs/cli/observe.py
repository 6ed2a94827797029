"""Commands that read a root: `list`, `show`, `history`, `verify`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

import click

from spark_abs.advice import named
from spark_abs.cli.output import Output, batch_number, duration, moment, one_line, size, text_of, watermark
from spark_abs.cli.root_command import Context, root_command
from spark_abs.errors import DamageError
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.manifests.find import lookup
from spark_abs.model import CheckpointMode
from spark_abs.observe.listing import CheckpointRow, checkpoint_rows, event_rows
from spark_abs.observe.sources import SourcePosition, source_positions
from spark_abs.observe.verification import verify_one, verify_root
from spark_abs.store.history import HistoryEvent, HistoryRow
from spark_abs.store.root import Root

CHECKPOINTS = (
    ("id", True),
    ("kind", False),
    ("name", False),
    ("attempt", True),
    ("completed", False),
    ("age", True),
    ("duration", True),
    ("new", True),
    ("full", True),
    ("", False),
)


@click.command("list")
@root_command
def list_checkpoints(ctx: Context, root: Root) -> None:
    """List completed checkpoints and savepoints by id.

    A mark tells the ones that a restore left behind, that an edit made, and that are damaged. Of cuts that
    a watcher keeps the moment is shown, too: it is what `spark-abs rewind --before` takes.
    """
    rows = checkpoint_rows(root, ctx.now_ms())

    def text(out: Output) -> None:
        cuts = any(row.moment_ms is not None for row in rows)
        if rows:
            columns = (*CHECKPOINTS[:4], ("moment", False), *CHECKPOINTS[4:]) if cuts else CHECKPOINTS
            out.table(columns, (_checkpoint_cells(row, cuts) for row in rows))
        else:
            out.line("no checkpoint was completed yet")

    ctx.out.result(rows, text)


def _checkpoint_cells(row: CheckpointRow, is_cut: bool) -> tuple[str, ...]:
    said = "abandoned" if row.abandoned else "edited" if row.edited else ""
    mark = f"damaged: {one_line(row.damage)}" if row.damage else said
    return (
        text_of(row.id),
        text_of(row.kind),
        text_of(row.name),
        text_of(row.attempt),
        *([moment(row.moment_ms)] if is_cut else []),
        moment(row.completed_ms),
        duration(row.age_ms),
        duration(row.duration_ms),
        size(row.size_new),
        size(row.size_full),
        mark,
    )


SNAPSHOTS = (
    ("stage", False),
    ("batch", True),
    ("partitions", True),
    ("watermark", True),
    ("start delay", True),
    ("alignment", True),
    ("waited", True),
    ("sync", True),
    ("async", True),
    ("new", True),
    ("full", True),
    ("files", True),
)
SOURCES = (("stage", False), ("source", False), ("position", False), ("last files", False))
FILES_SHOWN = 3
OUTPUTS = (("stage", False), ("output", False), ("kind", False), ("version", True), ("table", False))


@dataclass(frozen=True, slots=True)
class Shown:
    """A manifest, whether a restore left it behind, and the positions of its sources."""

    abandoned: bool
    manifest: Manifest
    sources: tuple[SourcePosition, ...]


@click.command
@root_command
@click.argument("checkpoint", metavar="ID|NAME|latest")
def show(ctx: Context, root: Root, checkpoint: str) -> None:
    """Show one checkpoint: timings and sizes of its stages, positions of sources, versions of outputs."""
    found = lookup(root, checkpoint)
    sources = (s for stage in found.manifest.stages for s in source_positions(root, stage))
    shown = Shown(found.abandoned, found.manifest, tuple(sources))
    ctx.out.result(shown, lambda out: _checkpoint_text(out, shown))


def _checkpoint_text(out: Output, shown: Shown) -> None:
    manifest = shown.manifest
    out.pairs(_checkpoint_pairs(shown))
    out.line("")
    out.table(SNAPSHOTS, (_stage(s) for s in manifest.stages))
    if shown.sources:
        out.line("")
        out.table(SOURCES, map(_source, shown.sources))
    out.line("")
    out.table(
        OUTPUTS,
        (
            (s.stage, o.output, o.kind, text_of(o.version), named(o.name, o.table))
            for s in manifest.stages
            for o in s.outputs
        ),
    )


def _checkpoint_pairs(shown: Shown) -> Iterator[tuple[str, str]]:
    found = shown.manifest
    name = f" {found.name!r}" if found.name else ""
    mode = "" if found.mode is CheckpointMode.ALIGNED else f", {found.mode}"
    yield found.kind.value, f"{found.id}{name}{mode}{', abandoned' if shown.abandoned else ''}"
    if found.edited is None:
        yield "job", f"{found.job}, attempt {found.attempt}, run {found.run}"
    else:
        origin = f"checkpoint {found.edited.checkpoint} of attempt {found.edited.attempt}"
        yield "job", f"{found.job}, made from {origin} by an edit"
    yield "completed", moment(found.completed_ms)
    yield "completed in", duration(found.completed_ms - found.triggered_ms)
    yield "size", f"{size(found.size_full)}, of which new {size(found.size_new)}"
    late = sum(s.dropped_late for s in found.stages)
    yield "dropped late", f"{late} rows"


def _source(found: SourcePosition) -> tuple[str, ...]:
    names = [unquote(uri.rpartition("/")[2]) for uri in found.files]
    more = f" and {len(names) - FILES_SHOWN} more" if len(names) > FILES_SHOWN else ""
    return found.stage, found.source, found.said, ", ".join(names[:FILES_SHOWN]) + more


def _stage(found: StageSnapshot) -> tuple[str, ...]:
    timings = found.timings
    return (
        found.stage if found.carried is None else f"{found.stage} (as of checkpoint {found.carried})",
        batch_number(found.cut_batch),
        str(found.shuffle_partitions or "-"),
        watermark(found.watermark_ms),
        duration(timings.start_delay_ms),
        duration(timings.alignment_ms),
        duration(timings.backpressured_ms),
        duration(timings.sync_ms),
        duration(timings.async_ms),
        size(found.size_new),
        size(found.size_full),
        str(len(found.files)),
    )


EVENTS = (
    ("time", False),
    ("event", False),
    ("id", True),
    ("attempt", True),
    ("run", True),
    ("stage", False),
    ("duration", True),
    ("new", True),
    ("full", True),
    ("", False),
)


@click.command
@root_command
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Show only the newest N events.")
def history(ctx: Context, root: Root, limit: int | None) -> None:
    """List the events of all checkpoints, removed ones included, oldest first."""
    rows = event_rows(root, limit)
    ctx.out.result(rows, lambda out: out.table(EVENTS, map(_event_cells, rows)))


def _event_cells(row: HistoryRow) -> tuple[str, ...]:
    return (
        moment(row.at_ms),
        row.event.value,
        text_of(row.checkpoint),
        text_of(row.attempt),
        text_of(row.run),
        row.stage or "",
        duration(row.duration_ms),
        size(row.size_new),
        size(row.size_full),
        one_line(": ".join(part for part in (_what(row), row.reason, row.detail) if part)),
    )


def _what(row: HistoryRow) -> str | None:
    """Name what an event is about; of a command, its kind and who asked."""
    if row.event is not HistoryEvent.COMMAND:
        return row.name
    return " ".join(part for part in (row.kind, row.name, f"by {row.by}" if row.by else "") if part)


FINDINGS = (("path", False), ("checkpoint", True), ("stage", False), ("problem", False))


@click.command
@root_command
@click.argument("checkpoint", metavar="[ID|NAME|latest]", required=False)
def verify(ctx: Context, root: Root, checkpoint: str | None) -> None:
    """Read every byte of a checkpoint, or of all of them and other data of the job; exit code 3 on damage."""
    found = verify_root(root, ctx.out) if checkpoint is None else verify_one(root, checkpoint, ctx.out)

    def text(out: Output) -> None:
        if not found:
            out.line("nothing is damaged")
            return
        rows = ((f.path, text_of(f.checkpoint), text_of(f.stage), one_line(f.problem)) for f in found)
        out.table(FINDINGS, rows)

    ctx.out.result({"findings": found}, text)
    if found:
        click.get_current_context().exit(DamageError.exit_code)
