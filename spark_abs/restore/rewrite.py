"""Rewrite the state of a stage: read in Spark's format, changed, written in Spark's format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_abs.codec import from_json, to_json
from spark_abs.errors import Refused
from spark_abs.manifest import StageSnapshot, StateFunction
from spark_abs.model import PROVIDER_KEY, CheckpointId, Provider
from spark_abs.restore.hdfs_store import ENTRY, WRITTEN_WITH, keyed_as, read_snapshots, write_snapshots
from spark_abs.snapshots.layout import CODEC_KEY, parse_commit, parse_offsets, with_settings
from spark_abs.snapshots.materialise import fresh_query_id, materialise
from spark_abs.snapshots.operators import HEADS, stored_texts
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.snapshots.take import snapshot_stage
from spark_abs.spark.state_rewriter import (
    FAMILY,
    KEY,
    PARTITION_KEY,
    VALUE,
    Store,
    read_entries,
    rewrite_state,
)
from spark_abs.state.operator import Timeout
from spark_abs.state.packing import GROUP
from spark_abs.state.rows import StateRows, group_numbers, write_groups
from spark_abs.state.unsafe import StoreRow, bytes_of, group_rows, head_row
from spark_abs.store.root import Root
from spark_abs.store.row_batches import pieces
from spark_abs.store.storage import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_STATE_DATA = re.compile(r"state/\d+/\d+/(?!(?:.*/)?_metadata/)")
_PART = "#partition"


@dataclass(frozen=True, slots=True)
class NewState:
    """The new state of a function."""

    rows: StateRows
    frame: DataFrame
    """One row for each key, in the columns of `rows`."""


OperatorChange = NewState | None
"""The new state of an operator; None removes it."""


def require_rewritable(root: Root, snapshot: StageSnapshot) -> None:
    """Refuse a stage whose state cannot be rewritten.

    Raises:
        Refused: its state is in Spark's state format 2.
        DamageError: its files are damaged.
    """
    (commit,) = (f for f in snapshot.files if f.path == f"commits/{int(snapshot.cut_batch)}")
    if parse_commit(stored_texts(root, [commit])[commit.path]).unique_ids is not None:
        raise Refused(
            f"the state of stage {snapshot.stage!r} is in Spark's state format 2, which Spark does not write "
            "anew: unset spark.sql.streaming.stateStore.checkpointFormatVersion for a new root"
        )


def rewrite_stage(
    session: SparkSession,
    kept: StateStorage,
    *,
    checkpoint: CheckpointId,
    snapshot: StageSnapshot,
    scratch: Place,
    changes: Mapping[int, OperatorChange],
    provider: Provider | None = None,
) -> StageSnapshot:
    """Return a stage's snapshot with the state of some operators changed; its files are pinned in `state/`.

    Args:
        session: a session.
        kept: the state storage, opened by the run that owns the root.
        checkpoint: the checkpoint that the new files belong to.
        snapshot: the snapshot to change, which has passed `require_rewritable`.
        scratch: an empty place that the session's executors see.
        changes: the changes by number of the operator; other operators stay as they are.
        provider: the new state store provider; None if it does not change.

    Raises:
        UsageError: rows that cannot be a state.
        DamageError: bytes are missing from `state/` or altered.
        Fenced: a newer run owns the root.
    """
    source, target = scratch.below("source"), scratch.below("target")
    materialise(kept.root, snapshot.files, target=source, query_id=fresh_query_id())
    materialise(
        kept.root,
        [f for f in snapshot.files if not _STATE_DATA.match(f.path)],
        target=target,
        query_id=fresh_query_id(),
    )

    batch, keeper, before = snapshot.cut_batch, provider or Provider(snapshot.provider), snapshot.provider
    partitions = {operator.operator_id: operator.partitions for operator in snapshot.operators}
    codec = parse_offsets(snapshot.offsets).codec

    def change(store: Store, entries: DataFrame) -> DataFrame:
        if store.operator not in changes:
            return entries
        new = changes[store.operator]
        return _emptied(entries) if new is None else _replaced(entries, new)

    def of_hdfs(store: Store) -> DataFrame:
        return read_snapshots(session, source, store, partitions[store.operator], codec)

    def change_of_hdfs(store: Store, like: DataFrame) -> DataFrame:
        return keyed_as(like, change(store, of_hdfs(store)))

    if keeper is Provider.HDFS:
        _set(target, snapshot, {PROVIDER_KEY: keeper, CODEC_KEY: WRITTEN_WITH})
        for operator in snapshot.operators:
            for store in (Store(operator.operator_id, name) for name in operator.stores):
                there = (
                    of_hdfs(store) if before == keeper else read_entries(session, source.uri, batch, store)
                )
                write_snapshots(change(store, there), target, store, int(batch) + 1)
    elif before == Provider.HDFS:
        # Spark reads no entries out of this provider: what it reads in the copy are the types alone.
        _set(target, snapshot, {PROVIDER_KEY: keeper})
        rewrite_state(session, target.uri, target.uri, batch, change_of_hdfs)
    else:
        rewrite_state(session, source.uri, target.uri, batch, change)
    copy = snapshot_stage(kept, checkpoint, target, batch)
    return replace(
        snapshot,
        offsets=copy.offsets,
        operators=copy.operators,
        provider=copy.provider,
        files=copy.files,
        size_new=copy.size_new,
    )


def _set(target: Place, snapshot: StageSnapshot, settings: Mapping[str, str]) -> None:
    """Write settings of the state into the newest batch of the copy, from which Spark takes them."""
    text = with_settings(snapshot.offsets, settings)
    target.write(f"offsets/{int(snapshot.cut_batch)}", text.encode())


def _emptied(entries: DataFrame) -> DataFrame:
    """Return no entries in the same partitions: Spark would optimize a filter to no partitions at all."""
    none: list[tuple[bytes, bytes, str]] = []
    nothing = entries.sparkSession.sparkContext.parallelize(none, entries.rdd.getNumPartitions())
    return keyed_as(entries, entries.sparkSession.createDataFrame(nothing, ENTRY))


def _replaced(entries: DataFrame, new: NewState) -> DataFrame:
    """Replace all key groups; the record of the operator stays in each partition."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import IntegerType, StructField, StructType

    from spark_abs.state.processor import RECORD_GROUP

    count, group = entries.rdd.getNumPartitions(), F.col(f"{PARTITION_KEY}.{GROUP}")
    schema = f"{PARTITION_KEY} struct<{GROUP}: int>, {KEY} binary, {VALUE} binary, {FAMILY} string"
    notes = entries.where((F.col(FAMILY) == HEADS) & (group == RECORD_GROUP))
    notes = notes.mapInArrow(partial(_notes, new.rows.function), schema)
    numbered = StructType([StructField(GROUP, IntegerType()), *new.frame.schema.fields])
    groups = new.frame.mapInArrow(partial(_numbered, new.rows), numbered).groupBy(GROUP)

    rows = new.rows  # what the executors get: not the frame

    def entries_of(group_rows: pa.Table) -> pa.Table:
        return _entries(rows, group_rows)

    written = groups.applyInArrow(entries_of, schema)
    home = F.pmod(F.hash(group), F.lit(count))  # where Spark's own shuffle sends a key group
    placed = notes.withColumn(_PART, F.spark_partition_id()).unionByName(written.withColumn(_PART, home))
    pairs = placed.select(_PART, KEY, VALUE, FAMILY).rdd.map(lambda r: (int(r[0]), (r[1], r[2], r[3])))
    # Partitions of a frame are Spark's to change; those of such a one are not.
    found = pairs.partitionBy(count, lambda partition: partition).values()
    return keyed_as(entries, entries.sparkSession.createDataFrame(found, ENTRY))


