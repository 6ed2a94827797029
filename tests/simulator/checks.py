"""What the simulated cluster has on storage, as facts for the invariants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spark_abs.manifest import StageSnapshot
from spark_abs.model import NO_BATCH, AttemptId, CheckpointMode, Position, Version, counts
from tests.invariants import (
    Edge,
    NamedBytes,
    Need,
    Outcome,
    consistent_cut,
    intact,
    no_dead_work,
    none_lost,
    nothing_lost,
    one_outcome,
    only_completed,
    require,
    same_order,
    same_rows,
    state_and_flight,
)
from tests.simulator.cluster import Checkpoint, Stage, State, Storage, apply, carried, digest, record
from tests.simulator.ideal import ideal
from tests.simulator.table import Row


def check_checkpoint(storage: Storage, row: Checkpoint) -> None:
    """Check a checkpoint the moment it is committed: invariants 1 and 2."""
    acked = {snapshot.stage for snapshot in row.snapshots}
    require(
        f"1: checkpoint {row.id} is completed and holds nothing of {stage.id}"
        for stage in storage.graph
        if stage.id not in acked
    )
    require(_cut(storage, row))
    require(intact(_named(storage, row)))


def _cut(storage: Storage, row: Checkpoint) -> Iterator[str]:
    repeats = storage.replaying[row.attempt]
    if row.mode is CheckpointMode.ALIGNED and not repeats and not storage.loops:
        yield from _aligned_cut(storage, row)
    else:
        for stage in storage.graph:
            yield from _stage_cut(storage, row, stage, stage.id in repeats)
    yield from consistent_cut(_edges(storage, row))


def _stage_cut(storage: Storage, row: Checkpoint, stage: Stage, repeats: bool) -> Iterator[str]:
    """Check one stage of a cut against its inputs, and its outputs against what it has read of them."""
    snapshot = row.snapshot(stage.id)
    inputs = len(stage.inputs) + bool(stage.native)
    held: State = storage.packs[snapshot.files[0].at.pack] if snapshot.files else ((),) * inputs
    where = f"checkpoint {row.id}, {stage.id} after batch {snapshot.cut_batch}"
    for rows, position in zip(held, snapshot.positions, strict=False):
        produced = storage.cut_version(row.id, position.channel)
        read = _visible(storage, row.attempt, position.channel, position.version)
        before = _visible(storage, row.attempt, position.channel, max(produced, position.version))
        of = f"{where}, reading {position.channel}"
        yield from state_and_flight(of, rows, before[len(read) :], before, repeats)
    if stage.native:
        records = tuple(record(stage.id, number) for number in range(int(snapshot.offsets)))
        yield from same_rows(1, f"{where}, its own records", held[-1], records)
    _, rows = apply(stage, ((),) * inputs, held)
    for output in snapshot.outputs:
        found = _visible(storage, row.attempt, output.table, output.version or 0)
        yield from same_rows(1, f"{where}, {output.table}", found, carried(output.output, rows))


def _aligned_cut(storage: Storage, row: Checkpoint) -> Iterator[str]:
    offsets = tuple(int(row.snapshot(stage.id).offsets) for stage in storage.graph)
    expected = ideal(storage.graph, offsets)
    for stage in storage.graph:
        snapshot = row.snapshot(stage.id)
        where = f"checkpoint {row.id}, state of {stage.id} after batch {snapshot.cut_batch}"
        held: State = ()
        if snapshot.files:
            held = storage.packs[snapshot.files[0].at.pack]
        yield from same_rows(1, where, _tagged(held), _tagged(expected[stage.id]))
        for output in snapshot.outputs:
            found = _visible(storage, row.attempt, output.table, output.version or 0)
            yield from same_rows(1, f"checkpoint {row.id}, {output.table}", found, expected[output.table])


def check_skip(storage: Storage, snapshots: Iterable[StageSnapshot]) -> None:
    """Check that a checkpoint which is skipped would hold what these parts of the last one hold."""
    attempt = storage.state.attempt.id
    stages = {stage.id: stage for stage in storage.graph}
    require(v for cut in snapshots for v in _same_as_now(storage, attempt, stages[cut.stage], cut))


def _same_as_now(storage: Storage, attempt: AttemptId, stage: Stage, cut: StageSnapshot) -> Iterator[str]:
    native, where = storage.native[attempt, stage.id], f"skipped, {stage.id} after batch {cut.cut_batch}"
    held = native.state(native.committed) if native.committed != NO_BATCH else ()
    then = storage.packs[cut.files[0].at.pack] if cut.files else ()
    yield from same_rows(1, f"{where}, its state", _tagged(then), _tagged(held))
    for output in cut.outputs:
        table = storage.tables[output.table]
        found = _visible(storage, attempt, output.table, output.version or 0)
        rows = _visible(storage, attempt, output.table, table.version)
        yield from same_rows(1, f"{where}, {output.table}", found, rows)


def in_place(storage: Storage, row: Checkpoint) -> int:
    """Return how many open inputs stand before a barrier without rows in between, and no edge of a loop."""
    edges = _edges(storage, row)
    return sum(edge.rowless and not edge.closed and not edge.consumed.feedback for edge in edges)


def _rowless(storage: Storage, row: Checkpoint, position: Position, produced: Version) -> bool:
    if position.version >= produced:
        return False
    read = _visible(storage, row.attempt, position.channel, position.version)
    return read == _visible(storage, row.attempt, position.channel, produced)


def gaps(storage: Storage, row: Checkpoint) -> Iterator[int]:
    """Yield by how many entries each open input stands beyond its barrier, or short of it."""
    for edge in _edges(storage, row):
        if not edge.closed:
            yield edge.consumed.version - edge.produced


def rows_in_flight(storage: Storage, row: Checkpoint) -> int:
    """Return how many rows are on their way round in a checkpoint."""
    found = 0
    for edge in _edges(storage, row):
        if edge.consumed.feedback:
            read = _visible(storage, row.attempt, edge.channel, edge.consumed.version)
            found += len(_visible(storage, row.attempt, edge.channel, edge.produced)) - len(read)
    return found


def _tagged(state: State | tuple[Row, ...]) -> list[tuple[int, object]]:
    """Tell the inputs of a state apart."""
    return [(number, item) for number, rows in enumerate(state) for item in rows]


def _visible(storage: Storage, attempt: AttemptId, name: str, version: int) -> list[Row]:
    """Return what an output holds at a version, in the order of its log."""
    table = storage.tables[name]
    if name.endswith("/sink"):
        return list(table.read(Version(version)))
    path = storage.path(table.channel, attempt)
    work = (c for c in table.log if c.attempt and c.version <= version)
    return [r for c in work if counts(path, c.attempt, c.version) for r in table.rows[c.version]]


def _edges(storage: Storage, row: Checkpoint) -> Iterator[Edge]:
    run = storage.state.run
    assert run is not None
    for stage in storage.graph:
        for position in row.snapshot(stage.id).positions:
            produced = storage.cut_version(row.id, position.channel)
            closed = position.is_closed(run.id)
            rowless = _rowless(storage, row, position, produced)
            yield Edge(row.id, position.channel, stage.id, produced, position, closed, row.mode, rowless)


def _named(storage: Storage, row: Checkpoint) -> Iterator[NamedBytes]:
    for snapshot in row.snapshots:
        for file in snapshot.files:
            state = storage.packs.get(file.at.pack)
            size, sha256 = digest(state) if state is not None else (None, None)
            yield NamedBytes(row.id, file.path, file.size, file.sha256, size, sha256)


def check_retention(storage: Storage) -> None:
    """Check that all is there that can be reached: invariant 6."""
    present: set[object] = set(storage.packs)
    for name, table in storage.tables.items():
        present |= {(name, number) for number, entry in enumerate(table.entries) if entry is not None}
    require(nothing_lost(_needs(storage), present))
    for row in storage.retained.values():
        require(intact(_named(storage, row)))


def _needs(storage: Storage) -> Iterator[Need]:
    attempt = storage.state.attempt.id
    readers: list[tuple[str, Iterable[Position]]] = [
        (stage.id, storage.native[attempt, stage.id].durable.positions) for stage in storage.graph
    ]
    for row in storage.retained.values():
        for snapshot in row.snapshots:
            by = f"{snapshot.stage} of checkpoint {row.id}"
            yield from (Need(by, file.at.pack) for file in snapshot.files)
            readers.append((by, snapshot.positions))
    for by, positions in readers:
        for position in positions:
            for number in range(position.version + 1, len(storage.tables[position.channel].entries)):
                yield Need(by, (position.channel, number))


def check_end(storage: Storage) -> None:
    """Check a job that has run to its end: invariants 2, 4 and 5."""
    outcomes = [Outcome(number, row is not None) for number, row in storage.checkpoints]
    require(one_outcome([barrier.id for barrier in storage.claimed], outcomes))
    require(only_completed(storage.retained, outcomes))
    require(no_dead_work(commit for table in storage.tables.values() for commit in table.log))
    require(_like_no_failure(storage))


def _like_no_failure(storage: Storage) -> Iterator[str]:
    attempt = storage.state.attempt.id
    expected = ideal(storage.graph, tuple(stage.native for stage in storage.graph))
    repeated: set[str] = set()
    """Channels that may hold rows twice."""
    for stage in storage.graph:
        native = storage.native[attempt, stage.id]
        held = native.state(native.committed) if native.committed != NO_BATCH else ()
        if stage.id not in storage.replaying[attempt]:
            yield from _order(storage, stage, held)
        same = same_rows
        if stage.id in storage.replaying[attempt] or not repeated.isdisjoint(stage.inputs):
            repeated.update(stage.channels)
            same = none_lost
        yield from same(4, f"state of {stage.id}", _tagged(held), _tagged(expected[stage.id]))
        if stage.sink:
            table = storage.tables[stage.target]
            yield from same(4, table.name, table.read(table.version), expected[table.name])


def _order(storage: Storage, stage: Stage, held: State) -> Iterator[str]:
    """Check that a stage saw every channel in the order of its log."""
    for channel, rows in zip(stage.inputs, held, strict=False):
        table = storage.tables[channel]
        log = _visible(storage, storage.state.attempt.id, channel, table.version)
        yield from same_order(f"{stage.id} reading {channel}", rows, log)
