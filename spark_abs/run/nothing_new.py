"""Whether there is new data since the newest checkpoint: only then does a bounded run end with another one.

A job that a scheduler starts every minute would write a checkpoint a minute otherwise, of the same state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice

from deltalake.exceptions import DeltaError

from spark_abs.channels.follow import follow
from spark_abs.errors import AbsError
from spark_abs.manifest import Manifest, OutputVersion, StageShape, StageSnapshot
from spark_abs.manifests.checkpoints import Checkpoints
from spark_abs.model import NO_BATCH, CheckpointId, StageId, channel_id
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.path import channel_path
from spark_abs.run_context import RunContext
from spark_abs.sinks.delta.sink_log import SinkLog
from spark_abs.snapshots.layout import OffsetFile, parse_offsets
from spark_abs.stages.native import NativeLog
from spark_abs.stages.new_rows import native_offsets
from spark_abs.store.control import Control
from spark_abs.store.table import Table

log = logging.getLogger(__name__)

MOST_ENTRIES = 50
"""Entries without rows that a channel may have after the cut: each start leaves one, and none goes before the
cut of a retained checkpoint has passed it."""


def nothing_since(
    ctx: RunContext, shapes: tuple[StageShape, ...], stages: Iterable[StageId]
) -> CheckpointId | None:
    """Return the newest checkpoint if it holds all that the stages have read and written; None if not.

    Asked when all stages have ended. That no native source and no watermark has moved, and no channel and no
    table has got rows, is read from their logs; what cannot be read is no reason to do without a checkpoint.
    """
    with suppress(AbsError, DeltaError, OSError):
        state = Control.open(ctx.root).state
        manifest = Checkpoints.open(ctx.root, ctx.job).newest_on(state.attempt)
        if manifest is None or manifest.attempt != ctx.attempt or shapes != manifest.graph:
            return None
        now = {stage: NativeLog(ctx.native(stage)) for stage in stages}
        if _holds_all(ctx, state, manifest, now):
            return manifest.id
    return None


def _holds_all(
    ctx: RunContext, state: ControlState, manifest: Manifest, now: Mapping[StageId, NativeLog]
) -> bool:
    cuts = {snapshot.stage: snapshot for snapshot in manifest.stages}
    return cuts.keys() == now.keys() and all(
        _has_read(cuts[stage], native)
        and not any(_has_got(ctx, state, cuts[stage], output) for output in cuts[stage].outputs)
        for stage, native in now.items()
    )


def _has_read(cut: StageSnapshot, native: NativeLog) -> bool:
    """Say whether a cut has all that a stage has read from elsewhere than from channels."""
    last = native.idle_at()
    if last is None or (cut.cut_batch == NO_BATCH) != (last == NO_BATCH):
        return False
    return last == NO_BATCH or _read_from(parse_offsets(cut.offsets)) == _read_from(native.offsets(last))


def _read_from(planned: OffsetFile) -> tuple[Mapping[str, str], int]:
    return native_offsets(planned), planned.watermark_ms


def _has_got(ctx: RunContext, state: ControlState, cut: StageSnapshot, output: OutputVersion) -> bool:
    """Say whether an output has, or may have, rows that a cut does not have."""
    match output.kind:
        case "function":
            return False
        case "delta":
            table = Table.open(ctx.root.storage.place(output.table))
            return SinkLog(table, ctx.writer(cut.stage, output.output)).last_batch() > cut.cut_batch
        case "channel" if output.version is not None:
            channel = channel_id(cut.stage, output.output)
            entries = follow(ctx.root, channel, channel_path(state, channel)).after(output.version)
            found = list(islice(entries, MOST_ENTRIES + 1))
            return len(found) > MOST_ENTRIES or any(entry.files for entry in found)
    return True
