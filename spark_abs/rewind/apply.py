"""A rewind at work: claims, fences, the journal, tables, checkpoint directories. Every step can be repeated.

1. Each directory is claimed: of two rewinds one gives way.  2. Each query's `metadata` becomes a fence, so
that Spark cannot start it. If nothing has moved since the plan, the number of its next batch is taken, so
that a driver that still runs cannot plan it.  3. One commit decides that the rewind has begun: from here it
is finished, never withdrawn.  4. Tables go back.  5. Checkpoint directories go back.  6. The fences and
claims go. A rewind that was killed before step 3 is withdrawn: nothing else was changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from spark_abs.codec import from_json, to_json
from spark_abs.errors import CommitConflict, DamageError, Refused
from spark_abs.model import BatchId, Version
from spark_abs.rewind import claim
from spark_abs.rewind.claim import Claim
from spark_abs.rewind.directory import (
    bring_back,
    check_schemas,
    check_sources,
    least_number,
    lift_fence,
    occupy,
    put_fence,
    vacate,
)
from spark_abs.rewind.journal import (
    Fence,
    Journal,
    Mark,
    TableGoal,
    mark_of,
    top_of,
)
from spark_abs.rewind.kept import KeptCut, bring, forget_brought, require_whole
from spark_abs.rewind.plan import RewindPlan
from spark_abs.sinks.delta.changes import commits_since
from spark_abs.sinks.delta.rollback import missing
from spark_abs.snapshots.capture import CaptureIncomplete, capture
from spark_abs.store.failpoint import Failpoint
from spark_abs.store.log import LogCommit
from spark_abs.store.storage import Place, Storage
from spark_abs.store.table import Commit, Table

_FEATURES = frozenset(
    (
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "generatedColumns",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
    )
)
"""Features of tables whose versions are restored by their files alone."""


def check_plan(plan: RewindPlan, storage: Storage) -> RewindPlan:
    """See that all that the plan needs is there: state of each batch, files of each version.

    Returns:
        the plan with the new numbers of batches, which are above the versions of all state.

    Raises:
        Refused: something is gone, or a table can only be changed by Spark; says what.
    """
    queries = []
    for query in plan.journal.queries:
        place = storage.place(query.uri)
        try:
            if plan.kept is not None:
                require_whole(plan.kept, query.uri)
                paths = [file.path for file in plan.kept.files(query.uri)]
            else:
                captured = capture(place.fs, place.path, BatchId(query.batch), source_logs=False)
                paths = [file.path for file in captured.files]
                check_sources(place, query, plan.journal.rewind)
            check_schemas(place, query, plan.journal.rewind)
        except (CaptureIncomplete, DamageError) as error:
            raise Refused(f"query {query.name!r} cannot go back to batch {query.batch}: {error}") from error
        if query.moves:
            query = replace(query, number=max(query.number, least_number(query, paths)))
        queries.append(query)
    for goal in plan.journal.tables:
        _check_table(Table.open(storage.place(goal.uri)), goal)
    return replace(plan, journal=replace(plan.journal, queries=tuple(queries)))


def _check_table(table: Table, goal: TableGoal) -> None:
    protocol = table.delta.protocol()
    features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
    others = sorted(features - _FEATURES)
    if protocol.min_reader_version == 2 or protocol.min_writer_version in (5, 6):
        others.append(f"of protocol {protocol.min_reader_version}, {protocol.min_writer_version}")
    if others:
        raise Refused(
            f"table {goal.uri} has the features {', '.join(others)}, with which only Spark changes it: a "
            "rewind cannot bring it back"
        )
    if goal.restored and table.delta.metadata().configuration.get("delta.appendOnly") == "true":
        raise Refused(
            f"table {goal.uri} has the property delta.appendOnly=true, which forbids to take rows out of it: "
            "unset it for the time of the rewind"
        )
    if goal.restored and (gone := missing(table, Version(goal.version))):
        raise Refused(f"table {goal.uri}: {gone}")


def apply(plan: RewindPlan, storage: Storage, *, require_still: Callable[[], None], at: Failpoint) -> None:
    """Carry a plan out.

    Args:
        plan: checked by `check_plan`.
        storage: where directories and tables are.
        require_still: raises Refused unless queries and tables are as when the plan was made; called when all
            fences stand.
        at: called with the name of each point where a kill is tried.

    Raises:
        Refused: a query still runs, or another rewind works; nothing was changed.
    """
    journal = plan.journal
    begin(journal, storage, require_still=require_still, at=at, kept=plan.kept)
    carry_out(journal, storage, at)


def begin(
    journal: Journal,
    storage: Storage,
    *,
    require_still: Callable[[], None],
    at: Failpoint,
    kept: KeptCut | None = None,
) -> None:
    """Claim and fence the queries of a journal, copy the files of a kept cut, and decide that it is done.

    Arguments and errors as for `apply`.
    """
    places = {query.uri: storage.place(query.uri) for query in journal.queries}
    uris = tuple(places)
    wanted = Claim(journal.rewind, uris)
    try:
        for uri in uris:  # the one that decides first: nothing stands before its claim does
            at("claim")
            claim.take(places[uri], wanted)
        for query in journal.queries:
            at("fence")
            put_fence(places[query.uri], Fence(journal.rewind, query.metadata, uris))
        at("fenced")
        require_still()
        for query in journal.queries:
            at("occupy")
            occupy(places[query.uri], query, journal.rewind)
        if kept is not None:
            for place in places.values():
                bring(kept, place, top_of(journal.rewind))
                at("copied")
        write_journal(journal, storage)
        at("journal")
        claim.begin(places[uris[0]], journal.rewind)
    except Exception:
        withdraw(wanted, storage)
        raise
    at("begun")


def write_journal(journal: Journal, storage: Storage) -> None:
    """Write the plan of a rewind, in place of an earlier one of the same id."""
    first = storage.place(journal.queries[0].uri)
    first.write(f"{top_of(journal.rewind)}/journal.json", to_json(journal).encode())


def journal_of(first: Place, rewind: str) -> Journal | None:
    """Read the plan of a rewind from the directory that has it; None if that is another one."""
    found = first.read(f"{top_of(rewind)}/journal.json")
    return None if found is None else from_json(Journal, found)


def withdraw(held: Claim | Fence, storage: Storage) -> bool:
    """Take the fences and claims of a rewind away that has not begun; say whether it has not."""
    places = [storage.place(uri) for uri in held.queries]
    if not claim.withdraw(places[0], held.rewind):
        return False
    for place in places:
        forget_brought(place, top_of(held.rewind))
        vacate(place, held.rewind)
        lift_fence(place, held.rewind)
        claim.release(place, held.rewind)
    return True


def carry_out(journal: Journal, storage: Storage, at: Failpoint) -> None:
    """Do what is left of a rewind that has begun."""
    places = [storage.place(query.uri) for query in journal.queries]
    done = f"{top_of(journal.rewind)}/done"
    if places[0].read(done) is None:
        numbers = {query.uri: query.number for query in journal.queries}
        versions = {}
        for goal in journal.tables:
            at("table")
            versions[goal.uri] = _restore(storage.place(goal.uri), goal, journal, numbers)
        for place, query in zip(places, journal.queries, strict=True):
            bring_back(place, query, journal, versions, at)
        at("rewound")
        places[0].write(done, b"")
    at("done")
    for place in reversed(places):  # the first one last: it has the journal
        lift_fence(place, journal.rewind)
        at("lifted")
        claim.release(place, journal.rewind)


def _restore(place: Place, goal: TableGoal, journal: Journal, numbers: Mapping[str, int]) -> Version:
    """Bring a table back in one commit; return its version, also when an earlier call has made it.

    Raises:
        DamageError: the log lacks a commit since the plan, so it does not say whether this was done.
    """
    table = Table.open(place)
    while True:
        table.refresh()
        since: list[LogCommit] = []
        for version, later in commits_since(table, Version(goal.before)):
            if later is None:
                raise DamageError(f"{place} has lost version {version} of its log while the rewind worked")
            since.append(later)
        for made in since:
            if (mark := mark_of(made.metadata)) is not None and mark.sparkAbsRewind == journal.rewind:
                return made.version
        # A driver that still runs may have ended the batch that is undone, in a table that had none of it.
        late = any(c.data_change and not goal.transactions.keys().isdisjoint(c.transactions) for c in since)
        restored = goal.restored or late
        if restored and not journal.undo_others:
            _refuse_others(goal, since)
        said = to_json(Mark(journal.rewind, goal.version if restored else None))
        transactions = {app: numbers[query] for app, query in goal.transactions.items()}
        commit = Commit((), transactions, said, replace=restored)
        try:
            if restored and goal.version >= 0:
                table.restore(Version(goal.version), commit)
                continue  # another commit may have come behind it: the mark says which version it is
            return table.commit_next(commit)
        except CommitConflict:
            continue


def version_of(table: Table, rewind: str, after: int) -> Version | None:
    """Return the version that a rewind made of a table, None if there is none after a version."""
    for commit in table.backwards():
        if commit.version <= after:
            return None
        if (mark := mark_of(commit.metadata)) is not None and mark.sparkAbsRewind == rewind:
            return commit.version
    return None


def _refuse_others(goal: TableGoal, since: Sequence[LogCommit]) -> None:
    """Refuse rows that others have added since the plan; a query that was not stopped is none of them."""
    added = [c for c in since if c.data_change and goal.transactions.keys().isdisjoint(c.transactions)]
    if added:
        raise Refused(
            f"table {goal.uri}: others have changed rows in version {added[0].version} while the rewind "
            "worked, and it would undo that: say --force rows to finish it if these rows may go"
        )
