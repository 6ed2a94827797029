"""The grammar of Spark's checkpoint directory. Pure: from names and text to values.

Offset log 1 and 2, commit log 1 to 3, state formats 1 and 2 (with unique ids in the names). Newer formats are
refused, since a wrong guess would silently lose state. No other module knows the names and lines of that
directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from spark_abs.codec import parsed
from spark_abs.errors import DamageError, Refused
from spark_abs.model import PROVIDER_KEY

OFFSET_LOG_VERSIONS = (1, 2)
COMMIT_LOG_VERSIONS = (1, 2, 3)
OPERATOR_METADATA_VERSIONS = (1, 2)
VOID_OFFSET = "-"
END_OF_TIME_MS = 253_402_300_799_000
"""The last second of the year 9999, as a watermark: later event times cannot be written as a date."""
DEFAULT_STORE = "default"
CODEC_KEY = "spark.sql.streaming.stateStore.compression.codec"
PARTITIONS_KEY = "spark.sql.shuffle.partitions"
ENCODING_KEY = "spark.sql.streaming.stateStore.encodingFormat"
"""A setting of every query since Spark 4.0, the first that writes operator metadata."""


@dataclass(frozen=True, slots=True)
class OffsetFile:
    """One file of the offset log: the input that a batch was planned to read."""

    version: int
    watermark_ms: int
    """The watermark under which the batch ran; 0 when the query has none."""
    timestamp_ms: int
    conf: Mapping[str, str]
    offsets: Mapping[str, str]
    """Source to offset text, in the order of the file. Version 1 names sources by their position, from 0. A
    source without an offset is left out."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The offset texts alone, for `model.positions_of`."""
        return tuple(self.offsets.values())

    @property
    def provider(self) -> str:
        """The class of the state store provider; empty if the file does not have it."""
        return self.conf.get(PROVIDER_KEY, "")

    @property
    def codec(self) -> str:
        """How changelogs are compressed."""
        return self.conf.get(CODEC_KEY, "lz4")

    @property
    def names_operators(self) -> bool:
        """Whether the Spark that planned the batch writes operator metadata."""
        return ENCODING_KEY in self.conf


@dataclass(frozen=True, slots=True)
class CommitFile:
    """One file of the commit log: the result of a batch."""

    version: int
    watermark_ms: int
    """The watermark of the next batch."""
    unique_ids: Mapping[int, tuple[tuple[str, ...], ...]] | None = None
    """State format 2: for each operator and partition, the ids of the state files that the batch
    committed."""


def parse_offsets(text: str, where: str = "") -> OffsetFile:
    """Read the text of `offsets/<b>`.

    Args:
        text: the text.
        where: the file from which it comes, for the message.

    Raises:
        Refused: a newer log version.
        DamageError: anything else that Spark would not have written.
    """
    with _naming(where):
        return _offset_file(text)


def _offset_file(text: str) -> OffsetFile:
    version, lines = _header(text, "offset log", OFFSET_LOG_VERSIONS)
    if not lines:
        raise DamageError("offset log: there is nothing after the version")
    metadata = parsed(lines[0], dict, "offset log metadata") if lines[0].strip() else {}
    offsets: dict[str, str] = {}
    for index, line in enumerate(lines[1:]):
        if version == 1:
            source, offset = str(index), line
        else:
            source, colon, offset = line.partition(":")
            if not colon:
                raise DamageError(f"offset log: no source name in {line[:80]!r}")
        if offset != VOID_OFFSET:
            offsets[source] = offset
    conf = metadata.get("conf") or {}
    return OffsetFile(
        version,
        _int(metadata.get("batchWatermarkMs", 0), "batchWatermarkMs"),
        _int(metadata.get("batchTimestampMs", 0), "batchTimestampMs"),
        {str(k): str(v) for k, v in conf.items()},
        offsets,
    )


