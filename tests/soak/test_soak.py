"""The short soak; the long one is `make soak`. And that a soak would see what it looks for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.soak.jobs import Verdict, compared, misplaced
from tests.soak.schedule import Victim, lives
from tests.soak.soak import soak

SEED, KILLS = 11, 5
"""Two lives, one of them on executors; every kind of victim but a driver's lone Python."""


@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_job_that_is_killed_again_and_again_writes_every_row_once_and_in_order(tmp_path: Path) -> None:
    killed = {kill.victim for life in lives(SEED, KILLS) for kill in life.kills}
    assert killed >= {Victim.DRIVER, Victim.JVM, Victim.GATE, Victim.WORKER, Victim.EXECUTOR}
    said: list[str] = []
    found = soak(tmp_path, SEED, KILLS, said.append)
    assert (found.lost, found.duplicated, found.out_of_order) == (0, 0, 0), said
    assert found.expected > 0
    assert len(said) == KILLS


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
