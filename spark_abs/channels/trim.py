"""Trim a channel behind its readers: first the data files, then their entries in the table, then the log."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from urllib.parse import unquote

import pyarrow as pa
from deltalake import PostCommitHookProperties
from deltalake.exceptions import DeltaError
from pyarrow import fs

from spark_abs.channels.entries import entry_of, note_of
from spark_abs.channels.files import Evaluation, evaluation_of
from spark_abs.errors import CommitConflict
from spark_abs.model import NO_ATTEMPT, NO_BATCH, ChannelId, Entry, Version, checked_relative
from spark_abs.store.log import LogCommit, log_file, log_files_before, read_commit
from spark_abs.store.root import Root
from spark_abs.store.table import Table


def trim(
    root: Root,
    channel: ChannelId,
    before: Version,
    *,
    rows_before: int = 0,
    in_flight: Collection[tuple[Version, Version]] = (),
    released: Collection[tuple[Version, Version]] = (),
    known: int = 0,
) -> None:
    """Delete data and log files of the entries before version `before`, and files without a commit.

    1. Delete their data files, then those of later entries whose rows are not needed. 2. Let the table forget
    those files. 3. Write a checkpoint of the table. 4. Delete the log files of the former, oldest first.
    5. Delete the files of batches that were evaluated and never committed.

    After a kill, a repeated call continues: log files, which tell it what to delete, are deleted after the
    data, and data is deleted oldest first. Missing files count as deleted, so two calls may run at a time.
    Without anything to delete it costs two listings. It may run beside the channel's writer, whose commit may
    have to be retried once, and beside readers: entry `before` and all later entries stay in the log.

    Args:
        root: The job's root.
        channel: The channel.
        before: The first entry that is still needed, by a reader or a retained checkpoint.
        rows_before: The first entry whose rows are needed, if it is later than `before`.
        in_flight: Earlier rows that are needed: those after the first version of a pair, up to the second.
        released: Pairs that were `in_flight` in an earlier call, perhaps of another run, for a cut that is
            gone: otherwise these rows stay until `before` has passed them.
        known: The `rows_before` of an earlier call that has returned: older rows are not looked for again,
            `released` ones excepted.

    Raises:
        FileNotFoundError: there is no such channel.
        DamageError: a log file cannot be read.
        CommitConflict: another clean-up ran at the same moment; repeat the call.
    """
    table = Table.open(root.place(root.channel(channel)))
    place = root.path(root.channel(channel))
    before = Version(min(before, table.version))
    doomed = log_files_before(root.fs, place, before)
    behind = [version for version, path in doomed if path.endswith(log_file(version))]
    rows = range(max(before, known), min(rows_before, table.version))
    left = _with_rows(root.fs, place, table, [v for v in rows if not _any_between(in_flight, v)])
    ends = min(known or rows.stop, rows.stop)
    freed = {v for after, until in released for v in range(max(after + 1, before), min(until + 1, ends))}
    again = _still_there(root.fs, place, table, [v for v in freed if not _any_between(in_flight, v)])
    if behind or again or left:
        for commit in (*map(table.read_commit, behind), *again, *left):
            for file in commit.adds if commit is not None else ():
                _delete(root.fs, place, file.path)
        _forget_missing(table)
        table.delta.create_checkpoint()
        for _, path in doomed:
            _delete_file(root.fs, path)
    _sweep(root.fs, place, table, before)


def written_by(root: Root, channel: ChannelId, at_ms: int) -> Version:
    """Return the last version of a channel written by a time, else the version before its oldest one.

    Raises:
        FileNotFoundError: there is no such channel.
    """
    table = Table.open(root.place(root.channel(channel)))
    found = earliest(root, channel)
    while (commit := table.read_commit(Version(found + 1))) is not None and commit.at_ms <= at_ms:
        found = Version(found + 1)
    return found


def earliest(root: Root, channel: ChannelId, down_to: int = 0) -> Version:
    """Return the entry after which a channel is complete, `down_to` if it is older.

    Data files are deleted before their log files, oldest first: what comes after the last deleted one is
    complete.
    """
    place = root.path(root.channel(channel))
    table = Table.open(root.place(root.channel(channel)))
    found = table.version
    for commit in takewhile(lambda commit: commit.version > down_to, table.backwards()):
        if not all(_there(root.fs, place, commit)):
            break
        found = Version(commit.version - 1)
    return Version(max(found, down_to))


def left_after(root: Root, channel: ChannelId, version: Version) -> Entry | None:
    """Return the oldest entry of an attempt that is left, if any after a version are gone; else None."""
    place = root.path(root.channel(channel))
    whole = earliest(root, channel, version)
    number = whole
    while whole > version and (commit := read_commit(root.fs, place, number + 1)) is not None:
        number, entry = commit.version, entry_of(commit)
        if entry is not None and entry.attempt != NO_ATTEMPT:
            return entry
    return None


def _any_between(pairs: Collection[tuple[Version, Version]], version: int) -> bool:
    return any(after < version <= until for after, until in pairs)


def _with_rows(
    filesystem: fs.FileSystem, place: str, table: Table, versions: Sequence[int]
) -> list[LogCommit]:
    """Return the commits, of ascending versions, from the first on whose files are not all deleted.

    They are read backwards: files are deleted oldest first, so before one that has lost its files all have.
    """
    found: list[LogCommit] = []
    for version in reversed(versions):
        commit = table.read_commit(version)
        if commit is None:
            break
        there = _there(filesystem, place, commit)
        if there and not any(there):
            break
        if there:
            found.append(commit)
    return found[::-1]


def _still_there(
    filesystem: fs.FileSystem, place: str, table: Table, versions: Collection[int]
) -> list[LogCommit]:
    """Return the commits, of ascending versions, of which any file is left, wherever others have none."""
    commits = [commit for version in sorted(versions) if (commit := table.read_commit(version)) is not None]
    return [commit for commit in commits if any(_there(filesystem, place, commit))]


def _there(filesystem: fs.FileSystem, place: str, commit: LogCommit) -> list[bool]:
    """Say of each file that a commit adds whether it exists."""
    infos = filesystem.get_file_info([f"{place}/{file.path}" for file in commit.adds])
    return [info.type is fs.FileType.File for info in infos]


def _forget_missing(table: Table) -> None:
    try:
        table.delta.repair(post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False))
    except DeltaError as error:
        raise CommitConflict(f"{table.uri} changed during clean-up: {error}") from error
    table.refresh()


def _sweep(filesystem: fs.FileSystem, place: str, table: Table, before: Version) -> None:
    """Delete directories of evaluations that can never be committed.

    These are not in the table, and are older than a committed evaluation. A file that the table no longer
    lists may still belong to an entry (OPTIMIZE rewrites files, readers use the log), so the log is read
    before anything is deleted.
    """
    newest = _newest(table)
    if newest is None:
        return
    listed = filesystem.get_file_info(fs.FileSelector(f"{place}/data", allow_not_found=True))
    found = {info.base_name: evaluation_of(info.base_name) for info in listed}
    live = {_directory(path) for path in _active(table)}
    orphans = {n for n, one in found.items() if one is not None and one < newest and n not in live}
    if not orphans:
        return
    for version in range(before, table.version + 1):
        commit = table.read_commit(version)
        orphans -= {_directory(file.path) for file in commit.adds} if commit is not None else set()
    for name in sorted(orphans):
        _delete_directory(filesystem, f"{place}/data/{name}")


def _newest(table: Table) -> Evaluation | None:
    """Return the evaluation that was committed last."""
    for commit in table.backwards():
        note = note_of(commit)
        if note is not None and note.batch != NO_BATCH:
            return Evaluation(note.attempt, note.run, note.batch)
    return None


def _active(table: Table) -> list[str]:
    return [unquote(str(path)) for path in pa.table(table.delta.get_add_actions())["path"].to_pylist()]


def _directory(path: str) -> str | None:
    """Return the directory of a file of this package below `data/`."""
    head, _, rest = path.partition("/")
    return rest.partition("/")[0] if head == "data" and "/" in rest else None


def _delete(filesystem: fs.FileSystem, place: str, path: str) -> None:
    """Delete a data file. A directory of this package is deleted whole, since it holds only one batch."""
    name = _directory(checked_relative(path))
    if name is not None and evaluation_of(name) is not None:
        _delete_directory(filesystem, f"{place}/data/{name}")
    else:
        _delete_file(filesystem, f"{place}/{path}")


def _delete_directory(filesystem: fs.FileSystem, path: str) -> None:
    try:
        filesystem.delete_dir(path)
    except FileNotFoundError:
        return


def _delete_file(filesystem: fs.FileSystem, path: str) -> None:
    try:
        filesystem.delete_file(path)
    except FileNotFoundError:
        return
