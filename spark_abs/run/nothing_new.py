"""Whether data is newer than the newest checkpoint: only then does a bounded run end with a checkpoint.

Otherwise a job that a scheduler starts every minute would write a checkpoint of the same state each time.
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
from spark_abs.manifests.manifest_table import Checkpoints
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
"""Entries without rows that a channel may have after the cut: each start leaves one, and clean-up removes an
entry only when the cuts of all retained checkpoints are after it.
"""


def nothing_since(
    ctx: RunContext, shapes: tuple[StageShape, ...], stages: Iterable[StageId]
) -> CheckpointId | None:
    """Return the newest checkpoint if it includes all rows that the stages have read and written.

    None if not.

    Called when all stages have ended. Logs show whether a native source or a watermark has advanced, or a
    channel or a table has new rows. If a log cannot be read, a checkpoint is taken.
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
    """Say whether a cut includes all rows that a stage has read from its native sources."""
    last = native.idle_at()
    if last is None or (cut.cut_batch == NO_BATCH) != (last == NO_BATCH):
        return False
    return last == NO_BATCH or _read_from(parse_offsets(cut.offsets)) == _read_from(native.offsets(last))


def _read_from(planned: OffsetFile) -> tuple[Mapping[str, str], int]:
    return native_offsets(planned), planned.watermark_ms


def _has_got(ctx: RunContext, state: ControlState, cut: StageSnapshot, output: OutputVersion) -> bool:
    """Say whether an output has, or may have, rows that are not in a cut."""
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
