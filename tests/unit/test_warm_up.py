"""The first batch of a stage holds back the stages before it, and nobody else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.model import ChannelId, StageId, Version, channel_id
from spark_abs.plan.graph import JobGraph, StageDecl
from spark_abs.stages.consumers import Consumers
from spark_abs.stages.credit import Credit
from spark_abs.stages.warm_up import AT_MOST_S, WarmUp

CLICKS, ORDERS, MATCH, TOTALS = map(StageId, ("clicks", "orders", "match", "totals"))
AGAIN = channel_id(TOTALS)
GRAPH = JobGraph(
    (
        StageDecl(CLICKS, (), has_native=True),
        StageDecl(ORDERS, (), has_native=True),
        StageDecl(MATCH, (channel_id(CLICKS), channel_id(ORDERS), AGAIN), feedback=(AGAIN,)),
        StageDecl(TOTALS, (channel_id(MATCH),)),
    ),
    (),
)


class Warming:
    """The stages of a job, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.up = WarmUp(GRAPH, lambda: self.now)

    def held(self) -> set[StageId]:
        return {stage for stage in (CLICKS, ORDERS, MATCH, TOTALS) if self.up.holds(stage)}


@pytest.fixture
def warming() -> Warming:
    return Warming()


def test_rows_reach_every_stage_behind_but_not_by_a_feedback_edge() -> None:
    assert GRAPH.downstream() == {
        CLICKS: {MATCH, TOTALS},
        ORDERS: {MATCH, TOTALS},
        MATCH: {TOTALS},
        TOTALS: frozenset(),
    }


def test_a_stage_holds_all_before_it_from_its_first_rows_to_the_end_of_its_first_batch(
    warming: Warming,
) -> None:
    assert warming.held() == set()
    warming.up.begins(CLICKS)
    warming.up.wrote([channel_id(CLICKS)])
    warming.up.ended(CLICKS)
    assert warming.held() == {CLICKS, ORDERS}  # match has rows
    warming.up.wrote([channel_id(MATCH)])
    warming.up.ended(MATCH)
    assert warming.held() == {CLICKS, ORDERS, MATCH}  # totals has
    warming.up.ended(TOTALS)
    assert warming.held() == set()


def test_later_batches_hold_nobody(warming: Warming) -> None:
    warming.up.begins(MATCH)
    warming.up.ended(MATCH)
    warming.up.wrote([channel_id(CLICKS)])
    warming.up.begins(MATCH)
    assert warming.held() == set()


def test_a_stage_that_does_not_come_to_its_first_batch_holds_nobody_for_long(warming: Warming) -> None:
    """Its trigger may be an hour; what it is handed meanwhile does not begin the time anew."""
    warming.up.wrote([channel_id(MATCH)])
    warming.now = AT_MOST_S - 1
    warming.up.wrote([channel_id(MATCH)])
    assert warming.held() == {CLICKS, ORDERS, MATCH}
    warming.now = AT_MOST_S
    assert warming.held() == set()


@pytest.mark.parametrize("entries", [2, None])
def test_the_channels_of_a_stage_that_is_held_count_as_full_unless_they_have_no_bound(
    entries: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SimpleNamespace(capacity_entries=entries, capacity_bytes=None)
    ctx: Any = SimpleNamespace(settings=settings)
    channel, held = channel_id(CLICKS), [True]
    credit = Credit(ctx, [channel], Consumers(ctx, {}), Version(0), 0, held.pop)
    monkeypatch.setattr(credit, "_prime", lambda: None)
    full: tuple[ChannelId, ...] = (channel,) if entries is not None else ()
    assert credit.full() == full
    held.append(False)
    assert credit.full() == ()
