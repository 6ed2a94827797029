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
from spark_abs.rewind.query import is_still, newest_planned
from spark_abs.rewind.survey import Survey, survey
from spark_abs.store.storage import Place, Storage
from spark_abs.store.table import Table

_MAGIC = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked plan."""

    plan: RewindPlan
    found: Survey

    def require_still(self) -> None:
        """See that no query has begun or ended a batch, and no table was changed, since the survey.

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

    def require_back(self) -> None:
        """Look once more, after the rewind: a query that was not stopped may have written.

        Raises:
            Refused: one has.
        """
        now = {query.uri: query for query in self.plan.journal.queries}
        for query in self.found.queries:
            goal = now.get(query.place.uri)
            if goal is not None and newest_planned(query.place) != goal.batch:
                raise Refused(
                    f"query {query.name!r} has begun a batch during the rewind: stop it and rewind again"
                )


def new_id(now_ms: int) -> str:
    """Return the id of a new rewind; a later one sorts after it."""
    return f"{datetime.fromtimestamp(now_ms / 1000, UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"


def found_directories(patterns: Sequence[str], storage: Storage, mark: str, what: str) -> tuple[Place, ...]:
    """Return the directories that patterns name.

    Args:
        patterns: paths or URIs, with `*`, `?` and `[…]` within a name.
        storage: how they are reached.
        mark: what makes it one: the name of a file, or of a directory if it ends with `/`.
        what: for messages.

    Raises:
        UsageError: a pattern leads to none.
    """
    found: dict[str, Place] = {}
    for pattern in patterns:
        places = [place for place in _matching(pattern, storage) if _has(place, mark)]
        if not places:
            raise UsageError(f"{pattern} leads to no {what}: none has {mark}")
        found |= {place.uri: place for place in places}
    return tuple(found.values())


def _has(place: Place, mark: str) -> bool:
    wanted = fs.FileType.Directory if mark.endswith("/") else fs.FileType.File
    return bool(place.fs.get_file_info(f"{place.path}/{mark.rstrip('/')}").type is wanted)


def _matching(pattern: str, storage: Storage) -> Iterator[Place]:
    if not ("://" in pattern and "?" in pattern):  # no location: `?` begins the options of a URL
        literal = storage.place(pattern)
        if literal.exists():  # a shell has found it, or its name has letters of a pattern
            return iter([literal])
    names = pattern.rstrip("/").split("/")
    first = next((at for at, name in enumerate(names) if _MAGIC & set(name)), len(names))
    top = storage.place("/".join(names[:first]) or ("/" if pattern.startswith("/") else "."))
    return _below(top, names[first:])


def _below(top: Place, names: Sequence[str]) -> Iterator[Place]:
    """Iterate the places below another that a pattern names, one name after another."""
    if not names:
        yield top
        return
    for info in top.fs.get_file_info(fs.FileSelector(top.path, allow_not_found=True)):
        if info.type is fs.FileType.Directory and fnmatch.fnmatchcase(info.base_name, names[0]):
            yield from _below(top.below(info.base_name), names[1:])


def prepare(
    checkpoints: Sequence[Place],
    tables: Sequence[Place],
    *,
    storage: Storage,
    now_ms: int,
    before_ms: int | None = None,
    at: Mapping[str, int] | None = None,
    undo_others: bool = False,
    others_stay: bool = False,
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
        others_stay: whether commits that name no batch are those of others, in tables that stay as they are.

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
    plan = plan_rewind(
        found,
        cut,
        rewind=new_id(now_ms),
        now_ms=now_ms,
        undo_others=undo_others,
        others_stay=others_stay,
    )
    check_plan(plan, storage)
    return Prepared(plan, found)


def listed(checkpoints: Sequence[Place], tables: Sequence[Place]) -> Iterator[tuple[int, dict[str, int]]]:
    """Iterate the moments of aligned cuts, newest first: when the last batch had ended, and the batches."""
    found = survey(checkpoints, tables)
    for cut in cuts(found.pipeline, found.pipeline.newest()):
        yield (
            found.pipeline.ended_ms(cut),
            {query: found.pipeline.batches[query][at].number for query, at in cut.items()},
        )
