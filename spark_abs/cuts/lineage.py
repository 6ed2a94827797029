"""Which versions of a table the batches of a query made, from the transactions in its log: pure code.

Delta's sink writes `txn` with the id of its query and the number of the batch into each commit, and a writer
in `foreachBatch` does so with `txnAppId` and `txnVersion`. A commit with no higher number than the one before
it has set the transaction back: the table was rewound, and the batches above the number are abandoned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spark_abs.cuts.cut import NEVER, NOTHING, Batch, Written


@dataclass(frozen=True, slots=True)
class Transactions:
    """The commits of one writer to a table."""

    first: Mapping[int, int]
    """Batch to the version that it made."""
    rewound: Mapping[int, int]
    """Batch to the newest version that a rewind made with the same rows."""

    def written(self, query: str, table: str, batches: Sequence[Batch]) -> Written:
        """Return the commits as a cut needs them."""
        numbers = sorted(self.first)
        last, following = [], []
        for batch in batches:
            at = bisect_right(numbers, batch.number)
            last.append(self.first[numbers[at - 1]] if at else NOTHING)
            following.append(self.first[numbers[at]] if at < len(numbers) else NEVER)
        return Written(query, table, tuple(last), tuple(following))

    def version_at(self, batch: int) -> int:
        """Return the newest version with the rows up to a batch, `NOTHING` if no batch up to it made one."""
        numbers = [number for number in self.first if number <= batch]
        rewinds = [version for number, version in self.rewound.items() if number <= batch]
        return max([self.first[n] for n in numbers] + rewinds, default=NOTHING)


def transactions(commits: Iterable[tuple[int, int]]) -> Transactions:
    """Follow the transactions of one writer.

    Args:
        commits: version of the table and number of the batch, in the order of the log.
    """
    first: dict[int, int] = {}
    rewound: dict[int, int] = {}
    newest = NOTHING
    for version, batch in commits:
        if batch <= newest:
            for abandoned in [number for number in first if number > batch]:
                del first[abandoned]
            for abandoned in [number for number in rewound if number > batch]:
                del rewound[abandoned]
            rewound[batch] = version
        else:
            first[batch] = version
        newest = batch
    return Transactions(first, rewound)


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
