"""A soak would see what it looks for, and a seed says what it does."""

from __future__ import annotations

from collections import Counter

from tests.soak.jobs import Verdict, compared, misplaced
from tests.soak.schedule import lives


def test_a_seed_names_its_kills_and_another_one_others() -> None:
    assert lives(5, 20) == lives(5, 20)
    assert lives(5, 20) != lives(6, 20)
    for kills in (1, 7, 20):
        numbers = [kill.number for life in lives(5, kills) for kill in life.kills]
        assert numbers == list(range(1, kills + 1))
        assert all(
            kill.victim.ends_life == (kill is life.kills[-1])
            for life in lives(5, kills)
            for kill in life.kills
        )


def test_what_is_lost_or_there_twice_or_out_of_order_is_counted() -> None:
    assert compared("aabc", Counter("abcd")) == Verdict(expected=4, lost=1, duplicated=1)
    assert misplaced([3, 4, 5]) == 0
    assert misplaced([3, 5, 4]) == 2
    assert misplaced([]) == 0
