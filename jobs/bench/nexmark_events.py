"""Nexmark's persons, auctions and bids, 1 : 3 : 46, as Parquet files; and links and sources of a graph.

The same for the same seed. As in Nexmark an auction's seller is one of the thousand newest persons, a bid is
by one of them for one of the hundred newest auctions. With hot items a share of the auctions has one seller,
and a share of the bids one auction and one bidder, in every hundred of them, as in CheckMate's generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

Numbers = npt.NDArray[np.int64]

EVENTS_A_SECOND = 10_000
"""Of event time."""
SCHEMAS: Mapping[str, str] = {
    "person": "id long, name string, state string, at timestamp",
    "auction": "id long, seller long, category long, at timestamp",
    "bid": "auction long, bidder long, price long, at timestamp",
    "source": "node long",
    "link": "start long, end long",
}
_START_US = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1_000_000)
_PERSONS, _AUCTIONS, _CYCLE = 1, 3, 50
_FIRST_ID, _CATEGORIES = 1000, 5
_ACTIVE_PERSONS, _ACTIVE_AUCTIONS, _HOT_OF = 1000, 100, 100
_SOURCES, _LINKS = 1, 4
"""Of five events of the graph."""
_NODES, _HOT_NODES = 100_000, 10
_STATES = np.array(["AZ", "CA", "ID", "OR", "WA", "WY"])


def write(directory: Path, kind: str, files: int, events: int, hot: float, seed: int = 7) -> None:
    """Write the files of a kind, each of so many events of all kinds; `hot` is the share of hot items.

    The names of the files are in the order of their events.
    """
    make = _MAKE[kind]
    directory.mkdir(parents=True)
    for number in range(files):
        random = np.random.default_rng([seed, number, list(SCHEMAS).index(kind)])
        at = np.arange(number * events, (number + 1) * events)
        pq.write_table(pa.table(make(at, hot, random)), directory / f"{number:06d}.parquet")


def _persons(event: Numbers, _: float, random: np.random.Generator) -> dict[str, object]:
    event = event[event % _CYCLE < _PERSONS]
    number = event // _CYCLE
    return {
        "id": _FIRST_ID + number,
        "name": np.char.add("person ", number.astype(str)),
        "state": random.choice(_STATES, event.size),
        "at": _time(event),
    }


def _auctions(event: Numbers, hot: float, random: np.random.Generator) -> dict[str, object]:
    event = event[(event % _CYCLE >= _PERSONS) & (event % _CYCLE < _PERSONS + _AUCTIONS)]
    newest = event // _CYCLE
    seller = _recent(newest, _ACTIVE_PERSONS, random)
    is_hot = random.random(event.size) < hot
    return {
        "id": _FIRST_ID + newest * _AUCTIONS + event % _CYCLE - _PERSONS,
        "seller": _FIRST_ID + np.where(is_hot, newest // _HOT_OF * _HOT_OF, seller),
        "category": 10 + random.integers(0, _CATEGORIES, event.size),
        "at": _time(event),
    }


def _bids(event: Numbers, hot: float, random: np.random.Generator) -> dict[str, object]:
    event = event[event % _CYCLE >= _PERSONS + _AUCTIONS]
    person, auction = event // _CYCLE, event // _CYCLE * _AUCTIONS + _AUCTIONS - 1
    for_hot, by_hot = (random.random(event.size) < hot for _ in range(2))
    # Not the hot seller: that is the first of its hundred.
    hot_bidder = np.minimum(person // _HOT_OF * _HOT_OF + 1, person)
    bidder = np.where(by_hot, hot_bidder, _recent(person, _ACTIVE_PERSONS, random))
    offered = _recent(auction, _ACTIVE_AUCTIONS, random)
    return {
        "auction": _FIRST_ID + np.where(for_hot, auction // _HOT_OF * _HOT_OF, offered),
        "bidder": _FIRST_ID + bidder,
        "price": np.round(100 * 10 ** (random.random(event.size) * 6)).astype(np.int64),
        "at": _time(event),
    }


def _sources(event: Numbers, _: float, random: np.random.Generator) -> dict[str, object]:
    """Make the first nodes sources, then others."""
    event = event[event % (_SOURCES + _LINKS) < _SOURCES]
    number = event // (_SOURCES + _LINKS)
    return {"node": np.where(number < _HOT_NODES, number, _node(random, event.size))}


def _links(event: Numbers, hot: float, random: np.random.Generator) -> dict[str, object]:
    """Half as many links from a node as there are nodes, so that what a source reaches stays small."""
    event = event[event % (_SOURCES + _LINKS) >= _SOURCES]
    is_hot = random.random(event.size) < hot
    start = np.where(is_hot, random.integers(0, _HOT_NODES, event.size), _node(random, event.size))
    return {"start": start, "end": _node(random, event.size)}


def _node(random: np.random.Generator, count: int) -> Numbers:
    return random.integers(0, _NODES, count)


def _recent(newest: Numbers, many: int, random: np.random.Generator) -> Numbers:
    """Draw from the `many` newest there are, fewer at the beginning."""
    back = np.minimum(newest + 1, many)
    return newest - (random.random(newest.size) * back).astype(np.int64)


def _time(event: Numbers) -> pa.Array:
    return pa.array(_START_US + event * 1_000_000 // EVENTS_A_SECOND, pa.timestamp("us", tz="UTC"))


_MAKE: Mapping[str, Callable[[Numbers, float, np.random.Generator], dict[str, object]]] = {
    "person": _persons,
    "auction": _auctions,
    "bid": _bids,
    "source": _sources,
    "link": _links,
}
