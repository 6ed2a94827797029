"""Cleaning up after a completed checkpoint: retire manifests, sweep `state/`, trim channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from spark_abs.channels.trim import trim
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import NO_EPOCH, ChannelId, CheckpointId, StageId, Version
from spark_abs.run_context import RunContext
from spark_abs.sinks.sending.senders import Senders
from spark_abs.snapshots.retention import needed_of_channels, newest_since
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.snapshots.sweep import sweep
from spark_abs.snapshots.tidy import retire, trim_tables
from spark_abs.stages.consumers import Consumers
from spark_abs.store.clock import steady_ms
from spark_abs.store.control import Control

TRIM_EVERY, TRIM_AFTER_MS = 50, 30 * 60_000
"""After so many checkpoints, or after so much time, the tables of the root are trimmed again."""


class CheckpointCleaner:
    """Called in a background thread, once at a time; opens its own handles.

    The order matters: a manifest goes first, then what only it named. Killed anywhere, the next call goes
    on; every step refuses to work for a run that was replaced (invariant: retention never removes what a
    retained manifest or an unread position can reach). Only rows that were in flight to the checkpoints of a
    killed call then stay until their entries go.
    """

    def __init__(
        self,
        ctx: RunContext,
        inputs: Mapping[StageId, Sequence[ChannelId]],
        kept: StateStorage,
        senders: Senders | None = None,
    ) -> None:
        """Take the run, the channels that each stage reads, the handle on `state/`, and the sinks outside."""
        self._ctx = ctx
        self._inputs = inputs
        self._kept = kept
        self._senders = senders or Senders()
        self._trimmed: tuple[CheckpointId, int] | None = None
        """The newest checkpoint when the tables were trimmed, and when that was, by `steady_ms`."""
        self._read: dict[CheckpointId, Manifest] = {}
        self._rows: dict[ChannelId, Version] = {}
        """The entry of each channel before which the rows that nobody needs are deleted."""
        self._released: dict[ChannelId, set[tuple[Version, Version]]] = {}
        """Rows in flight to checkpoints that are gone, which may still be there."""

    def __call__(self) -> None:
        """Retire, sweep, trim; at first and from time to time trim the tables' logs and what left the tables.

        A run trims them at its first call, so that short runs do, too.
        """
        ctx = self._ctx
        checkpoints = Checkpoints.open(ctx.root, ctx.job)
        state = Control.open(ctx.root).state
        if not self._read:
            self._retained(checkpoints)  # for what was in flight to checkpoints that go now
        retire(ctx.root, checkpoints, state, run=ctx.run, keep=ctx.settings.keep)
        ctx.failpoint("tidy.retire.after")
        self._retained(checkpoints)  # captures wait for the sweep: it reads only what has come since
        sweep(self._kept, partial(self._retained, checkpoints))
        ctx.failpoint("tidy.sweep.after")
        kept = self._retained(checkpoints)
        outside = self._senders.needed(state, kept)
        consumers = Consumers(ctx, self._inputs, lambda channel: outside.get(channel, ()))
        channels = {channel for inputs in self._inputs.values() for channel in inputs} | outside.keys()
        readers = {channel: consumers.consumed(channel) for channel in sorted(channels)}
        since = newest_since(kept, ctx.settings.keep, lambda m: state.on_path(m.attempt, m.id))
        for channel, needed in needed_of_channels(kept, readers, since).items():
            trim(
                ctx.root,
                channel,
                needed.floor,
                rows_before=needed.rows,
                in_flight=needed.in_flight,
                released=self._released.get(channel, ()),
                known=self._rows.get(channel, Version(0)),
            )
            self._rows[channel] = needed.rows
            self._released.pop(channel, None)
            ctx.failpoint(f"tidy.{channel}.trim.after")
        newest, now = max((m.id for m in kept), default=NO_EPOCH), steady_ms()
        if self._must_trim(newest, now):
            trim_tables(ctx.root)
            self._trimmed = newest, now

    def _must_trim(self, newest: CheckpointId, now: int) -> bool:
        if self._trimmed is None:
            return True
        before, at = self._trimmed
        return newest - before >= TRIM_EVERY or now - at >= TRIM_AFTER_MS

    def _retained(self, checkpoints: Checkpoints) -> tuple[Manifest, ...]:
        """Return every manifest, by id. Known manifests are not read again."""
        found = checkpoints.load_since(self._read)
        before, self._read = self._read, {manifest.id: manifest for manifest in found}
        for gone in before.keys() - self._read.keys():
            for flight in before[gone].in_flight():
                self._released.setdefault(flight.channel, set()).add((flight.after, flight.until))
        return found
