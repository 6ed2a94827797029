"""The inputs that queries read again after a rewind: rows of those that are gone would be missing.

Spark says nothing of an input file that is gone: it lists a directory anew. A query that reads a Delta table
of which a file is gone cannot start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import pyarrow as pa

from spark_abs.errors import Refused, UsageError
from spark_abs.restore.delta_inputs import why_not_from
from spark_abs.restore.refusals import Back, Force, forced_by, lost_inputs, lost_tables
from spark_abs.rewind.files import read_until
from spark_abs.rewind.journal import Journal, QueryGoal
from spark_abs.rewind.table import TableFacts
from spark_abs.snapshots.delta_offsets import delta_offset
from spark_abs.snapshots.file_sources import is_there, logged_after
from spark_abs.snapshots.layout import parse_offsets
from spark_abs.snapshots.parallel import in_threads
from spark_abs.store.storage import Place, Storage, told

_REWIND = Back("rewind", "moment", "queries")


def lost_again(
    journal: Journal, tables: Sequence[TableFacts], storage: Storage, *, forced: bool
) -> tuple[str, ...]:
    """Refuse to lose the rows of inputs that are gone; forced, return notes for the plan.

    Args:
        journal: the goals of the queries.
        tables: all that were given; others are not looked at.
        storage: where input files are.
        forced: whether rows may be lost.

    Raises:
        Refused: names them, or says why it is not known whether they are there.
        DamageError: the log of a file source is not as Spark writes it.
    """
    movers = [query for query in journal.queries if query.moves]
    files = [note for query in movers for note in _lost_files(query, storage, forced)]
    places, lost = {table.id: table.place for table in tables}, list[str]()
    for query in movers:
        try:
            lost += _lost_rows(query, places)
        except (pa.ArrowException, OSError, UsageError) as error:
            what = f"it is not known whether tables have the files that query {query.name!r} reads again"
            files.append(_not_known(what, error, forced=forced))
    which = "rows that queries read again"
    return (*files, *lost_tables(which, lost, forced=forced, back=_REWIND))


def _lost_files(query: QueryGoal, storage: Storage, forced: bool) -> tuple[str, ...]:
    paths = sorted(set(_read_again(query, storage.place(query.uri))))
    try:
        there = in_threads(partial(is_there, storage), paths)
    except (pa.ArrowException, OSError, UsageError) as error:
        what = f"it is not known whether the input files that query {query.name!r} reads again are there"
        return (_not_known(what, error, forced=forced),)
    gone = [path for path, found in zip(paths, there, strict=True) if not found]
    which = f"{len(gone)} of {len(paths)} input files that query {query.name!r} reads again"
    return lost_inputs(which, gone, forced=forced, back=_REWIND)


def _not_known(what: str, error: Exception, *, forced: bool) -> str:
    said = f"{what}: {told(error)}"
    if not forced:
        raise Refused(
            f"{said}; rows of those that are gone would be missing after the rewind: let their store be "
            f"read, or pass {forced_by(Force.INPUTS)} to accept that"
        ) from error
    return said


def _lost_rows(query: QueryGoal, tables: Mapping[str, Place]) -> Iterator[str]:
    """Iterate the tables that stay and lack rows that a query reads again, each with the reason."""
    for source, line in parse_offsets(query.offsets).offsets.items():
        offset = delta_offset(line)
        if offset is None or offset.table_id not in tables or source in query.jumps:
            continue
        place = tables[offset.table_id]
        # The options of the source, such as one that lets columns change, are not in storage.
        if found := why_not_from(place, offset, tracked=True):
            yield f"query {query.name!r} resumes at version {offset.commit} of {place}, and {found}"


def _read_again(query: QueryGoal, checkpoint: Place) -> Iterator[str]:
    """Iterate the files, as Spark names them, that a query has planned to read since its batch."""
    offsets = parse_offsets(query.offsets)
    for source in query.logs:
        log = checkpoint.below(f"sources/{source}")
        yield from (entry.path for entry in logged_after(log, read_until(offsets, source)))
