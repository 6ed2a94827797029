"""Nexmark's queries 1, 3, 8 and 12 and CheckMate's cyclic one, in every mode and without checkpoints.

Each run takes what is there, a file a batch, as fast as it goes, with a checkpoint every second. Then more
files come, and the job is restored to its newest checkpoint and goes on. Without checkpoints it just goes on.
What is in the table at the end is compared with pandas. After CheckMate, arXiv 2403.13629.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from deltalake import DeltaTable
from rich.console import Console

from bench import nexmark_events
from bench.figures import Figure, figure, ratios
from bench.nexmark_queries import QUERIES, Query, declare
from spark_abs.observe.listing import event_rows
from spark_abs.sinks.delta.commit_metadata import note_of
from spark_abs.store.history import HistoryEvent
from spark_abs.store.log import read_commit, versions_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_abs.store.root import Root

VARIANTS: Mapping[str, Mapping[str, str]] = {
    "none": {"interval": "1d"},
    "aligned": {"interval": "1s"},
    "unaligned": {"interval": "1s", "mode": "unaligned"},
    "at_least_once": {"interval": "1s", "mode": "at_least_once"},
}
HOT = 0.3
"""The share of hot items where there are any."""
_FILES, _MORE = 20, 2


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one variant."""

    events_s: float
    checkpoints_ms: tuple[int, ...] = ()
    bytes: tuple[int, ...] = ()
    """Needed to restore each checkpoint."""
    recovery_s: float | None = None
    """From the start that restores to the first batch of rows in the table after the checkpoint."""


def figures(
    spark: SparkSession,
    base: Path,
    runs: int,
    divide: int,
    console: Console,
    queries: Sequence[Query] = QUERIES,
    items: Sequence[str] = ("uniform", "hot"),
) -> Iterator[Figure]:
    """Run the variants of each query in turns; one run of each query's first variant is not counted."""
    for query in queries:
        for which in items if query.keyed else ("uniform",):
            source = base / f"{query.name}-{which}"
            hot = HOT if which == "hot" else 0.0
            for kind in query.kinds:
                nexmark_events.write(source / kind, kind, _FILES + _MORE, query.events // divide, hot)
            expected = _counted(query.expected({kind: _read(source / kind) for kind in query.kinds}))
            assert expected, f"{query.name} gives nothing of {source}"
            found: dict[str, list[Measured]] = {name: [] for name in VARIANTS}
            for turn in range(-1, runs):
                for name in list(VARIANTS)[:1] if turn < 0 else VARIANTS:
                    place = base / f"{query.name}-{which}-{name}-{turn}"
                    one = _run(spark, query, name, source, place, expected)
                    console.print(f"{query.name}, {which}, {name}: {one.events_s:.0f} events/s, {_said(one)}")
                    if turn >= 0:
                        found[name].append(one)
            shutil.rmtree(source)
            yield from _figures(f"nexmark_{query.name}_{which}", found)


def _said(one: Measured) -> str:
    if one.recovery_s is None:
        return "no checkpoints"
    return f"{len(one.checkpoints_ms)} checkpoints, first row after {one.recovery_s:.1f} s"


def _figures(name: str, found: Mapping[str, Sequence[Measured]]) -> Iterator[Figure]:
    none = [one.events_s for one in found["none"]]
    yield figure(f"{name}_none_events", none, "events/s")
    for variant, several in list(found.items())[1:]:
        prefix = f"{name}_{variant}"
        yield figure(f"{prefix}_rate_vs_none", ratios([one.events_s for one in several], none))
        for percent in (50, 99):
            took = [float(np.percentile(one.checkpoints_ms, percent)) for one in several]
            yield figure(f"{prefix}_checkpoint_p{percent}", took, "ms")
        yield figure(f"{prefix}_checkpoint_bytes", [float(np.max(one.bytes)) for one in several], "bytes")
        recovered = [one.recovery_s for one in several if one.recovery_s is not None]
        yield figure(f"{prefix}_recovery_seconds", recovered, "s")


def _run(
    spark: SparkSession, query: Query, variant: str, source: Path, base: Path, expected: Counter[object]
) -> Measured:
    """Run a variant to the end of its input, then, restored, to the end of more input, and compare."""
    _arrive(query, source, base, range(_FILES))
    job = declare(query, spark, base, **VARIANTS[variant])
    job.start(available_now=True).await_termination()
    began = min((base / f"root/native/1/{kind}/metadata").stat().st_mtime for kind in query.kinds)
    rows = sum(
        pq.read_metadata(file).num_rows for kind in query.kinds for file in (base / "input" / kind).iterdir()
    )
    rate = rows / (max(_commits(job.root, base / "out").values()) - began)
    completed = [
        row for row in event_rows(job.root) if row.event is HistoryEvent.COMPLETED and row.stage is None
    ]
    there = set(_commits(job.root, base / "out"))
    _arrive(query, source, base, range(_FILES, _FILES + _MORE))
    restored = time.time()
    again = declare(query, spark, base, **VARIANTS[variant])
    restart = "native" if variant == "none" else "checkpoint"
    again.start(available_now=True, restart=restart).await_termination()  # type: ignore[arg-type]
    new = [at for version, at in _commits(job.root, base / "out").items() if version not in there]
    rows_there = _counted(query.of_table(DeltaTable(str(base / "out")).to_pandas()))
    if variant == "at_least_once":
        rows_there = Counter(dict.fromkeys(rows_there, 1))
        expected = Counter(dict.fromkeys(expected, 1))
    wrong = len(expected - rows_there), len(rows_there - expected)
    assert wrong == (0, 0), (
        f"{query.name}, {variant}: of {len(expected)} rows {wrong} are missing or too many"
    )
    # Spark may still write state there.
    shutil.rmtree(base, ignore_errors=True)
    if variant == "none":
        return Measured(rate)
    return Measured(
        rate,
        tuple(row.duration_ms for row in completed if row.duration_ms is not None),
        tuple(row.size_full for row in completed if row.size_full is not None),
        min(new) - restored,
    )


def _arrive(query: Query, source: Path, base: Path, files: range) -> None:
    for kind in query.kinds:
        (base / "input" / kind).mkdir(parents=True, exist_ok=True)
        for number in files:
            name = f"{kind}/{number:06d}.parquet"
            os.link(source / name, base / "input" / name)


def _commits(root: Root, table: Path) -> Mapping[int, float]:
    """Return when commits with rows of a batch were written; those of a restore do not count."""
    found = {}
    for version in versions_in(root.fs, str(table)):
        commit = read_commit(root.fs, str(table), version)
        note = None if commit is None else note_of(commit, str(table))
        if commit is not None and commit.adds and note is not None and not note.begins:
            found[int(version)] = (table / "_delta_log" / f"{version:020d}.json").stat().st_mtime
    return found


def _read(directory: Path) -> pd.DataFrame:
    rows: pd.DataFrame = pq.read_table(directory).to_pandas()
    return rows


def _counted(rows: pd.DataFrame) -> Counter[object]:
    """Count equal rows, whatever their order."""
    return Counter(pd.util.hash_pandas_object(rows.reset_index(drop=True), index=False).tolist())
