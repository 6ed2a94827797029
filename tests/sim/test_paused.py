"""Seeded runs of a whole job whose sources are paused now and then."""

from __future__ import annotations

from collections import Counter

from spark_abs.model import BatchId, StageId, channel_id
from tests.sim.test_simulation import violated
from tests.simulator.cluster import LATE, Stage
from tests.simulator.parts import Evaluating, Parts, unwritten
from tests.simulator.simulate import FIVE, simulate

TWO_CHANNELS = (
    Stage(StageId("a"), native=12, outputs=("main", LATE), sink=True),
    Stage(StageId("b"), (channel_id("a"), channel_id("a", LATE)), join=True, outputs=(), sink=True),
)


def test_paused_sources_survive_everything() -> None:
    """Barriers go ahead of the batch that a paused source has planned (P11, P18)."""
    seen = Counter[str]()

    def holds(process: Evaluating, batch: BatchId) -> bool:
        held = unwritten(process, batch)
        seen["batches held" if held else "batches finished"] += 1
        return held

    for seed in range(100):
        seen += simulate(seed, FIVE, Parts(may_hold=holds))
    wanted = {"completed", "driver kills", "restores", "batches held", "batches finished"}
    assert wanted - seen.keys() == set()


def test_a_pause_that_holds_a_batch_of_which_an_output_has_a_part_is_caught() -> None:
    """A barrier ahead of that batch would stand behind its rows in one channel."""
    assert violated(Parts(may_hold=lambda *_: True), TWO_CHANNELS) != "-"
