"""The state of a stage at a checkpoint, as a frame."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_abs.codec import from_json
from spark_abs.errors import DamageError, UsageError
from spark_abs.manifest import StateFunction
from spark_abs.observe.state_at import StateAt
from spark_abs.snapshots.materialise import fresh_query_id, materialise, passing_place
from spark_abs.snapshots.operators import HEADS, SEGMENTS
from spark_abs.state.packing import GROUP
from spark_abs.state.rows import StateRows, read_group
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.row_batches import in_pieces
from spark_abs.store.storage import Place

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

READER = "statestore"
_SLOT, _BYTES = "slot", "bytes"
_PARTITION = "partition_id"


def state_frame(
    session: SparkSession, root: Root, found: StateAt, before: StateAt | None = None
) -> DataFrame:
    """Read the state, or its differences from the state `before`; see `JobRoot.state`."""
    if before is None:
        return _read(session, root, found)
    then, now = _read(session, root, before), _read(session, root, found)
    if then.dtypes != now.dtypes:
        raise UsageError(
            f"the state schema of stage {found.snapshot.stage!r} differs: {then.schema.simpleString()} at "
            f"checkpoint {before.manifest.id}, and {now.schema.simpleString()} at checkpoint "
            f"{found.manifest.id}. "
            "Read each checkpoint by itself, and compare the columns that both have"
        )
    return changes(then, now, found.identity)


def _read(session: SparkSession, root: Root, found: StateAt) -> DataFrame:
    with native_copy(session, root, found) as native:
        if found.part is None:
            frame = function_rows(session, native, found)
        else:
            frame = read_store(session, native, found, found.part.options).drop(_PARTITION)
        return frame.localCheckpoint(eager=True)


@contextmanager
def native_copy(session: SparkSession, root: Root, found: StateAt) -> Iterator[Place]:
    """Copy the files of a stage's snapshot to a place that all readers see, for the time of the context."""
    _ = session.streams  # a session without it cannot load a state store: it makes their coordinator
    if (session.sparkContext.master or "").startswith("local"):
        with tempfile.TemporaryDirectory(prefix="spark-abs-") as directory:
            place = Place(str(Path(directory) / "native"))
            materialise(root, found.snapshot.files, target=place, query_id=fresh_query_id())
            yield place
        return
    from spark_abs.spark.session import apply_storage_conf

    ledger = Control.open(root).state
    place = passing_place(root.anywhere(ledger.attempt.natives), ledger.newest_run)
    apply_storage_conf(session, root.storage, [place.uri])
    try:
        materialise(root, found.snapshot.files, target=place, query_id=fresh_query_id())
        yield place
    finally:
        with suppress(FileNotFoundError):
            place.fs.delete_dir(place.path)


def read_store(session: SparkSession, native: Place, found: StateAt, options: Mapping[str, str]) -> DataFrame:
    """Open a part of an operator's state with Spark's own reader."""
    reader = session.read.format(READER).option("batchId", int(found.snapshot.cut_batch))
    return reader.option("operatorId", found.operator.id).options(**options).load(native.uri)


def function_rows(session: SparkSession, native: Place, found: StateAt) -> DataFrame:
    """Decode the state of a stateful function: a row for each key."""
    from pyspark.sql import functions as F

    from spark_abs.spark.versions import from_arrow_schema

    heads = read_store(session, native, found, {"stateVarName": HEADS})
    segments = read_store(session, native, found, {"stateVarName": SEGMENTS})
    group = F.col(f"key.{GROUP}").alias(GROUP)
    parts = heads.select(group, F.lit(None).cast("int").alias(_SLOT), f"value.{_BYTES}").unionByName(
        segments.select(group, F.col(f"user_map_key.{_SLOT}").alias(_SLOT), f"user_map_value.{_BYTES}")
    )
    rows = StateRows(_form(found, heads))
    decoded = parts.where(F.col(GROUP) >= 0).groupBy(GROUP)

    def decode(of_group: pa.Table) -> pa.Table:
        return _decode(rows, of_group)

    return decoded.applyInArrow(decode, from_arrow_schema(rows.schema))


def form_of(session: SparkSession, root: Root, found: StateAt) -> StateFunction:
    """Return the form of the function that an operator runs."""
    if found.function is not None:
        return found.function
    with native_copy(session, root, found) as native:
        return _form(found, read_store(session, native, found, {"stateVarName": HEADS}))


