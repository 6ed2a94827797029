"""Whether a reader and a writer of a table are at cuts that fit together, against the rows themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_abs.cuts.edge import ReadUntil, Stand, compare, together

CHANGES = (True, False, True, False, False, True)
"""Versions 1, 3 and 4 change no rows, as OPTIMIZE does."""


def stand(until: int, version: int, *, in_part: bool = False) -> Stand:
    return compare(ReadUntil(until, in_part), version, CHANGES.__getitem__)


@given(st.lists(st.booleans(), max_size=8), st.data())
def test_it_is_aligned_if_both_have_the_same_rows(changes: list[bool], data: st.DataObject) -> None:
    """Each version that changes rows is one row here; the oracle compares the rows themselves."""
    until = data.draw(st.integers(0, len(changes)))
    version = data.draw(st.integers(-1, len(changes) - 1))
    read = {number for number in range(until) if changes[number]}
    had = {number for number in range(version + 1) if changes[number]}
    found = compare(ReadUntil(until), version, changes.__getitem__)
    assert (found is Stand.ALIGNED, found is Stand.BEHIND, found is Stand.BEYOND) == (
        read == had,
        read < had,
        read > had,
    )


def test_exactly_behind_the_version_no_commit_is_looked_at() -> None:
    assert compare(ReadUntil(8), 7, lambda _: pytest.fail("the log is not needed")) is Stand.ALIGNED


def test_commits_without_rows_count_for_neither_side() -> None:
    assert stand(3, 4) is Stand.ALIGNED
    assert stand(5, 2) is Stand.ALIGNED
    assert stand(2, 4) is Stand.BEHIND
    assert stand(6, 2) is Stand.BEYOND


def test_a_version_that_is_read_in_part_never_fits() -> None:
    """As an initial snapshot that is not finished: there is no position between two of its files."""
    assert stand(2, 2, in_part=True) is Stand.BEHIND
    assert stand(2, 1, in_part=True) is Stand.BEYOND


def test_of_several_sources_none_may_be_elsewhere() -> None:
    assert together([]) is Stand.ALIGNED
    assert together([Stand.ALIGNED, Stand.BEHIND]) is Stand.BEHIND
    assert together([Stand.BEHIND, Stand.BEYOND, Stand.ALIGNED]) is Stand.BEYOND
