"""Which files of a native checkpoint make the cut of a batch: exactly those that the next batch starts from.

Spark works meanwhile: it purges old files and uploads snapshots late. If a listed file vanishes, the capture
starts again. An incomplete set of files is an error, never a smaller cut.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from pyarrow import fs

from spark_abs.codec import decoded
from spark_abs.errors import AbsError, DamageError, Refused
from spark_abs.manifest import OperatorState
from spark_abs.model import NO_BATCH, BatchId, Provider, is_number
from spark_abs.snapshots.layout import (
    DEFAULT_STORE,
    PARTITIONS_KEY,
    CommitFile,
    OffsetFile,
    OperatorMetadata,
    file_source_logs,
    file_source_offset,
    is_file_source_log,
    is_ignored,
    later_compact,
    operator_without_metadata,
    parse_commit,
    parse_offsets,
    parse_operator,
    source_log_file,
    state_file,
)
from spark_abs.snapshots.lineage import HEAD_BYTES
from spark_abs.snapshots.schema_log import SCHEMA_LOGS, entries_at
from spark_abs.snapshots.stores import Wanted, files_of_version
from spark_abs.store.storage import Place

ATTEMPTS = 5
"""How often a capture starts again because Spark purged a file meanwhile."""


def newest_batch(native: Place, log: str) -> BatchId:
    """Return the newest batch in a log of a native checkpoint, `offsets` or `commits`; `NO_BATCH` if none."""
    found = newest_file(native, log)
    return NO_BATCH if found is None else BatchId(int(found.base_name))


def newest_file(native: Place, log: str) -> fs.FileInfo | None:
    """Return the file of the newest batch in a log of a native checkpoint; None if there is no batch."""
    selector = fs.FileSelector(f"{native.path}/{log}", allow_not_found=True)
    files = (info for info in native.fs.get_file_info(selector) if is_number(info.base_name))
    return max(files, key=lambda info: int(info.base_name), default=None)


class CaptureIncomplete(AbsError):
    """Files of a cut are missing: the stage declines the checkpoint and works on."""


class CapturedFile(NamedTuple):
    """A file of a cut as listed. If it differs later, the capture is stale."""

    path: str
    """Relative to the native directory."""
    size: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Captured:
    """The cut of one batch: its files and their content."""

    batch: BatchId
    files: tuple[CapturedFile, ...] = ()
    offsets_text: str = ""
    """The text of `offsets/<batch>`."""
    offsets: OffsetFile | None = None
    commit: CommitFile | None = None
    operators: tuple[OperatorState, ...] = ()
    provider: str = ""
    """Class of the state store provider; empty for a stage without state."""
    shuffle_partitions: int = 0


def capture(
    filesystem: fs.FileSystem,
    native_dir: str,
    batch: BatchId,
    kept: Collection[CapturedFile] = (),
    *,
    source_logs: bool = True,
    later_logs: bool = False,
) -> Captured:
    """Return the files that make the cut of `batch`, a batch that has ended.

    Reads the two logs, operator metadata and the heads of state files; copies nothing. Safe while the query
    runs, in any thread.

    Args:
        filesystem: where the native checkpoint is.
        native_dir: its path as `filesystem` takes it.
        batch: the batch of the cut; `NO_BATCH` gives an empty capture.
        kept: files that need not be copied. If the state can be loaded in several ways, a way that uses them
            is chosen (P12).
        source_logs: False leaves out the logs of sources, of which Spark deletes older files.
        later_logs: whether a compact file from after the cut stands for files of a source's log that are
            gone. It lists later files, too, so only a rewind can use it, which cuts it.

    Raises:
        CaptureIncomplete: a needed file does not exist (purged, or not yet uploaded).
        Refused: a log version, state provider or codec that is not known.
        DamageError: a file does not have Spark's format.
    """
    if batch == NO_BATCH:
        return Captured(batch)
    vanished: FileNotFoundError | None = None
    for _ in range(ATTEMPTS):
        try:
            reader = _Reader(filesystem, native_dir.rstrip("/"), batch, kept)
            return reader.capture(source_logs, later_logs)
        except FileNotFoundError as error:
            vanished = error
    raise CaptureIncomplete(f"cut of batch {batch} in {native_dir}: {vanished}") from vanished


class _Reader:
    """One attempt at a capture, on one listing. Raises FileNotFoundError if a listed file has vanished."""

    def __init__(
        self, filesystem: fs.FileSystem, base: str, batch: BatchId, kept: Collection[CapturedFile]
    ) -> None:
        self._fs, self._base, self._batch, self._kept = filesystem, base, batch, kept
        self._dirs: dict[str, dict[str, CapturedFile]] = {}
        self._chosen: set[CapturedFile] = set()
        self._shuffle_partitions = 0
        self._list("", recursive=False)
        for directory in ("offsets", "commits"):
            self._list(directory, recursive=False)
        for directory in ("sources", "state", SCHEMA_LOGS):
            self._list(directory, recursive=True)

    def capture(self, source_logs: bool, later_logs: bool) -> Captured:
        """Find and read the files of the query that a checkpoint needs."""
        b = self._batch
        self._need("", "metadata", "the query's id")
        offsets_text = self._text(self._need("offsets", str(b), f"the offsets of batch {b}"))
        offsets = parse_offsets(offsets_text, f"{self._base}/offsets/{b}")
        commit_text = self._text(self._need("commits", str(b), f"the commit of batch {b}"))
        commit = parse_commit(commit_text, f"{self._base}/commits/{b}")
        if b > 0:
            self._need("offsets", str(b - 1), "the offsets of the batch before, which a start reads")
            self._chosen.update(f for f in [self._dirs["commits"].get(str(b - 1))] if f)
        for source in self._children("sources") if source_logs else ():
            self._source(source, offsets, later_logs)
        for directory, files in self._dirs.items():
            if directory.startswith(f"{SCHEMA_LOGS}/"):
                self._schema_log(files, offsets)
        numbers = sorted(int(name) for name in self._children("state") if is_number(name))
        operators = [self._operator(str(number), offsets, commit) for number in numbers]
        return Captured(
            batch=b,
            files=tuple(sorted(self._chosen)),
            offsets_text=offsets_text,
            offsets=offsets,
            commit=commit,
            operators=tuple(operators),
            provider=offsets.provider if operators else "",
            shuffle_partitions=self._shuffle_partitions,
        )

    def _source(self, source: str, offsets: OffsetFile, later_logs: bool) -> None:
        top = f"sources/{source}"
        files = self._dirs.get(top, {})
        logs = {name: log for name in files if (log := source_log_file(name)) is not None}
        offset = offsets.offsets.get(source)
        until = file_source_offset(offset)
        if until is not None:
            try:
                chosen = set(file_source_logs(logs, until))
            except LookupError as error:
                later = later_compact(logs, until) if later_logs else None
                if later is None:
                    raise self._incomplete(top, error) from error
                chosen = {later}
        elif offset is None and any(is_file_source_log(self._text(files[name])) for name in logs):
            chosen = set()
        else:
            chosen = set(logs)
        self._chosen.update(f for name, f in files.items() if name in chosen or name not in logs)
        for directory, inside in self._dirs.items():
            if directory.startswith(f"{top}/"):
                self._chosen.update(inside.values())

    def _schema_log(self, files: Mapping[str, CapturedFile], offsets: OffsetFile) -> None:
        """Choose the entries that existed at the cut: rows are read with the schema of the newest one."""
        found = {int(name): file for name, file in files.items() if is_number(name)}
        texts = {number: partial(self._text, file) for number, file in found.items()}
        self._chosen.update(found[number] for number in entries_at(texts, offsets.offsets.get))

    def _operator(self, operator: str, offsets: OffsetFile, commit: CommitFile) -> OperatorState:
        top = f"state/{operator}"
        metadata = self._operator_metadata(top, offsets)
        if metadata.operator_id != int(operator):
            raise DamageError(
                f"{self._base}/{top} holds the metadata of another operator, {metadata.operator_id}"
            )
        try:
            provider = Provider(offsets.provider)
        except ValueError:
            raise Refused(f"state store provider {offsets.provider!r} is not supported") from None
        recorded = metadata.partitions
        if metadata.version == 1:
            # Written once, when the operator first ran; a repartitioning shows in the offset log alone.
            recorded = int(offsets.conf.get(PARTITIONS_KEY, recorded))
        self._shuffle_partitions = max(self._shuffle_partitions, recorded)
        ids = None if commit.unique_ids is None else commit.unique_ids.get(metadata.operator_id, ())
        partitions = self._partitions(top, recorded) if ids is None else len(ids)
        if partitions == 0:
            raise self._incomplete(top, LookupError("the commit lacks stateUniqueIds"))
        for store in metadata.stores:
            for partition in range(partitions):
                wanted = None if ids is None else frozenset(ids[partition])
                self._store(
                    f"{top}/{partition}" + ("" if store.name == DEFAULT_STORE else f"/{store.name}"),
                    Wanted(provider, self._batch + 1, wanted, offsets.codec),
                )
        schemas = self._schemas(top)
        return OperatorState(
            operator_id=metadata.operator_id,
            name=metadata.name,
            partitions=partitions,
            stores=tuple(store.name for store in metadata.stores),
            schema=json.dumps(schemas, separators=(",", ":"), sort_keys=True),
        )

    def _partitions(self, top: str, recorded: int) -> int:
        """Return the number of partitions of an operator, from its metadata and its directories.

        The metadata has the query's shuffle partitions, even for an operator that gathers all rows in one
        partition (a limit, an aggregation without keys).
        """
        below = (d.removeprefix(f"{top}/").partition("/")[0] for d in self._dirs if d.startswith(f"{top}/"))
        there = {int(name) for name in below if is_number(name)}
        return 1 if there == {0} else recorded

    def _store(self, directory: str, wanted: Wanted) -> None:
        files = {
            f"{below}{name}": file
            for below in ("", "SSTs/", "logs/")
            for name, file in self._dirs.get(f"{directory}/{below}".rstrip("/"), {}).items()
        }
        try:
            names = files_of_version(
                wanted,
                {name: file.size for name, file in files.items()},
                lambda name: self._bytes(files[name]),
                lambda name: self._bytes(files[name], HEAD_BYTES),
                {name for name, file in files.items() if file in self._kept},
            )
        except LookupError as error:
            raise self._incomplete(directory, error) from error
        self._chosen.update(files[name] for name in names)

    def _operator_metadata(self, top: str, offsets: OffsetFile) -> OperatorMetadata:
        """Choose all metadata files up to the cut, and read the newest; a Spark before 4.0 writes none."""
        if (first := self._dirs.get(f"{top}/_metadata", {}).get("metadata")) is not None:
            self._chosen.add(first)
            return parse_operator(self._text(first))
        dated = self._up_to_cut(f"{top}/_metadata/v2")
        if not dated and not offsets.names_operators:
            partitions = int(offsets.conf.get(PARTITIONS_KEY, 0))
            try:
                return operator_without_metadata(int(top.rpartition("/")[2]), self._stores(top), partitions)
            except LookupError as error:
                raise self._incomplete(top, error) from error
        if not dated:
            raise self._incomplete(top, LookupError(f"no operator metadata up to batch {self._batch}"))
        self._chosen.update(dated.values())
        return parse_operator(self._text(dated[max(dated)]))

    def _stores(self, top: str) -> set[str]:
        """Return the names of the state stores that have files of a version."""
        found = set()
        for directory, files in self._dirs.items():
            if directory.startswith(f"{top}/") and any(map(state_file, files)):
                found.add("/".join(directory.removeprefix(f"{top}/").split("/")[1:]) or DEFAULT_STORE)
        return found

    def _schemas(self, top: str) -> dict[str, str]:
        """Choose the schema files up to the cut; return the newest of each store, in base64."""
        newest: dict[str, CapturedFile] = {}
        for directory, inside in self._dirs.items():
            if not directory.startswith(f"{top}/"):
                continue
            match directory.removeprefix(f"{top}/").split("/"):
                case ["_stateSchema", store]:
                    dated = self._up_to_cut(directory)
                    self._chosen.update(dated.values())
                    if dated:
                        newest[store] = dated[max(dated)]
                case [_, *store_name, "_metadata"]:
                    self._chosen.update(inside.values())
                    if "schema" in inside:
                        newest[store_name[0] if store_name else DEFAULT_STORE] = inside["schema"]
        return {store: base64.b64encode(self._bytes(f)).decode() for store, f in newest.items()}

    def _up_to_cut(self, directory: str) -> dict[tuple[int, str], CapturedFile]:
        """Return the files named `<batch>` or `<batch>_<id>` up to the cut."""
        dated = {}
        for name, file in self._dirs.get(directory, {}).items():
            number = name.partition("_")[0]
            if is_number(number) and int(number) <= self._batch:
                dated[int(number), name] = file
        return dated

    def _list(self, directory: str, *, recursive: bool) -> None:
        self._dirs.setdefault(directory, {})
        top = f"{self._base}/{directory}".rstrip("/")
        found = self._fs.get_file_info(fs.FileSelector(top, allow_not_found=True, recursive=recursive))
        for info in found:
            if info.type is not fs.FileType.File or is_ignored(info.base_name):
                continue
            path = info.path.removeprefix(f"{self._base}/")
            parent = path.rpartition("/")[0]
            file = CapturedFile(path, info.size, info.mtime_ns or 0)
            self._dirs.setdefault(parent, {})[info.base_name] = file

    def _children(self, top: str) -> list[str]:
        """Return the directories right below `top` that contain a file."""
        return sorted({d.split("/")[1] for d in self._dirs if d.startswith(f"{top}/")})

    def _need(self, directory: str, name: str, what: str) -> CapturedFile:
        file = self._dirs[directory].get(name)
        if file is None:
            raise self._incomplete(f"{directory}/{name}".lstrip("/"), LookupError(f"{what} is missing"))
        self._chosen.add(file)
        return file

    def _incomplete(self, where: str, why: LookupError) -> CaptureIncomplete:
        return CaptureIncomplete(f"cut of batch {self._batch}: {self._base}/{where}: {why.args[0]}")

    def _bytes(self, file: CapturedFile, limit: int | None = None) -> bytes:
        with self._fs.open_input_stream(f"{self._base}/{file.path}") as stream:
            return bytes(stream.read(limit))

    def _text(self, file: CapturedFile) -> str:
        return decoded(self._bytes(file), f"{self._base}/{file.path}")
