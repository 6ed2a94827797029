"""What a rewind writes beside Spark's files, below `_rewind/` in each checkpoint directory (ADR 13).

`_rewind/claims` decides which rewind may change the directory, and whether it has begun.
`_rewind/<id>/journal.json`, in the first directory only, is the plan.
`_rewind/<id>/files/` has each file that was changed or taken away, as it was.
`_rewind/<id>/brought.json` names files of a kept cut that come back; `_rewind/<id>/kept/` has them first.
`_rewind/<id>/rewound.json` says of one directory that its files are as the rewind wants them.
`metadata`, the file with the query's id, holds a `Fence` while a rewind works: Spark cannot start the query.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spark_abs.codec import from_json
from spark_abs.errors import DamageError
from spark_abs.model import FORMAT, checked_relative

DIRECTORY = "_rewind"
PURGED = "purged"
"""A file beside the record of a rewind: the files that it had kept are deleted, or about to be."""
MARK = "spark.abs.rewind"
"""A setting in the offsets of a batch that is none: no driver of an earlier time can plan this number."""
FENCE = "A rewind of this query is not finished. Call the same `spark-abs rewind` again, which finishes it."
"""The first line of `metadata` while a rewind works; the fence follows as JSON."""


def top_of(rewind: str) -> str:
    """Return the directory of a rewind, relative to a checkpoint directory.

    Raises:
        DamageError: `rewind`, which may come from a file, is not the id of one.
    """
    name = checked_relative(rewind)
    if "/" in name:
        raise DamageError(f"{rewind!r} is not the id of a rewind")
    return f"{DIRECTORY}/{name}"


@dataclass(frozen=True, slots=True)
class Fence:
    """What stands in `metadata` of each query while a rewind works."""

    rewind: str
    metadata: str
    """The text that was there."""
    queries: tuple[str, ...]
    """The checkpoint directories that the rewind fences; the first has the journal."""
    v: int = FORMAT


@dataclass(frozen=True, slots=True)
class Mark:
    """The user metadata of the commit that a rewind makes on a table."""

    sparkAbsRewind: str  # noqa: N815 - as it stands in the table's history
    """The id of the rewind."""
    version: int | None
    """Whose rows the table has from here on, -1 for none; None if its rows did not change."""
    v: int = FORMAT


def mark_of(metadata: str | None) -> Mark | None:
    """Return the mark of a rewind, None for what others have written."""
    if metadata is None or "sparkAbsRewind" not in metadata:
        return None
    try:
        return from_json(Mark, metadata)
    except DamageError:
        return None


@dataclass(frozen=True, slots=True)
class TableGoal:
    """A table that goes back."""

    uri: str
    version: int
    """Whose rows it gets; -1: none."""
    before: int
    """Its version when the plan was made."""
    transactions: Mapping[str, str]
    """Application id to the checkpoint directory of its query, to whose number it is set."""
    restored: bool
    """Whether rows change; if not, only transactions are set."""


@dataclass(frozen=True, slots=True)
class QueryGoal:
    """A query that goes back."""

    uri: str
    name: str
    batch: int
    """The batch after which it resumes."""
    number: int
    """The number that this batch gets: above all that the query has ever used. `batch` if the query stays."""
    metadata: str
    """The text of its `metadata`."""
    before: int
    """The newest batch in its offset log when the plan was made."""
    jumps: Mapping[str, str]
    """Delta source to the table whose new version it reads after."""
    offsets: str
    """The text of the offsets of the batch."""
    logs: Mapping[str, int]
    """File source to the newest number in its log when the plan was made."""

    @property
    def moves(self) -> bool:
        """Whether its files change; else it is only fenced."""
        return self.number != self.batch


def in_order(goals: Iterable[QueryGoal]) -> tuple[QueryGoal, ...]:
    """Return the goals in the order in which directories are claimed: of two rewinds one gets all."""
    return tuple(sorted(goals, key=lambda goal: goal.uri))


@dataclass(frozen=True, slots=True)
class Journal:
    """The plan of a rewind that has begun."""

    rewind: str
    at_ms: int
    queries: tuple[QueryGoal, ...]
    """As `in_order`: the directory of the first one decides whether the rewind has begun."""
    tables: tuple[TableGoal, ...]
    undo_others: bool = False
    """Whether commits of others are undone, too."""
    undoes: str = ""
    """The id of the rewind that this one takes back."""
    planned: bool = True
    """Whether the goals are there: an undo makes them after the files are back."""
    lose_inputs: bool = False
    """Whether an undo may lose the rows of inputs that are gone and would be read again."""
    v: int = FORMAT


@dataclass(frozen=True, slots=True)
class Brought:
    """The files of a kept cut that a rewind brings back to one checkpoint directory."""

    files: tuple[str, ...]
    """All of them, relative to the directory; until they are moved they wait in `_rewind/<id>/kept/`."""
    new: tuple[str, ...]
    """Those of which the directory had none of the name: an undo deletes them."""
    v: int = FORMAT


@dataclass(frozen=True, slots=True)
class Rewound:
    """What a rewind did to one checkpoint directory."""

    rewind: str
    at_ms: int
    batch: int
    """The batch to whose end the query went back."""
    number: int
    """The number that this batch has since."""
    v: int = FORMAT