def at_end_of_time(text: str) -> str:
    """Return the plan of a next batch that reads nothing, with the watermark at the end of time.

    Args:
        text: the content of `offsets/<b>`; the result is for `offsets/<b+1>`.

    Raises:
        DamageError: the text has no metadata that says a watermark.
    """
    metadata = _metadata(text)
    if "batchWatermarkMs" not in metadata:
        raise DamageError("offset log metadata: no batchWatermarkMs")
    return _with_metadata(text, {**metadata, "batchWatermarkMs": END_OF_TIME_MS})


def with_settings(text: str, settings: Mapping[str, str]) -> str:
    """Return `offsets/<b>` with changed settings of the query.

    Raises:
        DamageError: the text has no metadata.
    """
    metadata = _metadata(text)
    return _with_metadata(text, {**metadata, "conf": {**(metadata.get("conf") or {}), **settings}})


def with_offsets(text: str, offsets: Mapping[str, str]) -> str:
    """Return `offsets/<b>` with other offsets of some sources.

    Args:
        text: the content of the file.
        offsets: source, named as in `OffsetFile.offsets`, to its offset text.

    Raises:
        Refused, DamageError: as `parse_offsets`.
    """
    head, metadata, *lines = text.split("\n")
    named = parse_offsets(text).version != 1
    at = {line.partition(":")[0] if named else str(n): n for n, line in enumerate(lines)}
    for source, offset in offsets.items():
        line = f"{source}:{offset}" if named else offset
        if source in at:
            lines[at[source]] = line
        else:
            lines.append(line)
    return "\n".join([head, metadata, *lines])


def parse_commit(text: str, where: str = "") -> CommitFile:
    """Read the text of `commits/<b>`; arguments and errors as of `parse_offsets`."""
    with _naming(where):
        return _commit_file(text)


