"""What is wrong with a watched root: its watcher, what it reads, and the tables that its cuts need."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spark_abs.diagnosis.diagnoses import HOUR, Diagnosis, typed
from spark_abs.manifest import Manifest
from spark_abs.manifests.find import readable
from spark_abs.model import NO_TABLE
from spark_abs.observe.headline import run_said
from spark_abs.observe.status import JobStatus
from spark_abs.protocol.control import WATCHED_JOB
from spark_abs.quantities import duration_said as length
from spark_abs.store.log import versions_in
from spark_abs.store.root import Root
from spark_abs.watch.ahead import Ahead, has_older_cut, look_ahead
from spark_abs.watch.pins import CleanUp, clean_ups

_OVERDUE_MS = HOUR
"""So old is a moment that a watcher has missed: by default it looks every ten minutes."""
_SLACK = 1.1
"""A cut stays until a newer one is kept: a little longer than its word says."""


@dataclass(frozen=True, slots=True)
class KeptTable:
    """A table, and the kept cuts that need its older versions."""

    uri: str
    clean_ups: tuple[CleanUp, ...]
    oldest: tuple[int, int] | None = None
    """The oldest cut that needs another version than the present one: its id, and when it was made."""
    log_begins: int | None = None
    """The first version whose commit is in the log; None: there is none."""
    without_log: tuple[int, ...] = ()
    """The cuts whose versions are before that."""
    of_another: tuple[int, ...] = ()
    """The cuts of the table that was at this place before."""


@dataclass(frozen=True, slots=True)
class WatchedFacts:
    """What is known of a watched root at one moment."""

    root: str
    now_ms: int
    status: JobStatus
    ahead: Ahead | None = None
    """None if nothing was watched yet."""
    overdue: bool = False
    """Whether there is a newer cut that a look an hour ago would have found."""
    tables: tuple[KeptTable, ...] = ()


def gather_watched(root: Root, status: JobStatus, now_ms: int) -> WatchedFacts:
    """Return what is known of a watched root; of its cuts those that are whole."""
    kept = readable(root, WATCHED_JOB)
    newest = kept[-1] if kept else None
    if newest is None and status.watch is None:
        return WatchedFacts(root.uri, now_ms, status)
    ahead = look_ahead(root, status.watch, newest)
    return WatchedFacts(
        root.uri,
        now_ms,
        status,
        ahead=ahead,
        overdue=has_older_cut(ahead, newest, now_ms - _OVERDUE_MS),
        tables=tuple(_tables(ahead, kept)),
    )


def _tables(ahead: Ahead, kept: Sequence[Manifest]) -> Iterator[KeptTable]:
    """Iterate the tables that were read, with the cuts that need an older version of them."""
    for table in () if ahead.found is None else ahead.found.tables:
        needs = [
            (cut, int(output.version))
            for cut in kept
            for part in cut.stages
            for output in part.outputs
            if output.table_id == table.id and output.version not in (None, NO_TABLE)
        ]
        others = {
            int(cut.id)
            for cut in kept
            for part in cut.stages
            for output in part.outputs
            if output.table == table.uri and output.table_id != table.id
        }
        older = [cut for cut, version in needs if version < table.version]
        oldest = min(older, key=lambda cut: cut.acked_ms, default=None)
        begins = min(versions_in(table.place.fs, table.place.path), default=None)
        yield KeptTable(
            table.uri,
            clean_ups(table.place),
            oldest=None if oldest is None else (int(oldest.id), oldest.acked_ms),
            log_begins=begins,
            without_log=tuple(
                int(cut.id) for cut, version in needs if begins is not None and version < begins
            ),
            of_another=tuple(sorted(others)),
        )


def watched_diagnoses(facts: WatchedFacts) -> tuple[Diagnosis, ...]:
    """Return what is wrong with a watched root: what keeps new cuts away first. A healthy one has nothing."""
    looks = (_away, _passed_over, _unread, _no_cut, _lost, _made_anew, _tables_cleaned)
    return tuple(found for look in looks for found in look(facts))


def _away(facts: WatchedFacts) -> Iterator[Diagnosis]:
    status, ahead = facts.status, facts.ahead
    missed = facts.overdue or (ahead is not None and bool(ahead.lost))
    if status.alive is not None or not (status.broke or missed):
        return
    how = "" if status.run is None else f": {run_said(status.run, killed=status.killed)}"
    why = f", and there has been a newer one for more than {length(_OVERDUE_MS)}" if facts.overdue else ""
    yield Diagnosis(
        "watcher-away",
        f"No watcher is at work{how}; {_newest(facts)}{why}",
        "Start it again"
        if status.watch is not None
        else "Start it again with the checkpoint directories "
        "and tables of its queries, and with the --keep that it had: without it, cuts are deleted that the "
        "default does not keep",
        _watch(facts),
    )


def _passed_over(facts: WatchedFacts) -> Iterator[Diagnosis]:
    if facts.status.alive is None or not facts.overdue:
        return
    aborted, newest, last = facts.status.last_aborted, facts.status.last, ""
    if aborted is not None and (newest is None or newest.id is None or aborted.id > newest.id):
        last = f"; cut {aborted.id} was given up: {aborted.detail}"
    yield Diagnosis(
        "cuts-passed-over",
        f"A watcher is at work, there has been a newer cut for more than {length(_OVERDUE_MS)}, and "
        f"{_newest(facts)}{last}",
        "See what the watcher prints at each look; if it looks less often than that, this is no fault",
        typed(facts.root, "history", "--limit", "20"),
    )


def _unread(facts: WatchedFacts) -> Iterator[Diagnosis]:
    if facts.ahead is not None and facts.ahead.unread:
        yield Diagnosis(
            "unreadable",
            f"What is watched cannot be read from here: {facts.ahead.unread}",
            "If the watcher can read them, ask on its machine; otherwise repair what is named, or leave a "
            "query out that is gone for good: until then no look keeps anything",
        )


def _no_cut(facts: WatchedFacts) -> Iterator[Diagnosis]:
    ahead = facts.ahead
    if ahead is None or not ahead.waits:
        return
    since_ms = facts.status.moment_ms if ahead.since_ms is None else ahead.since_ms
    if since_ms is None or facts.now_ms - since_ms < _OVERDUE_MS:
        return
    then = "" if facts.status.moment_ms is None else " since then"
    oldest = "" if ahead.since_ms is None else f", the oldest of {length(facts.now_ms - since_ms)} ago"
    more = f"; and {len(ahead.waits) - 1} more such pairs" if len(ahead.waits) > 1 else ""
    yield Diagnosis(
        "no-aligned-cut",
        f"{_newest(facts)}, and no batches{then} fit together{oldest}: {ahead.waits[0]}{more}",
        "Let the query that is behind catch up; leave out the directory of one that will never run again",
        typed(facts.root, "status"),
    )


def _lost(facts: WatchedFacts) -> Iterator[Diagnosis]:
    for lost in () if facts.ahead is None else facts.ahead.lost:
        one = lost.first == lost.last
        which = f"batch {lost.first}" if one else f"batches {lost.first} to {lost.last}"
        yield Diagnosis(
            "deleted-before-kept",
            f"Nothing goes back to {which} of query {lost.query}: they came after the newest cut, and Spark "
            "has deleted their files before a look",
            "Look more often (--every), or let the query keep more batches "
            "(spark.sql.streaming.minBatchesToRetain)",
            _watch(facts) if facts.status.alive is None else "",
        )


def _made_anew(facts: WatchedFacts) -> Iterator[Diagnosis]:
    for table in facts.tables:
        if table.of_another:
            yield Diagnosis(
                "table-made-anew",
                f"Table {table.uri} was dropped and made anew: {_counted(table.of_another)} of the table "
                "before, and no rewind goes back there",
                "Rewind to a later moment; these cuts go when they are too old (--keep)",
                typed(facts.root, "list"),
            )


def _tables_cleaned(facts: WatchedFacts) -> Iterator[Diagnosis]:
    for table in facts.tables:
        if table.without_log:
            yield Diagnosis(
                "tables-cleaned",
                f"The log of table {table.uri} begins at version {table.log_begins}, and "
                f"{_counted(table.without_log)} of versions before that: a rewind there is refused",
                "Set the property delta.logRetentionDuration to the age up to which cuts are kept, or keep "
                "them for less (--keep)",
                typed(facts.root, "list"),
            )
        for clean_up in table.clean_ups:
            if table.oldest is None or table.without_log:
                continue
            cut, at_ms = table.oldest
            if facts.now_ms - at_ms > _SLACK * clean_up.after_ms:
                yield Diagnosis(
                    "tables-cleaned",
                    f"Table {table.uri}: {clean_up.deleted} that are older than "
                    f"{length(clean_up.after_ms)}, and cut {cut} is {length(facts.now_ms - at_ms)} old: a "
                    "rewind to it may be refused",
                    f"Set the property {clean_up.property} with ALTER TABLE … SET TBLPROPERTIES, or keep "
                    "cuts for less (--keep)",
                    typed(facts.root, "list"),
                )


def _counted(cuts: Sequence[int]) -> str:
    first, *rest = cuts
    return f"{len(rest) + 1} kept cuts, the first {first}, are" if rest else f"kept cut {first} is"


def _newest(facts: WatchedFacts) -> str:
    status = facts.status
    if status.last is None or status.moment_ms is None:
        return "no cut is kept"
    return f"the newest cut is {status.last.id}, {length(facts.now_ms - status.moment_ms)} old"


def _watch(facts: WatchedFacts) -> str:
    """Return the command that starts the watcher again; nothing if an earlier version watched."""
    watch = facts.status.watch
    if watch is None:
        return ""
    tables = ("--tables", *watch.tables) if watch.tables else ()
    every = ("--every", watch.every) if watch.every else ("--once",)
    given = ("--checkpoints", *watch.checkpoints, *tables, "--keep", *watch.keep.split(), *every)
    return typed(facts.root, "watch", *map(shlex.quote, given))
