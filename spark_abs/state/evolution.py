"""A stateful function continues with state that an earlier form of it has written.

Stored state is not rewritten: a segment is converted to the present form when it is read. The form has the
earlier names of fields, the dropped fields and the value of each field that a segment lacks, so that segments
of any age can be read. The name of a dropped field cannot be used again: an old segment may still hold it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import pyarrow as pa

from spark_abs.codec import to_plain
from spark_abs.errors import UsageError
from spark_abs.manifest import StateFunction
from spark_abs.state.segments import STATE
from spark_abs.state.values import table as as_table

_LATER = ("renamed", "dropped", "defaults")
"""Fields added to forms later: part of the digest only if they are not empty."""

_INTEGERS = ("int8", "int16", "int32", "int64")
_WIDER: Mapping[str, tuple[str, ...]] = {
    **{kind: _INTEGERS[at + 1 :] for at, kind in enumerate(_INTEGERS)},
    "float": ("double",),
}
_EXACT = {"int8": ("float", "double"), "int16": ("float", "double"), "int32": ("double",)}
_DECIMAL = re.compile(r"decimal128\((\d+), (-?\d+)\)")


@dataclass(frozen=True, slots=True)
class Evolved:
    """The evolution of a stored form to a declared form."""

    form: StateFunction
    """The declared form, with the history in the stored form."""
    obstacles: tuple[str, ...]
    """Why the evolution is impossible; empty if it is possible."""


def form_digest(form: StateFunction) -> str:
    """Return the digest of a function's form for heads. The time to live is not part of the form."""
    plain = {k: v for k, v in to_plain(form).items() if k != "older" and (v or k not in _LATER)}
    text = json.dumps({**plain, "ttl_ms": None}, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def evolve(stored: StateFunction, declared: StateFunction) -> Evolved:
    """Return how a function continues with state of a stored form. Pure and idempotent.

    A field may be new, with a default or null in existing states; renamed, if `renamed` has it; dropped, if
    `dropped` has it; or have a wider type. The default from a field's first start stays. Further names in
    `dropped` are not recorded, so they may stay after the field is gone.
    """
    sources = {name: _source(stored, declared, name) for name, _ in _fields(declared)}
    obstacles = [
        *_fixed(stored, declared),
        *_mixed(stored, declared, sources),
        *_lost(stored, declared, sources),
    ]
    renamed, defaults = {}, {}
    for name, source in sources.items():
        past = declared if source is None else stored
        if (source or name) in past.defaults:
            defaults[name] = past.defaults[source or name]
        if source is not None:
            names = (source, *stored.renamed.get(source, ()))
            if before := tuple(other for other in names if other != name):
                renamed[name] = before
    used = set(sources.values())
    gone = [
        n for name, _ in _fields(stored) if name not in used for n in (name, *stored.renamed.get(name, ()))
    ]
    form = replace(
        declared, renamed=renamed, dropped=(*stored.dropped, *gone), defaults=defaults, older=stored.older
    )
    if form_digest(form) != form_digest(stored):
        form = replace(form, older=(*stored.older, form_digest(stored)))
    return Evolved(form, tuple(dict.fromkeys(obstacles)))


def widens(old: str, new: str) -> bool:
    """Say whether a type can hold every value of another type; types are named as in the form."""
    before, after = _DECIMAL.fullmatch(old), _DECIMAL.fullmatch(new)
    if before and after:
        scale = int(after[2]) - int(before[2])
        return scale >= 0 and int(after[1]) - int(before[1]) >= scale
    return new in _WIDER.get(old, ()) or new in _EXACT.get(old, ())


def fitted(table: pa.Table, form: StateFunction, schema: pa.Schema) -> pa.Table:
    """Convert the state columns of a segment's table to the present form; other columns stay.

    Args:
        table: the segment as it was written, at any time.
        form: the present form, which evolved from the form of the segment.
        schema: the columns of a segment in the present form.
    """
    wanted = [field for field in schema if field.name.startswith(STATE)]
    names = [name for name in table.column_names if name.startswith(STATE)]
    if names == [f.name for f in wanted] and all(table.schema.field(f.name).type == f.type for f in wanted):
        return table
    columns = {name: table[name] for name in table.column_names if not name.startswith(STATE)}
    for field in wanted:
        name = field.name.removeprefix(STATE)
        known = [STATE + n for n in (name, *form.renamed.get(name, ())) if STATE + n in names]
        if known:
            columns[field.name] = table[known[0]].cast(field.type)
        else:
            value = json.loads(form.defaults[name]) if name in form.defaults else None
            columns[field.name] = constant(value, field, table.num_rows)
    ordered = [f.name for f in schema if f.name in columns]
    return pa.table([columns[name] for name in ordered], names=ordered)


def default_text(function: str, value: object, field: pa.Field) -> str:
    """Return the default of a field as stored in a form.

    Raises:
        UsageError: the default cannot be stored or does not fit the field; the message names the function.
    """
    try:
        text = json.dumps(value)
        constant(json.loads(text), field, 1)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise UsageError(
            f"{function}: the default of {field.name!r} must be a number, a text, a truth value, or lists "
            f"and dicts of them that fit {field.type}: {error}"
        ) from error
    return text


def constant(value: object, field: pa.Field, rows: int) -> pa.Array:
    """Return a column with the same value in each row.

    Raises:
        ValueError, TypeError, pyarrow.ArrowException: the value does not have the field's type.
    """
    one = as_table([(value,)], pa.schema([field]))[field.name].combine_chunks()
    return one.take(pa.array([0] * rows, pa.int64()))


def difference(stored: StateFunction, declared: StateFunction, obstacles: Sequence[str]) -> str:
    """Describe why a function cannot continue with its state, with both forms side by side."""
    rows = [("", "stored", "declared"), *_compared(stored, declared)]
    widths = [max(len(row[at]) for row in rows) for at in range(2)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    return "\n".join(["; ".join(obstacles), *lines])


def _compared(stored: StateFunction, declared: StateFunction) -> Iterator[tuple[str, str, str]]:
    for what, old, new in (
        ("uid", stored.uid, declared.uid),
        ("key groups", str(stored.key_groups), str(declared.key_groups)),
        ("timeout", stored.timeout, declared.timeout),
    ):
        yield what, old, new
    for old, new in zip_longest(stored.key, declared.key, fillvalue="-"):
        yield "key", old, new
    fields = dict(_fields(stored))
    for name, kind in _fields(declared):
        source = _source(stored, declared, name)
        old = "-" if source is None or source not in fields else f"{source}: {fields.pop(source)}"
        yield "state", old, f"{name}: {kind}"
    for name, kind in fields.items():
        yield "state", f"{name}: {kind}", "-"


def _fixed(stored: StateFunction, declared: StateFunction) -> Iterator[str]:
    """Describe changes of parts that are fixed: they decide where a key is stored, and its clock."""
    if stored.uid != declared.uid:
        yield "the state belongs to another function: the functions of a stage keep their order"
    if stored.key != declared.key:
        yield "the key columns changed: state would be assigned to wrong keys"
    if stored.key_groups != declared.key_groups:
        yield (
            f"the state has {stored.key_groups} key groups, {declared.key_groups} are declared: the number "
            "decides where a key is kept"
        )
    if stored.timeout != declared.timeout:
        yield (
            f"the timeout was {stored.timeout} when the state was written and is now {declared.timeout}: "
            "Spark fixes the kind of timeout of a stage, so give the stage another name"
        )


def _mixed(
    stored: StateFunction, declared: StateFunction, sources: Mapping[str, str | None]
) -> Iterator[str]:
    """Describe the fields that would lose values or take the values of another field."""
    old = dict(_fields(stored))
    taken = {*stored.dropped, *(name for names in stored.renamed.values() for name in names)}
    for name, kind in _fields(declared):
        source, before = sources[name], declared.renamed.get(name, ())
        if source is None:
            if before:
                yield f"renamed= says that field {name!r} was {_any(before)}, which the state does not have"
            elif name in taken:
                yield f"an earlier form of the state had a field {name!r}: give the new field another name"
            continue
        if source == name and (both := [other for other in before if other != name and other in old]):
            yield f"renamed= says that field {name!r} was {_any(both)}, and the state has both"
        if list(sources.values()).count(source) > 1:
            yield f"renamed= makes two fields of field {source!r}"
        if source != name and name in taken - set(stored.renamed.get(source, ())):
            yield f"an earlier form of the state had a field {name!r}: give the renamed field another name"
        if old[source] != kind and not widens(old[source], kind):
            yield f"the type of field {name!r} changes from {old[source]} to {kind}, which may lose values"


def _lost(stored: StateFunction, declared: StateFunction, sources: Mapping[str, str | None]) -> Iterator[str]:
    """Describe the fields that would be dropped without a declaration, each with its possible new name."""
    new = {name: kind for name, kind in _fields(declared) if sources[name] is None}
    for name, kind in _fields(stored):
        if name in sources.values() or not {name, *stored.renamed.get(name, ())}.isdisjoint(declared.dropped):
            continue
        heirs = [other for other, wider in new.items() if kind == wider or widens(kind, wider)]
        heir = heirs[0] if heirs else "<its new name>"
        yield (
            f"field {name!r} is no longer declared, and its values would be lost: give renamed={{{heir!r}: "
            f"{name!r}}} if the field was renamed, or dropped={name!r} to give it up"
        )


def _source(stored: StateFunction, declared: StateFunction, name: str) -> str | None:
    """Return the stored field that a declared field continues, None for a new field."""
    fields = [field for field, _ in _fields(stored)]
    if name in fields:
        return name
    for before in declared.renamed.get(name, ()):
        heirs = [field for field in fields if before in (field, *stored.renamed.get(field, ()))]
        if heirs:
            return heirs[0]
    return None


def _fields(form: StateFunction) -> list[tuple[str, str]]:
    """Return name and type of each field of the state."""
    parts = [column.partition(": ") for column in form.state]
    return [(name, kind) for name, _, kind in parts]


def _any(names: Sequence[str]) -> str:
    return " or ".join(repr(name) for name in names)
