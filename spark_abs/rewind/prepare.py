"""From the arguments of a rewind to its plan: directories and tables, the moment, the cut."""

from __future__ import annotations

import fnmatch
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pyarrow import fs

from spark_abs.cuts.cut import cuts, newest_cut
from spark_abs.errors import Refused, UsageError
from spark_abs.rewind.apply import check_plan
from spark_abs.rewind.plan import RewindPlan, plan_rewind
from spark_abs.rewind.query import is_still
from spark_abs.rewind.survey import Survey, survey
from spark_abs.store.storage import Place, Storage
from spark_abs.store.table import Table

_MAGIC = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked plan."""

    plan: RewindPlan
    storage: Storage
    found: Survey
    checkpoints: tuple[Place, ...]

    def require_still(self) -> None:
        """See that no query has begun or ended a batch, and no table has a new version, since the survey.

        Raises:
            Refused: one has.
        """
        for query in self.found.queries:
            if not is_still(query):
                raise Refused(
                    f"query {query.name!r} has begun or ended a batch since the plan was made: stop all "
                    "queries of these directories first; nothing was changed"
                )
        for table in self.found.tables:
            if Table.open(table.place).version != table.version:
                raise Refused(
                    f"table {table.uri} has a new version since the plan was made: stop its writers first; "
                    "nothing was changed"
                )


def new_id(now_ms: int) -> str:
    """Return the id of a new rewind; a later one sorts after it."""
    return f"{datetime.fromtimestamp(now_ms / 1000, UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"


def found_directories(patterns: Sequence[str], storage: Storage, mark: str, what: str) -> tuple[Place, ...]:
    """Return the directories that patterns name.

    Args:
        patterns: paths or URIs, with `*`, `?` and `[…]` within a name.
        storage: how they are reached.
        mark: the file or directory that makes it one.
        what: for messages.

    Raises:
        UsageError: a pattern leads to none.
    """
    found: dict[str, Place] = {}
    for pattern in patterns:
        places = [place for place in _matching(pattern, storage) if place.below(mark).exists()]
        if not places:
            raise UsageError(f"{pattern} leads to no {what}: none has {mark}")
        found |= {place.uri: place for place in places}
    return tuple(found.values())


def _matching(pattern: str, storage: Storage) -> Iterator[Place]:
    names = pattern.rstrip("/").split("/")
    first = next((at for at, name in enumerate(names) if _MAGIC & set(name)), None)
    if first is None:
        yield storage.place(pattern)
        return
    top = storage.place("/".join(names[:first]) or ("/" if pattern.startswith("/") else "."))
    for info in top.fs.get_file_info(fs.FileSelector(top.path, allow_not_found=True)):
        if info.type is fs.FileType.Directory and fnmatch.fnmatchcase(info.base_name, names[first]):
            rest = "/".join([top.below(info.base_name).uri, *names[first + 1 :]])
            yield from _matching(rest, storage)


def prepare(
    checkpoints: Sequence[Place],
    tables: Sequence[Place],
    *,
    storage: Storage,
    now_ms: int,
    before_ms: int | None = None,
    at: Mapping[str, int] | None = None,
    undo_others: bool = False,
) -> Prepared:
    """Plan a rewind to the newest aligned cut, and check that all it needs is there.

    Args:
        checkpoints: the checkpoint directories of the queries.
        tables: the tables that they write.
        storage: how they are reached.
        now_ms: the time.
        before_ms: the moment that no batch of the cut may be later than; None: now.
        at: query to the batch that it may not be beyond.
        undo_others: whether rows that others have written since may go.

    Raises:
        UsageError: a query of `at` is not among them.
        NoAlignedCut: there is none.
        Refused: the plan cannot be carried out; says why.
    """
    found = survey(checkpoints, tables)
    bound = found.pipeline.newest() if before_ms is None else found.pipeline.before(before_ms)
    for name, batch in (at or {}).items():
        if name not in bound:
            raise UsageError(f"--at {name}={batch}: the queries are {', '.join(bound)}")
        batches = found.pipeline.batches[name]
        place = max((at for at, b in enumerate(batches) if b.number <= batch), default=-1)
        bound[name] = min(bound[name], place)
    cut = newest_cut(found.pipeline, bound)
    plan = plan_rewind(found, cut, rewind=new_id(now_ms), now_ms=now_ms, undo_others=undo_others)
    check_plan(plan, storage)
    return Prepared(plan, storage, found, tuple(checkpoints))


def listed(checkpoints: Sequence[Place], tables: Sequence[Place]) -> Iterator[tuple[int, dict[str, int]]]:
    """Iterate the moments of aligned cuts, newest first: when the last batch had ended, and the batches."""
    found = survey(checkpoints, tables)
    for cut in cuts(found.pipeline, found.pipeline.newest()):
        yield (
            found.pipeline.ended_ms(cut),
            {query: found.pipeline.batches[query][at].number for query, at in cut.items()},
        )