def _form(found: StateAt, heads: DataFrame) -> StateFunction:
    """Return the form of the function: from the manifest, or if it is not there, from the state itself."""
    from pyspark.sql import functions as F

    from spark_abs.state.processor import RECORD_GROUP, Record

    if found.function is not None:
        return found.function
    records = heads.where(F.col(f"key.{GROUP}") == RECORD_GROUP).select(f"value.{_BYTES}").limit(1).collect()
    if not records:
        raise DamageError(
            f"checkpoint {found.manifest.id} does not record the function that operator {found.operator.id} "
            f"of stage {found.snapshot.stage!r} runs"
            + (": the edit that made the checkpoint has removed the state" if found.manifest.edited else "")
        )
    return from_json(Record, bytes(records[0][0])).function


def _decode(rows: StateRows, parts: pa.Table) -> pa.Table:
    """Turn the parts of a key group into rows; runs on the executors."""
    head: bytes | None = None
    segments: dict[int, bytes] = {}
    number = parts[GROUP][0].as_py()
    for slot, data in zip(parts[_SLOT].to_pylist(), parts[_BYTES].to_pylist(), strict=True):
        if slot is None:
            head = data
        else:
            segments[slot] = data
    if head is None:
        raise DamageError(f"key group {number} has segments and no head")
    return in_pieces(read_group(rows, number, head, segments))


CHANGE = "change"
ADDED, REMOVED, CHANGED = "added", "removed", "changed"
_SIDES = ("before", "after")
_ID, _ALL, _COUNT, _ROW = "#id", "#all", "#count", "#row"


def changes(before: DataFrame, after: DataFrame, identity: Sequence[str]) -> DataFrame:
    """Return the rows in which two frames with the same columns differ.

    With an identity: `change` (`added`, `removed`, `changed`), the columns of the identity, and structs
    `before` and `after` of the others, null on the side without the row. Without: `change` (`added`,
    `removed`) and the columns; of equal rows the surplus of one frame is returned.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.window import Window

    columns = after.columns
    names = list(identity) or columns
    others = [c for c in columns if c not in identity] if identity else []

    def side(frame: DataFrame, name: str) -> DataFrame:
        # What cannot be compared as it is, is compared by what it holds: maps have no order.
        keys = [comparable(F.col(c), frame.schema[c].dataType) for c in names]
        found = frame.select(
            F.struct(*(k.alias(f"c{i}") for i, k in enumerate(keys))).alias(_ID),
            F.struct(
                F.lit(0).alias("#"),
                *(comparable(F.col(c), frame.schema[c].dataType).alias(c) for c in others),
            ).alias(_ALL),
            F.struct(*columns).alias(_ROW),
            F.lit(1).alias(_COUNT),
        )
        if not identity:
            found = found.withColumn(_COUNT, F.row_number().over(Window.partitionBy(_ID).orderBy(F.lit(1))))
        return found.alias(name)

    left, right = side(before, _SIDES[0]), side(after, _SIDES[1])

    def col(of: str, name: str) -> Column:
        return F.col(f"{of}.`{name}`")

    same_row = col("before", _ID).eqNullSafe(col("after", _ID)) & (
        col("before", _COUNT) == col("after", _COUNT)
    )
    gone, new = col("after", _COUNT).isNull(), col("before", _COUNT).isNull()
    joined = left.join(right, same_row, "full_outer").where(
        gone | new | ~col("before", _ALL).eqNullSafe(col("after", _ALL))
    )
    change = F.when(new, ADDED).when(gone, REMOVED).otherwise(CHANGED).alias(CHANGE)
    row = F.when(gone, col("before", _ROW)).otherwise(col("after", _ROW))
    found = [row.getField(name).alias(name) for name in names]
    if identity:
        for at, absent in zip(_SIDES, (new, gone), strict=True):
            fields = F.struct(*(col(at, _ROW).getField(c).alias(c) for c in others))
            found.append(F.when(~absent, fields).alias(at))
    return joined.select(change, *found)


def comparable(column: Column, kind: DataType) -> Column:
    """Return a column that compares as the given one does, also if it holds maps."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    if not _has_map(kind):
        return column
    match kind:
        case MapType():
            entry = StructType().add("key", kind.keyType).add("value", kind.valueType)
            entries = F.transform(F.map_entries(column), lambda e: comparable(e, entry))
            return F.array_sort(entries)
        case ArrayType():
            return F.transform(column, lambda item: comparable(item, kind.elementType))
        case StructType():
            inside = (comparable(column.getField(f.name), f.dataType).alias(f.name) for f in kind.fields)
            return F.when(column.isNotNull(), F.struct(*inside))
        case _:
            return column


def _has_map(kind: DataType) -> bool:
    from pyspark.sql.types import ArrayType, MapType, StructType

    match kind:
        case MapType():
            return True
        case ArrayType():
            return _has_map(kind.elementType)
        case StructType():
            return any(_has_map(f.dataType) for f in kind.fields)
        case _:
            return False
