"""Which sources a pause names, and what is refused."""

from __future__ import annotations

import pytest

from spark_abs.errors import Refused, UsageError
from spark_abs.model import ChannelId, StageId
from spark_abs.plan.graph import JobGraph, StageDecl
from spark_abs.protocol.control import begin_job, pause
from spark_abs.run.paused_sources import PausedSources, refuse_paused

CLICKS, ORDERS, BOTH, MIXED = (StageId(name) for name in ("clicks", "orders", "both", "mixed"))
INPUTS = (ChannelId("clicks.main"), ChannelId("orders.main"))


def sources(*, mixed: bool = False, bounded: bool = False) -> PausedSources:
    stages = [
        StageDecl(CLICKS, (), has_native=True),
        StageDecl(ORDERS, (), has_native=True),
        StageDecl(BOTH, INPUTS),
    ]
    if mixed:
        stages.append(StageDecl(MIXED, INPUTS[:1], has_native=True))
    return PausedSources(JobGraph(tuple(stages), ()), bounded, [ORDERS])


def test_a_pause_without_names_is_one_of_all_sources() -> None:
    found = sources()
    assert found.named([]) == (CLICKS, ORDERS)
    assert found.named([ORDERS, ORDERS]) == (ORDERS,)
    assert (found.holds(CLICKS), found.holds(ORDERS)) == (False, True)
    found.hold(frozenset([CLICKS]))
    assert (found.holds(CLICKS), found.holds(ORDERS)) == (True, False)


def test_a_stage_that_is_no_source_is_not_paused() -> None:
    with pytest.raises(UsageError, match="'both' is no source of the job; its sources are: clicks, orders"):
        sources().named([BOTH])


def test_a_source_beside_channels_is_not_paused_and_the_others_are() -> None:
    for names in ([], [CLICKS, MIXED]):
        with pytest.raises(UsageError, match="stage 'mixed' reads a native source beside its channels"):
            sources(mixed=True).named(names)
    assert sources(mixed=True).named([CLICKS]) == (CLICKS,)


def test_a_run_that_ends_with_its_input_is_not_paused_and_does_not_begin_paused() -> None:
    with pytest.raises(UsageError, match="a bounded run ends with its input"):
        sources(bounded=True).named([])
    state = begin_job("job", 0)
    refuse_paused(state, "/data/shop")
    with pytest.raises(Refused, match=r"clicks \(by ann@desk\).*`spark-abs resume /data/shop`"):
        refuse_paused(pause(state, [CLICKS], "ann@desk", 5), "/data/shop")
