"""Stateful functions in Python: `map_groups_with_state` and its flat and vectorised forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from spark_abs.errors import GraphError, UsageError
from spark_abs.model import PROVIDER_KEY, Provider, RowOutputMode, checked_name
from spark_abs.quantities import duration_ms
from spark_abs.settings import Settings
from spark_abs.spark.worker_start import quick_start
from spark_abs.state.batches import BatchFunction, per_batch
from spark_abs.state.declared import NOTHING, declaring
from spark_abs.state.operator import GroupFunction, Operator, Timeout
from spark_abs.state.packing import GROUP, OUTPUT, ROWS, Pack, Unpack
from spark_abs.state.per_key import KeyFunction, per_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    Schema = str | StructType
    Renamed = Mapping[str, str | Sequence[str]]

KEY_GROUPS = 16
_ROCKSDB = Provider.ROCKSDB.rpartition(".")[2]
_DELAY = "spark.watermarkDelayMs"
TimeoutName = Literal["none", "processing-time", "event-time"]


def map_groups_with_state(
    frame: DataFrame,
    key: str | Sequence[str],
    function: KeyFunction,
    state_schema: Schema,
    output_schema: Schema,
    *,
    uid: str = "state",
    timeout: TimeoutName = "none",
    ttl: str | None = None,
    key_groups: int = KEY_GROUPS,
    output_mode: RowOutputMode = "append",
    renamed: Renamed | None = None,
    defaults: Mapping[str, object] | None = None,
    dropped: str | Sequence[str] = (),
) -> DataFrame:
    """Call `fn(key, rows, state)` for each key with rows, and for each that has timed out; one row comes out.

    The meaning is that of Spark's `mapGroupsWithState`. Python is entered once for a key group and batch,
    and a batch reads and writes of the state what its keys have, not what is kept.

    Choose the number of key groups for long: only an edit of a savepoint changes it (`Edit.rekey`). Two to
    eight for each shuffle partition that the stage may ever have, and so many that none holds more than a few
    hundred megabytes; each group costs a batch that touches it about two milliseconds.

    Args:
        frame: a streaming frame.
        key: one or more columns of atomic types. As Spark groups: nulls are equal, NaNs too, -0.0 is 0.0.
        function: given the key as a tuple, an iterator of rows, and a `GroupState`; returns a row, as a
            tuple, a Row or a dict.
        state_schema: of the tuple that is kept for a key, as DDL text or StructType; any Spark types.
        output_schema: of what comes out.
        uid: by which the state is known; two functions of one stage need two.
        timeout: `none`, `processing-time` or `event-time`: the latter needs `withWatermark` before, and
            drops rows that are late by the watermark, as Spark's own operators do.
        ttl: how long after its last update a state is there, in processing time, for example `2h`. A call
            that does not update it, or sets a timeout only, does not count.
        key_groups: into how many groups keys are divided by their hash.
        output_mode: `append` or `update`, what the query has.
        renamed: fields of the state that had other names when state was written: the new name to the old
            one, or to several. It may stay when all is renamed.
        defaults: what a new field has in states that are there already; null if it is not said. It holds
            for good from when the field comes.
        dropped: fields whose values are given up: a field that is neither declared nor renamed nor named here
            is missed, and the start refused. It may stay when the fields are gone.

    The state schema may change while the state lives: a new field, one with a new name, one that is dropped,
    one of a wider type (an integer, a float or a decimal that holds every value of the one before). States
    are read in the new form; nothing is rewritten. A name that was given up is not taken again. Any other
    change is refused before the job starts, also one within a struct.

    Raises:
        UsageError: a schema, a column or an option cannot be.
        GraphError: the stage's state store or uid cannot be.
    """
    return _stateful(
        frame, key, function=partial(per_key, function=function, flat=False),
        state_schema=state_schema, output_schema=output_schema, uid=uid, timeout=timeout, ttl=ttl,
        key_groups=key_groups, output_mode=output_mode, renamed=renamed, defaults=defaults, dropped=dropped,
    )  # fmt: skip


def flat_map_groups_with_state(
    frame: DataFrame,
    key: str | Sequence[str],
    function: KeyFunction,
    state_schema: Schema,
    output_schema: Schema,
    *,
    uid: str = "state",
    timeout: TimeoutName = "none",
    ttl: str | None = None,
    key_groups: int = KEY_GROUPS,
    output_mode: RowOutputMode = "append",
    renamed: Renamed | None = None,
    defaults: Mapping[str, object] | None = None,
    dropped: str | Sequence[str] = (),
) -> DataFrame:
    """As `map_groups_with_state`, with a function that returns an iterator of any number of rows."""
    return _stateful(
        frame, key, function=partial(per_key, function=function, flat=True),
        state_schema=state_schema, output_schema=output_schema, uid=uid, timeout=timeout, ttl=ttl,
        key_groups=key_groups, output_mode=output_mode, renamed=renamed, defaults=defaults, dropped=dropped,
    )  # fmt: skip


def map_batches_with_state(
    frame: DataFrame,
    key: str | Sequence[str],
    function: BatchFunction,
    state_schema: Schema,
    output_schema: Schema,
    *,
    uid: str = "state",
    timeout: TimeoutName = "none",
    ttl: str | None = None,
    key_groups: int = KEY_GROUPS,
    output_mode: RowOutputMode = "append",
    renamed: Renamed | None = None,
    defaults: Mapping[str, object] | None = None,
    dropped: str | Sequence[str] = (),
) -> DataFrame:
    """Call `fn(rows, states, batch)` once for a key group: everything is Arrow, nothing is done per key.

    `rows` has all rows of the group, in the frame's columns, those of a key together and as they came.
    `states` has key and state columns, a row for each key that has rows or has timed out, and a state.
    `batch` is a `GroupBatch`: clocks, and the keys that have timed out.

    The function returns `(states, output)`, two tables or None, or a `GroupAnswer`, which can also remove.
    New states have key and state columns, with timeouts also `timeout_ms`; a key that is not mentioned
    keeps its state, and its timeout unless that has passed. A state that is returned counts as updated, also
    if it is as it was given; one that is not mentioned does not.

    A `timeout_ms` may be past already, as a row that comes late may make it: its key times out in the same
    batch, once all rows are through. If the function was called without rows, it is too late for that: the
    key times out when the clock has moved on.

    For all else see `map_groups_with_state`.
    """
    return _stateful(
        frame, key, function=partial(per_batch, function=function),
        state_schema=state_schema, output_schema=output_schema, uid=uid, timeout=timeout, ttl=ttl,
        key_groups=key_groups, output_mode=output_mode, renamed=renamed, defaults=defaults, dropped=dropped,
    )  # fmt: skip


def _stateful(
    frame: DataFrame,
    key: str | Sequence[str],
    *,
    function: Callable[[Operator], GroupFunction],
    state_schema: Schema,
    output_schema: Schema,
    uid: str,
    timeout: TimeoutName,
    ttl: str | None,
    key_groups: int,
    output_mode: RowOutputMode,
    renamed: Renamed | None,
    defaults: Mapping[str, object] | None,
    dropped: str | Sequence[str],
) -> DataFrame:
    from pyspark.sql.pandas.types import to_arrow_schema

    from spark_abs.state.processor import Processor

    spark, declared = frame.sparkSession, declaring()
    if output_mode not in get_args(RowOutputMode):
        raise UsageError(f"output_mode {output_mode!r} is neither 'append' nor 'update'")
    if timeout not in list(Timeout):
        raise UsageError(f"timeout {timeout!r} is not one of {', '.join(Timeout)}")
    kind, event_time = Timeout(timeout), _event_time(frame)
    if kind is Timeout.EVENT_TIME and event_time is None:
        raise UsageError(
            "timeout='event-time' needs a watermark: call withWatermark before, and keep its column"
        )
    provider = declared.provider if declared is not None else None
    if not (provider or spark.conf.get(PROVIDER_KEY) or "").endswith(_ROCKSDB):
        where = f"stage {declared.stage!r}: " if declared is not None else ""
        raise GraphError(
            f"{where}stateful functions keep their state in RocksDB: use state_provider='rocksdb'"
        )
    if declared is not None and declared.settings is not None:
        settings = declared.settings
    else:
        settings = Settings.of_session(spark, None, {})
    names = (key,) if isinstance(key, str) else tuple(key)
    _check_collations(frame, names)
    output = _struct(spark, output_schema)
    operator = Operator(
        declared.stage if declared is not None else "",
        checked_name(uid, "uid"),
        key_groups=key_groups,
        key=names,
        rows=to_arrow_schema(frame.schema, timezone="UTC"),
        state=to_arrow_schema(_struct(spark, state_schema), timezone="UTC"),
        output=to_arrow_schema(output, timezone="UTC"),
        timeout=kind,
        ttl_ms=_ttl(ttl),
        max_group_bytes=settings.max_group_bytes,
        cache_bytes=settings.cache_bytes,
        renamed={field: (n,) if isinstance(n, str) else tuple(n) for field, n in (renamed or {}).items()},
        defaults=dict(defaults or {}),
        dropped=(dropped,) if isinstance(dropped, str) else tuple(dropped),
    )
    if declared is not None and uid in declared.evolved:
        operator = operator.as_form(declared.evolved[uid])
    late = spark.sparkContext.accumulator(0)
    before = declared.before if declared is not None else NOTHING
    if declared is not None:
        declared.add(operator.note, late)
    mode = {Timeout.NONE: "None", Timeout.PROCESSING_TIME: "ProcessingTime", Timeout.EVENT_TIME: "EventTime"}
    with quick_start(spark.sparkContext):
        packed = frame.mapInArrow(Pack(operator.rows, names, key_groups), f"{GROUP} int, {ROWS} binary")
        grouped = packed.groupBy(GROUP).transformWithStateInPandas(
            Processor(operator, function(operator), event_time, late, before),
            f"{OUTPUT} binary",
            output_mode,
            mode[kind],
        )
        return grouped.mapInArrow(Unpack(operator.output, uid), output)


def _struct(spark: SparkSession, schema: Schema) -> StructType:
    from pyspark.sql.types import StructType

    if isinstance(schema, StructType):
        return schema
    return spark.createDataFrame([], schema).schema  # Spark reads DDL, with any of its types


def _event_time(frame: DataFrame) -> str | None:
    """Return the column that the nearest watermark is about."""
    marked = [field.name for field in frame.schema.fields if _DELAY in (field.metadata or {})]
    return marked[0] if marked else None


def _check_collations(frame: DataFrame, key: Sequence[str]) -> None:
    from pyspark.sql.types import StringType

    for field in frame.schema.fields:
        kind = field.dataType
        if field.name in key and isinstance(kind, StringType) and kind.collation != "UTF8_BINARY":
            raise UsageError(
                f"key column {field.name!r} has the collation {kind.collation}, and keys are compared by "
                "their bytes: cast it to string first"
            )


def _ttl(ttl: str | None) -> int | None:
    if ttl is None:
        return None
    try:
        found = duration_ms(ttl)
    except ValueError as error:
        raise UsageError(f"ttl {ttl!r}: {error}") from None
    if found < 1:
        raise UsageError("ttl must be above 0")
    return found