def _notes(form: StateFunction, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Put the new form of the function into the record of each partition."""
    from spark_abs.state.processor import RECORD_GROUP, Record

    for batch in batches:
        rows = []
        for value in batch.column(batch.schema.get_field_index(VALUE)).to_pylist():
            note = replace(from_json(Record, bytes_of(value)), function=form)
            rows.append(head_row(RECORD_GROUP, to_json(note).encode()))
        yield _batch([(RECORD_GROUP, row) for row in rows])


def _numbered(rows: StateRows, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Add to each row the number of its key group."""
    for batch in batches:
        table = pa.Table.from_batches([batch]).cast(rows.schema)
        yield from table.add_column(0, GROUP, group_numbers(rows, table)).to_batches()


def _entries(rows: StateRows, given: pa.Table) -> pa.Table:
    groups = write_groups(rows, given.select(rows.schema.names).cast(rows.schema))
    timeout = Timeout(rows.function.timeout)
    entries = [(number, row) for number, held in groups.items() for row in group_rows(number, held, timeout)]
    return pa.Table.from_batches(pieces(_batch(entries)))


def _batch(entries: list[tuple[int, StoreRow]]) -> pa.RecordBatch:
    numbers = [{GROUP: number} for number, _ in entries]
    return pa.record_batch(
        [
            pa.array(numbers, pa.struct([pa.field(GROUP, pa.int32())])),
            pa.array([row.key for _, row in entries], pa.binary()),
            pa.array([row.value for _, row in entries], pa.binary()),
            pa.array([row.family for _, row in entries], pa.string()),
        ],
        names=[PARTITION_KEY, KEY, VALUE, FAMILY],
    )
