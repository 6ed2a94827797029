"""Each invariant finds what violates it, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from spark_abs.model import AttemptId, ChannelId, CheckpointId, Position, RunId, StageId, Version
from tests.invariants import (
    BlockedInput,
    Edge,
    InvariantViolated,
    Logged,
    NamedBytes,
    Need,
    Outcome,
    consistent_cut,
    intact,
    no_dead_work,
    none_blocked,
    nothing_lost,
    one_outcome,
    only_completed,
    require,
    same_order,
    same_rows,
)

N = CheckpointId


def edge(produced: int, consumed: int, closed: bool = False) -> Edge:
    position = Position(ChannelId("a.main"), AttemptId(1), Version(consumed), N(1))
    return Edge(N(1), ChannelId("a.main"), StageId("b"), Version(produced), position, closed)


def work(version: int, run: int, attempt: int = 1) -> Logged:
    return Logged("a.main", Version(version), AttemptId(attempt), RunId(run))


def file(found_size: int | None = 3, found_sha256: str | None = "abc") -> NamedBytes:
    return NamedBytes(N(1), "state/1", 3, "abc", found_size, found_sha256)


HOLDS = [
    pytest.param(consistent_cut([edge(5, 5)]), id="consumer and producer agree"),
    pytest.param(consistent_cut([edge(5, 4, closed=True)]), id="the consumer had read to the end"),
    pytest.param(consistent_cut([replace(edge(5, 4), rowless=True)]), id="no rows lie between"),
    pytest.param(one_outcome([N(1), N(2)], [Outcome(N(1), False), Outcome(N(2), True)]), id="ids in order"),
    pytest.param(intact([file()]), id="bytes as named"),
    pytest.param(
        none_blocked([BlockedInput(StageId("b"), ChannelId("a.main"), N(2))], {N(1): True}), id="open"
    ),
    pytest.param(same_rows(4, "t", [2, 1, 1], [1, 1, 2]), id="rows in any order"),
    pytest.param(same_order("t", [1, 2], [1, 2, 3]), id="a prefix in order"),
    pytest.param(
        no_dead_work([work(1, 1), Logged("a.main", Version(2), fences_runs_below=RunId(2)), work(3, 2)]),
        id="work before the fence of its run",
    ),
    pytest.param(only_completed([N(1)], [Outcome(N(1), True)]), id="a completed checkpoint"),
    pytest.param(nothing_lost([Need("checkpoint 1", "p")], {"p", "q"}), id="what is needed is there"),
]

VIOLATED = [
    pytest.param(consistent_cut([edge(5, 6)]), id="1: consumed after the barrier"),
    pytest.param(consistent_cut([edge(5, 4)]), id="1: not all before the barrier"),
    pytest.param(one_outcome([N(2), N(2)], []), id="2: an id claimed twice"),
    pytest.param(one_outcome([N(1)], [Outcome(N(1), False), Outcome(N(1), True)]), id="2: two outcomes"),
    pytest.param(
        one_outcome([N(1), N(2)], [Outcome(N(2), False), Outcome(N(1), True)]), id="2: outcomes out of order"
    ),
    pytest.param(one_outcome([], [Outcome(N(1), True)]), id="2: never claimed"),
    pytest.param(intact([file(None, None)]), id="2: unreadable"),
    pytest.param(intact([file(3, "abd")]), id="2: altered"),
    pytest.param(intact([file(2, "abc")]), id="2: truncated"),
    pytest.param(
        none_blocked([BlockedInput(StageId("b"), ChannelId("a.main"), N(1))], {N(1): False}), id="3"
    ),
    pytest.param(same_rows(4, "t", [1], [1, 1]), id="4: lost"),
    pytest.param(same_rows(4, "t", [1, 1], [1]), id="4: twice"),
    pytest.param(same_order("t", [2, 1], [1, 2]), id="4: out of order"),
    pytest.param(
        no_dead_work([Logged("a.main", Version(1), fences_runs_below=RunId(2)), work(2, 1)]),
        id="5: work of a replaced run",
    ),
    pytest.param(
        no_dead_work([Logged("a.main", Version(1), burns=frozenset({AttemptId(1)})), work(2, 1)]),
        id="5: work of a dead attempt",
    ),
    pytest.param(only_completed([N(1)], [Outcome(N(1), False)]), id="5: an aborted checkpoint listed"),
    pytest.param(nothing_lost([Need("checkpoint 1", "p")], {"q"}), id="6: reachable and gone"),
]


@pytest.mark.parametrize("wrong", HOLDS)
def test_what_holds_is_not_reported(wrong: Iterable[str]) -> None:
    assert list(wrong) == []


@pytest.mark.parametrize("wrong", VIOLATED)
def test_a_violation_is_one_sentence(wrong: Iterable[str]) -> None:
    assert len(list(wrong)) == 1


def test_the_error_says_how_to_see_it_again() -> None:
    with pytest.raises(InvariantViolated, match=r"^seed 7\n4: t: 1 rows lost, e\.g\. 'x'$"):
        require(same_rows(4, "t", [], ["x"]), "seed 7")
