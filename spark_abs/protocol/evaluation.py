"""Which parts of a batch are evaluated, copied or completed, so that all consumers hold the same rows.

An output is evaluated once a batch, whatever takes it. All files are written before the first commit, which
names them: once it stands, it decides the rows of every other output of that batch.
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
    """For which table: relative to the root for a channel, a whole location for a sink; empty: for no table,
    the files are staged below the root."""
    directory: str = ""
    """Relative to the table, or to the root; empty if there are no rows, or the table takes its rows from
    what is staged for another one."""
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
    """Whether files are committed as they are; if not, Delta's own writer reads them and writes others."""


@dataclass(frozen=True, slots=True)
class Write:
    """An output that is evaluated into files."""

    output: str
    to: Consumer | None
    """Whose files they are; None: nobody's, they are staged for those who read them. Others that are plain
    get copies: tables that forget files at different times cannot share them."""


def writes(
    consumers: Sequence[Consumer], called: Collection[str], unsure: Collection[str]
) -> tuple[Write, ...]:
    """Return which outputs are evaluated into files, the main one first.

    Args:
        consumers: the tables that get rows, in the order of their commits; without any nothing is written.
        called: outputs that a function takes.
        unsure: outputs that may have other rows when they are evaluated a second time: of the main one it
            concerns all, of another one only itself.
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
    """How the tables that lack a partly committed batch get its rows."""

    own: Mapping[str, Staged] = field(default_factory=dict)
    """By table: files that lie there for it, or the fact that it has no rows."""
    lent: Mapping[str, Staged] = field(default_factory=dict)
    """By table: files of the same output, of another table or staged."""
    anew: tuple[Consumer, ...] = ()
    """Nothing is named for their output: it is evaluated again."""


def missing(lacking: Sequence[Consumer], named: Sequence[Staged]) -> Missing:
    """Return how the consumers that lack a batch get its rows, another output having committed it.

    Args:
        lacking: the consumers without the batch, in the order of their commits.
        named: what the first commit of the batch names; empty if a version wrote it that named nothing.
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
    """Return by output where its rows can be read; one without rows has files nowhere, which says it, too."""
    found: dict[str, Staged] = {}
    for staged in named:
        if staged.directory or not staged.rows:
            found.setdefault(staged.output, staged)
    return found
