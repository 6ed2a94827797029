"""What the simulated job is made of: the product's own parts, of which a test breaks one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from spark_abs.alignment import align, in_place, loops, marker
from spark_abs.manifest import StageSnapshot
from spark_abs.model import (
    AttemptId,
    Barrier,
    BatchId,
    Branch,
    ChannelId,
    Entry,
    Position,
    RunId,
    StageId,
    Version,
)
from spark_abs.protocol import credit, rebuild, stage_progress
from spark_abs.protocol.changes import Comparison, UnderWay
from spark_abs.protocol.compare import compare
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.coordinator import Coordinator
from spark_abs.protocol.rebuild import Repeat
from spark_abs.snapshots.retention import Needed, needed_of_channels
from tests.simulator.cluster import Checkpoint, Native, SinkApp, Stage, State, Storage, named_by_writer
from tests.simulator.table import Planned, Table

Paths = Mapping[ChannelId, Sequence[Branch]]
Sinks = Iterable[tuple[StageId, str]]
"""Stages and names of sinks."""


class Evaluating(Protocol):
    """The process of a stage that evaluates a batch."""

    def lets_ahead(self, batch: BatchId) -> bool:
        """Take an unaligned barrier after the batch before, an output a step; say whether it did a step."""

    def written(self, batch: BatchId) -> Entry | None:
        """Return what an output holds of a batch that is run again."""


def in_log(table: Table, app: str, version: int) -> bool:
    """Say whether a transaction is already in a table's log."""
    return table.transactions.get(app, -1) >= version


def unwritten(process: Evaluating, batch: BatchId) -> bool:
    """Say whether no output has a part of a planned batch."""
    return process.written(batch) is None


def loop_ended(storage: Storage, attempt: AttemptId, paths: Paths, head: Stage, run: RunId) -> bool:
    """Say whether the loop of a stage has ended, from storage alone."""
    (loop,) = [loop for loop in storage.loops if head.id in loop.stages]
    members = []
    for stage in loop.stages:
        native = storage.native[attempt, stage]
        unread = {
            p.channel
            for p in native.durable.positions
            if any(e.files for e in storage.tables[p.channel].after(p.version, paths[p.channel]))
        }
        idle = native.planned == native.committed
        members.append(loops.Member(idle, native.durable.positions, frozenset(unread)))
    return loops.has_ended(loop, members, run)


def first_positions(state: ControlState) -> Mapping[tuple[StageId, ChannelId], Position]:
    """Return where stages begin to read channels, as a run finds it."""
    return state.attempt.first_positions


def table_version(
    checkpoint: Checkpoint, table: str, _sinks: Iterable[tuple[StageId, str]]
) -> Version | None:
    """Return to which version a checkpoint brings a table back; None if it does not have the table."""
    outputs = (output for snapshot in checkpoint.snapshots for output in snapshot.outputs)
    return min((o.version for o in outputs if o.table == table and o.version is not None), default=None)


def stands_at(native: Native, cut: StageSnapshot) -> bool:
    """Say whether a stage has done nothing since a cut."""
    return native.planned == native.committed == cut.cut_batch


@dataclass(frozen=True, slots=True)
class Parts:
    """What the simulated job is made of; a test puts a broken part in the place of one."""

    decide: Callable[..., align.Decision] = align.decide
    emission: Callable[..., marker.Emission] = marker.emission
    captured: Callable[[Native, BatchId], State] = Native.state
    already: Callable[[Table, str, int], bool] = in_log
    overtaking: Callable[..., Barrier | None] = marker.overtaking
    is_at_cut: Callable[..., bool] = in_place.is_at_cut
    lets_ahead: Callable[[Evaluating, BatchId], bool] = lambda process, batch: process.lets_ahead(batch)
    written: Callable[[Evaluating, BatchId], Entry | None] = lambda process, batch: process.written(batch)
    may_hold: Callable[[Evaluating, BatchId], bool] | None = None
    """Whether a paused source may hold a planned batch; None: sources are not paused."""
    coordinator: Callable[..., Coordinator] = Coordinator
    stands_at: Callable[[Native, StageSnapshot], bool] = stands_at
    repeats: Callable[..., tuple[Repeat[Planned], ...]] = rebuild.repeats
    capacity: credit.Capacity = credit.ANY
    load: Callable[[Entry], credit.Load | None] = credit.load_of
    slowest: Callable[[Iterable[Version]], Version | None] = credit.slowest
    at_once: Callable[..., bool] = credit.at_once
    loop_ended: Callable[..., bool] = loop_ended
    compare: Callable[..., Comparison] = compare
    under_way: Callable[..., UnderWay] = stage_progress.under_way
    first_positions: Callable[[ControlState], Mapping[tuple[StageId, ChannelId], Position]] = first_positions
    sink_app: SinkApp = named_by_writer
    table_version: Callable[[Checkpoint, str, Sinks], Version | None] = table_version
    needed: Callable[..., Mapping[ChannelId, Needed]] = needed_of_channels
