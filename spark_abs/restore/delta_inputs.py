"""Check that Delta tables still have the rows that streams read after a checkpoint.

A stream reads the files that each commit added, not the files of the newest version: `OPTIMIZE` and then
`VACUUM` delete them, and the clean-up of the log deletes commits. The cost grows with the commits after the
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyarrow import fs

from spark_abs.codec import decoded
from spark_abs.errors import DamageError, UsageError
from spark_abs.manifest import Manifest, SourceShape, StageSnapshot
from spark_abs.model import StageId, is_number
from spark_abs.snapshots.delta_offsets import DELTA, FEED, DeltaOffset, delta_offset
from spark_abs.snapshots.layout import parse_offsets
from spark_abs.snapshots.packs import PackReader
from spark_abs.snapshots.parallel import THREADS
from spark_abs.snapshots.state_storage import locate
from spark_abs.store.log import log_file, versions_in
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

T = TypeVar("T")
_COMMITS, _FILES = 256, 10_000
"""So many are in memory at once, however long the log is."""
_LISTED = 1_000
"""From so many files of a directory on, one listing is faster than a question for each file."""


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Whether Delta tables have the rows that a restore reads again."""

    lost: tuple[str, ...] = ()
    """Sources that lack rows, each with the reason."""
    unknown: tuple[str, ...] = ()
    """Sources that could not be checked, each with the reason."""


def delta_inputs(root: Root, manifest: Manifest) -> DeltaInputs:
    """Check that all Delta tables have the rows that stages read after a checkpoint; changes nothing."""
    shapes = {shape.stage: shape.sources for shape in manifest.graph}
    moved = {o.table_id for stage in manifest.stages for o in stage.outputs if o.kind == "table"}
    lost: list[str] = []
    unknown: list[str] = []
    for snapshot in manifest.stages:
        tracked = any("schema_tracking/" in file.path for file in snapshot.files)
        sources, before = shapes.get(snapshot.stage, ()), ""
        if "reservoirId" in snapshot.offsets:
            before = _before(root, snapshot)
        found = asked(
            root,
            snapshot.stage,
            offsets=snapshot.offsets,
            declared=sources,
            tracked=tracked,
            before=before,
            moved=moved,
        )
        lost += found.lost
        unknown += found.unknown
    return DeltaInputs(tuple(lost), tuple(unknown))


def _before(root: Root, snapshot: StageSnapshot) -> str:
    """Return the offsets of the batch before the cut, from `state/`; empty if it has none."""
    wanted = [f for f in snapshot.files if f.path == f"offsets/{snapshot.cut_batch - 1}"]
    try:
        with PackReader(root) as reader:
            where = locate(root, reader, wanted) if wanted else {}
            return "".join(
                decoded(b"".join(reader.pieces(where[f.sha256, f.at.pack], f.sha256, f.size)), f.path)
                for f in wanted
            )
    except DamageError:  # reported when the checkpoint is verified
        return ""


def asked(
    root: Root,
    stage: StageId,
    *,
    offsets: str,
    declared: Sequence[SourceShape],
    tracked: bool = False,
    before: str = "",
    moved: Collection[str] = (),
) -> DeltaInputs:
    """Check that Delta tables have the rows that one stage reads after the offsets of a batch.

    Args:
        root: for the storage.
        stage: for messages.
        offsets: the text of the batch's offset file; empty if the stage has run no batch.
        declared: the sources of the stage, in the order of that file.
        tracked: whether the source tracks its schema in a log: then the schema may change.
        before: the text of the offset file of the batch before: a start of Spark plans that batch again.
        moved: ids of tables that the restore takes back: the stage continues behind that, and reads nothing
            of before.
    """
    lost: list[str] = []
    unknown: list[str] = []
    planned = parse_offsets(before).offsets if before else {}
    for key, text in parse_offsets(offsets).offsets.items() if offsets else ():
        offset = delta_offset(text)
        shape = declared[int(key)] if is_number(key) and int(key) < len(declared) else None
        if shape is not None and "iceberg" in shape.kind.lower():
            unknown.append(
                f"stage {stage!r} resumes in {shape}; it was not checked that its later snapshots are there"
            )
        if offset is None or offset.table_id in moved:
            continue
        if shape is None or shape.kind.lower() != DELTA or not shape.name:
            unknown.append(
                f"stage {stage!r} resumes at version {offset.version} of the Delta table with the id "
                f"{offset.table_id}; its location is not recorded, so it was not checked that its later "
                "versions are there"
            )
            continue
        said = f"stage {stage!r} resumes at version {offset.commit} of {shape.name}"
        try:
            place, again = root.storage.place(shape.name), delta_offset(planned.get(key))
            found = why_not_from(place, offset, shape.at == FEED, tracked, again)
        except (UsageError, OSError, pa.ArrowException) as error:
            unknown.append(f"{said}; it could not be checked that the table has its rows: {error}")
            continue
        if found:
            lost.append(f"{said}, and {found}")
    return DeltaInputs(tuple(lost), tuple(unknown))


