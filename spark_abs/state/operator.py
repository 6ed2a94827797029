"""A stateful operator over Arrow tables: the work of one key group in one batch. Runs without Spark."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

from spark_abs.codec import to_json
from spark_abs.errors import StateFunctionFailed, UsageError
from spark_abs.manifest import StateFunction
from spark_abs.model import BatchId
from spark_abs.state.evolution import default_text, difference, evolve, fitted, form_digest
from spark_abs.state.group import (
    Change,
    GroupStore,
    Head,
    KeyGroup,
    read_head,
    segment_schema,
)
from spark_abs.state.keys import Places, by_key, canonical, check_key_groups, check_key_type, hashes
from spark_abs.state.segments import KEY, NEVER, STATE, Flags


class Timeout(StrEnum):
    """The clock of timeouts."""

    NONE = "none"
    PROCESSING_TIME = "processing-time"
    EVENT_TIME = "event-time"


@dataclass(frozen=True)
class Operator:
    """A stateful operator: names, schemas, limits."""

    stage: str
    uid: str
    key_groups: int
    key: tuple[str, ...]
    rows: pa.Schema
    state: pa.Schema
    output: pa.Schema
    timeout: Timeout = Timeout.NONE
    ttl_ms: int | None = None
    max_group_bytes: int = 2**28
    cache_bytes: int = 2**28
    renamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Earlier names of fields of the state."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of fields in states that are older than the field."""
    dropped: tuple[str, ...] = ()
    """Fields that are dropped with their values."""
    form: StateFunction = field(init=False)
    segment: pa.Schema = field(init=False)

    def __post_init__(self) -> None:
        """Check names and types.

        Raises:
            UsageError: a name or type is not valid; the message names the column.
        """
        for name in ("rows", "state", "output"):
            plain = pa.schema([pa.field(f.name, f.type) for f in getattr(self, name)])
            object.__setattr__(self, name, plain)
        check_key_groups(self.key_groups, self.name)
        if not self.key:
            raise UsageError(f"{self.name}: give at least one key column")
        for name in self.key:
            if self.rows.names.count(name) != 1:
                raise UsageError(
                    f"{self.name}: the rows need exactly one key column {name!r}, found {self.rows.names}"
                )
            check_key_type(name, self.rows.field(name).type)
        for name in self.state.names:
            if name in self.key or self.state.names.count(name) > 1:
                raise UsageError(
                    f"{self.name}: state field {name!r} is declared twice, or is also a key column"
                )
        for name in (*self.renamed, *self.defaults):
            if name not in self.state.names:
                raise UsageError(f"{self.name}: the state has no field {name!r}, only {self.state.names}")
        for name in self.dropped:
            if name in self.state.names:
                raise UsageError(f"{self.name}: dropped= names field {name!r}, which the state declares")
        object.__setattr__(self, "segment", segment_schema(self.key_schema, self.state))
        form = StateFunction(
            self.uid,
            self.key_groups,
            key=_texts(self.key_schema),
            state=_texts(self.state),
            timeout=self.timeout.value,
            ttl_ms=self.ttl_ms,
            renamed=dict(self.renamed),
            dropped=self.dropped,
            defaults={
                n: default_text(self.name, value, self.state.field(n)) for n, value in self.defaults.items()
            },
        )
        object.__setattr__(self, "form", form)

    def after(self, stored: StateFunction) -> Operator:
        """Return the operator for a continuation with state of a stored form.

        Raises:
            StateFunctionFailed: it cannot continue; the message has both forms.
        """
        evolved = evolve(stored, self.form)
        if evolved.obstacles:
            said = difference(stored, self.form, evolved.obstacles)
            raise StateFunctionFailed(f"{self.name}: its state does not fit its declaration: {said}")
        return self.as_form(evolved.form)

    def as_form(self, form: StateFunction) -> Operator:
        """Return the operator with a form that has the history of its state."""
        if form == self.form:
            return self
        heir = replace(self)
        object.__setattr__(heir, "form", form)
        return heir

    def fit(self, table: pa.Table) -> pa.Table:
        """Convert the table of a segment to the present columns."""
        return fitted(table, self.form, self.segment)

    @property
    def name(self) -> str:
        """The name for errors."""
        return f"stage {self.stage!r}, function {self.uid!r}" if self.stage else f"function {self.uid!r}"

    @property
    def digest(self) -> str:
        """The digest in the heads of its key groups."""
        return form_digest(self.form)

    @property
    def key_schema(self) -> pa.Schema:
        """The key columns."""
        return pa.schema([self.rows.field(name) for name in self.key])

    @property
    def states_schema(self) -> pa.Schema:
        """Key columns, then state columns: the form in which a function gets states."""
        return pa.schema([*self.key_schema, *self.state])


