"""How near to a wished moment plain queries fit together: the distance to the newest aligned cut. No Spark.

Time is simulated, batch by batch, and the cuts are those that `spark-abs rewind` finds. As with Spark's
trigger of ten seconds, batches of all queries begin at the same full ten seconds; one that was to begin while
the one before still ran begins at its end. A batch reads all that its table has when it begins, and is in the
table when it ends. The load is the part of the ten seconds that a batch takes on average; one batch of twenty
takes more than about twice as long.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from rich.console import Console

from bench.figures import Figure, figure
from spark_abs.cuts.cut import NEVER, Batch, Pipeline, Read, Written, newest_cut

INTERVAL_S = 10.0
LOADS = {"low": 0.2, "half": 0.5, "high": 0.9}
SHAPES: Mapping[str, Mapping[str, str]] = {
    "chain": {"bronze": "", "silver": "bronze", "gold": "silver"},
    "fan_out": {"bronze": "", "left": "bronze", "right": "bronze"},
}
"""Query, which is also its table, to the table that it reads."""
_SPREAD = 0.4
"""Standard deviation of the logarithm of a duration."""


@dataclass(slots=True)
class _Query:
    ended: list[float] = field(default_factory=list)
    until: list[int] = field(default_factory=list)
    """The first version that the batch has not read."""


def history(shape: Mapping[str, str], load: float, batches: int, seed: int) -> Pipeline:
    """Run queries for so many batches; times in the result are milliseconds."""
    chance, queries = Random(seed), {name: _Query() for name in shape}
    for name, source in shape.items():  # a table comes before its readers
        query, start = queries[name], 0.0
        for number in range(batches):
            read = bisect_right(queries[source].ended, start) if source else number + 1
            end = start + INTERVAL_S * load * chance.lognormvariate(-(_SPREAD**2) / 2, _SPREAD)
            if not query.until or read > query.until[-1]:  # else there is nothing to read, and no batch
                query.ended.append(end)
                query.until.append(read)
            start = max((start // INTERVAL_S + 1) * INTERVAL_S, end)
    return Pipeline(
        {
            name: tuple(Batch(n, round(1000 * end)) for n, end in enumerate(query.ended))
            for name, query in queries.items()
        },
        tuple(
            Written(name, name, tuple(range(len(query.ended))), (*range(1, len(query.ended)), NEVER))
            for name, query in queries.items()
        ),
        tuple(Read(name, source, tuple(queries[name].until)) for name, source in shape.items() if source),
    )


def distances(pipeline: Pipeline, moments: int, seed: int) -> Iterator[float]:
    """Yield by how many seconds the newest cut at or before random moments has ended earlier."""
    chance = Random(seed)
    last = min(batches[-1].ended_ms for batches in pipeline.batches.values())
    for _ in range(moments):
        wished = round(chance.uniform(last / 10, last))
        cut = newest_cut(pipeline, pipeline.before(wished))
        yield (wished - pipeline.ended_ms(cut)) / 1000


def figures(console: Console, batches: int = 2_000, moments: int = 500) -> Iterator[Figure]:
    """Wish for moments of simulated queries, of each shape at each load."""
    for shape, edges in SHAPES.items():
        for name, load in LOADS.items():
            found = sorted(distances(history(edges, load, batches, seed=7), moments, seed=8))
            console.print(
                f"{shape}, load {load:.0%}: {statistics.median(found):.1f} s, at most {found[-1]:.1f} s"
            )
            yield figure(f"rewind_distance_{shape}_{name}", found, "s")
