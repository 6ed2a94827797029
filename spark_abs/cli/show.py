"""`spark-abs show`: one checkpoint in full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

import click

from spark_abs.advice import named
from spark_abs.cli.output import Output, duration, moment, size, text_of
from spark_abs.cli.root_command import Context, root_command
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.manifests.find import lookup
from spark_abs.model import NO_BATCH, CheckpointMode
from spark_abs.observe.sources import SourcePosition, source_positions
from spark_abs.snapshots.layout import END_OF_TIME_MS
from spark_abs.store.root import Root

STAGES = (
    ("stage", False),
    ("batch", True),
    ("partitions", True),
    ("watermark (UTC)", True),
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
    """A manifest and where it stands."""

    abandoned: bool
    manifest: Manifest
    sources: tuple[SourcePosition, ...]


@click.command
@root_command
@click.argument("checkpoint", metavar="ID|NAME|latest")
def show(ctx: Context, root: Root, checkpoint: str) -> None:
    """Show one checkpoint: its stages, what each took, where sources stand, and the versions of outputs."""
    found = lookup(root, checkpoint)
    sources = (s for stage in found.manifest.stages for s in source_positions(root, stage))
    shown = Shown(found.abandoned, found.manifest, tuple(sources))
    ctx.out.result(shown, lambda out: _text(out, shown))


def _text(out: Output, shown: Shown) -> None:
    manifest = shown.manifest
    out.pairs(_pairs(shown))
    out.line("")
    out.table(STAGES, (_stage(s) for s in manifest.stages))
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


def _pairs(shown: Shown) -> Iterator[tuple[str, str]]:
    found = shown.manifest
    name = f" {found.name!r}" if found.name else ""
    mode = "" if found.mode is CheckpointMode.ALIGNED else f", {found.mode}"
    yield found.kind.value, f"{found.id}{name}{mode}{', abandoned' if shown.abandoned else ''}"
    if found.edited is None:
        yield "job", f"{found.job}, attempt {found.attempt}, run {found.run}"
    else:
        origin = f"checkpoint {found.edited.checkpoint} of attempt {found.edited.attempt}"
        yield "job", f"{found.job}, made from {origin} by an edit"
    yield "completed", f"{moment(found.completed_ms)} UTC"
    yield "completed in", duration(found.completed_ms - found.triggered_ms)
    yield "size", f"{size(found.size_full)}, of which new {size(found.size_new)}"
    late = sum(s.dropped_late for s in found.stages)
    yield "dropped late", f"{late} rows"


def _watermark(ms: int | None) -> str:
    return "end of time" if ms == END_OF_TIME_MS else moment(ms)


def _source(found: SourcePosition) -> tuple[str, ...]:
    names = [unquote(uri.rpartition("/")[2]) for uri in found.files]
    more = f" and {len(names) - FILES_SHOWN} more" if len(names) > FILES_SHOWN else ""
    return found.stage, found.source, found.said, ", ".join(names[:FILES_SHOWN]) + more


def _stage(found: StageSnapshot) -> tuple[str, ...]:
    timings = found.timings
    return (
        found.stage if found.carried is None else f"{found.stage} (as of checkpoint {found.carried})",
        "-" if found.cut_batch == NO_BATCH else str(found.cut_batch),
        str(found.shuffle_partitions or "-"),
        _watermark(found.watermark_ms),
        duration(timings.start_delay_ms),
        duration(timings.alignment_ms),
        duration(timings.backpressured_ms),
        duration(timings.sync_ms),
        duration(timings.async_ms),
        size(found.size_new),
        size(found.size_full),
        str(len(found.files)),
    )