def _texts(schema: pa.Schema) -> tuple[str, ...]:
    return tuple(f"{f.name}: {f.type}" for f in schema)


@dataclass(frozen=True, slots=True)
class BatchTime:
    """A batch and its clocks in milliseconds; a repeated batch has the same."""

    batch: BatchId
    processing_ms: int
    watermark_ms: int | None = None
    """None: the frame has no watermark."""

    def threshold(self, timeout: Timeout) -> int | None:
        """Return the time before which timeouts are due."""
        match timeout:
            case Timeout.NONE:
                return None
            case Timeout.PROCESSING_TIME:
                return self.processing_ms
            case Timeout.EVENT_TIME:
                return self.watermark_ms


@dataclass(frozen=True, slots=True)
class GroupInput:
    """The input of a function for a key group. `keys` are the keys of the rows, then the timed-out keys.

    `rows` are in the order of `keys`, and in order of arrival within a key: key i has rows `starts[i]` to
    `starts[i+1]`. `states` has the states, with key columns, of the `keys` that are true in `has_state`, in
    that order.
    """

    time: BatchTime
    group: int
    keys: pa.Table
    with_rows: int
    """How many of `keys` have rows; the others have timed out."""
    rows: pa.Table
    starts: Places
    states: pa.Table
    has_state: Flags
    timeouts: Places
    expires: Places
    """When the state of each of `keys` expires."""


@dataclass(frozen=True, slots=True)
class GroupOutput:
    """The result of a function, with one item for each key whose index in `keys` is in `changed`.

    `states` has the state columns and a row for each item of `changed`. Where `removed`, the row has no
    meaning. Where not `updated`, it is the key's old state, with its old time to live.
    """

    output: pa.Table
    changed: Places
    states: pa.Table
    updated: Flags
    removed: Flags
    timeouts: Places


GroupFunction = Callable[[GroupInput], GroupOutput]


class Cache:
    """Key groups that this process has read. The least recently used are dropped first.

    A cached group is used only if the store's head still has the same bytes. A group in use is not in the
    cache, so that changes of a failed batch are lost.
    """

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[str, int], KeyGroup] = OrderedDict()

    def pop(self, scope: str, number: int) -> KeyGroup | None:
        """Take a group out of the cache."""
        return self._groups.pop((scope, number), None)

    def put(self, scope: str, group: KeyGroup, limit: int) -> None:
        """Put a group back and drop groups that exceed `limit` bytes."""
        self._groups[scope, group.number] = group
        total = sum(g.size for g in self._groups.values())
        while total > limit and self._groups:
            _, left = self._groups.popitem(last=False)
            total -= left.size


def run_group(
    operator: Operator,
    function: GroupFunction,
    *,
    store: GroupStore,
    cache: Cache,
    scope: str,
    group: int,
    rows: pa.Table,
    time: BatchTime,
) -> pa.Table:
    """Run a function on one key group in one batch, for its rows and its keys with due timeouts.

    Args:
        operator: the operator.
        function: called once if there is a row or a due timeout.
        store: the store of the group.
        cache: the cache of this process.
        scope: identifies the operator in the cache.
        group: the number of the key group.
        rows: all rows of the group, perhaps none.
        time: the batch and its clocks.

    Returns:
        the output.

    Raises:
        StateFunctionFailed: the function failed, or its state has grown beyond the limit.
        DamageError: stored state is altered.
    """
    known = cache.pop(scope, group)
    state = _open(operator, store, known, group)
    given, where, places = _input(operator, state, group, rows, time)
    if given.keys.num_rows == 0:
        cache.put(scope, state, operator.cache_bytes)
        return operator.output.empty_table()
    answer = function(given)
    if len(answer.changed):
        table = _stored(operator, given, answer)
        change = Change(table, where[answer.changed], places[answer.changed])
        due_ms, fired = time.threshold(operator.timeout), rows.num_rows == 0  # called for what is due alone
        state.apply(change, store, time.processing_ms, due_ms, fired=fired)
        if state.head.size > operator.max_group_bytes:
            raise StateFunctionFailed(
                f"{operator.name}, batch {time.batch}: the state of key group {group} has {state.head.size} "
                f"bytes, the limit spark.abs.state.maxGroupBytes is {operator.max_group_bytes}; keys of this "
                f"batch begin with {_some(given.keys)}: remove states, let them time out, use more key "
                "groups from a new start on, or raise the limit"
            )
    cache.put(scope, state, operator.cache_bytes)
    return answer.output