def why_not_from(
    place: Place,
    offset: DeltaOffset,
    feed: bool = False,
    tracked: bool = False,
    planned: DeltaOffset | None = None,
) -> str:
    """Say which rows a stream cannot read after an offset, and why; empty if it can read all.

    Args:
        place: the table.
        offset: where the stream resumes.
        feed: whether it reads the change data feed.
        tracked: as for `asked`.
        planned: where the batch before it begins, which is planned again: that needs the log only.

    Raises:
        OSError: the store cannot be read now.
    """
    try:
        table = Table.open(place)
    except FileNotFoundError:
        return "the table is gone"
    except DamageError as error:
        return str(error)
    if table.id != offset.table_id:
        return f"it is another table now: its id is {table.id}, and {offset.table_id} was read"
    newest = int(table.version)
    if offset.version > newest + 1:
        return f"it ends with version {newest}: an older copy was put back"
    wanted = range(offset.commit, newest + 1)
    logged = range(min(offset.commit, planned.commit if planned else newest), newest + 1)
    there = {version for version in versions_in(place.fs, place.path) if version >= logged.start}
    if gone := [version for version in logged if version not in there]:
        return f"versions {gone[0]} to {gone[-1]} are gone from its log"
    missing = _Missing(place)
    if offset.initial:
        try:
            missing.look((offset.version, path) for path in _initial(place, offset))
        except (DeltaError, FileNotFoundError) as error:
            return f"version {offset.version}, whose rows it reads first, can no longer be opened: {error}"
    columns = _Columns(table)
    if not tracked and (said := columns.at(offset.version)):
        return said
    for commits in _windows(_commits(place, wanted), _COMMITS):
        for commit in commits:
            if not tracked and commit.schema and (said := columns.why_not(commit.version, commit.schema)):
                return said
        missing.look((c.version, path) for c in commits for path in c.files_after(offset, feed))
    return str(missing)


@dataclass(frozen=True, slots=True)
class _Commit:
    """The part of one commit that a stream reads."""

    version: int
    added: tuple[str, ...]
    """Files, in the order of the log."""
    removed: tuple[str, ...]
    changes: tuple[str, ...]
    """Files of the change data feed."""
    schema: str
    """The schema of the table from here on, as Delta's JSON; empty if the commit does not change it."""

    def files_after(self, offset: DeltaOffset, feed: bool) -> tuple[str, ...]:
        """Return the files that are read after an offset; a change data feed reads all of the commit."""
        if feed:
            return self.changes or (*self.added, *self.removed)
        if self.version > offset.version:
            return self.added
        return self.added[max(offset.index, -1) + 1 :]


def _commits(place: Place, versions: Iterable[int]) -> Iterator[_Commit]:
    """Read commits in several threads, and yield them in their order."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="spark-abs-log") as pool:
        for window in _windows(iter(versions), _COMMITS):
            yield from pool.map(lambda version: _read(place, version), window)


def _read(place: Place, version: int) -> _Commit:
    text = place.read(log_file(version))
    if text is None:
        raise FileNotFoundError(f"{place}/{log_file(version)} was deleted meanwhile")
    added, removed, changes, schema = [], [], [], ""
    for line in text.splitlines():
        action: Any = json.loads(line) if line else {}
        if (add := action.get("add")) and add.get("dataChange", True):
            added.append(unquote(str(add["path"])))
        elif (remove := action.get("remove")) and remove.get("dataChange", True):
            removed.append(unquote(str(remove["path"])))
        elif cdc := action.get("cdc"):
            changes.append(unquote(str(cdc["path"])))
        elif metadata := action.get("metaData"):
            schema = str(metadata.get("schemaString") or "")
    return _Commit(version, tuple(added), tuple(removed), tuple(changes), schema)


def _initial(place: Place, offset: DeltaOffset) -> list[str]:
    """Return the files of the first version that are still to be read: Delta reads the oldest first."""
    handle = DeltaTable(place.uri, version=offset.version, storage_options=place.options)
    actions = pa.table(handle.get_add_actions(flatten=True)).select(["modification_time", "path"])
    rows = actions.sort_by([("modification_time", "ascending"), ("path", "ascending")])["path"].to_pylist()
    return [unquote(str(path)) for path in rows[max(offset.index, -1) + 1 :]]


class _Columns:
    """Compares the columns of the newest version with those of older ones."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._now = _types(table.delta.schema().to_json())

    def at(self, version: int) -> str:
        """Say why rows of a version cannot be read; empty if they can, or if the log does not tell."""
        before = min(version, int(self._table.version))
        try:
            place = self._table.place
            handle = DeltaTable(place.uri, version=before, storage_options=place.options)
        except (DeltaError, FileNotFoundError):
            return ""
        return self.why_not(before, handle.schema().to_json())

    def why_not(self, version: int, schema: str) -> str:
        """Say which columns of a schema a stream can no longer read, empty if it can read all."""
        then = _types(schema)
        other = [name for name in then if name not in self._now or not _reads(then[name], self._now[name])]
        if not other:
            return ""
        return (
            f"its columns have changed since version {version}, which Delta's stream refuses: "
            f"{', '.join(other)} had another type or name"
        )


