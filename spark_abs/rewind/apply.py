"""A rewind at work: fences, the journal, tables, checkpoint directories. Every step can be repeated.

1. Each query's `metadata` becomes a fence, so that Spark cannot start it.  2. If nothing has moved since the
plan, the journal is written: from here the rewind is finished, never withdrawn.  3. Tables go back.
4. Checkpoint directories go back.  5. The journal is done.  6. The fences go. A rewind that was killed before
step 2 is withdrawn: the fences go, and nothing else was changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pyarrow import fs

from spark_abs.codec import from_json, to_json
from spark_abs.errors import CommitConflict, DamageError, Refused
from spark_abs.model import BatchId, Version, checked_relative
from spark_abs.rewind.files import cut_source_log, newer
from spark_abs.rewind.journal import (
    DIRECTORY,
    FENCE,
    Fence,
    Journal,
    Mark,
    QueryGoal,
    Rewound,
    TableGoal,
    mark_of,
)
from spark_abs.rewind.kept import KEPT, KeptCut, bring, brought, forget_brought, require_whole
from spark_abs.rewind.plan import RewindPlan
from spark_abs.rewind.query import fence_of, jumped, resumed
from spark_abs.sinks.delta.changes import commits_since
from spark_abs.sinks.delta.rollback import missing
from spark_abs.snapshots.capture import CaptureIncomplete, capture
from spark_abs.snapshots.layout import OffsetFile, file_source_offset, is_file_source_log, parse_offsets
from spark_abs.snapshots.materialise import METADATA
from spark_abs.store.log import LogCommit
from spark_abs.store.storage import Place, Storage
from spark_abs.store.table import Commit, Table

Failpoint = Callable[[str], None]

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


def check_plan(plan: RewindPlan, storage: Storage) -> None:
    """See that all that the plan needs is there: state of each batch, files of each version.

    Raises:
        Refused: something is gone, or a table can only be restored by Spark; says what.
    """
    for query in plan.journal.queries:
        place = storage.place(query.uri)
        try:
            if plan.kept is not None:
                require_whole(plan.kept, query.uri)
                continue
            capture(place.fs, place.path, BatchId(query.batch), source_logs=False)
            _source_logs(query, Files(place, plan.journal.rewind))
        except (CaptureIncomplete, DamageError) as error:
            raise Refused(f"query {query.name!r} cannot go back to batch {query.batch}: {error}") from error
    for goal in plan.journal.tables:
        if goal.restored:
            _check_table(Table.open(storage.place(goal.uri)), goal)


def _check_table(table: Table, goal: TableGoal) -> None:
    protocol = table.delta.protocol()
    features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
    others = sorted(features - _FEATURES)
    if protocol.min_reader_version == 2 or protocol.min_writer_version in (5, 6):
        others.append(f"of protocol {protocol.min_reader_version}, {protocol.min_writer_version}")
    if others:
        raise Refused(
            f"table {goal.uri} has the features {', '.join(others)}, with which only Spark restores a "
            "version: a rewind cannot bring it back"
        )
    if gone := missing(table, Version(goal.version)):
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
    if not journal.queries:
        for goal in journal.tables:
            _restore(storage.place(goal.uri), goal, journal)
        return
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
    """Fence the queries of a journal, copy the files of a kept cut beside theirs, and write the journal.

    Arguments and errors as for `apply`.
    """
    places = [storage.place(query.uri) for query in journal.queries]
    uris = tuple(place.uri for place in places)
    for place, query in zip(places, journal.queries, strict=True):
        at("fence")
        if fence_of(place) is not None:
            _withdraw(places, journal.rewind)
            raise Refused(f"another rewind of {place} has begun meanwhile")
        # A store that tears a file loses the id: this copy has it.
        place.write(f"{DIRECTORY}/{journal.rewind}/{METADATA}", query.metadata.encode())
        _put_fence(place, Fence(journal.rewind, uris[0], query.metadata, uris))
    at("fenced")
    try:
        for place in places:
            if (fence := fence_of(place)) is None or fence.rewind != journal.rewind:
                raise Refused(f"another rewind of {place} has begun meanwhile")
        require_still()
        if kept is not None:
            for place in places:
                bring(kept, place, f"{DIRECTORY}/{_checked(journal.rewind)}")
                at("copied")
    except BaseException:
        _withdraw(places, journal.rewind)
        raise
    write_journal(journal, storage)
    at("journal")


def write_journal(journal: Journal, storage: Storage) -> None:
    """Write the plan of a rewind, in place of an earlier one of the same id."""
    first = storage.place(journal.queries[0].uri)
    first.write(f"{DIRECTORY}/{journal.rewind}/journal.json", to_json(journal).encode())


def journal_of(first: Place, rewind: str) -> Journal | None:
    """Read the plan of a rewind from the directory that has it; None if it has not begun."""
    found = first.read(f"{DIRECTORY}/{_checked(rewind)}/journal.json")
    return None if found is None else from_json(Journal, found)


def withdraw(fence: Fence, storage: Storage) -> None:
    """Take the fences of a rewind away that has not begun."""
    _withdraw([storage.place(uri) for uri in fence.queries], fence.rewind)


def _checked(rewind: str) -> str:
    name = checked_relative(rewind)
    if "/" in name:
        raise DamageError(f"{rewind!r} is not the id of a rewind")
    return name


def carry_out(journal: Journal, storage: Storage, at: Failpoint) -> None:
    """Do what is left of a rewind that has begun."""
    places = [storage.place(query.uri) for query in journal.queries]
    done = f"{DIRECTORY}/{_checked(journal.rewind)}/done"
    if places[0].read(done) is None:
        versions = {}
        for goal in journal.tables:
            at("table")
            versions[goal.uri] = _restore(storage.place(goal.uri), goal, journal)
        for place, query in zip(places, journal.queries, strict=True):
            _rewind_files(place, query, journal, versions, at)
        at("rewound")
        places[0].write(done, b"")
    at("done")
    for place in places:
        _lift_fence(place, journal.rewind)
        at("lifted")


def _put_fence(place: Place, fence: Fence) -> None:
    _remove(place, f".{METADATA}.crc")  # it would not be that of the new file
    place.write(METADATA, f"{FENCE}\n{to_json(fence)}".encode())


def _lift_fence(place: Place, rewind: str) -> None:
    fence = fence_of(place)
    if fence is not None and fence.rewind == rewind:
        place.write(METADATA, fence.metadata.encode())


def _withdraw(places: Sequence[Place], rewind: str) -> None:
    for place in places:
        forget_brought(place, f"{DIRECTORY}/{_checked(rewind)}")
        _lift_fence(place, rewind)


def _remove(place: Place, path: str) -> None:
    try:
        place.fs.delete_file(f"{place.path}/{path}")
    except FileNotFoundError:
        return


def _restore(place: Place, goal: TableGoal, journal: Journal) -> Version:
    """Bring a table back in one commit; return its version, also when an earlier call has made it.

    Raises:
        DamageError: the log lacks a commit since the plan, so it does not say whether this was done.
    """
    table = Table.open(place)
    said = to_json(Mark(journal.rewind, goal.version if goal.restored else None))
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
        _refuse_others(goal, since, journal)
        commit = Commit((), goal.transactions, said, replace=goal.restored)
        try:
            if goal.restored and goal.version >= 0:
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


def _refuse_others(goal: TableGoal, since: Sequence[LogCommit], journal: Journal) -> None:
    """Refuse rows that others have added since the plan; a query that was not stopped is none of them."""
    added = [c for c in since if c.data_change and goal.transactions.keys().isdisjoint(c.transactions)]
    if added and goal.restored and not journal.undo_others:
        raise Refused(
            f"table {goal.uri}: others have changed rows in version {added[0].version} while the rewind "
            "worked, and it would undo that: say --force rows to finish it if these rows may go"
        )


class Files:
    """The files of one checkpoint directory, and the copies of those that a rewind changes."""

    def __init__(self, place: Place, rewind: str) -> None:
        self.place = place
        self._top = f"{DIRECTORY}/{_checked(rewind)}"
        self._kept = f"{self._top}/files"

    def listed(self) -> list[str]:
        """Return the paths of all files but ours, relative to the directory."""
        selector = fs.FileSelector(self.place.path, recursive=True)
        top = f"{self.place.path.rstrip('/')}/"
        found = (
            info.path.removeprefix(top)
            for info in self.place.fs.get_file_info(selector)
            if info.type is fs.FileType.File
        )
        return sorted(path for path in found if not path.startswith(f"{DIRECTORY}/"))

    def put_back(self, at: Failpoint) -> None:
        """Move all copies to where they were."""
        top = f"{self.place.path}/{self._kept}"
        for info in self.place.fs.get_file_info(fs.FileSelector(top, allow_not_found=True, recursive=True)):
            if info.type is fs.FileType.File:
                at("back")
                path = checked_relative(info.path.removeprefix(f"{top}/"))
                self.place.move(f"{self._kept}/{path}", path)

    def put_in(self, at: Failpoint) -> None:
        """Move the files of a kept cut to their places, what is there to the copies."""
        come = brought(self.place, self._top)
        for path in come.files:
            if self.place.below(f"{self._top}/{KEPT}/{path}").exists():
                at("kept")
                directory, _, name = path.rpartition("/")
                for old in (path, f"{directory}/.{name}.crc") if path not in come.new else ():
                    copied = self.place.below(f"{self._kept}/{old}").exists()
                    if self.place.below(old).exists() and not copied:
                        self.take_away(old)
                self.place.move(f"{self._top}/{KEPT}/{path}", path)

    def take_out(self) -> None:
        """Delete the files of a kept cut of which there were none; called when the copies are back."""
        for path in brought(self.place, self._top).new:
            _remove(self.place, checked_relative(path))

    def forget_record(self) -> None:
        """Take away the record of the rewind: the directory is as it was before."""
        _remove(self.place, f"{self._top}/rewound.json")

    def take_away(self, path: str) -> None:
        """Move a file to the copies."""
        self.place.move(path, f"{self._kept}/{path}")

    def rewrite(self, path: str, text: str) -> None:
        """Replace a file; what was there first is kept."""
        now = self.place.read(path)
        if now == text.encode():
            return
        if now is not None and not self.place.below(f"{self._kept}/{path}").exists():
            self.place.write(f"{self._kept}/{path}", now)
        directory, _, name = path.rpartition("/")
        _remove(self.place, f"{directory}/.{name}.crc")
        self.place.write(path, text.encode())

    def text(self, path: str) -> str:
        """Return the text of a file, also of one that was taken away."""
        data = self.place.read(path)
        data = self.place.read(f"{self._kept}/{path}") if data is None else data
        if data is None:
            raise DamageError(f"{self.place}/{path} is missing")
        return data.decode()

    def text_in(self, directory: str, name: str) -> str:
        """Return the text of a file of a directory."""
        return self.text(f"{directory}/{name}")

    def names(self, directory: str) -> list[str]:
        """Return the names of the files of a directory, also of those taken away."""
        found: set[str] = set()
        for top in (directory, f"{self._kept}/{directory}"):
            selector = fs.FileSelector(f"{self.place.path}/{top}", allow_not_found=True)
            found |= {
                i.base_name for i in self.place.fs.get_file_info(selector) if i.type is fs.FileType.File
            }
        return sorted(found)


def _source_logs(query: QueryGoal, files: Files) -> dict[str, str]:
    """Return the files that the logs of the query's file sources lack: path to text."""
    offsets = parse_offsets(query.offsets[str(query.batch)])
    wanted: dict[str, str] = {}
    for source, line in offsets.offsets.items():
        until, directory = file_source_offset(line), f"sources/{source}"
        names = files.names(directory)
        if until is not None and names:
            made = cut_source_log(names, until, partial(files.text_in, directory))
            wanted |= {f"{directory}/{name}": text for name, text in made.items()}
    return wanted


