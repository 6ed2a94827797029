"""Credit: what a channel holds, whether it takes another batch, and which batches need not ask (P19)."""

from __future__ import annotations

import pytest

from spark_abs.alignment.marker import Cancelled, Cut, Emission, Free, Nothing
from spark_abs.model import (
    NO_EPOCH,
    AttemptId,
    CheckpointId,
    DataFile,
    Entry,
    Version,
)
from spark_abs.protocol.credit import ANY, Capacity, Load, Unread, at_once, grants, load_of, unread
from tests.simulator.alignment import barrier

ONE, TWO = CheckpointId(1), CheckpointId(2)


def loads(*sizes: int) -> list[Load]:
    return [Load(Version(n), size) for n, size in enumerate(sizes, start=1)]


@pytest.mark.parametrize(
    ("consumers", "found"),
    [((0,), Unread(3, 60)), ((1, 3), Unread(2, 50)), ((3, 3), Unread(0, 0)), ((), Unread(0, 0))],
)
def test_what_the_slowest_consumer_has_not_read_is_counted(consumers: tuple[int, ...], found: Unread) -> None:
    """A channel that nobody reads holds nothing."""
    assert unread(loads(10, 20, 30), [Version(v) for v in consumers]) == found


@pytest.mark.parametrize(
    ("found", "capacity", "granted"),
    [
        (Unread(1, 10), Capacity(entries=2), True),
        (Unread(2, 10), Capacity(entries=2), False),
        (Unread(1, 10), Capacity(size=11), True),
        (Unread(1, 11), Capacity(size=11), False),
        (Unread(1, 99), Capacity(entries=9, size=11), False),
        (Unread(9, 1), Capacity(entries=9, size=11), False),
        (Unread(9_999, 9_999), ANY, True),
        (Unread(0, 0), Capacity(entries=1, size=1), True),
    ],
)
def test_a_channel_grants_until_entries_or_bytes_are_used_up(
    found: Unread, capacity: Capacity, granted: bool
) -> None:
    assert grants(found, capacity) is granted


def test_an_entry_without_rows_takes_no_room() -> None:
    """Nobody ever consumes a silent one; one of a marker is consumed, and must not keep rows out."""
    assert load_of(Entry(Version(1), AttemptId(1))) is None
    assert load_of(Entry(Version(1), AttemptId(1), barrier=barrier(1))) is None
    assert load_of(Entry(Version(1), AttemptId(1), files=(DataFile("a", 7, 1),))) == Load(Version(1), 7)


@pytest.mark.parametrize(
    ("emission", "written", "offered", "goes"),
    [
        (Nothing(), NO_EPOCH, NO_EPOCH, False),
        (Nothing(), NO_EPOCH, ONE, True),
        (Cut(ONE), NO_EPOCH, ONE, True),
        (Cut(ONE), ONE, ONE, False),
        (Cut(ONE), ONE, TWO, True),
        (Cancelled(ONE), NO_EPOCH, ONE, True),
        (Free(), NO_EPOCH, NO_EPOCH, False),
        (Free(), NO_EPOCH, ONE, True),
        (Free(), ONE, ONE, False),
        (Free(), ONE, TWO, True),
    ],
)
def test_a_batch_with_a_marker_needs_no_credit(
    emission: Emission, written: CheckpointId, offered: CheckpointId, goes: bool
) -> None:
    """A stage that may take a barrier where it stands goes with the one that it is offered, once."""
    assert at_once(emission, written, offered) is goes
