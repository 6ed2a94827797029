"""Which versions of a table the batches of a query made, from the transactions in its log: pure code.

Delta's sink writes `txn` with the id of its query and the number of the batch into each commit, and a writer
in `foreachBatch` does so with `txnAppId` and `txnVersion`. A commit with no higher number than the one before
it has set the transaction back: the batches above the number are abandoned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
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


def batches_by_time(
    commits: Mapping[int, int], queries: Mapping[str, Mapping[int, Attempted]], slack_ms: int
) -> Mapping[int, tuple[str, int]] | str:
    """Conclude from times alone which batch of which query made each commit; or say why that is open.

    It is concluded only if there is one possibility: each commit lies between the plan of exactly one batch
    and its end, no batch of another query is near, and all batches that were committed made equally many: a
    commit of others can fall into a batch, but not one into each. A query's own plans and commits have one
    clock, that of its driver; all others may differ.

    Args:
        commits: version to the time of the commit, in ms.
        queries: query to its batches; only queries that can have written the table.
        slack_ms: by how much clocks may differ.
    """
    begun = {query: sorted((times.begun_ms, b) for b, times in of.items()) for query, of in queries.items()}
    found: dict[int, tuple[str, int]] = {}
    for version, at in commits.items():
        near = [query for query in queries if _is_near(queries[query], begun[query], at, slack_ms)]
        if len(near) != 1:
            said = f"those of {' and '.join(map(repr, near))}" if near else "that of none"
            return f"the time of version {version} is near {said}"
        (query,) = near
        place = bisect_right(begun[query], (at, -1)) - 1
        if place < 0 or (place + 1 < len(begun[query]) and begun[query][place + 1][0] == at):
            return f"version {version} was made just when a batch of {query!r} began"
        batch = begun[query][place][1]
        if at > queries[query][batch].ended_ms + slack_ms:
            return f"version {version} was made when {query!r} had ended batch {batch}"
        found[version] = query, batch
    made = Counter(found.values())
    for query in {query for query, _ in found.values()}:
        counts = {made[query, b] for b, times in queries[query].items() if times.ended_ms < NEVER}
        newest = made[query, max(queries[query])]  # it may not have ended: then it may lack some
        if not counts or len(counts | {max(newest, *counts)}) > 1:
            most = max(newest, *counts)
            return (
                f"some batches of {query!r} would have made {min(counts, default=0)} commits, others {most}"
            )
    return found


def _is_near(
    batches: Mapping[int, Attempted], begun: Sequence[tuple[int, int]], at: int, slack_ms: int
) -> bool:
    """Say whether a time is within a batch of a query, or so near that clocks may hide it."""
    last = bisect_right(begun, (at + slack_ms, NEVER)) - 1
    # An earlier batch may have ended later, where a file of its end was copied.
    return any(at - slack_ms <= batches[b].ended_ms for _, b in begun[max(last - 1, 0) : last + 1])
