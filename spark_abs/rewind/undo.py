"""Take a rewind back, and finish one that was interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spark_abs.cuts.cut import newest_cut
from spark_abs.errors import AbsError, DamageError, Refused, UsageError
from spark_abs.rewind.apply import (
    begin,
    carry_out,
    check_plan,
    journal_of,
    version_of,
    withdraw,
    write_journal,
)
from spark_abs.rewind.directory import Files
from spark_abs.rewind.inputs import lost_again
from spark_abs.rewind.journal import PURGED, Journal, in_order, top_of
from spark_abs.rewind.plan import plan_rewind, query_goal
from spark_abs.rewind.query import QueryFacts, is_still, read_queries, rewinds_of, unfinished
from spark_abs.rewind.survey import survey
from spark_abs.store.failpoint import Failpoint
from spark_abs.store.storage import Place, Storage
from spark_abs.store.table import Table


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a rewind that was interrupted."""

    rewind: str
    finished: bool
    """False: it had changed nothing, and is withdrawn."""


def finish(
    checkpoints: Sequence[Place], tables: Sequence[Place], *, at: Failpoint, undo_others: bool = False
) -> Finished | None:
    """Finish or withdraw the rewind whose fence stands in one of these directories; None if none stands.

    What stands in a directory is not trusted: nothing is changed outside of what is given.

    Raises:
        Refused: the rewind is of directories or tables that are not given; or others have changed a table.
    """
    held = unfinished(checkpoints)
    if held is None:
        return None
    storage = checkpoints[0].storage
    _require_given(held.rewind, held.queries, checkpoints)
    if withdraw(held, storage):
        return Finished(held.rewind, False)
    journal = journal_of(storage.place(held.queries[0]), held.rewind)
    if journal is None:
        raise DamageError(f"the plan of rewind {held.rewind} is missing in {held.queries[0]}")
    _require_given(held.rewind, [query.uri for query in journal.queries], checkpoints)
    _require_given(held.rewind, [table.uri for table in journal.tables], tables)
    journal = replace(journal, undo_others=undo_others or journal.undo_others)
    if not journal.planned:
        journal = _second_half(journal, storage, tables, at)
    carry_out(journal, storage, at)
    return Finished(held.rewind, True)


def _require_given(rewind: str, named: Sequence[str], given: Sequence[Place]) -> None:
    if missing := sorted(set(named) - {place.uri for place in given}):
        raise Refused(f"rewind {rewind} is also of {', '.join(missing)}: give that, too")


@dataclass(frozen=True, slots=True)
class Undo:
    """The newest rewind of some queries, which nothing has followed yet."""

    journal: Journal
    queries: tuple[QueryFacts, ...]
    tables: dict[str, int]
    """Table to its present version, which the rewind made."""

    @property
    def steps(self) -> tuple[str, ...]:
        """Sentences for a person."""
        return (
            *(f"table {t.uri}: the rows of version {t.before} come back" for t in self.journal.tables),
            *(
                f"query {q.name!r}: the files of batches {q.batch + 1} to {q.before} come back"
                for q in self.journal.queries
            ),
            "then all go to the newest batches of that time that fit together",
        )

    def require_still(self) -> None:
        """See that nothing has moved since this was found.

        Raises:
            Refused: a query has run, or a table was changed.
        """
        for query in self.queries:
            if _is_purged(query.place, self.journal.rewind):
                raise Refused(f"the files that rewind {self.journal.rewind} had kept were purged meanwhile")
            if not is_still(query):
                raise Refused(f"query {query.name!r} has run since: the rewind can no longer be undone")
        for uri, version in self.tables.items():
            if Table.open(self.queries[0].place.storage.place(uri)).version != version:
                raise Refused(f"table {uri} was changed since: the rewind can no longer be undone")