_INSIDE = ("elementType", "keyType", "valueType")
"""The names of element types in the JSON of an array or a map."""


def _types(schema: str) -> dict[str, Any]:
    return _fields(json.loads(schema))


def _fields(struct: Any) -> dict[str, Any]:
    return {str(field["name"]): field["type"] for field in struct["fields"]}


def _reads(then: Any, now: Any) -> bool:
    """Say whether a stream reads values of one type as another: a struct may have more fields since.

    As Delta's `SchemaUtils.isReadCompatible`, without its rules for null.
    """
    if not isinstance(then, dict) or not isinstance(now, dict) or then["type"] != now["type"]:
        return bool(then == now)
    if then["type"] == "struct":
        old, new = _fields(then), _fields(now)
        return all(name in new and _reads(kind, new[name]) for name, kind in old.items())
    return all(_reads(then.get(inside), now.get(inside)) for inside in _INSIDE)


@dataclass(slots=True)
class _Missing:
    """Counts the files that are gone."""

    place: Place
    wanted: int = 0
    gone: int = 0
    first: str = ""
    versions: list[int] = field(default_factory=list)
    """The first and the last version that lacks one."""

    def look(self, files: Iterable[tuple[int, str]]) -> None:
        """Check files, each with the version that has added it."""
        for window in _windows(iter(files), _FILES):
            self.wanted += len(window)
            there = self._there([path for _, path in window])
            for version, path in window:
                if path not in there:
                    self.gone += 1
                    self.first = self.first or path
                    self.versions = [*self.versions[:1], version]

    def __str__(self) -> str:
        if not self.gone:
            return ""
        between = " to ".join(str(v) for v in dict.fromkeys((self.versions[0], self.versions[-1])))
        return (
            f"{self.gone} of {self.wanted} files that it reads are gone, those of version {between}, the "
            f"first {self.first} (VACUUM deletes files that the newest version does not need)"
        )

    def _there(self, paths: Sequence[str]) -> set[str]:
        by_directory: dict[str, list[str]] = {}
        for path in paths:
            by_directory.setdefault(path.rpartition("/")[0], []).append(path)
        there: set[str] = set()
        single: list[str] = []
        for directory, inside in by_directory.items():
            if self.place.local or len(inside) < _LISTED or ":" in directory:
                single += inside
                continue
            selector = fs.FileSelector(f"{self.place.path}/{directory}".rstrip("/"), allow_not_found=True)
            names = {info.base_name for info in self.place.fs.get_file_info(selector)}
            there |= {path for path in inside if path.rpartition("/")[2] in names}
        with ThreadPoolExecutor(THREADS, thread_name_prefix="spark-abs-files") as pool:
            found = pool.map(self._exists, _windows(iter(single), 100))
            return there.union(*found)

    def _exists(self, paths: Sequence[str]) -> set[str]:
        """Ask the store for files; a file of a clone is named by its whole location."""
        whole = [path for path in paths if ":" in path or path.startswith("/")]
        found = {path for path in whole if self.place.storage.place(path).exists()}
        mine = [path for path in paths if path not in whole]
        infos = self.place.fs.get_file_info([f"{self.place.path}/{path}" for path in mine])
        there = zip(mine, infos, strict=True)
        return found | {path for path, info in there if info.type is not fs.FileType.NotFound}


def _windows(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while window := list(islice(items, size)):
        yield window
