"""Which files of a checkpoint are newer than a batch, and the log of a file source as of a batch. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import gcd

from spark_abs.errors import DamageError
from spark_abs.model import is_number
from spark_abs.snapshots.layout import (
    OffsetFile,
    SourceLogFile,
    file_source_logs,
    file_source_offset,
    later_compact,
    source_entries,
    source_log_file,
    state_file,
)
from spark_abs.snapshots.schema_log import entries_at

_HEAD = "v1"
_SCHEMA_ENTRY = re.compile(r"((?:.*/)?_schema_log_[^/]+)/(\d+)")
"""A file in the log of a source with `schemaTrackingLocation`: Delta names the directory after the table."""
_INTERVAL = 10
"""Spark's default of `spark.sql.streaming.fileSource.log.compactInterval`."""


def read_until(offsets: OffsetFile, source: str) -> int:
    """Return the newest entry of the log of a file source that a batch has read, -1 if none."""
    until = file_source_offset(offsets.offsets.get(source))
    return -1 if until is None else until


def newer(path: str, batch: int, logs: Mapping[str, int]) -> bool:
    """Say whether a file was written for a later batch: a query that resumes after `batch` must not find it.

    Args:
        path: relative to the checkpoint directory. Files that Spark does not write are not newer.
        batch: the last batch of the query.
        logs: file source to the last number of its log.
    """
    *directories, name = path.split("/")
    if name.endswith(".crc"):  # of Hadoop, with a point before, or of Spark
        name = name.removeprefix(".").removesuffix(".crc")
    match directories:
        case ["offsets" | "commits"]:
            return name.endswith(".tmp") or (is_number(name) and int(name) > batch)
        case ["sources", source]:
            log = source_log_file(name)
            return log is not None and source in logs and log.number > logs[source]
        case ["state", _, "_metadata", "v2"] | ["state", _, "_stateSchema", _]:
            number = name.partition("_")[0]
            return is_number(number) and int(number) > batch
        case ["state", _, _] | ["state", _, _, _]:
            found = state_file(name)
            return found is not None and found.version > batch + 1
    return False


def holds_schema_log(path: str) -> bool:
    """Say whether a directory, with its path in the checkpoint, is a log of schemas."""
    return _SCHEMA_ENTRY.fullmatch(f"{path}/0") is not None


def later_schemas(paths: Iterable[str], offsets: OffsetFile, read: Callable[[str], str]) -> list[str]:
    """Return the entries of schema logs that were written after a batch: Delta reads with the newest one.

    Args:
        paths: of all files of the checkpoint.
        offsets: those of the batch.
        read: path to its text.

    Raises:
        Refused: an entry has a format that is not known.
        DamageError: an entry is damaged.
    """
    logs: dict[str, dict[int, str]] = {}
    for path in paths:
        if (entry := _SCHEMA_ENTRY.fullmatch(path)) is not None:
            logs.setdefault(entry[1], {})[int(entry[2])] = path
    found = []
    for log in logs.values():
        stay = entries_at({n: partial(read, path) for n, path in log.items()}, offsets.offsets.get)
        found += [path for number, path in log.items() if number not in stay]
    return sorted(found)


def advanced_source_log(
    names: Iterable[str], until: int, number: int, read: Callable[[str], str]
) -> dict[str, str]:
    """Return the files by which the log of a file source holds at a number what it held at an offset.

    The numbers between have no entries, so that no query writes them again.

    Args:
        names: the files of `sources/<source>/`.
        until: the offset; -1: nothing was read.
        number: a number above all of the log.
        read: file to its text.

    Raises:
        DamageError: entries up to the offset are in no file.
    """
    logs = {name: log for name in names if (log := source_log_file(name)) is not None}
    interval = _interval(logs) if any(log.compact for log in logs.values()) else _INTERVAL
    newest = (number + 1) // interval * interval - 1
    if newest <= until:
        made = cut_source_log(logs, until, read) if until >= 0 else {}
        return made | {str(n): _HEAD for n in range(until + 1, number + 1)}
    entries = _entries_until(logs, until, read)
    # Spark takes the distance of the two newest compact files for the interval.
    compact = [n for n in (newest - interval, newest) if n >= 0 and (n > until or f"{n}.compact" not in logs)]
    return {
        **{f"{n}.compact": "\n".join([_HEAD, *(line for at, line in entries if at <= n)]) for n in compact},
        **{str(n): _HEAD for n in range(newest + 1, number + 1)},
    }


def _entries_until(
    logs: Mapping[str, SourceLogFile], until: int, read: Callable[[str], str]
) -> list[tuple[int, str]]:
    """Return the entries up to an offset, each with its number, oldest first.

    A later compact file is asked first: where Spark has deleted what is older, a driver that was frozen may
    have written a number again.
    """
    if until < 0:
        return []
    later = later_compact(logs, until)
    if later is not None:
        return [(e.batch, e.line) for e in source_entries(read(later)) if e.batch <= until]
    made = cut_source_log(logs, until, read)
    there = {name: log for name in (*logs, *made) if (log := source_log_file(name)) is not None}
    found: dict[tuple[int, str], None] = {}
    for name in sorted(file_source_logs(there, until), key=lambda name: there[name].number):
        entries = source_entries(made[name] if name in made else read(name))
        found |= dict.fromkeys((entry.batch, entry.line) for entry in entries)
    return list(found)


def cut_source_log(names: Iterable[str], until: int, read: Callable[[str], str]) -> dict[str, str]:
    """Return the files that the log of a file source lacks to be read up to an offset.

    Spark merges older files of the log into a compact one, and deletes them after a while. A compact file
    after the offset has all entries up to it: they are written out again, as Spark would have written them
    by then.

    Args:
        names: the files of `sources/<source>/`.
        until: the offset.
        read: file to its text.

    Raises:
        DamageError: entries up to the offset are in no file.
    """
    logs = {name: log for name in names if (log := source_log_file(name)) is not None}
    try:
        file_source_logs(logs, until)
    except LookupError as missing:
        later = later_compact(logs, until)
        if later is None:
            raise DamageError(f"the log of a file source: {missing.args[0]}") from missing
        text = read(later)
        head, entries = text.partition("\n")[0], source_entries(text)
        interval = _interval(logs)
        base = (until + 1) // interval * interval - 1
        wanted = [(base, f"{base}.compact")] if base >= 0 else []
        wanted += [(number, str(number)) for number in range(base + 1, until + 1)]
        return {
            name: "\n".join([head, *(e.line for e in entries if _belongs(e.batch, at, name))])
            for at, name in wanted
            if name not in logs
        }
    return {}


def _belongs(number: int, at: int, name: str) -> bool:
    return number <= at if name.endswith(".compact") else number == at


def _interval(logs: Mapping[str, SourceLogFile]) -> int:
    """Return the interval of compact files, as `CompactibleFileStreamLog` derives it from those there are.

    Two need not follow one another: Spark may have deleted those between that of a kept cut and its newest.
    """
    compact = sorted(log.number for log in logs.values() if log.compact)
    if len(compact) > 1:
        return gcd(*(number + 1 for number in compact))
    batches = compact[0] + 1
    return next((n for n in range(_INTERVAL, batches // 2 + 1) if batches % n == 0), batches)
