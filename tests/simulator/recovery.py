"""What begins a run of the simulated job, and what brings it back: fences, outcomes, restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spark_abs.codec import to_json
from spark_abs.errors import AbortReason
from spark_abs.model import FENCED, NO_BATCH, AttemptId, BatchId, CheckpointId, RunId
from spark_abs.protocol import attempt_changes, control
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.path import BranchPoint
from spark_abs.protocol.rebuild import LostStage, Repeat
from tests.simulator.cluster import Checkpoint, Native, Stage, Storage
from tests.simulator.table import Planned

Clock = Callable[[], int]


def settle(storage: Storage, checkpoint: CheckpointId, completed: bool, reason: AbortReason) -> None:
    """Tell the gates of an outcome, through `control/`."""
    aborted = () if completed else (control.Aborted(checkpoint, reason),)
    done = (checkpoint,) if completed else ()
    storage.control.append(control.settle(storage.state, aborted, done))


def fence(storage: Storage, run: RunId, before: AttemptId) -> Iterator[None]:
    """Shut out older runs and the attempts before `before`, then abort every id without an outcome."""
    for stage in storage.graph:
        for output, table in storage.outputs(stage):
            table.fence_runs(run, storage.owner(stage, output))
            for attempt in storage.state.attempts:
                if attempt.id < before:
                    table.burn(storage.app(stage, output, attempt.id), attempt.id)
            yield
    yield from abort_open(storage, run)


def abort_open(storage: Storage, run: RunId) -> Iterator[None]:
    """Abort every id without an outcome."""
    for claim in storage.state.claims:
        completed = storage.decide(claim.barrier.id, None, run)
        settle(storage, claim.barrier.id, completed, AbortReason.RUN_ENDED)
        yield


def begun_from(state: ControlState, checkpoint: Checkpoint, plan: str, clock: Clock) -> ControlState:
    """Begin the attempt of a restore to a checkpoint."""
    return attempt_changes.begin_attempt(
        state,
        checkpoint.attempt,
        checkpoint=checkpoint.id,
        plan=plan,
        host="sim",
        pid=1,
        now_ms=clock(),
    )


def restore(storage: Storage, checkpoint: Checkpoint, clock: Clock) -> Iterator[None]:
    """Bring everything back to a checkpoint under a new attempt; each step may be repeated."""
    channels = (channel for stage in storage.graph for channel in stage.channels)
    plan = to_json(BranchPoint({c: storage.cut_version(checkpoint.id, c) for c in channels}))
    storage.control.append(begun_from(storage.state, checkpoint, plan, clock))
    yield
    run, attempt = storage.state.run, storage.state.attempt
    assert run is not None
    storage.replaying[attempt.id] = storage.replaying[checkpoint.attempt] | {
        snapshot.stage
        for snapshot in checkpoint.snapshots
        for position in snapshot.positions
        if position.version > storage.cut_version(checkpoint.id, position.channel)
    }
    yield from fence(storage, run.id, before=attempt.id)
    for stage in storage.graph:
        storage.native[attempt.id, stage.id] = materialised(storage, stage, checkpoint, attempt.id)
        yield
        if stage.sink:
            name = stage.target
            storage.tables[name].restore(storage.cut_version(checkpoint.id, name))
            yield
    storage.control.append(attempt_changes.finish_attempt(storage.state, attempt.id))


def materialised(storage: Storage, stage: Stage, checkpoint: Checkpoint, attempt: AttemptId) -> Native:
    """Return a native checkpoint built from what a manifest names, and nothing else."""
    snapshot, native = checkpoint.snapshot(stage.id), storage.fresh(stage, attempt)
    if snapshot.cut_batch == NO_BATCH:
        return native
    batch, (file,) = snapshot.cut_batch, snapshot.files
    native.offsets[batch] = Planned(snapshot.positions, int(snapshot.offsets))
    native.commits[batch] = file.sha256
    native.states[batch + 1] = {file.sha256: storage.packs[file.at.pack]}
    return native


def rebuilt(
    storage: Storage, stage: Stage, repeats: Callable[..., tuple[Repeat[Planned], ...]]
) -> Native | None:
    """Return what takes the place of a native checkpoint that is lost; None if it cannot be exact."""
    attempt = storage.state.attempt
    rows = [
        row for row in storage.retained.values() if row.attempt == attempt.id or row.id == attempt.checkpoint
    ]
    native, cut = storage.fresh(stage, attempt.id), NO_BATCH
    if rows:
        newest = max(rows, key=lambda row: row.id)
        native, cut = materialised(storage, stage, newest, attempt.id), newest.snapshot(stage.id).cut_batch
    elif attempt.parent is not None:
        return None
    written, plans = NO_BATCH, dict[BatchId, Planned]()
    for output, table in storage.outputs(stage):
        done = table.transactions.get(storage.app(stage, output, attempt.id), NO_BATCH)
        assert done < FENCED
        written = max(written, BatchId(done))
        plans |= {batch: planned for (a, batch), planned in table.plans.items() if a == attempt.id}
    # What a simulated source reads is a number: it can begin anew.
    found = repeats(LostStage(cut, written), plans)
    native.script = {repeat.batch: repeat.plan for repeat in found}
    lost = storage.native[attempt.id, stage.id]
    native.had_read = lost.had_read | {
        p.channel: max(p.version, lost.had_read.get(p.channel, p.version)) for p in lost.durable.positions
    }
    return native
