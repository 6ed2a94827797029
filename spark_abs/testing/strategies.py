"""Hypothesis strategies: job graphs for the simulated cluster. Needs the `test` extra."""

from __future__ import annotations

from hypothesis import strategies as st

from spark_abs.model import ChannelId, StageId, channel_id
from spark_abs.testing.cluster import LATE, Graph, Stage


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw an acyclic graph of two to five stages: sources, then unions and joins of what came before.

    Every channel may be read by several stages, or twice by one; a stage may have a native input beside its
    channels and a second output. What nobody reads gets a sink.
    """
    sources = draw(st.integers(1, 2))
    stages = [Stage(StageId(f"source{n + 1}"), native=draw(st.integers(0, 6))) for n in range(sources)]
    for number in range(draw(st.integers(1, 3))):
        offered = [channel for stage in stages for channel in stage.channels]
        inputs = tuple(draw(st.lists(st.sampled_from(offered), min_size=1, max_size=2)))
        join = len(inputs) == 2 and draw(st.booleans())
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
    read = {channel for stage in stages for channel in stage.inputs}
    return tuple(_finished(stage, read) for stage in stages)


def _finished(stage: Stage, read: set[ChannelId]) -> Stage:
    """Leave out the channels of a stage that nobody reads; it then has a sink."""
    outputs = tuple(output for output in stage.outputs if channel_id(stage.id, output) in read)
    sink = stage.sink or not outputs
    return Stage(stage.id, stage.inputs, stage.native, stage.join, outputs, sink)
