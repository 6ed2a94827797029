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
    """Call `fn(key, rows, state)` for each key with rows and for each timed-out key; it returns one row.

    It works like Spark's `mapGroupsWithState`. Spark calls Python once for each key group and batch, and a
    batch reads and writes only the state of the keys it touches.

    Choose the number of key groups once: only an edit of a savepoint changes it (`Edit.rekey`). Take two to
    eight for each shuffle partition that the stage may ever have, and enough that none holds more than a few
    hundred megabytes. Each group that a batch touches costs it about two milliseconds.

    Args:
        frame: a streaming frame.
        key: one or more columns of atomic types. As in Spark's grouping, nulls are equal, NaNs are equal, and
            -0.0 is 0.0.
        function: given the key as a tuple, an iterator of rows, and a `GroupState`; returns a row, as a
            tuple, a Row or a dict.
        state_schema: of a key's state, a tuple, as DDL text or StructType; any Spark types.
        output_schema: of the returned rows.
        uid: identifies the state; functions of one stage need different uids.
        timeout: `none`, `processing-time` or `event-time`: the latter needs `withWatermark` before, and
            drops rows that are late by the watermark, as Spark's own operators do.
        ttl: how long a state exists after its last update, in processing time, for example `2h`. A call that
            does not update the state, or only sets a timeout, does not prolong it.
        key_groups: the number of groups into which keys are divided by hash.
        output_mode: the query's, `append` or `update`.
        renamed: fields of the state with their earlier names: new name to old name, or to several. Entries
            may stay after the rename.
        defaults: values of new fields in existing states; null without a default. The default at a field's
            first start is fixed for good.
        dropped: fields whose values may be lost. If a stored field is neither declared nor renamed nor named
            here, the start is refused. Entries may stay after the fields are gone.

    The state schema may change between runs: fields may be added, renamed, dropped, or get a wider type (an
    integer, a float or a decimal that holds every value of the old type). Old states are converted when they
    are read; nothing is rewritten. The name of a dropped field cannot be used again. Any other change, also
    within a struct, is refused before the job starts.

    Raises:
        UsageError: a schema, a column or an option is not valid.
        GraphError: the stage's state store is not supported, or the uid is used twice.
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
    """Like `map_groups_with_state`, with a function that returns an iterator of any number of rows."""
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
    """Call `fn(rows, states, batch)` once for each key group, with Arrow tables: no Python per key.

    `rows` has all rows of the group in the frame's columns, grouped by key and in order of arrival. `states`
    has key and state columns, with a row for each key that has a state and has rows or has timed out. `batch`
    is a `GroupBatch` with the clocks and the timed-out keys.

    The function returns `(states, output)`, each a table or None, or a `GroupAnswer`, which can also remove
    states. New states have key and state columns, with timeouts also `timeout_ms`. A returned state counts as
    updated, even if it is unchanged. A key that is not returned keeps its state, is not updated, and keeps
    its timeout unless it has passed.

    A `timeout_ms` may already be in the past, for example after a late row: the key then times out in the
    same batch, after all rows. If the function was called without rows, the key times out in a later batch,
    once the clock has advanced.

    All other parameters are as in `map_groups_with_state`.
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
    from spark_abs.spark.session import require_classic
    from spark_abs.spark.versions import to_arrow_schema
    from spark_abs.state.processor import Processor

    spark, declared = frame.sparkSession, declaring()
    require_classic(spark, "a stateful function")
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
        rows=to_arrow_schema(frame.schema),
        state=to_arrow_schema(_struct(spark, state_schema)),
        output=to_arrow_schema(output),
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
        declared.add(operator.form, late)
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
    """Return the column of the nearest watermark."""
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
