"""From the arguments of a rewind to its plan: directories and tables, the moment, the cut."""

from __future__ import annotations

import fnmatch
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pyarrow import fs

from spark_abs.cuts.cut import NoAlignedCut, cuts, newest_cut
from spark_abs.errors import Refused, UsageError
from spark_abs.quantities import time_said
from spark_abs.rewind.apply import check_plan
from spark_abs.rewind.inputs import lost_again
from spark_abs.rewind.kept import KeptCut, kept_cuts
from spark_abs.rewind.plan import RewindPlan, plan_rewind
from spark_abs.rewind.query import is_still, read_queries
from spark_abs.rewind.survey import Survey, survey
from spark_abs.snapshots.capture import newest_batch
from spark_abs.snapshots.materialise import METADATA
from spark_abs.store.root import Root
from spark_abs.store.storage import Place, Storage
from spark_abs.store.table import Table

_MAGIC = frozenset("*?[")
_NAME = re.compile(r"\w+(\.\w+){0,2}")
"""A table's name in a catalog."""


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
            if goal is not None and newest_batch(query.place, "offsets") != goal.number:
                raise Refused(
                    f"query {query.name!r} has begun a batch during the rewind: stop it and rewind again"
                )


def new_id(now_ms: int) -> str:
    """Return the id of a new rewind; a later one sorts after it."""
    return f"{datetime.fromtimestamp(now_ms / 1000, UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"


def checkpoints_at(patterns: Sequence[str], storage: Storage) -> tuple[Place, ...]:
    """Return the checkpoint directories that patterns name; arguments and errors as of `_directories`."""
    return _directories(patterns, storage, METADATA, "checkpoint directory")


def tables_at(patterns: Sequence[str], storage: Storage) -> tuple[Place, ...]:
    """Return the Delta tables that patterns name; arguments and errors as of `_directories`."""
    return _directories(patterns, storage, "_delta_log/", "Delta table")


def _directories(patterns: Sequence[str], storage: Storage, mark: str, what: str) -> tuple[Place, ...]:
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
            said = f"{pattern} leads to no {what}: none has {mark}"
            if mark.endswith("/") and _NAME.fullmatch(pattern):
                said += f"; of a table in a catalog give the location that DESCRIBE DETAIL {pattern} shows"
            raise UsageError(said)
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
    lose_inputs: bool = False,
    kept: Root | None = None,
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
        lose_inputs: whether rows of inputs that are gone, and would be read again, may be lost.
        kept: where `watch` has kept cuts: the newest of these is taken if Spark has no cut so far back.

    Raises:
        UsageError: a query of `at` is not among them, or has no such batch.
        NoAlignedCut: there is none.
        Refused: the plan cannot be carried out; says why.
    """
    found = survey(checkpoints, tables)
    newest = {query.name: query.planned for query in found.queries}
    for name, batch in (at or {}).items():
        if name not in newest:
            raise UsageError(f"--at {name}={batch}: the queries are {', '.join(newest)}")
        if batch > newest[name] >= 0:
            raise UsageError(f"query {name!r} has no batch {batch}: its newest is {newest[name]}")
    taken: KeptCut | None = None
    try:
        cut = newest_cut(found.pipeline, _bound(found, before_ms, at or {}))
    except NoAlignedCut as none:
        if kept is None:
            raise NoAlignedCut(f"{none}{_oldest(found)}") from none
        found, cut, taken = _kept(
            found, kept, checkpoints, tables, before_ms=before_ms, at=at or {}, why=none
        )
    plan = plan_rewind(
        found,
        cut,
        rewind=new_id(now_ms),
        now_ms=now_ms,
        undo_others=undo_others,
        others_stay=others_stay,
    )
    plan = check_plan(replace(plan, kept=taken), storage)
    lost = lost_again(plan.journal, found.tables, storage, forced=lose_inputs)
    return Prepared(replace(plan, notes=(*plan.notes, *lost)), found)


def _bound(found: Survey, before_ms: int | None, at: Mapping[str, int]) -> dict[str, int]:
    """Return the place of the newest batch of each query that may be in the cut, -1 if none."""
    pipeline, made = found.pipeline, {query.name: query.made for query in found.queries}
    bound = pipeline.newest() if before_ms is None else pipeline.before(before_ms)
    for name, batch in at.items():
        old = (made[name].get(b.number, b.number) for b in pipeline.batches[name])
        places = (place for place, number in enumerate(old) if number <= batch)
        bound[name] = min(bound[name], max(places, default=-1))
    return bound


def _kept(
    found: Survey,
    root: Root,
    checkpoints: Sequence[Place],
    tables: Sequence[Place],
    *,
    before_ms: int | None,
    at: Mapping[str, int],
    why: NoAlignedCut,
) -> tuple[Survey, dict[str, int], KeptCut]:
    """Return the newest kept cut within the bounds, and what storage shows as far back as that.

    The logs of the tables must still agree with it: a cut is only taken if it is aligned by them.

    Raises:
        NoAlignedCut: there is none.
    """
    tried = 0
    for cut in kept_cuts(root, found.queries):
        batches = cut.batches(found.queries)
        if before_ms is not None and cut.moment_ms > before_ms:
            continue
        if any(batches[name] > batch for name, batch in at.items()):
            continue
        tried += 1
        deeper = survey(checkpoints, tables, kept=cut.read())
        bound = {
            name: next((place for place, b in enumerate(known) if b.number == batches[name]), -1)
            for name, known in deeper.pipeline.batches.items()
        }
        try:
            if newest_cut(deeper.pipeline, bound) == bound and cut.is_of(deeper.tables):
                return deeper, bound, cut
        except NoAlignedCut as error:
            why = error
    said = f"{tried} cuts from before the moment, but the logs of the tables fit none of them"
    none = said if tried else "no cut of these queries so far back"
    raise NoAlignedCut(f"{why}; {root.uri} keeps {none}{_oldest(found, root)}")


def _oldest(found: Survey, root: Root | None = None) -> str:
    """Name the oldest moment there is, also of those that a root keeps; nothing if there is none."""
    moments = [found.pipeline.ended_ms(cut) for cut in cuts(found.pipeline, found.pipeline.newest())]
    others = ", and --root ROOT also those that `spark-abs watch` has kept"
    if root is not None:
        moments, others = [*moments, *(cut.moment_ms for cut in kept_cuts(root, found.queries))], ""
    if not moments:
        return ""
    return f". The oldest moment there is: {time_said(min(moments))}; --list shows all{others}"


def kept_moments(root: Root, checkpoints: Sequence[Place]) -> Iterator[tuple[int, dict[str, int]]]:
    """Iterate the moments of the cuts that a root keeps of these queries, newest first, as `listed`."""
    queries = read_queries(checkpoints)
    return ((cut.moment_ms, cut.batches(queries)) for cut in kept_cuts(root, queries))


def listed(checkpoints: Sequence[Place], tables: Sequence[Place]) -> Iterator[tuple[int, dict[str, int]]]:
    """Iterate the moments of aligned cuts, newest first: when the last batch had ended, and the batches."""
    found = survey(checkpoints, tables)
    for cut in cuts(found.pipeline, found.pipeline.newest()):
        yield (
            found.pipeline.ended_ms(cut),
            {query: found.pipeline.batches[query][at].number for query, at in cut.items()},
        )
