"""What the tables of a changed job must hold: each row once for every way that it has taken.

Rows are numbered by their source, and say which stages they came through. The history of the job says which
ways there were, and which of them are one way that was given another name. Nothing else is known here.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spark_abs.model import channel_id
from tests.simulator.cluster import LATE, Graph
from tests.simulator.rewiring import Hop, Path, Renamed, paths
from tests.simulator.table import Row

_NUMBERED = re.compile(r"#(\d+)")
_COUNTED = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class Step:
    """A start that has recorded the job that it starts."""

    name: str
    graph: Graph
    renamed: Renamed
    """By what the ways of the job before are found in this one."""
    planned: Mapping[str, int]
    """How many records each source had planned to read by then: all after them is read by this job."""
    finished: Mapping[str, int]
    """Up to which record each source had finished by then."""


@dataclass
class Life:
    """A way, from the start that began it to the one that ended it."""

    since: int
    """From which record on everything has to be there."""
    least: int
    """No record below may be there."""
    name: Path
    names: set[Path]
    """All names by which its rows may have come."""
    until: int | None = None
    """Records from here on cannot be there; None if it has not ended."""

    def reaches(self, number: int) -> bool:
        """Say whether a record may have come before its end."""
        return self.until is None or number < self.until


def lives(history: Sequence[Step]) -> Mapping[str, list[Life]]:
    """Return the lives of all ways, by table."""
    found: dict[str, list[Life]] = defaultdict(list)
    called: dict[Path, set[Path]] = {}
    for number, step in enumerate(history):
        called = _called(called, step)
        there = Counter(paths(step.graph))
        for table, known in found.items():
            for life in known:
                life.names |= set(map(step.renamed, life.names))
                if life.until is not None:
                    continue
                way = (table, step.renamed(life.name))
                if there[way]:
                    there[way] -= 1
                    life.name = way[1]
                    life.names |= called[way[1]]
                else:
                    life.until = step.planned.get(life.name[0][0], 0)
        for (table, path), count in there.items():
            source = path[0][0]
            since = step.planned.get(source, 0) if number else 0
            direct = len(path) == 1 or (len(path) == 2 and path[1][0] not in _stages(history[:number]))
            least = step.finished.get(source, 0) if number and direct else 0
            found[table] += [Life(since, least, path, set(called[path])) for _ in range(count)]
    return found


def _called(before: Mapping[Path, set[Path]], step: Step) -> dict[Path, set[Path]]:
    """Return the names of all ways: rows may have gone the first part of one when it was another."""
    names: dict[Path, set[Path]] = {}
    for old, known in before.items():
        names.setdefault(step.renamed(old), set()).update(known, map(step.renamed, known))
    found: dict[Path, set[Path]] = {}
    for path in sorted(
        {way[: i + 1] for _, way in paths(step.graph, channels=True) for i in range(len(way))}, key=len
    ):
        first = {(*name, path[-1]) for name in found.get(path[:-1], ())}
        found[path] = {path} | names.get(path, set()) | first
    return found


def _stragglers(history: Sequence[Step], table: str) -> set[str]:
    """Return by which names rows may come that had gone a way that ended, and lay in a channel then."""
    behind: set[Path] = set()
    found: set[str] = set()
    called: dict[Path, set[Path]] = {}
    for step in history:
        called = _called(called, step)
        behind |= {name for path, names in called.items() if path[-1][1] for name in names}
        ends = {way[i:] for name, way in paths(step.graph) if name == table for i in range(1, len(way))}
        joined = {(*way, *end) for way in behind for end in ends if _follows(step.graph, way[-1], end[0][0])}
        found |= {told(way) for way in joined}
        behind |= {way[: i + 1] for way in joined for i in range(len(way) - 1)}
    return found


def _follows(graph: Graph, hop: Hop, stage: str) -> bool:
    return any(s.id == stage and channel_id(*hop) in s.inputs for s in graph)


def _stages(history: Sequence[Step]) -> set[str]:
    return {stage.id for step in history for stage in step.graph}


def told(path: Path) -> str:
    """Return how rows say that they came this way; `#` stands for their number."""
    text = f"{path[0][0]}#"
    for stage, output in path:
        text = f"{stage}({text})"
        text = f"{LATE} {text}" if output == LATE else text
    return text


def check_lanes(history: Sequence[Step], tables: Mapping[str, Iterable[Row]], own: str) -> Iterator[str]:
    """Yield what is wrong with the tables of a job that has read all its sources; `own` are their names."""
    tables = {table: [row for row in rows if _source(row[1]) in own] for table, rows in tables.items()}
    records = {str(s.id): s.native for step in history for s in step.graph if s.native}
    known = lives(history)
    for table, rows in tables.items():
        found: dict[str, Counter[int]] = defaultdict(Counter)
        for _, label in rows:
            (number,) = _NUMBERED.findall(label)
            found[_COUNTED.sub("", _NUMBERED.sub("#", label))][int(number)] += 1
        for group in _grouped(known.get(table, [])):
            names = {told(path) for life in group for path in life.names}
            had = sum((found.pop(name, Counter()) for name in names), Counter[int]())
            path = group[0].name
            even = any(output == LATE for life in group for path in life.names for _, output in path)
            domain = range(0, records[path[0][0]], 2 if even else 1)
            yield from _uncovered(f"{table}, by {told(path)}", had, group, domain)
        for name in found.keys() - _stragglers(history, table):
            yield f"4: {table} has rows by {name}, which no job has sent that way"
    yield from _counted(history, tables)


def _source(label: str) -> str:
    return label[label.rindex("(") + 1 : label.index("#")]


def _grouped(known: list[Life]) -> Iterator[list[Life]]:
    """Bring together the lives that share a name."""
    left = list(known)
    while left:
        group, names = [left.pop(0)], set[Path]()
        while names != {n for life in group for n in life.names}:
            names = {n for life in group for n in life.names}
            group += [life for life in left if not names.isdisjoint(life.names)]
            left = [life for life in left if life not in group]
        yield group


def _uncovered(where: str, had: Counter[int], group: Sequence[Life], domain: range) -> Iterator[str]:
    for number in domain:
        least = sum(life.until is None and number >= life.since for life in group)
        most = sum(number >= life.least and life.reaches(number) for life in group)
        if not least <= had[number] <= most:
            yield f"4: {where}: record {number} is there {had[number]} times, not {least} to {most}"
            return
    if stray := had.keys() - set(domain):
        yield f"4: {where}: there are records that there should not be: {sorted(stray)[:5]}"
    counts = [0, *(had[number] for number in domain), 0]
    steps = sum(abs(a - b) for a, b in pairwise(counts))
    if steps > 2 * len(group):
        yield f"4: {where}: records are missing in the middle: {counts}"


def _counted(history: Sequence[Step], tables: Mapping[str, Iterable[Row]]) -> Iterator[str]:
    """Check the numbers that a stage with state gives its rows, where all of them come to a table one way."""
    counting = {stage.id for step in history for stage in step.graph if stage.counts}
    for stage in sorted(counting):
        for table, rows in tables.items():
            ends = [
                {path[i:] for name, path in paths(step.graph) if name == table for i in _places(path, stage)}
                for step in history
            ]
            found = sorted(int(n) for _, label in rows for n in re.findall(rf"{stage}\[(\d+)\]", label))
            once = all(len(set(s.inputs)) == len(s.inputs) for step in history for s in step.graph)
            whole = once and len(set.union(*ends)) == 1 and all(len(end) == 1 for end in ends)
            late = any(output == LATE for end in ends for path in end for _, output in path)
            if whole and not late and found != list(range(1, len(found) + 1)):
                yield f"4: {table}: the count of {stage} is not that of its rows: {found}"


def _places(path: Path, stage: str) -> Iterator[int]:
    return (i for i, (name, _) in enumerate(path) if name == stage)
