"""Which parts of a batch are evaluated, copied or completed, so that all consumers get the same rows.

Each output is evaluated once in a batch, for all its consumers. All files are written before the first
commit, which names them: this commit decides the rows of all other outputs of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from spark_abs.model import MAIN_OUTPUT


@dataclass(frozen=True, slots=True)
class Staged:
    """Files of one output that were written for a batch before any of its commits."""

    output: str
    table: str
    """The table of the files: relative to the root for a channel, a full location for a sink.

    Empty for files staged below the root.
    """
    directory: str = ""
    """Paths relative to the table or to the root.

    Empty without rows, or if the table uses the files staged for another table.
    """
    files: int = 0
    rows: int = 0
    size: int = 0
    """Bytes of all files."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A table to which the rows of an output are committed."""

    output: str
    table: str
    """As in `Staged`."""
    plain: bool = True
    """Whether files are committed unchanged; otherwise Delta's writer reads them and writes new files."""


@dataclass(frozen=True, slots=True)
class Write:
    """An output that is evaluated into files."""

    output: str
    to: Consumer | None
    """The table that owns the files; None for staged files.

    Other plain tables get copies: tables that remove files at different times cannot share them.
    """


def writes(
    consumers: Sequence[Consumer], called: Collection[str], unsure: Collection[str]
) -> tuple[Write, ...]:
    """Return the outputs that are evaluated into files, the main output first.

    Args:
        consumers: the tables that get rows, in the order of their commits; without consumers no files are
            written.
        called: outputs that are passed to a function.
        unsure: outputs whose rows may differ in a second evaluation. The main output affects all others.
    """
    if not consumers:
        return ()
    found = {
        output: _write(output, [c for c in consumers if c.output == output])
        for output in dict.fromkeys(c.output for c in consumers)
    }
    for output in sorted(called):
        if output not in found and output in unsure:
            found[output] = Write(output, None)
    named = {c.output for c in consumers} | set(called)
    if MAIN_OUTPUT in unsure and len(named) > 1:
        found.setdefault(MAIN_OUTPUT, Write(MAIN_OUTPUT, None))
    return tuple(sorted(found.values(), key=lambda write: write.output != MAIN_OUTPUT))


def _write(output: str, takers: Sequence[Consumer]) -> Write:
    return Write(output, next((taker for taker in takers if taker.plain), takers[0]))


@dataclass(frozen=True, slots=True)
class Missing:
    """How the tables that lack a partly committed batch get the rows."""

    own: Mapping[str, Staged] = field(default_factory=dict)
    """By table: its named files; no files for a table without rows."""
    lent: Mapping[str, Staged] = field(default_factory=dict)
    """By table: files of the same output, from another table or staged."""
    anew: tuple[Consumer, ...] = ()
    """Tables whose output has no named files: the output is evaluated again."""


def missing(lacking: Sequence[Consumer], named: Sequence[Staged]) -> Missing:
    """Return how the consumers that lack a batch get its rows, after another output has committed it.

    Args:
        lacking: the consumers without the batch, in the order of their commits.
        named: the files that the first commit of the batch names; empty if an earlier version wrote the
            commit.
    """
    own: dict[str, Staged] = {}
    lent: dict[str, Staged] = {}
    anew: list[Consumer] = []
    files = files_of(named)
    for consumer in lacking:
        mine = [s for s in named if (s.output, s.table) == (consumer.output, consumer.table)]
        if mine and (mine[0].directory or not mine[0].rows):
            own[consumer.table] = mine[0]
        elif consumer.output in files:
            lent[consumer.table] = files[consumer.output]
        else:
            anew.append(consumer)
    return Missing(own, lent, tuple(anew))


def files_of(named: Sequence[Staged]) -> dict[str, Staged]:
    """Return, for each output, files from which its rows can be read.

    An output without rows has an empty entry.
    """
    found: dict[str, Staged] = {}
    for staged in named:
        if staged.directory or not staged.rows:
            found.setdefault(staged.output, staged)
    return found
