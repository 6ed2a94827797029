"""The sinks outside of a job: opened before its queries start, each with a sender of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import SparkSession

from spark_abs.channels.trim import written_by
from spark_abs.errors import Refused
from spark_abs.manifest import Manifest
from spark_abs.model import NO_EPOCH, Branch, ChannelId, Entry, Version, channel_id
from spark_abs.protocol import outside
from spark_abs.protocol.changes import FIRST_ENTRY
from spark_abs.protocol.control import ControlState, OutsideSink, attach_outside
from spark_abs.protocol.outside import Mark, Owner
from spark_abs.protocol.path import channel_path
from spark_abs.run_context import RunContext
from spark_abs.sinks.sending.bounds import away, bounds_of, cuts_of, missed_by
from spark_abs.sinks.sending.sender import AGAIN, WAIT_S, Sender, Sending, require_free
from spark_abs.sinks.sending.tasks import SendTasks
from spark_abs.store.control import Control

_START_PATIENCE_S = 10.0
NOTHING_WAITS = Version(2**62)
"""How far a sink has read, as credit counts it, while no rows wait that can be sent."""


class Senders:
    """All sinks outside of a job. Safe to use from any thread."""

    def __init__(self, senders: Sequence[Sender] = ()) -> None:
        self._senders = tuple(senders)

    def start(self, on_failure: Callable[[Exception], None]) -> None:
        """Start to send; `on_failure` is called, from a sink's thread, if the thread cannot continue."""
        for sender in self._senders:
            sender.start(on_failure)

    def completed(self, manifest: Manifest) -> None:
        """Take note of a completed checkpoint."""
        for sender in self._senders:
            for cut in cuts_of([manifest], sender.channel):
                sender.completed(cut, manifest.name)

    def wrote(self, entries: Mapping[ChannelId, Entry]) -> None:
        """Take note of a batch that is in the channels."""
        for sender in self._senders:
            entry = entries.get(sender.channel)
            if entry is not None and entry.files:
                sender.wrote(entry.version)

    def unsent(self, channel: ChannelId) -> tuple[Version, ...]:
        """Return how far each sink has read a channel, as credit counts it.

        Rows after the newest complete checkpoint cannot be sent yet, so they block no producer, unless a sink
        gets each batch.
        """
        mine = [sender for sender in self._senders if sender.channel == channel]
        return tuple(sender.mark.version if sender.waits else NOTHING_WAITS for sender in mine)

    def needed(
        self, state: ControlState, manifests: Sequence[Manifest]
    ) -> Mapping[ChannelId, tuple[Version, ...]]:
        """Return the entries after which each sink may still read, also after a restore."""
        found: dict[ChannelId, tuple[Version, ...]] = {}
        for sender in self._senders:
            bounds = bounds_of(state, sender.channel, sender.mark, manifests)
            sender.floor, sender.asked = bounds.undone, bounds.asked
            found[sender.channel] = (*found.get(sender.channel, ()), bounds.needed)
        return found

    @property
    def need_checkpoints(self) -> bool:
        """Whether a sink gets its rows only after checkpoints."""
        return any(not sender.each_batch for sender in self._senders)

    def sending(self, patience_s: float) -> bool:
        """Say whether a sink has rows left to send and could be reached in the last `patience_s`."""
        return any(sender.waits and sender.troubled_s <= patience_s for sender in self._senders)

    def close(self, patience_s: float) -> tuple[str, ...]:
        """Send the rows that can be sent, at most for so long; return a sentence for each sink with more."""
        until = time.monotonic() + patience_s
        left = [sender.close(max(0.0, until - time.monotonic())) for sender in self._senders]
        return tuple(said for said in left if said)


def open_senders(
    spark: SparkSession,
    ctx: RunContext,
    sendings: Sequence[Sending],
    control: Control,
    manifests: Sequence[Manifest],
) -> Senders:
    """Fence the sinks of a job and read their marks, before any query runs; each is then in `control/`.

    Raises:
        Refused: see `Sender.recover`.
        SinkUnreachable: a sink cannot be reached.
        Fenced: a newer run has taken over.
    """
    if not sendings:
        return Senders()
    state = control.state
    records = {record.sink: record for record in state.outside}
    savepoints = {manifest.id: manifest.name for manifest in manifests if manifest.name is not None}
    found = []
    for sending in sendings:
        require_free(sending, _START_PATIENCE_S)
        path = channel_path(state, sending.channel)
        cuts = tuple(cuts_of(manifests, sending.channel))
        before = records.get(sending.name)
        if before is not None and (before.stage, before.output) != (sending.stage, sending.output):
            raise Refused(
                f"sink {sending.name!r} has received output {before.output!r} of stage {before.stage!r}, to "
                f"which its mark refers, and is now declared on output {sending.output!r} of stage "
                f"{sending.stage!r}: give the sink another name, and another Delta table"
            )
        gone = None if before is not None else away(state, sending.channel, manifests)
        first = _first(before, path, cuts, state) if gone is None else _behind(ctx, sending, path, gone)
        record = sending.record(first, before is not None and before.begun)
        owner = Owner(state.root, ctx.job, sending.name, ctx.run)
        missed = missed_by(state, record, manifests)
        tasks = SendTasks(spark, f"sink {sending.name} of job {ctx.job}")
        found.append(
            Sender(
                ctx,
                sending,
                record=record,
                path=path,
                cuts=cuts,
                savepoints=savepoints,
                owner=owner,
                missed=missed,
                tasks=tasks,
            )
        )
        records[sending.name] = record
    try:
        for sender in found:
            _recover(sender)
    except Exception:
        Senders(found).close(0)
        raise
    mine = [records[sending.name] for sending in sendings]
    control.update(lambda state: attach_outside(state, ctx.run, mine))
    return Senders(found)


def _recover(sender: Sender) -> None:
    until, pause = time.monotonic() + _START_PATIENCE_S, threading.Event()
    while True:
        try:
            return sender.begin()
        except AGAIN:
            if time.monotonic() > until:
                raise
            pause.wait(WAIT_S)


def _behind(ctx: RunContext, sending: Sending, path: Sequence[Branch], newest: Manifest) -> Mark:
    """Return where a sink begins whose channel is not in the newest checkpoint: after all older entries."""
    version = written_by(ctx.root, sending.channel, newest.completed_ms)
    return Mark(path[-1].attempt, newest.id, version)


def _first(
    before: OutsideSink | None, path: Sequence[Branch], cuts: Sequence[Mark], state: ControlState
) -> Mark:
    """Return where a sink begins: at the newest cut in its channel, else at the beginning of the channel."""
    if before is not None:
        channel = channel_id(before.stage, before.output)
        line = outside.line_to(channel_path(state, channel, before.first.attempt), before.first)
        return outside.mark_after_rollback(before.first, line, path, cuts)
    newest = [cut for cut in cuts if outside.is_on(path, cut)]
    if newest:
        return max(newest, key=lambda cut: cut.version)
    return Mark(path[-1].attempt, NO_EPOCH, FIRST_ENTRY)
