"""A store that misbehaves, in the one place where our commits go through deltalake."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deltalake import DeltaTable

from spark_abs.store.log import LogCommit
from spark_abs.store.table import Table

_SLOW_S = 0.1


@dataclass(frozen=True, slots=True)
class Fault:
    """What the store does with commits to some tables."""

    kind: str
    """`lost`: the commit takes place, the reply does not come. `blind`: nor can it be read back, once.
    `slow`: it takes a while. `hang`: it waits until the store is healed, and takes place then."""
    tables: str = ""
    """Part of the URI of those tables; all if empty."""
    every: int = 1
    """Every how many-th of these commits it happens to."""


@dataclass(slots=True)
class Store:
    """Stands before deltalake in a driver process; tells of each commit that it did something to."""

    tell: Callable[[str], None]
    fault: Fault | None = None
    healed: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    seen: int = 0
    unreadable: dict[str, int] = field(default_factory=dict)

    def install(self) -> None:
        commit, read = DeltaTable.create_write_transaction, Table.read_commit

        def faulty_commit(table: DeltaTable, *args: Any, **options: Any) -> None:
            fault = self._fault_for(table.table_uri)
            if fault is None:
                return commit(table, *args, **options)
            if fault.kind == "slow":
                threading.Event().wait(_SLOW_S)
            if fault.kind == "hang":
                self.healed.wait()
            self.tell(table.table_uri)
            at = table.version() + 1
            commit(table, *args, **options)
            if fault.kind in ("slow", "hang"):
                return None
            if fault.kind == "blind":
                self.unreadable[_place(table.table_uri)] = at
            raise OSError("connection reset by peer")

        def faulty_read(table: Table, version: int) -> LogCommit | None:
            if self.unreadable.get(_place(table.uri)) == version:
                raise OSError("connection refused")
            return read(table, version)

        DeltaTable.create_write_transaction = faulty_commit  # type: ignore[assignment, method-assign]
        Table.read_commit = faulty_read  # type: ignore[assignment, method-assign]

    def set(self, fault: Fault | None) -> None:
        """Misbehave from now on; with None, heal."""
        with self.lock:
            self.healed.set()
            self.healed, self.fault, self.seen = threading.Event(), fault, 0
            self.unreadable.clear()

    def _fault_for(self, uri: str) -> Fault | None:
        with self.lock:
            if self.fault is None or self.fault.tables not in uri:
                return None
            self.seen += 1
            return self.fault if self.seen % self.fault.every == 0 else None


def _place(uri: str) -> str:
    return uri.removeprefix("file://").rstrip("/")
