"""The plan of a rewind: from a survey and a cut to what each table and each query shall be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from spark_abs.advice import way
from spark_abs.cuts.cut import NEVER, Batch
from spark_abs.errors import Refused
from spark_abs.markup import plan
from spark_abs.quantities import time_said
from spark_abs.rewind.journal import Journal, QueryGoal, TableGoal, in_order, mark_of
from spark_abs.rewind.kept import KeptCut
from spark_abs.rewind.query import QueryFacts
from spark_abs.rewind.survey import Survey
from spark_abs.rewind.table import TableFacts, is_timed
from spark_abs.store.log import LogCommit

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class RewindPlan:
    """What a rewind will do."""

    journal: Journal
    moment_ms: int
    """When the last batch of the cut was committed."""
    steps: tuple[str, ...]
    notes: tuple[str, ...]
    kept: KeptCut | None = None
    """The cut whose files come back; None: Spark still has them."""

    def _repr_html_(self) -> str:
        head = f"Rewind to {time_said(self.moment_ms)}"
        return plan(head, self.steps, self.notes)

    @property
    def changes(self) -> bool:
        """Whether anything has to be changed."""
        return bool(self.journal.queries or self.journal.tables)


def plan_rewind(
    found: Survey,
    cut: Mapping[str, int],
    *,
    rewind: str,
    now_ms: int,
    undo_others: bool = False,
    others_stay: bool = False,
    abandoned: Mapping[str, int] | None = None,
    used: Mapping[str, int] | None = None,
) -> RewindPlan:
    """Plan the way back to a cut. Pure.

    Args:
        found: what is in storage.
        cut: query to the place of its batch, an aligned cut of `found.pipeline`.
        rewind: the id of the rewind.
        now_ms: the time.
        undo_others: whether rows that others have written since may go.
        others_stay: whether commits that name no batch are those of others, in tables that stay as they are.
        abandoned: table to its present version, whose rows are those of an earlier rewind: it goes back to
            what was surveyed in any case.
        used: checkpoint directory to the highest number that an undone rewind gave its query.

    Raises:
        Refused: others have changed a table since.
    """
    chosen = {query.name: query.batches[cut[query.name]] for query in found.queries}
    leaving, newest = abandoned or {}, _newest_numbers(found, used or {})
    back = {
        table.uri: version
        for table in found.tables
        if (version := _version(found, table, cut, table.uri in leaving)) is not None
    }
    jumps = {query.name: _jumps(query, chosen[query.name], found.tables, back) for query in found.queries}
    movers = {
        query.name: query.place.uri
        for query in found.queries
        if jumps[query.name]
        or query.planned != chosen[query.name].number
        or newest[query.name] > query.planned
    }
    goals: list[TableGoal] = []
    steps: list[str] = []
    for table in found.tables:
        goal = _table_goal(table, back.get(table.uri), movers, leaving.get(table.uri, table.version))
        if goal is None:
            continue
        strangers = table.strangers(goal.version) if goal.restored else ()
        if strangers and not undo_others:
            raise Refused(
                f"table {table.uri} would go back to version {goal.version}, and others have changed it "
                f"since: {_operations(strangers)}. Say {_force('rows')} if that may be undone"
            )
        goals.append(goal)
        steps.append(_table_step(table, goal, strangers))
    written = {name for t in found.tables if t.uri in back for name in t.writers.values()}
    queries = []
    for query in found.queries:
        batch = chosen[query.name]
        if query.name in movers:
            steps.append(_query_step(query, batch))
            number = max(newest[query.name] + 1, query.planned + 2)
            queries.append(replace(query_goal(query, batch.number), number=number, jumps=jumps[query.name]))
        elif query.name in written:
            # A writer that stays is fenced, too: what it writes meanwhile would be undone.
            queries.append(query_goal(query, batch.number))
    if queries and not others_stay:
        _refuse_untold(found, back, min(batch.ended_ms for batch in chosen.values()))
    return RewindPlan(
        Journal(rewind, now_ms, in_order(queries), tuple(goals), undo_others),
        found.pipeline.ended_ms(cut),
        tuple(steps),
        found.notes,
    )


def _force(obstacle: str) -> str:
    return way(f"force=['{obstacle}']", f"--force {obstacle}")


def version_at(found: Survey, table: TableFacts, cut: Mapping[str, int]) -> int:
    """Return the version whose rows a table has at an aligned cut; -1: it has none."""
    back = _version(found, table, cut, False)
    return table.version if back is None else back


def _newest_numbers(found: Survey, used: Mapping[str, int]) -> dict[str, int]:
    """Return the highest batch number that tables know of each query, -1 if none."""
    newest = {query.name: used.get(query.place.uri, -1) for query in found.queries}
    for table in found.tables:
        for app, query in table.writers.items():
            newest[query] = max(newest[query], table.newest(app))
    return newest


def _version(found: Survey, table: TableFacts, cut: Mapping[str, int], leaves: bool) -> int | None:
    """Return the version whose rows a table gets, None if it keeps its rows."""
    written = [w for w in found.pipeline.written if w.table == table.uri]
    following = min((w.next[cut[w.query]] for w in written), default=NEVER)
    if following == NEVER:
        return table.version if leaves else None
    until = [
        at for r in found.pipeline.read if r.table == table.uri and (at := r.until[cut[r.query]]) is not None
    ]
    return table.before(min(until, default=following))


def _jumps(
    query: QueryFacts, batch: Batch, tables: Sequence[TableFacts], restored: Collection[str]
) -> dict[str, str]:
    """Return the Delta sources of a query that read a restored table: source to table."""
    return {
        source: table.uri
        for source, at in query.sources_at(batch.number)
        for table in tables
        if table.id == at.table_id and table.uri in restored
    }


def _table_goal(
    table: TableFacts, back: int | None, movers: Mapping[str, str], present: int
) -> TableGoal | None:
    """Return what becomes of a table, None if no writer of it moves and it keeps its rows.

    Also a table that keeps its rows gets the new numbers of its writers: a driver that still writes a batch
    which is undone comes too late.
    """
    transactions = {
        app: movers[query] for app, query in table.writers.items() if query in movers and not is_timed(app)
    }
    if back is None:
        return TableGoal(table.uri, table.version, present, transactions, False) if transactions else None
    return TableGoal(table.uri, back, present, transactions, True)


def _table_step(table: TableFacts, goal: TableGoal, strangers: tuple[LogCommit, ...]) -> str:
    if not goal.restored:
        return f"table {table.uri}: no rows change, only the numbers of its writers' batches"
    undone = [c for c in table.path if c.version > goal.version and c.data_change]
    rows = dict[str, int]()
    for commit in undone:
        for path in commit.removed:
            rows.pop(path, None)
        rows |= {file.path: file.rows for file in commit.adds}  # an undo adds files again
    ran = sum(mark_of(commit.metadata) is None for commit in undone)
    writers = sorted({table.writers[app] for c in undone for app in c.transactions if app in table.writers})
    by = f" of {', '.join(writers)}" if writers else ""
    said = f"back to the rows of version {goal.version}" if goal.version >= 0 else "to no rows"
    others = f", {len(strangers)} of them by others" if strangers else ""
    return (
        f"table {table.uri}: from version {goal.before} {said}; {ran} commits{by} are undone"
        f"{others}, {sum(rows.values())} of the present rows go"
    )


def query_goal(query: QueryFacts, batch: int) -> QueryGoal:
    """Return the goal of a query that stays at a batch."""
    return QueryGoal(
        uri=query.place.uri,
        name=query.name,
        batch=batch,
        number=batch,
        metadata=query.metadata,
        before=query.planned,
        jumps={},
        offsets=query.texts[batch],
        logs=query.logs,
    )


def _query_step(query: QueryFacts, batch: Batch) -> str:
    if query.planned == batch.number:
        return f"query {query.name!r}: stays at batch {batch.number}, and next reads what comes after it"
    again = sum(number > batch.number for number in query.times)
    said = f"query {query.name!r}: from batch {query.planned} back to batch {batch.number}"
    if not again:
        return said
    batches = "the batch after it" if again == 1 else f"the {again} batches after it"
    return f"{said}; what {batches} read is read again, under new numbers"


def _refuse_untold(found: Survey, restored: Collection[str], since_ms: int) -> None:
    """Refuse a table that perhaps a query has written without a transaction: its rows would come twice."""
    for table in found.tables:
        late = {c.version for c in table.since(since_ms + 1)}
        strangers = tuple(c for c in table.strangers(-1) if c.version in late and c.data_change)
        if strangers and table.uri not in restored:
            raise Refused(
                f"table {table.uri} was changed after the moment by commits that name no batch of a query: "
                f"{_operations(strangers)}. If one of the queries made them, in a function without txnAppId "
                "and txnVersion, it would write these rows twice"
                + (f"; times do not tell: {table.timed}" if table.timed else "")
                + f". If others made them, do without the table, or say {_force('tables')}"
            )


def _operations(commits: tuple[LogCommit, ...]) -> str:
    said = [f"version {commit.version}: {commit.operation or 'unknown'}" for commit in commits[:_SHOWN]]
    if len(commits) > _SHOWN:
        said.append(f"and {len(commits) - _SHOWN} more")
    return "; ".join(said)
