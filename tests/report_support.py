"""Roots for the page, made without Spark: any number of stages and checkpoints, with failures among them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake

from spark_abs.manifest import (
    Location,
    Manifest,
    OperatorShape,
    OutputVersion,
    SourceShape,
    StageShape,
    StageSnapshot,
    StoredFile,
)
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import (
    AttemptId,
    BatchId,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    Position,
    RunId,
    StageId,
    Version,
    channel_id,
)
from spark_abs.protocol import control as ledger
from spark_abs.protocol.attempt import Attempt
from spark_abs.protocol.control import ControlState
from spark_abs.store.control import Control
from spark_abs.store.history import PATH, SCHEMA, History
from spark_abs.store.root import Root

JOB = "shop"
BEGAN_MS = 1_795_000_000_000
EVERY_MS = 10_000
WIDE = 10
"""Stages in a layer of the graph."""


def shapes(stages: int) -> tuple[StageShape, ...]:
    """Return a graph in layers: each stage reads one or two of the layer before; the last layer has sinks."""
    found = []
    for number in range(stages):
        above = [n for n in (number - WIDE, number - WIDE + 1) if n >= 0 and n // WIDE == number // WIDE - 1]
        inputs = tuple(str(channel_id(name(n))) for n in above)
        last = number + WIDE >= stages
        sources = [SourceShape("channel", channel) for channel in inputs]
        if not inputs:
            sources.append(SourceShape("json", f"/data/in-{number}"))
        found.append(
            StageShape(
                name(number),
                inputs,
                {"main": "{}"},
                {} if last else {"main": f"table-{number}"},
                {"totals": "main"} if last else {},
                sources=tuple(sources),
                operators=(OperatorShape("stateStoreSave", ("item",)),) if number % 3 == 0 else (),
                tables={"totals": f"/lake/totals-{number}"} if last else {},
            )
        )
    return tuple(found)


def name(number: int) -> StageId:
    return StageId(f"stage-{number:02d}")


def synthetic_root(
    path: Path, stages: int, checkpoints: int, detailed: int = 1_000, *, stored: int = 20, seed: int = 1
) -> Root:
    """Make a root with a history of so many checkpoints: every 50th is aborted, one stage is often slow.

    A third of the way in, the job was restored to 20 checkpoints before. Parts of stages are recorded of the
    newest `detailed` checkpoints.
    """
    root, chance, graph = Root(str(path)), random.Random(seed), shapes(stages)
    control = Control.create(root, JOB, BEGAN_MS)
    restored = checkpoints // 3 if checkpoints >= 90 else 0

    def fill(state: ControlState) -> ControlState:
        state = ledger.begin_run(state, "driver-1", 4711, BEGAN_MS)
        attempts = state.attempts
        if restored:
            state = ledger.end_run(state, RunId(1), "failed: the disk is full")
            second = Attempt(
                AttemptId(2),
                AttemptId(1),
                CheckpointId(restored - 20),
                plan='{"channels":{}}',
                ready=True,
                created_ms=BEGAN_MS + restored * EVERY_MS,
                root=state.root,
            )
            state = replace(state, attempts=(*attempts, second))
            state = ledger.begin_run(state, "driver-2", 815, second.created_ms)
        now = replace(state.attempt, shapes=graph)
        return replace(state, attempts=(*state.attempts[:-1], now), last_claimed=CheckpointId(checkpoints))

    state = control.update(fill)
    History(root)
    rows: list[dict[str, object]] = []
    for number in range(1, checkpoints + 1):
        events = _events(number, graph, restored, chance)
        rows += (e for e in events if number > checkpoints - detailed or "stage" not in e)
        if len(rows) > 100_000:
            _write(root, rows)
            rows = []
    _write(root, rows)
    run = state.runs[-1].id
    table = Checkpoints.open(root, JOB)
    table.fence(run)
    for number in range(max(1, checkpoints - stored + 1), checkpoints + 1):
        if not _aborted(number):
            assert table.complete(manifest(number, graph, state.attempt.id, run))
    return root


def _write(root: Root, rows: list[dict[str, object]]) -> None:
    write_deltalake(root.place(PATH).uri, pa.Table.from_pylist(rows, schema=SCHEMA), mode="append")


def _aborted(number: int) -> bool:
    return number % 50 == 0


def _kind(number: int) -> dict[str, object]:
    if number % 500 == 499:
        return {"kind": "savepoint", "name": f"nightly-{number}", "mode": "aligned"}
    return {"kind": "checkpoint", "mode": "aligned"}


def _events(
    number: int, graph: tuple[StageShape, ...], restored: int, chance: random.Random
) -> Iterator[dict[str, object]]:
    began = BEGAN_MS + number * EVERY_MS + chance.randrange(40)
    second = restored and number > restored
    common: dict[str, object] = {
        "checkpoint": number,
        "attempt": 2 if second else 1,
        "run": 2 if second else 1,
    }
    common |= _kind(number)
    yield {**common, "at_ms": began, "event": "triggered"}
    total = new = aligned = longest = 0
    sent: dict[StageId, int] = {}
    for place, shape in enumerate(graph):
        before = [sent[StageId(channel.split(".")[0])] for channel in shape.inputs]
        delay = max(before, default=0) + chance.randrange(5, 60)
        wait = max(before) - min(before) if len(before) > 1 else 0
        work = chance.randrange(20, 90) + (900 if place == 7 and number % 7 == 0 else 0)
        copy = chance.randrange(10, 120)
        sent[shape.stage] = delay + wait + work
        took = delay + wait + work + copy
        size = 4_000_000 + place * 300_000 + number * 900 + chance.randrange(40_000)
        fresh = 20_000 + chance.randrange(60_000)
        queued = chance.randrange(200_000) if wait else 0
        total, new, aligned, longest = total + size, new + fresh, aligned + queued, max(longest, took)
        part = {**common, "stage": shape.stage, "start_delay_ms": delay, "alignment_ms": wait}
        if _aborted(number) and place >= len(graph) // 2:
            late = {"event": "stage-waiting", "duration_ms": 60_000, "detail": "batch 7 is still running"}
            yield {**part, **late, "at_ms": began + 60_000, "alignment_bytes": queued}
        else:
            acked = {"event": "stage-acked", "duration_ms": took, "size_full": size, "size_new": fresh}
            times = {"sync_ms": 1, "async_ms": copy, "alignment_bytes": queued, "backpressured_ms": 0}
            yield {**part, **acked, **times, "at_ms": began + took}
    stages = len(graph)
    if _aborted(number):
        why = {"reason": "expired", "detail": "after 1 min", "acks": stages // 2, "duration_ms": 60_000}
        yield {**common, **why, "event": "aborted", "stages": stages, "at_ms": began + 60_000}
        return
    sizes = {"size_full": total, "size_new": new, "alignment_bytes": aligned, "dropped_late": 0}
    done = {"acks": stages, "stages": stages, "inflight_bytes": 0, "duration_ms": longest + 30}
    yield {**common, **sizes, **done, "event": "completed", "at_ms": began + longest + 30}


def manifest(number: int, graph: tuple[StageShape, ...], attempt: AttemptId, run: RunId) -> Manifest:
    began = BEGAN_MS + number * EVERY_MS
    kind = CheckpointKind(str(_kind(number)["kind"]))
    label = _kind(number).get("name")
    snapshots = tuple(_snapshot(number, place, shape, attempt) for place, shape in enumerate(graph))
    return Manifest(
        CheckpointId(number),
        attempt,
        run,
        JOB,
        kind=kind,
        name=None if label is None else str(label),
        triggered_ms=began,
        acked_ms=began + 800,
        completed_ms=began + 900,
        graph=graph,
        stages=snapshots,
    )


def _snapshot(number: int, place: int, shape: StageShape, attempt: AttemptId) -> StageSnapshot:
    channels = (
        OutputVersion("main", "channel", f"channels/{shape.stage}.main", table, Version(number))
        for table in shape.channels.values()
    )
    sinks = (
        OutputVersion(sink, "delta", f"/lake/{sink}-{place}", "t", Version(number // 2))
        for sink in shape.sinks
    )
    native = not shape.inputs
    return StageSnapshot(
        shape.stage,
        BatchId(number),
        offsets=f'v1\n{{"batchWatermarkMs":0,"conf":{{}}}}\n{{"logOffset":{number * 3}}}' if native else "",
        watermark_ms=BEGAN_MS + number * EVERY_MS,
        positions=tuple(
            Position(ChannelId(channel), attempt, Version(number), CheckpointId(number), at_barrier=True)
            for channel in shape.inputs
        ),
        outputs=(*channels, *sinks),
        shuffle_partitions=2 if shape.operators else 0,
        files=(StoredFile("offsets/1", 1_000_000 + number * 1000, "0" * 64, Location("pack", 0, 1)),),
        size_new=1000,
    )
