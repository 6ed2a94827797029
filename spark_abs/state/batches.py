"""A function that is called once for each key group and batch, with Arrow tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from spark_abs.errors import StateFunctionFailed
from spark_abs.state.keys import Places, canonical, hashes, same
from spark_abs.state.operator import GroupFunction, GroupInput, GroupOutput, Operator, Timeout
from spark_abs.state.segments import NEVER

TIMEOUT_COLUMN = "timeout_ms"


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """The further arguments of a vectorised function, beside rows and states."""

    batch: int
    processing_ms: int
    """The time of the batch: one value for the whole batch, and the same value if the batch is repeated."""
    watermark_ms: int | None
    """None if the frame has no watermark."""
    timed_out: pa.Table
    """The keys that have timed out and have no rows, as key columns."""


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """The result of a vectorised function. A pair `(states, output)` means the same, without removals."""

    states: pa.Table | None = None
    """Key columns and state columns, a row for each updated key. An update counts even if the state is
    unchanged. With timeouts also a column `timeout_ms`, null for none; it may be in the past."""
    output: pa.Table | None = None
    removed: pa.Table | None = None
    """Key columns: the keys whose state is removed."""


BatchFunction = Callable[
    [pa.Table, pa.Table, GroupBatch], GroupAnswer | tuple[pa.Table | None, pa.Table | None]
]


def per_batch(operator: Operator, function: BatchFunction) -> GroupFunction:
    """Call a function once with all rows of a key group and the states of their keys.

    Raises:
        StateFunctionFailed: when called: the function failed, or its result is not valid.
    """

    def call(given: GroupInput) -> GroupOutput:
        timed_out = given.keys.slice(given.with_rows)
        told = GroupBatch(given.time.batch, given.time.processing_ms, given.time.watermark_ms, timed_out)
        try:
            answer = function(given.rows, given.states, told)
        except Exception as error:
            raise _failed(operator, given, f"{type(error).__name__}: {error}") from error
        if isinstance(answer, tuple) and len(answer) == 2:
            answer = GroupAnswer(*answer)
        if not isinstance(answer, GroupAnswer):
            raise _failed(operator, given, f"it returned {type(answer).__name__}, not states and output")
        return _Answer(operator, given).read(answer)

    return call


class _Answer:
    """Reads the function's result for one key group."""

    def __init__(self, operator: Operator, given: GroupInput) -> None:
        self._operator, self._given = operator, given
        self._keys = [canonical(column) for column in given.keys.columns]
        hashed = hashes(self._keys)
        self._order = np.argsort(hashed, kind="stable")
        self._sorted = hashed[self._order]

    def read(self, answer: GroupAnswer) -> GroupOutput:
        """Check the function's result and find the new state of each key."""
        operator, timed = self._operator, self._operator.timeout is not Timeout.NONE
        wanted = operator.states_schema
        if timed:
            wanted = wanted.append(pa.field(TIMEOUT_COLUMN, pa.int64()))
        states = self._fit("its states", answer.states, wanted)
        removed = self._fit("its removals", answer.removed, operator.key_schema)
        output = self._fit("its output", answer.output, operator.output)
        places = [self._places(t, what) for t, what in ((states, "its states"), (removed, "its removals"))]
        changed = np.concatenate(places)
        if len(np.unique(changed)) != len(changed):
            raise _failed(operator, self._given, "its states and removals name a key twice")
        silent = self._passed(changed)
        with_state = self._given.has_state[silent]
        old = self._given.states.take(pa.array(np.cumsum(self._given.has_state)[silent[with_state]] - 1))
        names = operator.state.names
        nothing = operator.state.empty_table()
        gone = len(removed) + int((~with_state).sum())
        held = len(states) + int(with_state.sum())
        number = np.arange(held + gone)
        blank = pa.table([pa.nulls(gone, f.type) for f in nothing.schema], schema=nothing.schema)
        timeouts = (
            states[TIMEOUT_COLUMN].fill_null(NEVER).to_numpy() if timed else np.full(len(states), NEVER)
        )
        return GroupOutput(
            output,
            np.concatenate(
                [changed[: len(states)], silent[with_state], changed[len(states) :], silent[~with_state]]
            ),
            states=pa.concat_tables([states.select(names), old.select(names), blank]),
            updated=number < len(states),
            removed=number >= held,
            timeouts=np.concatenate([timeouts, np.full(held + gone - len(states), NEVER)]).astype(np.int64),
        )

    def _passed(self, changed: Places) -> Places:
        """Return the timed-out keys that the result does not mention: their timeout ends."""
        late = np.arange(self._given.with_rows, self._given.keys.num_rows)
        return np.setdiff1d(late, changed).astype(np.int64)

    def _fit(self, what: str, table: pa.Table | None, schema: pa.Schema) -> pa.Table:
        if table is None:
            return schema.empty_table()
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        if not isinstance(table, pa.Table):
            raise _failed(
                self._operator,
                self._given,
                f"{what} is {type(table).__name__}, not an Arrow table",
            )
        missing = [n for n in schema.names if n not in table.column_names]
        unknown = [n for n in table.column_names if n not in schema.names]
        if missing or unknown:
            raise _failed(
                self._operator,
                self._given,
                f"{what} has the columns {table.column_names}, its schema has {schema.names}",
            )
        try:
            return table.select(schema.names).cast(schema)
        except (pa.ArrowException, ValueError) as error:
            raise _failed(self._operator, self._given, f"{what} does not fit its schema: {error}") from error

    def _places(self, table: pa.Table, what: str) -> Places:
        """Return for each row which of the group's keys it is about."""
        keys = [canonical(table[name]) for name in self._operator.key]
        hashed = hashes(keys)
        found = np.full(len(hashed), -1, np.int64)
        at, asked = np.searchsorted(self._sorted, hashed), np.arange(len(hashed))
        while len(asked):
            inside = at < len(self._sorted)
            inside[inside] &= self._sorted[at[inside]] == hashed[asked[inside]]
            asked, at = asked[inside], at[inside]
            if not len(asked):
                break
            rows = pa.array(self._order[at])
            equal = same([k.take(pa.array(asked)) for k in keys], [k.take(rows) for k in self._keys])
            found[asked[equal]] = self._order[at[equal]]
            asked, at = asked[~equal], at[~equal] + 1
        if (found < 0).any():
            strange = (
                table.select(list(self._operator.key)).slice(int(np.argmax(found < 0)), 1).to_pylist()[0]
            )
            raise _failed(
                self._operator,
                self._given,
                f"{what} name the key {tuple(strange.values())}, which neither has rows nor has timed out",
            )
        return found


def _failed(operator: Operator, given: GroupInput, why: str) -> StateFunctionFailed:
    some = ", ".join(str(tuple(key.values())) for key in given.keys.slice(0, 3).to_pylist())
    return StateFunctionFailed(
        f"{operator.name}, key group {given.group} (keys {some}, …), batch {given.time.batch}: {why}"
    )
