"""What a reader of a counterexample sees of the simulated job."""

from __future__ import annotations

from collections.abc import Iterator

from spark_abs.model import Entry, Position
from spark_abs.protocol.messages import Acked, Claimed
from tests.simulator.cluster import Native
from tests.simulator.driver import Driver
from tests.simulator.memory import Batch


def told(driver: Driver) -> Iterator[str]:
    """Yield what is on storage, in memory and under way, a sentence each."""
    storage = driver.storage
    for table in storage.tables.values():
        yield from (f"{table.name} gets {_entry(e)}" for e in table.entries if e and e.attempt)
    for (_, stage), native in storage.native.items():
        for batch, planned in native.offsets.items():
            yield f"{stage} plans batch {batch}: {inputs(Native(planned))}"
        yield from (f"{stage} has finished batch {batch}" for batch in native.commits)
    yield from (f"id {barrier.id} is claimed" for barrier in storage.claimed)
    for number, row in storage.checkpoints:
        yield f"checkpoint {number} is {'completed' if row else 'aborted'}"
    yield from (f"gates know that {aborted.id} is aborted" for aborted in storage.state.aborted)
    yield from (f"sources may take barrier {barrier.id}" for barrier in driver.run.open)
    for process in driver.processes.values():
        if isinstance(process.at, Batch):
            left = [output for output, _ in process.channels][process.at.output :]
            yield f"{process.stage.id} has batch {process.at.id} ready for {', '.join(left) or 'its end'}"
        if process.taking:
            yield f"the agent of {process.stage.id} is about to pass barrier {process.taking.barrier.id} on"
    for checkpoint, name in sorted(driver.run.handed):
        yield f"{name} has its cut of {checkpoint}"
    for checkpoint, name in driver.acks:
        yield f"{name} acknowledges {checkpoint}"
    yield from (f"a message is under way: {_message(event)}" for event in driver.mail)
    yield from (f"the coordinator wants to {type(effect).__name__.lower()}" for effect in driver.todo)
    yield from (f"{stage} has ended" for stage in sorted(driver.run.ended))


def _entry(entry: Entry) -> str:
    marks = [f"batch {entry.batch} with {entry.rows} rows"] if entry.batch >= 0 else []
    marks += [f"barrier {entry.barrier.id}"] if entry.barrier else []
    marks += [f"cancel {entry.cancel}"] if entry.cancel else []
    marks += ["end"] if entry.end else []
    return f"entry {entry.version} ({', '.join(marks)})"


def inputs(native: Native) -> str:
    """Say how far a stage has read."""
    now = native.newest
    return ", ".join([*map(_position, now.positions), *([f"{now.native} records"] if now.native else [])])


def _position(position: Position) -> str:
    barrier = f", barrier {position.epoch}" if position.at_barrier else ""
    return f"{position.channel} to {position.version}{barrier}{', its end' if position.closed else ''}"


def _message(event: object) -> str:
    match event:
        case Acked(_, checkpoint, snapshot):
            return f"acked {checkpoint} by {snapshot.stage}"
        case Claimed(_, barrier, _):
            return f"claimed {barrier.id}"
        case _:
            return type(event).__name__.lower()
