"""A function that is called for each key with rows of Python values, as in Spark."""

from __future__ import annotations

import datetime
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from spark_abs.errors import StateFunctionFailed, UsageError
from spark_abs.state.operator import BatchTime, GroupFunction, GroupInput, GroupOutput, Operator, Timeout
from spark_abs.state.segments import NEVER
from spark_abs.state.values import rows as as_rows
from spark_abs.state.values import table as as_table
from spark_abs.state.values import tuples

if TYPE_CHECKING:
    from pyspark.sql import Row

KeyFunction = Callable[[tuple[Any, ...], "Iterator[Row]", "GroupState"], Any]


class GroupState:
    """The state of one key during a call of its function. It works like Spark's `GroupState`.

    Valid only during the call. A timeout holds until the next call; set it again there if needed.
    """

    __slots__ = (
        "_time",
        "_timed_out",
        "_timeout",
        "_timeout_kind",
        "_value",
        "removed",
        "timeout",
        "updated",
    )

    def __init__(
        self, value: tuple[Any, ...] | None, kind: Timeout, time: BatchTime, timed_out: bool
    ) -> None:
        self._value = value
        self._timeout_kind = kind
        self._time = time
        self._timed_out = timed_out
        self.timeout = NEVER
        """When the key times out, in milliseconds."""
        self.updated = False
        """Whether the last change was an `update`."""
        self.removed = False
        """Whether the last change was a `remove`."""

    @property
    def exists(self) -> bool:
        """Whether the key has a state."""
        return self._value is not None

    @property
    def get(self) -> tuple[Any, ...]:
        """The state.

        Raises:
            ValueError: the key has no state.
        """
        if self._value is None:
            raise ValueError("the key has no state: check `exists`, or use `getOption`")
        return self._value

    @property
    def getOption(self) -> tuple[Any, ...] | None:  # noqa: N802 (Spark's name)
        """The state, None if there is none."""
        return self._value

    @property
    def hasTimedOut(self) -> bool:  # noqa: N802 (Spark's name)
        """Whether the function is called because the key has timed out; the call then has no rows."""
        return self._timed_out

    def update(self, newValue: Sequence[Any]) -> None:  # noqa: N803 (Spark's name)
        """Replace the state: one value for each field of the state schema."""
        if newValue is None:
            raise ValueError("a state cannot be None: use `remove`")
        self._value = tuple(newValue)
        self.updated, self.removed = True, False

    def remove(self) -> None:
        """Remove the state."""
        self._value = None
        self.updated, self.removed = False, True

    def setTimeoutDuration(self, durationMs: int) -> None:  # noqa: N802, N803 (Spark's names)
        """Time out after this much processing time."""
        if self._timeout_kind is not Timeout.PROCESSING_TIME:
            raise UsageError("setTimeoutDuration needs timeout='processing-time'")
        if isinstance(durationMs, bool) or not isinstance(durationMs, int) or durationMs <= 0:
            raise ValueError(f"a timeout is a number of milliseconds above 0, found {durationMs!r}")
        self.timeout = self._time.processing_ms + durationMs

    def setTimeoutTimestamp(self, timestampMs: int | datetime.datetime) -> None:  # noqa: N802, N803
        """Time out after the watermark has passed a time: milliseconds since the epoch, or a datetime."""
        if self._timeout_kind is not Timeout.EVENT_TIME:
            raise UsageError("setTimeoutTimestamp needs timeout='event-time'")
        at = timestampMs
        if isinstance(at, datetime.datetime):
            at = int(at.timestamp() * 1000)
        if at <= 0:
            raise ValueError(f"a timeout timestamp is a number of milliseconds above 0, found {at!r}")
        watermark = self._time.watermark_ms
        if watermark is not None and at < watermark:
            raise ValueError(f"a timeout at {at} is before the watermark, {watermark}")
        self.timeout = int(at)

    def getCurrentWatermarkMs(self) -> int:  # noqa: N802 (Spark's name)
        """The watermark, in milliseconds since the epoch."""
        if self._time.watermark_ms is None:
            raise UsageError("the frame has no watermark: call withWatermark before")
        return self._time.watermark_ms

    def getCurrentProcessingTimeMs(self) -> int:  # noqa: N802 (Spark's name)
        """The time of the batch, in milliseconds since the epoch: one value for the whole batch."""
        return self._time.processing_ms

    def __repr__(self) -> str:
        return f"GroupState({'<undefined>' if self._value is None else self._value})"


