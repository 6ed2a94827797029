"""Single commit files of a Delta log, read without a table handle.

The gate and the tail readers open one file per new commit. Whole tables are read through deltalake.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.parse import unquote

from pyarrow import fs

from spark_abs.errors import DamageError
from spark_abs.model import DataFile, Version, is_number


@dataclass(frozen=True, slots=True)
class LogCommit:
    """The content of one `_delta_log/<version>.json`."""

    version: Version
    adds: tuple[DataFile, ...]
    removed: tuple[str, ...]
    """Paths of the files removed from the table."""
    data_change: bool
    """Whether any file was added or removed that changes the table's rows."""
    transactions: dict[str, int]
    operation: str
    metadata: str | None
    """The user metadata of the commit, as written."""
    token: str | None
    """The token by which a writer recognises its own commit."""
    at_ms: int = 0
    """When it was written, by the writer's clock; 0 if unknown."""
    redefines: bool = False
    """Whether it sets columns, properties or the protocol of the table."""
    read_plain: int = 0
    """How many files a stream reads of it: those that it adds to change the table's rows."""
    read_as_feed: int = 0
    """How many files a stream of the change data feed reads of it: those of the feed; if it has none, the
    files that it adds or removes to change the table's rows."""

    def is_last(self, index: int, feed: bool = False) -> bool:
        """Say whether no stream has a file of the commit left to read after the one at an index.

        Delta counts the files from 0, in the order of the log. A checkpoint of Spark does not say whether its
        source is plain or reads the feed, so neither may have one unless it is known. A plain source moves on
        to the next version by itself; one of the feed stays at the last file of the feed until there is a
        next version.

        Args:
            index: of the last file that was read.
            feed: whether it is known that the stream reads the feed.
        """
        return index + 1 >= (self.read_as_feed if feed else max(self.read_plain, self.read_as_feed))


def log_file(version: int) -> str:
    """Return the name of a commit file relative to its table."""
    return f"_delta_log/{version:020d}.json"


def versions_in(filesystem: fs.FileSystem, table_path: str) -> list[Version]:
    """List the versions whose commit files are there, in no order; none if there is no log."""
    selector = fs.FileSelector(f"{table_path}/_delta_log", allow_not_found=True)
    names = (info.base_name.partition(".") for info in filesystem.get_file_info(selector))
    return [Version(int(stem)) for stem, _, extension in names if extension == "json" and is_number(stem)]


def log_files_before(filesystem: fs.FileSystem, table_path: str, version: int) -> list[tuple[Version, str]]:
    """List commits, checkpoints and checksums of versions before `version` with their paths, oldest first."""
    found = []
    for info in filesystem.get_file_info(fs.FileSelector(f"{table_path}/_delta_log")):
        digits = info.base_name.partition(".")[0]
        if is_number(digits) and int(digits) < version:
            found.append((Version(int(digits)), info.path))
    return sorted(found)


def read_commit(filesystem: fs.FileSystem, table_path: str, version: int) -> LogCommit | None:
    """Read one commit of the table at `table_path`; None if there is no such version.

    Raises:
        DamageError: the file exists and is not a commit.
    """
    path = f"{table_path}/{log_file(version)}"
    try:
        with filesystem.open_input_stream(path) as stream:
            text = stream.read()
    except FileNotFoundError:
        return None
    try:
        return _parse(Version(version), text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamageError(f"{path} is not a Delta commit: {error}") from error


def _parse(version: Version, text: bytes) -> LogCommit:
    adds: list[DataFile] = []
    transactions: dict[str, int] = {}
    removed: list[str] = []
    operation, redefines = "", False
    metadata = token = None
    at_ms = added = taken = changes = 0
    for action in json.loads(b"[%b]" % b",".join(line for line in text.splitlines() if line)):
        if add := action.get("add"):
            stats = json.loads(add.get("stats") or "{}")
            adds.append(DataFile(unquote(add["path"]), int(add["size"]), int(stats.get("numRecords", 0))))
            added += bool(add["dataChange"])
        elif remove := action.get("remove"):
            removed.append(unquote(remove["path"]))
            taken += bool(remove["dataChange"])
        elif "cdc" in action:
            changes += 1
        elif txn := action.get("txn"):
            transactions[txn["appId"]] = int(txn["version"])
        elif "metaData" in action or "protocol" in action:
            redefines = True
        elif info := action.get("commitInfo"):
            operation = str(info.get("operation", ""))
            metadata, token = info.get("userMetadata"), info.get("absToken")
            at_ms = int(info.get("timestamp") or 0)
    return LogCommit(
        version,
        tuple(adds),
        removed=tuple(removed),
        data_change=bool(added or taken),
        transactions=transactions,
        operation=operation,
        metadata=metadata,
        token=token,
        at_ms=at_ms,
        redefines=redefines,
        read_plain=added,
        read_as_feed=changes or added + taken,
    )
