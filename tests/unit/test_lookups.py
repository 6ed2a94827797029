"""At which version a batch reads a lookup: pure decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_abs.errors import DamageError
from spark_abs.model import LookupVersion, Version
from spark_abs.protocol.lookups import following, is_due, version_of

LAST = LookupVersion("customers", "/data/customers", "4f", Version(7), 10_000)


@pytest.mark.parametrize(
    ("max_age_ms", "now_ms", "due"),
    [
        (0, 10_000, True),  # refresh="batch", in the same millisecond
        (30_000, 39_999, False),
        (30_000, 40_000, True),
        (30_000, 9_999, True),  # the clock was put back
        (None, 10**12, False),  # refresh="never"
    ],
)
def test_when_a_batch_looks_for_a_newer_version(max_age_ms: int | None, now_ms: int, due: bool) -> None:
    assert is_due(LAST, max_age_ms, now_ms) is due
    assert is_due(None, max_age_ms, now_ms)


def test_no_batch_goes_back_behind_the_one_before_it_or_to_another_table() -> None:
    newer = replace(LAST, version=Version(8))
    assert following(LAST, newer) is newer
    assert following(None, LAST) is LAST
    with pytest.raises(DamageError, match=r"is at version 7, and a batch has read version 8"):
        following(newer, LAST)
    with pytest.raises(DamageError, match=r"another table now, 5e; batches have read 4f at version 7"):
        following(LAST, replace(newer, table_id="5e"))


def test_what_is_recorded_counts_for_the_same_name_and_table() -> None:
    assert version_of("customers", LAST.table, [LAST]) is LAST
    assert version_of("people", LAST.table, [LAST]) is None
    assert version_of("customers", "/data/others", [LAST]) is None
