"""The inputs that queries read again after a rewind: rows of those that are gone would be missing.

Spark says nothing of a file that is gone: it lists a directory anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pyarrow as pa

from spark_abs.errors import Refused, UsageError
from spark_abs.restore.refusals import Back, Force, forced_by, lost_inputs
from spark_abs.rewind.journal import Journal, QueryGoal
from spark_abs.snapshots.file_sources import is_there, logged_after
from spark_abs.snapshots.layout import file_source_offset, parse_offsets
from spark_abs.snapshots.parallel import in_threads
from spark_abs.store.storage import Place, Storage, told

_REWIND = Back("rewind", "moment", "queries")


def lost_again(journal: Journal, storage: Storage, *, forced: bool) -> tuple[str, ...]:
    """Refuse to lose the rows of inputs that are gone; forced, return notes for the plan.

    Raises:
        Refused: names them, or says why it is not known whether they are there.
        DamageError: the log of a file source is not as Spark writes it.
    """
    return tuple(
        note for query in journal.queries if query.moves for note in _lost_files(query, storage, forced)
    )


def _lost_files(query: QueryGoal, storage: Storage, forced: bool) -> tuple[str, ...]:
    paths = sorted(set(_read_again(query, storage.place(query.uri))))
    try:
        there = in_threads(partial(is_there, storage), paths)
    except (pa.ArrowException, OSError, UsageError) as error:
        what = (
            f"it is not known whether the input files that query {query.name!r} reads again are there: "
            f"{told(error)}"
        )
        if not forced:
            raise Refused(
                f"{what}; rows of those that are gone would be missing after the rewind: let their store be "
                f"read, or pass {forced_by(Force.INPUTS)} to accept that"
            ) from error
        return (what,)
    gone = [path for path, found in zip(paths, there, strict=True) if not found]
    which = f"{len(gone)} of {len(paths)} input files that query {query.name!r} reads again"
    return lost_inputs(which, gone, forced=forced, back=_REWIND)


def _read_again(query: QueryGoal, checkpoint: Place) -> Iterator[str]:
    """Iterate the files, as Spark names them, that a query has planned to read since its batch."""
    offsets = parse_offsets(query.offsets).offsets
    for source in query.logs:
        until = file_source_offset(offsets.get(source))
        log = checkpoint.below(f"sources/{source}")
        yield from (entry.path for entry in logged_after(log, -1 if until is None else until))
