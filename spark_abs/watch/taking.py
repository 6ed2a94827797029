"""Which cut a round keeps, and its manifest: from what was found in storage. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice

from spark_abs.cuts.cut import cuts
from spark_abs.manifest import Manifest, OutputVersion, StageShape, StageSnapshot, Timings
from spark_abs.model import (
    MAIN_OUTPUT,
    AttemptId,
    Barrier,
    BatchId,
    RunId,
    StageId,
    Version,
)
from spark_abs.protocol.control import WATCHED_JOB
from spark_abs.rewind.plan import version_at
from spark_abs.rewind.query import QueryFacts
from spark_abs.rewind.survey import Survey
from spark_abs.snapshots.identity import identity, of_text
from spark_abs.snapshots.take import StageCopy

MOST = 10
"""How many cuts a round tries: files of older ones are more likely to be gone."""
_LONGEST = 40

Signature = frozenset[tuple[str, int]]
"""The hash of the file with each query's id, and its batch."""


def candidates(found: Survey, newest: Manifest | None) -> Iterator[dict[str, int]]:
    """Iterate the cuts that a round may keep, newest first: those that came after the newest kept one.

    Args:
        found: what is in storage.
        newest: the manifest that was made last.
    """
    known = None if newest is None else frozenset((identity(s), int(s.cut_batch)) for s in newest.stages)
    for cut in islice(cuts(found.pipeline, found.pipeline.newest()), MOST):
        if signature(found, cut) == known:
            return
        yield cut


def signature(found: Survey, cut: Mapping[str, int]) -> Signature:
    """Return by what a cut is known."""
    return frozenset((of_text(q.metadata), int(batch_of(found, cut, q))) for q in found.queries)


def batch_of(found: Survey, cut: Mapping[str, int], query: QueryFacts) -> BatchId:
    """Return the batch of a query in a cut."""
    return BatchId(found.pipeline.batches[query.name][cut[query.name]].number)


def stage_names(queries: Sequence[QueryFacts]) -> dict[str, StageId]:
    """Return the name of each query at the root: that of its directory as far as a name has such letters."""
    wanted = {}
    for query in queries:
        name = re.sub("[^A-Za-z0-9_-]", "_", query.place.uri.rstrip("/").rpartition("/")[2])[:_LONGEST]
        wanted[query.name] = name if name[:1].isalpha() else f"q{name}"
    names = list(wanted.values())
    return {
        query.name: StageId(
            wanted[query.name]
            if names.count(wanted[query.name]) == 1
            else f"{wanted[query.name]}-{sha256(query.place.uri.encode()).hexdigest()[:8]}"
        )
        for query in queries
    }


def tables_of(found: Survey, cut: Mapping[str, int], query: QueryFacts) -> tuple[OutputVersion, ...]:
    """Return the tables that a query writes, with the versions whose rows they have at a cut."""
    return tuple(
        OutputVersion(MAIN_OUTPUT, "table", table.uri, table.id, Version(version_at(found, table, cut)))
        for table in found.tables
        if table.apps_of(query.name)
    )


def part_of(
    name: StageId, directory: str, copy: StageCopy, tables: tuple[OutputVersion, ...], taken_ms: int
) -> StageSnapshot:
    """Return the part of a query, copied from its checkpoint directory, and with its tables."""
    return StageSnapshot(
        stage=name,
        cut_batch=copy.cut_batch,
        offsets=copy.offsets,
        watermark_ms=copy.watermark_ms,
        outputs=tables,
        operators=copy.operators,
        shuffle_partitions=copy.shuffle_partitions,
        provider=copy.provider,
        files=copy.files,
        size_new=copy.size_new,
        timings=Timings(async_ms=taken_ms, end_to_end_ms=taken_ms),
        directory=directory,
    )


def manifest_of(
    barrier: Barrier,
    attempt: AttemptId,
    run: RunId,
    *,
    stages: tuple[StageSnapshot, ...],
    moment_ms: int,
    now_ms: int,
) -> Manifest:
    """Return the manifest of a cut: `acked_ms` is when its last batch had ended."""
    return Manifest(
        id=barrier.id,
        attempt=attempt,
        run=run,
        job=WATCHED_JOB,
        kind=barrier.kind,
        name=None,
        triggered_ms=barrier.timestamp_ms,
        acked_ms=moment_ms,
        completed_ms=now_ms,
        graph=tuple(StageShape(s.stage, (), {}, {}, {s.stage: MAIN_OUTPUT}) for s in stages),
        stages=stages,
    )