def _commit_file(text: str) -> CommitFile:
    version, lines = _header(text, "commit log", COMMIT_LOG_VERSIONS)
    metadata = parsed(lines[0], dict, "commit log metadata") if lines else {}
    raw = metadata.get("stateUniqueIds")
    ids: dict[int, tuple[tuple[str, ...], ...]] | None = None
    if raw is not None:
        try:
            ids = {int(op): tuple(tuple(map(str, part)) for part in parts) for op, parts in raw.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise DamageError(f"commit log: stateUniqueIds cannot be read: {error}") from error
    return CommitFile(version, _int(metadata.get("nextBatchWatermarkMs", 0), "nextBatchWatermarkMs"), ids)


class StateFileKind(StrEnum):
    """The content of a versioned state file."""

    SNAPSHOT = "snapshot"
    """The whole state as of its version: RocksDB `.zip`, HDFS-backed `.snapshot`."""
    CHANGES = "changes"
    """The changes of one version: RocksDB `.changelog`, HDFS-backed `.delta`."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """A versioned file of one state store."""

    name: str
    version: int
    kind: StateFileKind
    unique_id: str | None
    """State format 2 only."""


_STATE_FILE = re.compile(r"(\d+)(?:_([0-9A-Za-z-]+))?\.(zip|changelog|delta|snapshot)")
_KINDS = {
    "zip": StateFileKind.SNAPSHOT,
    "snapshot": StateFileKind.SNAPSHOT,
    "changelog": StateFileKind.CHANGES,
    "delta": StateFileKind.CHANGES,
}


def state_file(name: str) -> StateFile | None:
    """Parse the name of a versioned state file; None for every other file of a store."""
    match = _STATE_FILE.fullmatch(name)
    if not match:
        return None
    return StateFile(name, int(match[1]), _KINDS[match[3]], match[2])


def is_ignored(name: str) -> bool:
    """Say whether a file is a checksum or temporary file, which is never part of a cut."""
    return name.startswith(".") or name.endswith((".crc", ".tmp"))


@dataclass(frozen=True, slots=True)
class SourceLogFile:
    """A numbered file under `sources/<source>/`."""

    number: int
    compact: bool


_SOURCE_LOG = re.compile(r"(\d+)(\.compact)?")


def source_log_file(name: str) -> SourceLogFile | None:
    """Parse the name of a numbered source log file; None for other files of a source."""
    match = _SOURCE_LOG.fullmatch(name)
    return SourceLogFile(int(match[1]), match[2] is not None) if match else None


def file_source_offset(offset: str | None) -> int | None:
    """Return the log offset of a file source's offset text, None if it is not one."""
    if offset is None:
        return None
    try:
        plain = json.loads(offset)
    except ValueError:
        return None
    if isinstance(plain, dict) and plain.keys() == {"logOffset"} and type(plain["logOffset"]) is int:
        return int(plain["logOffset"])
    return None


def is_file_source_log(text: str) -> bool:
    """Say whether the text of a numbered source file is the file source's list of files."""
    for line in text.splitlines()[1:2]:
        try:
            plain = json.loads(line)
        except ValueError:
            return False
        return isinstance(plain, dict) and {"path", "batchId"} <= plain.keys()
    return False


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """A line of the log of a file source: a file that a batch has read."""

    batch: int
    path: str
    """The URI, as Spark writes it."""
    line: str


def source_entries(text: str) -> list[SourceEntry]:
    """Parse a file of the log of a file source, plain or compact; its first line is the version.

    Raises:
        DamageError: a line is not as Spark writes it.
    """
    found = []
    for line in filter(None, text.split("\n")[1:]):
        try:
            plain = json.loads(line)
            found.append(SourceEntry(int(plain["batchId"]), str(plain["path"]), line))
        except (ValueError, KeyError, TypeError) as error:
            raise DamageError(f"the log of a file source has the line {line[:80]!r}") from error
    return found


def file_source_logs(files: Mapping[str, SourceLogFile], offset: int) -> tuple[str, ...]:
    """Choose the log files of a file source up to `offset`: the newest compact files and all later files.

    Two compact files are chosen if there are two, since Spark derives its compaction interval from them.

    Raises:
        LookupError: a file between the newest compact one and `offset` is missing; the message names it.
    """
    compact = sorted(f.number for f in files.values() if f.compact and f.number <= offset)
    base = compact[-1] if compact else -1
    after = {f.number: name for name, f in files.items() if not f.compact and base < f.number <= offset}
    missing = [n for n in range(base + 1, offset + 1) if n not in after]
    if missing:
        raise LookupError(f"file {missing[0]} of {base + 1} to {offset} is missing from the log")
    newest = set(compact[-2:])
    names = [name for name, f in files.items() if f.compact and f.number in newest]
    return (*sorted(names), *(after[n] for n in sorted(after)))


def later_compact(files: Mapping[str, SourceLogFile], offset: int) -> str | None:
    """Return the first compact file after `offset`, which has all entries up to it, too; None if none is."""
    later = [(f.number, name) for name, f in files.items() if f.compact and f.number > offset]
    return min(later)[1] if later else None


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A state store of an operator, as in the operator's metadata."""

    name: str
    partitions: int
    schema_paths: tuple[str, ...] = ()
    """Absolute, as Spark wrote them."""


@dataclass(frozen=True, slots=True)
class OperatorMetadata:
    """The text of `_metadata/metadata` (version 1) or `_metadata/v2/<batch>` (version 2)."""

    version: int
    operator_id: int
    name: str
    stores: tuple[StoreInfo, ...] = ()

    @property
    def partitions(self) -> int:
        """The query's shuffle partitions when the operator first ran."""
        return max((store.partitions for store in self.stores), default=0)


def parse_operator(text: str) -> OperatorMetadata:
    """Read the metadata of a stateful operator.

    Raises:
        Refused: a newer version.
        DamageError: anything else that Spark would not have written.
    """
    version, lines = _header(text, "operator metadata", OPERATOR_METADATA_VERSIONS)
    plain = parsed(lines[0] if lines else "", dict, "operator metadata")
    try:
        info = plain["operatorInfo"]
        stores = tuple(
            StoreInfo(
                str(store["storeName"]),
                _int(store["numPartitions"], "numPartitions"),
                tuple(map(str, store.get("stateSchemaFilePaths", ()))),
            )
            for store in plain["stateStoreInfo"]
        )
        return OperatorMetadata(
            version, _int(info["operatorId"], "operatorId"), str(info["operatorName"]), stores
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DamageError(f"operator metadata: field {error} is missing or has the wrong type") from error


_JOIN_STORES = tuple(
    f"{side}-{what}" for side in ("left", "right") for what in ("keyToNumValues", "keyWithIndexToValue")
)
"""The state stores of a join of two streams. Before Spark 4.0 every other operator has the default one."""


def operator_without_metadata(operator: int, stores: Collection[str], partitions: int) -> OperatorMetadata:
    """Return what is known of an operator of a Spark before 4.0, which has no name.

    Args:
        operator: its number.
        stores: those there are.
        partitions: the query's shuffle partitions.

    Raises:
        LookupError: these are not the stores of an operator: some are missing.
    """
    for known in ((DEFAULT_STORE,), _JOIN_STORES):
        if set(stores) == set(known):
            return OperatorMetadata(1, operator, "", tuple(StoreInfo(name, partitions) for name in known))
    raise LookupError(
        f"no operator of Spark before 4.0 has these state stores alone: {', '.join(sorted(stores)) or 'none'}"
    )


def relocate_operator(text: str, state_uri: str) -> str:
    """Move the absolute schema paths of `_metadata/v2/<batch>` to another `state` directory.

    Args:
        text: the file as Spark wrote it.
        state_uri: the URI of the new `state` directory, `file:/…` for a local one, as Spark writes it.

    Raises:
        DamageError: a path is not below a `state` directory.
    """
    parse_operator(text)
    head, _, body = text.partition("\n")
    plain = json.loads(body)
    for store in plain["stateStoreInfo"]:
        if "stateSchemaFilePaths" in store:
            paths = store["stateSchemaFilePaths"]
            store["stateSchemaFilePaths"] = [_below_state(str(path), state_uri) for path in paths]
    return f"{head}\n{json.dumps(plain, separators=(',', ':'))}"


_BELOW_STATE = re.compile(r".*/state/(\d+/_stateSchema/[^/]+/[^/]+)")


def _below_state(path: str, state_uri: str) -> str:
    match = _BELOW_STATE.fullmatch(path)
    if not match:
        raise DamageError(f"operator metadata: {path!r} is not a schema file below a state directory")
    return f"{state_uri}/{match[1]}"


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put a file in front of what is said of its text."""
    try:
        yield
    except (DamageError, Refused) as error:
        if not where:
            raise
        raise type(error)(f"{where}: {error}") from error


def _header(text: str, what: str, known: Sequence[int]) -> tuple[int, list[str]]:
    first, *rest = text.split("\n")
    match = re.fullmatch(r"v(\d+)", first.strip())
    if not match:
        raise DamageError(f"{what}: the first line is {first[:40]!r}, not a version")
    version = int(match[1])
    if version not in known:
        raise Refused(f"{what} version {version} is not supported, only {', '.join(map(str, known))}")
    return version, rest


def _metadata(text: str) -> dict[str, Any]:
    return parsed(text.split("\n")[1] if "\n" in text else "", dict, "offset log metadata")


def _with_metadata(text: str, metadata: Mapping[str, Any]) -> str:
    head, _, *offsets = text.split("\n")
    return "\n".join([head, json.dumps(metadata, separators=(",", ":")), *offsets])


def _int(value: object, what: str) -> int:
    if type(value) is not int:
        raise DamageError(f"{what}: expected a whole number, found {value!r}")
    return value
