"""Changes to a simulated job between two of its runs, and what each of them means for its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from spark_abs.model import MAIN_OUTPUT, ChannelId, StageId, channel_id
from tests.simulator.cluster import LATE, Graph, Stage

Hop = tuple[str, str]
"""A stage and the output by which rows leave it; the output is empty where they go to a sink."""
Path = tuple[Hop, ...]
"""The way of rows from the stage that reads them natively to the one that writes them into a table."""
Renamed = Callable[[Path], Path]


@dataclass(frozen=True, slots=True)
class Rewired:
    """A changed job."""

    name: str
    graph: Graph
    renamed: Renamed = lambda path: path
    """Which way the rows take from now on that took another one: together the two have each row once."""


def parted(channel: ChannelId) -> Hop:
    """Return the stage and the output of a channel."""
    stage, _, output = channel.partition(".")
    return stage, output


def normal(stages: Sequence[Stage]) -> Graph:
    """Return a graph in order, producers first, each stage with the outputs that are read."""
    read = {channel for stage in stages for channel in stage.inputs}
    found: list[Stage] = []
    waiting = list(stages)
    while waiting:
        done = {stage.id for stage in found}
        ready = [s for s in waiting if all(parted(c)[0] in done for c in s.inputs)]
        assert ready, "the graph has a cycle"
        found += [
            replace(s, outputs=tuple(o for o in (MAIN_OUTPUT, LATE) if channel_id(s.id, o) in read))
            for s in ready
        ]
        waiting = [s for s in waiting if s not in ready]
    return tuple(found)


def paths(graph: Graph, channels: bool = False) -> Iterator[tuple[str, Path]]:
    """Iterate every way from native records to a table, or to a channel too, as often as it is there."""

    def ways(stage: Stage) -> Iterator[Path]:
        if stage.native:
            yield ((stage.id, ""),)
        for channel in stage.inputs:
            name, output = parted(channel)
            (producer,) = (s for s in graph if s.id == name)
            for way in ways(producer):
                yield (*way[:-1], (name, output), (stage.id, ""))

    for stage in graph:
        if stage.sink:
            yield from ((stage.target, way) for way in ways(stage))
        for output in stage.outputs if channels else ():
            channel = channel_id(stage.id, output)
            yield from ((channel, (*way[:-1], (stage.id, output))) for way in ways(stage))


class Rewiring:
    """Makes changes by chance. Names are never used twice."""

    def __init__(self, rng: Random, sources: str) -> None:
        """Take chance, and the letters by which native sources are called."""
        self._rng = rng
        self._sources = iter(sources)
        self._names = 0
        self.changes: tuple[tuple[str, Callable[[Graph], Rewired | None], int], ...] = (
            ("swapped", self._swapped, 4),
            ("input added", self._input_added, 2),
            ("input dropped", self._input_dropped, 2),
            ("rewired", self._rewired, 2),
            ("put after", self._put_behind, 2),
            ("put between", self._put_between, 4),
            ("taken out", self._taken_out, 4),
            ("split", self._split, 2),
            ("merged", self._merged, 2),
            ("renamed", self._renamed, 2),
            ("left out", self._left_out, 1),
            ("source added", self._source_added, 1),
            ("sink renamed", self._sink_renamed, 3),
            ("sink moved", self._sink_moved, 2),
            ("sink dropped", self._sink_dropped, 1),
            ("sink added", self._sink_added, 2),
            ("state added or lost", self._state_toggled, 1),
        )

    def first(self) -> Graph:
        """Return the job as it is first declared."""
        rng, one, other = self._rng, self._source(), self._source()
        union = Stage(
            StageId("union"),
            (channel_id(one.id), channel_id(other.id)),
            counts=rng.random() < 0.4,
            sink=rng.random() < 0.5,
            table="all",
        )
        last = Stage(StageId("last"), (channel_id("union"),), sink=True, table="out")
        return normal((one, other, union, last))

    def change(self, graph: Graph) -> Rewired:
        """Change a job in one way that is possible."""
        while True:
            (_, make, _), *_ = self._rng.choices(self.changes, [weight for _, _, weight in self.changes])
            found = make(graph)
            if found is not None and found.graph != graph:
                return found

    def _fresh(self, kind: str) -> StageId:
        self._names += 1
        return StageId(f"{kind}{self._names}x")

    def _source(self) -> Stage:
        return Stage(StageId(next(self._sources)), native=self._rng.choice((30, 45)))

    def _one_of(self, stages: Iterator[Stage]) -> Stage | None:
        found = list(stages)
        return self._rng.choice(found) if found else None

    def _channel(self, graph: Graph, before: Stage | None = None) -> ChannelId:
        """Return any output of a stage, of one that is in front of `before` if it is given."""
        offered = graph[: graph.index(before)] if before is not None else graph
        output = self._rng.choice((MAIN_OUTPUT, MAIN_OUTPUT, LATE))
        return channel_id(self._rng.choice(offered).id, output)

    # -- inputs

    def _swapped(self, graph: Graph) -> Rewired | None:
        stage = self._one_of(s for s in graph if len(s.inputs) > 1)
        if stage is None:
            return None
        inputs = list(stage.inputs)
        self._rng.shuffle(inputs)
        return Rewired("swapped", put(graph, replace(stage, inputs=tuple(inputs))))

    def _input_added(self, graph: Graph) -> Rewired | None:
        stage = self._one_of(s for s in graph if s.inputs)
        if stage is None:
            return None
        inputs = list(stage.inputs)
        inputs.insert(int(self._rng.random() * (len(inputs) + 1)), self._channel(graph, stage))
        return Rewired("input added", put(graph, replace(stage, inputs=tuple(inputs))))

    def _input_dropped(self, graph: Graph) -> Rewired | None:
        stage = self._one_of(s for s in graph if len(s.inputs) > 1)
        if stage is None:
            return None
        gone = int(self._rng.random() * len(stage.inputs))
        inputs = tuple(c for i, c in enumerate(stage.inputs) if i != gone)
        return Rewired("input dropped", put(graph, replace(stage, inputs=inputs)))

    def _rewired(self, graph: Graph) -> Rewired | None:
        stage = self._one_of(s for s in graph if s.inputs)
        if stage is None:
            return None
        inputs = list(stage.inputs)
        inputs[int(self._rng.random() * len(inputs))] = self._channel(graph, stage)
        return Rewired("rewired", put(graph, replace(stage, inputs=tuple(inputs))))

    def _source_added(self, graph: Graph) -> Rewired | None:
        stage = self._one_of(s for s in graph if s.inputs)
        if stage is None or (name := next(self._sources, None)) is None:
            return None
        source = Stage(StageId(name), native=10)
        changed = replace(stage, inputs=(channel_id(source.id), *stage.inputs))
        return Rewired("source added", normal((source, *(changed if s is stage else s for s in graph))))

    # -- stages

    def _put_behind(self, graph: Graph) -> Rewired | None:
        name = self._fresh("n")
        stage = Stage(name, (self._channel(graph),), sink=True, table=f"of {name}")
        return Rewired("put after", normal((*graph, stage)))

    def _put_between(self, graph: Graph) -> Rewired | None:
        behind = self._one_of(s for s in graph if s.inputs)
        if behind is None:
            return None
        channel = self._rng.choice(behind.inputs)
        name = self._fresh("m")
        between = Stage(name, (channel,), counts=self._rng.random() < 0.2)
        inputs = tuple(channel_id(name) if c == channel else c for c in behind.inputs)
        if behind.inputs.count(channel) > 1:
            return None  # one stage would take the place of two readings

        def renamed(path: Path) -> Path:
            return _spliced(path, parted(channel), behind.id, [(str(name), MAIN_OUTPUT)])

        changed = (replace(s, inputs=inputs) if s is behind else s for s in graph)
        return Rewired("put between", normal((*changed, between)), renamed)

    def _taken_out(self, graph: Graph) -> Rewired | None:
        gone = self._one_of(
            s
            for s in graph
            if len(s.inputs) == 1 and not s.native and s.outputs == (MAIN_OUTPUT,) and not s.sink
        )
        if gone is None:
            return None
        mine, (theirs,) = channel_id(gone.id), gone.inputs
        readers = [s for s in graph if mine in s.inputs]
        if any(theirs in s.inputs for s in readers):
            return None  # a second reading of it: the two ways would be one
        stages = (
            replace(s, inputs=tuple(theirs if c == mine else c for c in s.inputs))
            for s in graph
            if s is not gone
        )
        return Rewired(
            "taken out", normal(tuple(stages)), lambda path: tuple(h for h in path if h[0] != gone.id)
        )

    def _split(self, graph: Graph) -> Rewired | None:
        first = self._one_of(s for s in graph if s.sink)
        if first is None:
            return None
        name = self._fresh("y")
        second = Stage(
            name, (channel_id(first.id),), sink=True, table=first.target, sink_name=first.sink_name
        )

        def renamed(path: Path) -> Path:
            return (*path[:-1], (first.id, MAIN_OUTPUT), (name, "")) if path[-1] == (first.id, "") else path

        changed = (replace(s, sink=False, table="") if s is first else s for s in graph)
        return Rewired("split", normal((*changed, second)), renamed)

    def _merged(self, graph: Graph) -> Rewired | None:
        known = {s.id: s for s in graph}
        second = self._one_of(
            s
            for s in graph
            if s.sink
            and not s.outputs
            and not s.native
            and len(s.inputs) == 1
            and parted(s.inputs[0])[1] == MAIN_OUTPUT
            and not known[StageId(parted(s.inputs[0])[0])].sink
        )
        if second is None:
            return None
        name = parted(second.inputs[0])[0]

        def renamed(path: Path) -> Path:
            return (*path[:-2], (name, "")) if path[-1][0] == second.id else path

        first = replace(known[StageId(name)], sink=True, table=second.target)
        stages = (first if s.id == name else s for s in graph if s is not second)
        return Rewired("merged", normal(tuple(stages)), renamed)

    def _renamed(self, graph: Graph) -> Rewired | None:
        stage = self._one_of(s for s in graph if not s.native)
        if stage is None:
            return None
        name = self._fresh("r")
        stages = tuple(
            replace(s, id=name if s is stage else s.id, table=s.target if s.sink else "", inputs=inputs)
            for s in graph
            for inputs in [tuple(_called(c, stage.id, name) for c in s.inputs)]
        )
        return Rewired(
            "renamed", normal(stages), lambda path: tuple((name if s == stage.id else s, o) for s, o in path)
        )

    def _left_out(self, graph: Graph) -> Rewired | None:
        gone = self._one_of(s for s in graph if not s.outputs and not s.native)
        return None if gone is None else Rewired("left out", normal([s for s in graph if s is not gone]))

    def _state_toggled(self, graph: Graph) -> Rewired | None:
        stage = self._one_of(s for s in graph if not s.native)
        if stage is None:
            return None
        return Rewired("state added or lost", put(graph, replace(stage, counts=not stage.counts)))

    # -- sinks

    def _sink_renamed(self, graph: Graph) -> Rewired | None:
        stage = self._one_of(s for s in graph if s.sink)
        if stage is None:
            return None
        return Rewired("sink renamed", put(graph, replace(stage, sink_name=self._fresh("sink"))))

    def _sink_moved(self, graph: Graph) -> Rewired | None:
        old = self._one_of(s for s in graph if s.sink)
        new = self._one_of(s for s in graph if not s.sink)
        if old is None or new is None:
            return None
        table, name = old.target, old.sink_name

        def renamed(path: Path) -> Path:
            if path[-1] == (old.id, "") and channel_id(old.id) in new.inputs:
                return (*path[:-1], (old.id, MAIN_OUTPUT), (new.id, ""))
            if path[-1] == (old.id, "") and path[-2:-1] == ((new.id, MAIN_OUTPUT),):
                return (*path[:-2], (new.id, ""))
            return path

        moved = {
            old.id: replace(old, sink=False, table=""),
            new.id: replace(new, sink=True, table=table, sink_name=name),
        }
        stages = tuple(moved.get(s.id, s) for s in graph)
        return Rewired("sink moved", normal(stages), renamed)

    def _sink_dropped(self, graph: Graph) -> Rewired | None:
        stage = self._one_of(s for s in graph if s.sink)
        if stage is None or sum(s.sink for s in graph) == 1:
            return None
        return Rewired("sink dropped", put(graph, replace(stage, sink=False, table="")))

    def _sink_added(self, graph: Graph) -> Rewired | None:
        stage = self._one_of(s for s in graph if not s.sink)
        if stage is None:
            return None
        free = [t for t in ("all", "out") if all(s.target != t for s in graph if s.sink)]
        table = self._rng.choice([*free, str(self._fresh("table"))])
        return Rewired("sink added", put(graph, replace(stage, sink=True, table=table)))


def put(graph: Graph, stage: Stage) -> Graph:
    """Return a graph with another stage in the place of the one that is called like it."""
    return normal(tuple(stage if s.id == stage.id else s for s in graph))


def _called(channel: ChannelId, old: StageId, new: StageId) -> ChannelId:
    stage, output = parted(channel)
    return channel_id(new, output) if stage == old else channel


def _spliced(path: Path, after: Hop, before: str, hops: Sequence[Hop]) -> Path:
    """Put hops between two that follow each other."""
    for place, hop in enumerate(path[:-1]):
        if hop == after and path[place + 1][0] == before:
            return (*path[: place + 1], *hops, *path[place + 1 :])
    return path