def _unread(offsets: OffsetFile, files: Files) -> list[str]:
    """Return the logs of file sources of which the query had read nothing."""
    sources = {path.split("/")[1] for path in files.listed() if path.startswith("sources/")}
    tops = [f"sources/{source}" for source in sorted(sources - offsets.offsets.keys())]
    return [top for top in tops if any(is_file_source_log(files.text_in(top, n)) for n in files.names(top))]


def _rewind_files(
    place: Place, query: QueryGoal, journal: Journal, versions: dict[str, Version], at: Failpoint
) -> None:
    """Bring one checkpoint directory back to the end of a batch."""
    record = f"{DIRECTORY}/{_checked(journal.rewind)}/rewound.json"
    if place.read(record) is not None:
        return
    files, offsets = Files(place, journal.rewind), parse_offsets(query.offsets[str(query.batch)])
    files.put_in(at)
    for path, text in _source_logs(query, files).items():
        files.rewrite(path, text)
    unread = tuple(f"{top}/" for top in _unread(offsets, files))
    for path in files.listed():
        if newer(path, query.batch, offsets) or path.startswith(unread):
            at("file")
            files.take_away(path)
    jumps = {source: int(versions[table]) + 1 for source, table in query.jumps.items()}
    last = jumped(query.offsets[str(query.batch)], jumps)
    for batch, text in query.offsets.items():
        at("offsets")
        files.rewrite(f"offsets/{int(batch)}", last if int(batch) == query.batch else resumed(text, last))
    before = {b: text for b, text in query.offsets.items() if int(b) < query.batch}
    made = Rewound(journal.rewind, journal.at_ms, query.batch, before)
    place.write(record, to_json(made).encode())
