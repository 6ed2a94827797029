"""Rows of a state store, byte for byte as Spark 4.2 wrote them for a function with event-time timeouts."""

from __future__ import annotations

import pytest

from spark_abs.errors import DamageError
from spark_abs.state.operator import Timeout
from spark_abs.state.rows import HeldGroup
from spark_abs.state.unsafe import bytes_of, group_rows, head_row

ZERO, NOTHING = "0000000000000000", "01000000000000000000000000000000"
GROUP_2, SLOT_1 = f"{ZERO}0200000000000000", f"{ZERO}0100000000000000"
AT = "0138d360ba010000"
WRITTEN = [
    ("heads", GROUP_2, f"{ZERO}0500000010000000" + b"{head".hex() + "000000"),
    (
        "segments",
        f"{ZERO}10000000180000001000000028000000{GROUP_2}{SLOT_1}",
        f"{ZERO}0800000010000000" + b"segment!".hex(),
    ),
    ("$eventTimers_keyToTimestamp", f"{ZERO}1000000018000000{AT}{GROUP_2}", NOTHING),
    ("$eventTimers_timestampToKey", f"{ZERO}{AT}1000000018000000{GROUP_2}", NOTHING),
]  # fmt: skip


def test_a_key_group_is_written_as_spark_writes_it() -> None:
    group = HeldGroup(b"{head", {1: b"segment!"}, 1_900_000_000_001)
    found = [(r.family, r.key.hex(), r.value.hex()) for r in group_rows(2, group, Timeout.EVENT_TIME)]
    assert found == WRITTEN
    clocks = [r.family for r in group_rows(2, group, Timeout.PROCESSING_TIME)][2:]
    assert clocks == ["$procTimers_keyToTimestamp", "$procTimers_timestampToKey"]


def test_a_group_without_state_has_no_rows() -> None:
    assert list(group_rows(2, HeldGroup(), Timeout.EVENT_TIME)) == []


def test_what_a_head_row_holds_is_read_again() -> None:
    row = head_row(-1, b"record")
    assert row.key.hex() == f"{ZERO}ffffffff00000000"
    assert bytes_of(row.value) == b"record"
    for wrong in (b"", row.value[:12], row.value[:-8], bytes(8) + b"\1" * 16):
        with pytest.raises(DamageError, match="does not have the layout that stateful functions write"):
            bytes_of(wrong)
