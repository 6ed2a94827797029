"""Hypothesis strategies: job graphs for the simulated cluster. Needs the `test` extra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from spark_abs.model import ChannelId, StageId, channel_id
from tests.simulator.cluster import AGAIN, LATE, Graph, Stage

MOST = 8
"""Stages of a graph."""


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph of two to eight stages: sources, then unions and joins of what came before.

    Every channel may be read by several stages, or twice by one; a stage may have a native input beside its
    channels and a second output. What nobody reads gets a sink. Some graphs have a loop, and no joins then:
    what is joined in a loop grows with every round.
    """
    loop, joins = draw(st.booleans()), 2
    stages = [
        Stage(StageId(f"source{n + 1}"), native=draw(st.integers(0, 6)))
        for n in range(draw(st.integers(1, 3)))
    ]
    sources = len(stages)
    for number in range(draw(st.integers(1, MOST - sources))):
        offered = [channel for stage in stages for channel in stage.channels]
        inputs = tuple(draw(st.lists(st.sampled_from(offered), min_size=1, max_size=2)))
        join = len(inputs) == 2 and joins > 0 and not loop and draw(st.booleans())
        joins -= join
        stages.append(
            Stage(
                StageId(f"stage{number}"),
                inputs,
                native=0 if join else draw(st.sampled_from((0, 0, 3))),
                join=join,
                outputs=draw(st.sampled_from((("main",), ("main", LATE)))),
                sink=draw(st.booleans()),
            )
        )
    if loop:
        head = draw(st.integers(sources, len(stages) - 1))
        tail = draw(st.sampled_from(_behind(stages, head)))
        back = channel_id(stages[tail].id, AGAIN)
        stages[tail] = replace(stages[tail], outputs=(*stages[tail].outputs, AGAIN))
        stages[head] = replace(stages[head], inputs=(*stages[head].inputs, back), feedback=(back,))
    read = {channel for stage in stages for channel in stage.inputs}
    return tuple(_finished(stage, read) for stage in stages)


def _behind(stages: Sequence[Stage], head: int) -> list[int]:
    """Return a stage and all that read, at first or second hand, what it writes."""
    found = [head]
    for number in range(head + 1, len(stages)):
        written = {channel for behind in found for channel in stages[behind].channels}
        if not written.isdisjoint(stages[number].inputs):
            found.append(number)
    return found


def _finished(stage: Stage, read: set[ChannelId]) -> Stage:
    """Leave out the channels of a stage that nobody reads; it then has a sink."""
    outputs = tuple(output for output in stage.outputs if channel_id(stage.id, output) in read)
    return replace(stage, outputs=outputs, sink=stage.sink or not outputs)
