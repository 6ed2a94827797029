"""The input of the small job, and what must come of it: plain Python that knows nothing of the job.

File number n holds two clicks, and the orders that belong to the clicks of file n-1.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

KEYS = 3


class Event(NamedTuple):
    id: int
    key: str
    kind: str
    amount: int


class Pair(NamedTuple):
    id: int
    key: str
    amount: int


class Total(NamedTuple):
    key: str
    n: int
    total: int


def events_of(file: int) -> list[Event]:
    clicks = [Event(i, f"k{i % KEYS}", "click", 0) for i in (2 * file, 2 * file + 1)]
    orders = [Event(i, f"k{i % KEYS}", "order", 7 * i + 1) for i in (2 * file - 2, 2 * file - 1) if i >= 0]
    return clicks + orders


def write_file(base: Path, file: int) -> None:
    """Let a file arrive: whole, under its name, younger than all before it."""
    path = base / "input" / f"{file:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    hidden.write_text("".join(json.dumps(event._asdict()) + "\n" for event in events_of(file)))
    os.utime(hidden, (1_700_000_000 + file, 1_700_000_000 + file))
    hidden.rename(path)


def file_of(event: Event) -> int:
    """Say which file an event came with."""
    return event.id // 2 + (event.kind == "order")


def pairs_of(events: Iterable[Event]) -> Counter[Pair]:
    events = list(events)
    clicks = {e.id: e.key for e in events if e.kind == "click"}
    return Counter(Pair(e.id, clicks[e.id], e.amount) for e in events if e.kind == "order" and e.id in clicks)


def totals_of(pairs: Iterable[Pair]) -> Counter[Total]:
    count: Counter[str] = Counter()
    amount: Counter[str] = Counter()
    for pair in pairs:
        count[pair.key] += 1
        amount[pair.key] += pair.amount
    return Counter(Total(key, count[key], amount[key]) for key in count)