def per_key(operator: Operator, function: KeyFunction, flat: bool) -> GroupFunction:
    """Call a function for each key: first the keys with rows, then the timed-out keys.

    Args:
        operator: the operator of the function.
        function: `fn(key, rows, state)`; returns rows if `flat`, else one row.
        flat: whether the function returns any number of rows.

    Raises:
        StateFunctionFailed: when called: the function failed, or its result does not fit the schema.
    """

    def call(given: GroupInput) -> GroupOutput:
        keys = tuples(given.keys)
        rows = as_rows(given.rows)
        states = iter(tuples(given.states.select(operator.state.names)))
        starts, has, before = given.starts.tolist(), given.has_state.tolist(), given.timeouts.tolist()
        out: list[Any] = []
        ends: list[int] = []  # of what each key has put out
        changed, values, updated, removed, timeouts = [], [], [], [], []
        for number, key in enumerate(keys):
            late = number >= given.with_rows
            state = GroupState(next(states) if has[number] else None, operator.timeout, given.time, late)
            key_rows = iter(()) if late else iter(rows[starts[number] : starts[number + 1]])
            try:
                answer = function(key, key_rows, state)
                if flat:
                    out.extend(answer if answer is not None else ())
                else:
                    out.append(answer)
            except Exception as error:
                raise failed(operator, given.time, key, error) from error
            ends.append(len(out))
            if state.updated or state.removed or state.timeout != before[number]:
                value = state.getOption
                if value is not None and len(value) != len(operator.state):
                    raise failed(
                        operator,
                        given.time,
                        key,
                        f"the state has {len(value)} values, its schema has {len(operator.state)}",
                    )
                changed.append(number)
                values.append(value)
                updated.append(state.updated)
                removed.append(value is None)
                timeouts.append(state.timeout)
        return GroupOutput(
            _encoded(
                operator,
                given,
                key_of=lambda at: keys[bisect_right(ends, at)],
                what="its output",
                schema=operator.output,
                values=out,
            ),
            np.array(changed, np.int64),
            states=_encoded(
                operator,
                given,
                key_of=lambda at: keys[changed[at]],
                what="its state",
                schema=operator.state,
                values=values,
            ),
            updated=np.array(updated, np.bool_),
            removed=np.array(removed, np.bool_),
            timeouts=np.array(timeouts, np.int64),
        )

    return call


def failed(operator: Operator, time: BatchTime, key: object, cause: Exception | str) -> StateFunctionFailed:
    """Return an error that names stage, function, key and batch."""
    why = f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else cause
    return StateFunctionFailed(f"{operator.name}, key {key}, batch {time.batch}: {why}")


def _encoded(
    operator: Operator,
    given: GroupInput,
    *,
    key_of: Callable[[int], tuple[Any, ...]],
    what: str,
    schema: pa.Schema,
    values: list[Any],
) -> pa.Table:
    try:
        return as_table(values, schema)
    except _UNFIT as error:
        at, why = _first_unfit(schema, values) or (0, error)
        said = f"{what} does not fit its schema: {type(why).__name__}: {why}"
        raise failed(operator, given.time, key_of(at), said) from error


_UNFIT = (pa.ArrowException, ValueError, TypeError, ArithmeticError, AttributeError, KeyError)


def _first_unfit(schema: pa.Schema, values: list[Any]) -> tuple[int, Exception] | None:
    for at, value in enumerate(values):
        try:
            as_table([value], schema)
        except _UNFIT as error:
            return at, error
    return None
