"""Whether the query of a stage can be adopted with the queries that feed it.

In the job a channel takes the place of the table between two queries, and it begins empty. So the reader must
have read all that the table holds, and no batch of the writer may be under way: an aligned cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from spark_abs.errors import AbsError
from spark_abs.manifest import CHANNEL, SourceShape
from spark_abs.model import ChannelId, StageId
from spark_abs.plan.specs import JobSpec, SinkSpec
from spark_abs.protocol.control import ControlState
from spark_abs.snapshots.delta_offsets import delta_offset
from spark_abs.snapshots.materialise import METADATA
from spark_abs.stages.native import NativeLog, native_of
from spark_abs.store.root import Root
from spark_abs.store.table import Table

_REMEDY = (
    "run the query once more with trigger(availableNow=True), after those that write the tables it reads; or "
    "bring all queries to one moment with `spark-abs rewind --checkpoints ... --tables ...`"
)


def why_not_aligned(
    job: JobSpec,
    root: Root,
    state: ControlState | None,
    log: NativeLog,
    *,
    offsets: Sequence[str | None],
    streams: Sequence[SourceShape],
) -> Iterator[str]:
    """Iterate the reasons why channels cannot take the place of the tables that a query reads.

    Args:
        job: the declarations.
        root: of the job.
        state: the state of `control/`; None for a new root.
        log: of the query's checkpoint.
        offsets: of its newest batch, by source.
        streams: the sources that its stage declares.
    """
    read = [
        (number, ChannelId(shape.name), offset)
        for number, (offset, shape) in enumerate(zip(offsets, streams, strict=False))
        if shape.kind == CHANNEL
    ]
    if any(shape.kind == CHANNEL and shape.feedback for shape in streams):
        yield "it closes a loop: the stages of a loop cannot adopt queries"
        return
    if read and (batch := _under_way(log)) is not None:
        yield f"its query was killed in batch {batch}, which it would plan from its table again: {_REMEDY}"
    for number, channel, offset in read:
        sinks = [sink for sink in job.sinks if sink.source.channel == channel and sink.table is not None]
        yield from _unread(root, sinks, number, channel, offset)
    for producer in dict.fromkeys(stage for _, channel, _ in read if (stage := _producer(job, channel))):
        yield from _not_with(job, root, state, producer)


def _unread(
    root: Root, sinks: Sequence[SinkSpec], number: int, channel: ChannelId, text: str | None
) -> Iterator[str]:
    """Iterate the reasons why a source of a query has not read exactly what a channel's table holds."""
    offset = delta_offset(text)
    if offset is None:
        yield (
            f"source {number} of its query reads no Delta table, or has read nothing of it, and the declared "
            f"frame reads channel {channel}"
        )
        return
    table = _table(root, sinks, offset.table_id)
    if table is None:
        yield (
            f"source {number} of its query reads the Delta table with the id {offset.table_id}, and no sink "
            f"writes {channel} to that table: declare the sink of the table that the query reads"
        )
        return
    if offset.initial or offset.index >= 0:
        yield f"its query has read a part of a version of {table.uri}: {_REMEDY}"
        return
    newest = _newest_rows(table, offset.version)
    if newest is not None:
        yield (
            f"its query has read {table.uri} up to version {offset.version - 1}, and version {newest} has "
            f"further rows, which a channel would not have: {_REMEDY}"
        )


def _newest_rows(table: Table, since: int) -> int | None:
    """Return the newest version with changed rows among those from `since` on, None if there is none."""
    for version in range(int(table.version), since - 1, -1):
        commit = table.read_commit(version)
        if commit is None or (commit.data_change and (commit.adds or commit.removed)):
            return version
    return None


def _not_with(job: JobSpec, root: Root, state: ControlState | None, producer: StageId) -> Iterator[str]:
    """Iterate the reasons why the query of a producer is not adopted by the same start."""
    given = job.stages[producer].adopt
    if given is None:
        yield (
            f"stage {producer!r}, which it reads, does not adopt the query that has written the table until "
            "now: declare it with adopt=CHECKPOINT, too"
        )
        return
    with suppress(AbsError, OSError):  # its own adoption says what is wrong with it
        log = NativeLog(root.storage.place(given))
        if log.place.read(METADATA) is None:
            return
        if (batch := _under_way(log)) is not None:
            yield (
                f"the query of stage {producer!r} was killed in batch {batch}: the table may hold its rows "
                f"already, and the channel would get them again. Run that query, then this one, once more "
                "with trigger(availableNow=True)"
            )
        native = None if state is None else NativeLog(native_of(root, state, producer))
        if native is not None and native.newest_planned() > log.newest_planned():
            yield (
                f"stage {producer!r}, which it reads, has run already: its later rows are in the channel and "
                "in the table. Queries of a chain are adopted together, by the first start"
            )


def _under_way(log: NativeLog) -> int | None:
    """Return the batch that a query has planned and not finished, None without one."""
    planned = log.newest_planned()
    return int(planned) if planned != log.newest_committed() else None


def _producer(job: JobSpec, channel: ChannelId) -> StageId | None:
    return next((sink.source.stage for sink in job.sinks if sink.source.channel == channel), None)


def _table(root: Root, sinks: Sequence[SinkSpec], table_id: str) -> Table | None:
    for sink in sinks:
        assert sink.table is not None
        table = Table.find(root.storage.place(sink.table))
        if table is not None and table.id == table_id:
            return table
    return None
