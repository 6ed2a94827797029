"""Which rewind may change a checkpoint directory. Exact commits to a small table in the directory decide.

A rewind claims all its directories, each in one commit: of two rewinds at the same instant the second finds
the claim of the first and has changed nothing. One more commit, to the table of the first directory, decides
that the rewind has begun: from there it is finished, never withdrawn. To withdraw it takes a commit to the
same table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from spark_abs.codec import from_json, to_json
from spark_abs.errors import Refused
from spark_abs.model import FORMAT
from spark_abs.rewind.journal import DIRECTORY
from spark_abs.store.storage import Place
from spark_abs.store.table import Commit, Table

CLAIMS = f"{DIRECTORY}/claims"
_SCHEMA = pa.schema([("claim", pa.string())])


@dataclass(frozen=True, slots=True)
class Claim:
    """The user metadata of a commit: who may change the directory from here on."""

    rewind: str
    """The id of the rewind; empty: nobody."""
    queries: tuple[str, ...] = ()
    """All directories that it claims; the first one has the journal and decides."""
    begun: bool = False
    """In the first directory: whether the rewind has begun."""
    purges: bool = False
    """Whether it is no rewind, but deletes what rewinds have kept: it is repeated, never finished."""
    v: int = FORMAT


_FREE = Claim("")


def claim_of(place: Place) -> Claim | None:
    """Return the claim on a checkpoint directory, None if there is none."""
    table = Table.find(place.below(CLAIMS))
    return None if table is None else _held(table)


def _held(table: Table) -> Claim | None:
    commit = table.read_commit(table.version)
    if commit is None or commit.metadata is None:
        return None
    claim = from_json(Claim, commit.metadata)
    return claim if claim.rewind else None


def take(place: Place, claim: Claim) -> None:
    """Claim a directory.

    Raises:
        Refused: another rewind has claimed it.
    """

    def decide(table: Table) -> Commit | None:
        held = _held(table)
        if held is not None and held.rewind != claim.rewind:
            raise Refused(
                f"another rewind of {place} has begun meanwhile: wait for it, or if it was killed, call its "
                "command again"
            )
        return None if held is not None else _commit(claim)

    Table.ensure(place.below(CLAIMS), _SCHEMA).commit(decide)


def begin(first: Place, rewind: str) -> None:
    """Record, in the first directory, that a rewind has begun.

    Raises:
        Refused: it was withdrawn meanwhile.
    """

    def decide(table: Table) -> Commit | None:
        held = _held(table)
        if held is None or held.rewind != rewind:
            raise Refused("the rewind was withdrawn meanwhile by another call; nothing was changed")
        return None if held.begun else _commit(replace(held, begun=True))

    Table.open(first.below(CLAIMS)).commit(decide)


def withdraw(first: Place, rewind: str) -> bool:
    """End a claim on the first directory unless the rewind has begun; say whether it has not."""
    begun = False

    def decide(table: Table) -> Commit | None:
        nonlocal begun
        held = _held(table)
        begun = held is not None and held.rewind == rewind and held.begun
        return None if held is None or held.rewind != rewind or begun else _commit(_FREE)

    _if_there(first, decide)
    return not begun


def release(place: Place, rewind: str) -> None:
    """End the claim of a rewind on a directory."""

    def decide(table: Table) -> Commit | None:
        held = _held(table)
        return None if held is None or held.rewind != rewind else _commit(_FREE)

    _if_there(place, decide)


def _if_there(place: Place, decide: Callable[[Table], Commit | None]) -> None:
    if (table := Table.find(place.below(CLAIMS))) is not None:
        table.commit(decide)


def _commit(claim: Claim) -> Commit:
    return Commit(metadata=to_json(claim))