def _open(operator: Operator, store: GroupStore, known: KeyGroup | None, group: int) -> KeyGroup:
    at = store.read_head()
    if at is None:
        return KeyGroup(group, [], Head(operator.digest), None)
    if known is not None and known.at == at:
        return known
    head = read_head(at)
    if head.operator not in (operator.digest, *operator.form.older):
        raise StateFunctionFailed(
            f"{operator.name}: the state of key group {group} was written by a definition of this function "
            f"of which the root has no record; it is now {to_json(operator.form)}. Declare the key, the "
            "state schema, the timeout, the uid and the number of key groups as they were then"
        )
    return KeyGroup.load(group, store, head=head, at=at, known=known, fit=operator.fit)


def _input(
    operator: Operator, state: KeyGroup, group: int, rows: pa.Table, time: BatchTime
) -> tuple[GroupInput, Places, Places]:
    columns = [canonical(rows[name]) for name in operator.key]
    hashed = hashes(columns)
    order, starts = by_key(columns, hashed)
    first = pa.array(order[starts[:-1]])
    keys = [column.take(first) for column in columns]
    where, places = state.find(keys, hashed[order[starts[:-1]]])
    expired = _due(operator, state, where, places, time)
    where, places = np.concatenate([where, expired[0]]), np.concatenate([places, expired[1]])
    has = state.has_state(where, places, time.processing_ms)
    if len(expired[0]):
        names = pa.schema([pa.field(KEY + f.name, f.type) for f in operator.key_schema])
        due = state.take(*expired, names)
        keys = [pa.concat_arrays([k, canonical(due[n])]) for k, n in zip(keys, names.names, strict=True)]
    stored = pa.schema([f for f in operator.segment if f.name.startswith((KEY, STATE))])
    states = state.take(where[has], places[has], stored)
    ordered = rows.take(pa.array(order))
    for name, column in zip(operator.key, columns, strict=True):
        at = ordered.schema.get_field_index(name)
        ordered = ordered.set_column(at, ordered.schema.field(at), column.take(pa.array(order)))
    given = GroupInput(
        time,
        group,
        keys=pa.table(keys, schema=operator.key_schema),
        with_rows=len(starts) - 1,
        rows=ordered,
        starts=starts,
        states=states.rename_columns(operator.states_schema.names),
        has_state=has,
        timeouts=state.timeouts(where, places),
        expires=state.expires(where, places),
    )
    return given, where, places


def _due(
    operator: Operator, state: KeyGroup, where: Places, places: Places, time: BatchTime
) -> tuple[Places, Places]:
    """Return the due keys without rows: a key with rows is not called for its timeout."""
    threshold = time.threshold(operator.timeout)
    none = np.empty(0, np.int64)
    if threshold is None:
        return none, none
    due_where, due_places = state.due(threshold)
    with_rows = set(zip(where.tolist(), places.tolist(), strict=True))
    if with_rows and len(due_where):
        pairs = zip(due_where.tolist(), due_places.tolist(), strict=True)
        kept = np.array([pair not in with_rows for pair in pairs])
        due_where, due_places = due_where[kept], due_places[kept]
    return due_where, due_places


def _stored(operator: Operator, given: GroupInput, answer: GroupOutput) -> pa.Table:
    """Return the rows to store: changes of the function, and timeouts that have passed.

    The time to live begins with an update: a state that was not updated keeps its expiry.
    """
    keys = [canonical(column).take(pa.array(answer.changed)) for column in given.keys.columns]
    until = NEVER if operator.ttl_ms is None else given.time.processing_ms + operator.ttl_ms
    expires = np.where(answer.updated, until, given.expires[answer.changed])
    return pa.table(
        [
            *keys,
            *(column.combine_chunks() for column in answer.states.columns),
            pa.array(answer.removed),
            pa.array(answer.timeouts, pa.int64(), mask=answer.timeouts == NEVER),
            pa.array(expires, pa.int64(), mask=answer.removed | (expires == NEVER)),
        ],
        schema=operator.segment,
    )


def _some(keys: pa.Table) -> str:
    return ", ".join(str(tuple(row.values())) for row in keys.slice(0, 3).to_pylist())
