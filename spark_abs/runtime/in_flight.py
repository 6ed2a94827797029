"""Rows in flight at a checkpoint, and a job that was changed behind it."""

from __future__ import annotations

from dataclasses import replace

from spark_abs.channels.in_flight import bytes_in_flight
from spark_abs.errors import Refused
from spark_abs.manifest import Manifest
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.path import channel_path
from spark_abs.runtime.graph import JobGraph
from spark_abs.runtime.native import NativeLog, native_of
from spark_abs.store.root import Root


def require_readers(root: Root, graph: JobGraph, state: ControlState, manifest: Manifest) -> None:
    """Refuse to start without a stage to which a checkpoint has rows in flight that it has not read since.

    They are in no state, and their producer does not write them again: they would be lost in silence.

    Raises:
        Refused: names checkpoint, stage, channel and entries.
    """
    reads = {(stage.name, channel) for stage in graph.stages for channel in stage.inputs}
    for flight in manifest.in_flight():
        if (flight.stage, flight.channel) in reads:
            continue
        read = [
            p.version
            for p in NativeLog(native_of(root, state, flight.stage)).consumed()
            if p.channel == flight.channel
        ]
        left = replace(flight, after=max(flight.after, min(read, default=flight.after)))
        path = channel_path(state, flight.channel)
        if left.after < left.until and bytes_in_flight(root, path, left):
            raise Refused(
                f"checkpoint {manifest.id} ({manifest.mode}) has entries {left.after + 1} to {left.until} of "
                f"channel {left.channel} in flight to stage {left.stage!r}, and no such stage reads that "
                "channel now: the rows would be lost. Declare the stage as it was and let it read them, then "
                "change the job behind a savepoint; or restore a savepoint, in which only ways back of loops "
                "have rows in flight"
            )
