"""The registry of the kinds of sinks outside, and how a sink is made again from what `control/` keeps of it.

A new kind is a folder beside this module and a line in `SinkKinds`. The folder has a module `kind` with a
`KIND`, see `spark_abs.sinks.kind`. Nothing else in the package names a kind, but for the class that users
import: it is a line in `spark_abs/__init__.pyi`, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypedDict

from spark_abs.codec import from_json, to_json
from spark_abs.errors import UsageError
from spark_abs.sinks.kind import Kind, Session, SinkTable, no_session
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage

if TYPE_CHECKING:
    import spark_abs


class SinkKinds(TypedDict, total=False):
    """The keywords of `Job.sink` for sinks outside: each is a kind, with the class that says more of it."""

    postgres: spark_abs.Postgres | str | None
    kafka: spark_abs.Kafka | str | None
    iceberg: spark_abs.Iceberg | str | None


OWN = "own"
"""Stands for a kind in the record of a sink that a user has written."""
_DECLARED_AS_TABLE = "delta"
"""The kind that no keyword is for: `Job.sink(table=…)` declares it, if rows are visible after checkpoints."""


def kinds() -> tuple[str, ...]:
    return (*SinkKinds.__annotations__, _DECLARED_AS_TABLE)


def kind(name: str) -> Kind[Any] | None:
    """Return a kind, None for `OWN` and for what only a newer version knows."""
    if name not in kinds():
        return None
    found: Kind[Any] = import_module(f"spark_abs.sinks.{name}.kind").KIND
    return found


def keywords(given: Mapping[str, object]) -> Mapping[str, object]:
    """Return what was given for each keyword, None for nothing.

    Raises:
        TypeError: there is no such keyword.
    """
    for name in given:
        if name not in SinkKinds.__annotations__:
            raise TypeError(f"Job.sink() got an unexpected keyword argument {name!r}")
    return {name: given.get(name) for name in SinkKinds.__annotations__}


def described(given: Mapping[str, object], table: object = None) -> tuple[str, str]:
    """Return the kind of a sink, and as JSON what makes it again; `OWN` and nothing if no kind was given.

    Args:
        given: for keywords of `SinkKinds`: a name, or what says more.
        table: of a Delta table that gets its rows after checkpoints, what makes it again.

    Raises:
        UsageError: what was given for a kind is not of it.
    """
    if table is not None:
        return _DECLARED_AS_TABLE, to_json(table)
    for name, value in given.items():
        found = kind(name) if value is not None else None
        if found is not None:
            config = found.config(value) if isinstance(value, str) else value
            if type(config) is not found.config:
                public = f"spark_abs.{found.config.__name__}"
                raise UsageError(f"{name}= takes a name as text or a {public}, not {value!r}")
            return name, to_json(config)
    return OWN, ""


def made_again(name: str, settings: str, root: Root, session: Session = no_session) -> TwoPhaseSink | None:
    """Make a sink of a kind; None for a sink that a user has written.

    Args:
        name: of the kind.
        settings: what `control/` keeps of the sink.
        root: the job's root.
        session: called only where Spark is needed: a table of Delta is changed that is not plain, or a
            predicate says which rows delete.

    Raises:
        UsageError: the extra of the package that the kind needs is not installed, or see `require_supported`.
    """
    found = kind(name)
    if found is None:
        return None
    require_supported(name, settings)
    try:
        return found.sink(from_json(found.config, settings), root, session)
    except ImportError as missing:
        raise UsageError(str(missing)) from missing


def require_supported(name: str, settings: str) -> None:
    """Refuse a recorded sink of an earlier version that this version cannot continue.

    Raises:
        UsageError: says how to go on.
    """
    found = kind(name)
    if found is not None and found.require_supported is not None:
        found.require_supported(settings)


def table_of(name: str, settings: str, storage: Storage) -> SinkTable | None:
    """Return the Delta table that a sink of a kind writes, None if it writes none; needs no extra."""
    found = kind(name)
    if found is None or found.table is None:
        return None
    return found.table(from_json(found.config, settings), storage)


def title_of(name: str) -> str:
    """Return what people call a kind, empty for a sink that a user has written."""
    found = kind(name)
    return "" if found is None else found.title
