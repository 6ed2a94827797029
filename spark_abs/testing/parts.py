"""What the simulated job is made of: the product's own parts, of which a test breaks one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_abs.model import BatchId, Entry, Version
from spark_abs.protocol import credit, cut, gate, rebuild
from spark_abs.protocol.coordinator import Coordinator
from spark_abs.protocol.rebuild import Repeat
from spark_abs.testing.cluster import Native, Planned, State, Table

if TYPE_CHECKING:
    from spark_abs.testing.process import Process


def in_log(table: Table, app: str, version: int) -> bool:
    """Say whether a transaction is already in a table's log."""
    return table.transactions.get(app, -1) >= version


@dataclass(frozen=True, slots=True)
class Parts:
    """What the simulated job is made of; a test puts a broken part in the place of one."""

    decide: Callable[..., gate.Decision] = gate.decide
    emission: Callable[..., cut.Emission] = cut.emission
    captured: Callable[[Native, BatchId], State] = Native.state
    already: Callable[[Table, str, int], bool] = in_log
    written: Callable[[Process, BatchId], Entry | None] = lambda process, batch: process.written(batch)
    coordinator: Callable[..., Coordinator] = Coordinator
    repeats: Callable[..., tuple[Repeat[Planned], ...]] = rebuild.repeats
    capacity: credit.Capacity = credit.ANY
    load: Callable[[Entry], credit.Load | None] = credit.load_of
    slowest: Callable[[Iterable[Version]], Version | None] = credit.slowest
    at_once: Callable[..., bool] = credit.at_once
