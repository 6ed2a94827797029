"""The two jobs of a soak: their input, and how far what they wrote is from what they should have written."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

import oracle
from generate_events import KINDS, START, Traffic, write_file
from spark_abs.model import Position, positions_of
from tests.crash import facts
from tests.crash.expected import Event, events_of, file_of, pairs_of, totals_of
from tests.crash.facts import SINKS
from tests.crash.jobs import Small

WITHIN, WINDOW = pd.Timedelta("60s"), pd.Timedelta("1min")
BACKLOG = 3
TAIL = 60
"""Files after all others, which let the watermarks pass what came before."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Differences from what a batch query says, in rows; order in files of a channel."""

    expected: int = 0
    lost: int = 0
    duplicated: int = 0
    out_of_order: int = 0

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.expected + other.expected,
            self.lost + other.lost,
            self.duplicated + other.duplicated,
            self.out_of_order + other.out_of_order,
        )

    @property
    def wrong(self) -> int:
        return self.lost + self.duplicated + self.out_of_order


class Soaked(Protocol):
    """A job under the soak."""

    base: Path

    def feed(self) -> None:
        """Let files arrive, as many as the job takes."""

    def feed_tail(self) -> None:
        """Let the last files arrive."""

    def check(self) -> Verdict:
        """Check what must hold whenever the job is down; rows that are still under way are not lost."""

    def check_complete(self) -> Verdict:
        """Check that all input has come through."""


def misplaced(seen: list[int]) -> int:
    """Count the files that are not where they belong."""
    return sum(found != wanted for found, wanted in zip(seen, facts.in_order(seen), strict=True))


def compared(found: Iterable[Any], wanted: Counter[Any]) -> Verdict:
    have = Counter(found)
    return Verdict(wanted.total(), (wanted - have).total(), (have - wanted).total())


@dataclass(slots=True)
class SmallSoaked:
    """The job of the crash tests; every checkpoint of it is compared row by row."""

    base: Path
    small: Small = field(init=False)

    def __post_init__(self) -> None:
        self.small = Small(self.base)

    def feed(self) -> None:
        self.small.feed()

    def feed_tail(self) -> None:
        self.feed()

    def check(self) -> Verdict:
        facts.check(self.base)
        return Verdict()

    def check_complete(self) -> Verdict:
        self.check()
        events = [event for file in range(self.small.files) for event in events_of(file)]
        pairs = pairs_of(events)
        wanted: tuple[Counter[Any], ...] = (Counter(events), pairs, totals_of(pairs.elements()))
        arrivals, paired = (facts.table(self.base, sink) for sink in SINKS[:2])
        found = (arrivals, paired, facts.last_totals(self.base))
        order = sum(
            misplaced(facts.files_in_order(self.base, name, Event._fields, lambda row: file_of(Event(**row))))
            for name in ("events.main", "events.orders")
        )
        return sum((compared(f, w) for f, w in zip(found, wanted, strict=True)), Verdict(out_of_order=order))


@dataclass(slots=True)
class AttributionSoaked:
    """The job of the demo, compared with its own oracle; the seed says what its events are."""

    base: Path
    seed: int
    files: int = 0
    arrived: dict[str, int] = field(default_factory=dict)
    """The file that each event came with, by the event's id."""

    def feed(self) -> None:
        while self.files - self._consumed() < BACKLOG:
            self._write()

    def feed_tail(self) -> None:
        for _ in range(TAIL):
            self._write()

    def check(self) -> Verdict:
        facts.check_root(self.base, ("attributed", "totals"))
        order = sum(misplaced(self._order(kind)) for kind in KINDS)
        if not self.files:
            return Verdict()
        return Verdict(duplicated=self._compare(pd.Timestamp(START)).duplicated, out_of_order=order)

    def check_complete(self) -> Verdict:
        end = pd.Timestamp(START) + (self.files - TAIL) * pd.Timedelta(seconds=Traffic().slice_seconds)
        return self.check() + self._compare(end)

    def _compare(self, cutoff: pd.Timestamp) -> Verdict:
        found = oracle.compare(self.base, cutoff, WITHIN, WINDOW)
        return sum((Verdict(d.expected, d.lost, d.extra) for d in found), Verdict())

    def _order(self, kind: str) -> list[int]:
        key = f"{kind[:-1]}_id"
        return facts.files_in_order(self.base, f"{kind}.main", (key,), lambda row: self.arrived[row[key]])

    def _write(self) -> None:
        for kind in KINDS:
            events = Traffic(seed=self.seed).file(kind, self.files)
            self.arrived |= {str(event[f"{kind[:-1]}_id"]): self.files for event in events}
            write_file(self.base / "unseen", kind, self.files, "json", events)
            name = f"{kind}-{self.files:06d}.json"
            os.utime(self.base / "unseen" / kind / name, (1_700_000_000 + self.files,) * 2)
            target = self.base / "input" / kind
            target.mkdir(parents=True, exist_ok=True)
            (self.base / "unseen" / kind / name).rename(target / name)
        self.files += 1

    def _consumed(self) -> int:
        """Return how many files have gone into the join; a source takes one a batch, an entry each."""
        attempts = (p for p in self.base.glob("root/native/*") if p.name.isdigit())
        natives = sorted(attempts, key=lambda p: int(p.name))
        newest = _newest(natives[-1] / "match") if natives else None
        if newest is None:
            return 0
        positions = positions_of(newest.read_text().splitlines())
        return min(self._taken(natives[-1], position) for position in positions)

    def _taken(self, native: Path, read: Position) -> int:
        source = _newest(native / read.channel.partition(".")[0])
        log = self.base / "root" / "channels" / read.channel / "_delta_log"
        unread = sum(p.stem.isdigit() and int(p.stem) > read.version for p in log.glob("*.json"))
        return (int(source.name) + 1 if source is not None else 0) - unread


def _newest(native: Path) -> Path | None:
    """Return the newest file of a stage's offset log."""
    files = [p for p in (native / "offsets").glob("*") if p.name.isdigit()]
    return max(files, key=lambda p: int(p.name), default=None)