def find_undo(checkpoints: Sequence[Place], tables: Sequence[Place]) -> Undo:
    """Find the newest rewind of these queries.

    Raises:
        UsageError: there is none.
        Refused: a query has run since, a table was changed since, or directories or tables are missing.
    """
    newest = {(found[-1].rewind if (found := rewinds_of(place)) else "") for place in checkpoints} - {""}
    if not newest:
        raise UsageError("these queries have not been rewound")
    rewind = max(newest)
    journal = _journal_in(checkpoints, rewind)
    if journal is not None and journal.undoes:
        raise Refused(
            f"rewind {rewind} took back rewind {journal.undoes}: go back anew in place of undoing it"
        )
    if journal is None:
        raise Refused(f"the plan of rewind {rewind} is in none of the directories: give all of its queries")
    _require_given(rewind, [query.uri for query in journal.queries], checkpoints)
    _require_given(rewind, [table.uri for table in journal.tables], tables)
    storage = checkpoints[0].storage
    if any(_is_purged(storage.place(query.uri), rewind) for query in journal.queries):
        raise Refused(f"the files that rewind {rewind} had kept were purged: it can no longer be undone")
    queries = read_queries([storage.place(query.uri) for query in journal.queries])
    for facts, goal in zip(queries, journal.queries, strict=True):
        if (facts.planned, facts.committed) != (goal.number, goal.number):
            raise Refused(f"query {goal.name!r} has run since: rewind {rewind} can no longer be undone")
    made = {}
    for table in (goal for goal in journal.tables if goal.restored):
        handle = Table.open(storage.place(table.uri))
        version = version_of(handle, rewind, table.before)
        if version is None or version != handle.version:
            raise Refused(f"table {table.uri} was changed since: rewind {rewind} can no longer be undone")
        made[table.uri] = int(version)
    return Undo(journal, queries, made)


def _journal_in(checkpoints: Sequence[Place], rewind: str) -> Journal | None:
    """Return the plan of a rewind from the directory that has it, None if none has."""
    return next((found for place in checkpoints if (found := journal_of(place, rewind)) is not None), None)


def _is_purged(place: Place, rewind: str) -> bool:
    return place.read(f"{top_of(rewind)}/{PURGED}") is not None


def undo(
    found: Undo,
    tables: Sequence[Place],
    *,
    rewind: str,
    now_ms: int,
    lose_inputs: bool = False,
    at: Failpoint,
) -> None:
    """Take a rewind back: files first, then all goes to the newest aligned cut of the time before it.

    The queries of that time may not have been at one: what they had not read, they read again. Queries that
    the rewind did not have stay as they are.

    Raises:
        Refused: something has moved meanwhile; nothing was changed.
    """
    storage = found.queries[0].place.storage
    journal = Journal(
        rewind,
        now_ms,
        queries=in_order(query_goal(query, query.planned) for query in found.queries),
        tables=(),
        undoes=found.journal.rewind,
        planned=False,
        lose_inputs=lose_inputs,
    )
    begin(journal, storage, require_still=found.require_still, at=at)
    carry_out(_second_half(journal, storage, tables, at), storage, at)


def _second_half(journal: Journal, storage: Storage, tables: Sequence[Place], at: Failpoint) -> Journal:
    """Put the files back, and plan the way to the newest cut of then; every step can be repeated."""
    undone, checkpoints = journal.undoes, [storage.place(query.uri) for query in journal.queries]
    before = _journal_in(checkpoints, undone)
    if before is None:
        raise DamageError(f"the plan of rewind {undone} is missing")
    changed = {goal.uri: goal for goal in before.queries}
    for query in journal.queries:
        files = Files(storage.place(query.uri), undone)
        if query.uri in changed:
            files.hand_over(journal.rewind, at)
            files.put_back(changed[query.uri], at)
            files.take_out(journal.rewind)
        files.forget_record()
    at("put back")
    restored = [goal for goal in before.tables if goal.restored]
    until = {goal.uri: goal.before for goal in restored}
    present = {goal.uri: int(Table.open(storage.place(goal.uri)).version) for goal in restored}
    try:
        seen = survey(checkpoints, tables, until, fenced_by=journal.rewind)
        plan = plan_rewind(
            seen,
            newest_cut(seen.pipeline, seen.pipeline.newest()),
            rewind=journal.rewind,
            now_ms=journal.at_ms,
            undo_others=before.undo_others or journal.undo_others,
            others_stay=True,
            abandoned=present,
            used={goal.uri: goal.number for goal in before.queries},
        )
        plan = check_plan(plan, storage)
        lost_again(plan.journal, seen.tables, storage, forced=journal.lose_inputs)
    except AbsError as error:
        again = tuple(replace(goal, before=present.get(goal.uri, goal.before)) for goal in before.tables)
        earlier = {goal.uri: goal for goal in before.queries}
        queries = tuple(earlier.get(goal.uri, goal) for goal in journal.queries)  # all fences go
        stands = replace(before, rewind=journal.rewind, queries=queries, tables=again)
        write_journal(stands, storage)
        carry_out(stands, storage, at)
        raise Refused(f"the rewind cannot be undone, and stands: {error}") from error
    goals = {goal.uri: goal for goal in plan.journal.queries}
    facts = {query.place.uri: query for query in seen.queries}
    queries = tuple(
        goals.get(g.uri) or query_goal(facts[g.uri], facts[g.uri].planned) for g in journal.queries
    )
    whole = replace(plan.journal, queries=queries, undoes=undone)
    write_journal(whole, storage)
    at("planned")
    return whole
