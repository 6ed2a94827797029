"""What a simulated job holds if nothing ever goes wrong."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from spark_abs.model import ChannelId, channel_id
from tests.simulator.cluster import Graph, State, apply, carried, record
from tests.simulator.table import Row


@cache
def ideal(graph: Graph, offsets: tuple[int, ...]) -> dict[str, tuple[Row, ...] | State]:
    """Return what a run that never failed holds at these native offsets, by stage id and by channel id.

    Nothing is on its way round a loop any more: what comes back is what was sent, found round by round.
    """
    back = {channel: () for stage in graph for channel in stage.feedback}
    while (held := _round(graph, offsets, back)) and any(held[channel] != back[channel] for channel in back):
        back = {channel: held[channel] for channel in back}  # type: ignore[misc]
    return held


def _round(
    graph: Graph, offsets: tuple[int, ...], back: Mapping[ChannelId, tuple[Row, ...]]
) -> dict[str, tuple[Row, ...] | State]:
    held: dict[str, tuple[Row, ...] | State] = {}
    for stage, offset in zip(graph, offsets, strict=True):
        news: list[tuple[Row, ...]] = [
            back[channel] if channel in stage.feedback else held[channel]  # type: ignore[misc]
            for channel in stage.inputs
        ]
        if stage.native:
            news.append(tuple(record(stage.id, number) for number in range(offset)))
        state, rows = apply(stage, ((),) * len(news), tuple(news))
        held[stage.id] = state
        held[f"{stage.id}/sink"] = rows
        for output in stage.outputs:
            held[channel_id(stage.id, output)] = carried(output, rows)
    return held
