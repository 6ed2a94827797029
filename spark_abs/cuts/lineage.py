"""Which versions of a table the batches of a query made, from the transactions in its log: pure code.

Delta's sink writes `txn` with the id of its query and the number of the batch into each commit, and a writer
in `foreachBatch` does so with `txnAppId` and `txnVersion`. A commit with no higher number than the one before
it has set the transaction back: the batches above the number are abandoned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spark_abs.cuts.cut import NEVER, NOTHING, Batch, Written


def written_by(
    commits: Iterable[tuple[int, int]], query: str, table: str, batches: Sequence[Batch]
) -> Written:
    """Return what a query has written to a table, as a cut needs it.

    Args:
        commits: version of the table and number of the batch, of one application id, in the order of the log.
        query: the query.
        table: the table.
        batches: of the query, oldest first.
    """
    first = first_versions(commits)
    numbers = sorted(first)
    last, following = [], []
    for batch in batches:
        at = bisect_right(numbers, batch.number)
        last.append(first[numbers[at - 1]] if at else NOTHING)
        following.append(first[numbers[at]] if at < len(numbers) else NEVER)
    return Written(query, table, tuple(last), tuple(following))


def first_versions(commits: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return for each batch the version that it made. Arguments as for `written_by`."""
    first: dict[int, int] = {}
    for version, batch in commits:
        while first and (newest := next(reversed(first))) > batch:
            del first[newest]
        first.setdefault(batch, version)
    return first


@dataclass(frozen=True, slots=True)
class Attempted:
    """When a query planned a batch and when it had committed it, in ms, by the clock of the files."""

    begun_ms: int
    ended_ms: int


def writer_of(
    commits: Mapping[int, int], queries: Mapping[str, Mapping[int, Attempted]], slack_ms: int
) -> tuple[str, ...]:
    """Return the queries that can have made the commits of an application id, each during its batch.

    Args:
        commits: number of the batch to the time of the commit, in ms.
        queries: query to its batches.
        slack_ms: by how much the clocks of the commits and of the files may differ.
    """
    return tuple(
        query
        for query, batches in queries.items()
        if (known := commits.keys() & batches.keys())
        and all(batches[b].begun_ms - slack_ms <= commits[b] <= batches[b].ended_ms + slack_ms for b in known)
    )
