"""`checkpoints/`: the manifests, and the outcome of every claimed id.

The outcome of id n is the first commit under `Transaction(job, n)`: a completion adds the manifest's row,
an abort adds none. Outcomes are committed in id order, so a late completion cannot follow an abort.
The name of a row's file ends in its sha256: any altered byte is seen.
"""

from __future__ import annotations

import hashlib
import io
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties
from deltalake.exceptions import CommitFailedError

from spark_abs.codec import from_json, require_format, to_json
from spark_abs.errors import AbortReason, CheckpointNotFound, CommitConflict, DamageError
from spark_abs.manifest import Manifest
from spark_abs.model import FORMAT, AttemptId, CheckpointId, CheckpointKind, RunId, Version, checked_relative
from spark_abs.protocol.attempt import Attempt
from spark_abs.protocol.control import Aborted, ControlState, settle
from spark_abs.store.control import Control
from spark_abs.store.fence import require_newest, run_fence
from spark_abs.store.root import Root
from spark_abs.store.table import AddFile, Commit, Table

PATH = "checkpoints"
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("attempt", pa.int64()),
        ("run", pa.int64()),
        ("job", pa.string()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("triggered_ms", pa.int64()),
        ("acked_ms", pa.int64()),
        ("completed_ms", pa.int64()),
        ("size_full", pa.int64()),
        ("size_new", pa.int64()),
        ("v", pa.int32()),
        ("body", pa.string()),
    ]
)

_FLAT = [name for name in SCHEMA.names if name not in ("body", "v")]
_BODY = ("id", "v", "body")
_READ_SINGLY, _AT_ONCE = 64, 8
"""So many new rows are read file by file, and so many of them at a time."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The flat columns of a manifest row, which a list shows."""

    id: CheckpointId
    attempt: AttemptId
    run: RunId
    job: str
    kind: CheckpointKind
    name: str | None
    triggered_ms: int
    acked_ms: int
    completed_ms: int
    size_full: int
    size_new: int


def _manifests(rows: Iterable[Mapping[str, Any]]) -> list[Manifest]:
    found = []
    for row in rows:
        require_format(row["v"], FORMAT, f"checkpoint {row['id']}")
        found.append(from_json(Manifest, row["body"]))
    return found


def _summary(row: Mapping[str, Any]) -> Summary:
    return Summary(**{**row, "kind": CheckpointKind(row["kind"])})


class Checkpoints:
    """The table `checkpoints/`. Not thread-safe."""

    def __init__(self, root: Root, job: str, table: Table) -> None:
        self._root = root
        self._job = job
        self._table = table
        self._read: tuple[Version, tuple[Manifest, ...]] | None = None

    @classmethod
    def open(cls, root: Root, job: str) -> Checkpoints:
        """Open the table of a root; create it if there is none."""
        return cls(root, job, Table.ensure(root.place(PATH), SCHEMA))

    def fence(self, run: RunId) -> None:
        """Fence older runs: their outcomes are refused from now on.

        Raises:
            Fenced: a newer run has done so already.
        """
        self._table.commit(lambda table: run_fence(table, self._job, run))

    def complete(self, manifest: Manifest) -> bool:
        """Commit a manifest; False if the id already has an outcome.

        Raises:
            Fenced: a newer run decides the outcomes now.
            CommitStateUnknown: the store did not answer; it may be committed.
        """
        add = self._write(manifest)
        return self._decide(manifest.id, manifest.run, (add,))

    def abort(self, checkpoint: CheckpointId, run: RunId) -> bool:
        """Commit the abort of an id; False if it already has an outcome."""
        return self._decide(checkpoint, run, ())

    def is_complete(self, checkpoint: CheckpointId) -> bool:
        """Say whether the manifest of an id is committed; errors as of `load`."""
        try:
            self.load(checkpoint)
        except CheckpointNotFound:
            return False
        return True

    def decided(self) -> CheckpointId:
        """Return the highest id with an outcome; all lower ids have one, too."""
        self._table.refresh()
        return CheckpointId(self._table.transaction(self._job) or 0)

    def summaries(self) -> tuple[Summary, ...]:
        """List completed checkpoints by id; reads flat columns only."""
        return tuple(sorted(map(_summary, self._rows(_FLAT)), key=lambda s: s.id))

    def summaries_since(self, known: Sequence[Summary]) -> tuple[Summary, ...]:
        """List completed checkpoints by id as `summaries`; of those in `known` no file is opened.

        Many new ones are read at once.

        Raises:
            DamageError: a row cannot be read.
            OSError: the store cannot be read now.
        """
        before = {s.id: s for s in known}
        there, news = self._since(before.keys())
        if news is None:
            return self.summaries()
        found = map(_summary, self._rows_in(news, _FLAT))
        return tuple(sorted((*(before[i] for i in there), *found), key=lambda s: s.id))

    def load_since(self, known: Mapping[CheckpointId, Manifest]) -> tuple[Manifest, ...]:
        """Return every manifest by id; of those in `known` no file is opened, since manifests never change.

        Raises:
            DamageError: a row cannot be read.
            OSError: the store cannot be read now.
        """
        there, news = self._since(known.keys())
        if news is None:
            return self.load_all()
        found = _manifests(self._rows_in(news, _BODY))
        return tuple(sorted((*(known[i] for i in there), *found), key=lambda m: m.id))

    def load(self, checkpoint: CheckpointId) -> Manifest:
        """Read one manifest.

        Raises:
            CheckpointNotFound: there is none of this id.
            DamageError: its row is damaged.
            OSError: the store cannot be read now.
        """
        manifests = self._load(checkpoint)
        if not manifests:
            raise CheckpointNotFound(f"no checkpoint {checkpoint} at {self._root.uri}: see `spark-abs list`")
        return manifests[0]

    def load_all(self) -> tuple[Manifest, ...]:
        """Return every manifest by id; later calls read again only if the table has changed."""
        self._table.refresh()
        if self._read is None or self._read[0] != self._table.version:
            manifests = tuple(sorted(self._load(None), key=lambda m: m.id))
            self._read = (self._table.version, manifests)
        return self._read[1]

    def newest_on(self, attempt: Attempt) -> Manifest | None:
        """Return the newest checkpoint of an attempt, or else the checkpoint that it began from.

        Raises:
            DamageError: its row cannot be read.
        """
        summaries = self.summaries()
        mine = [s.id for s in summaries if s.attempt == attempt.id]
        known = mine[-1] if mine else attempt.checkpoint
        return self.load(known) if known is not None and any(s.id == known for s in summaries) else None

    def retire(self, checkpoints: Sequence[CheckpointId], run: RunId) -> bool:
        """Remove manifests; files that no other manifest names may be swept afterwards.

        Returns False if another commit came first: read again and decide anew.

        Raises:
            Fenced: a newer run owns the table.
        """
        self._table.refresh()
        require_newest(self._table, self._job, run)
        gone, files = set(checkpoints), row_files(self._table, PATH)
        if any(any(map(file.may_have, gone)) for file in files if not file.has_one):
            return self._retire_rows(gone)
        removes = [file.path.removeprefix(f"{PATH}/") for file in files if file.least in gone]
        if not removes:
            return True
        try:
            self._table.commit_next(Commit(removes=removes))
        except CommitConflict:
            return False
        return True

    def _retire_rows(self, checkpoints: Set[CheckpointId]) -> bool:
        """Remove manifests of which a file has several: `OPTIMIZE` has put them together."""
        try:
            self._table.delta.delete(
                f"id IN ({', '.join(str(int(c)) for c in sorted(checkpoints))})",
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except CommitFailedError:
            return False
        return True

    def _load(self, checkpoint: CheckpointId | None) -> list[Manifest]:
        return _manifests(self._rows(_BODY, checkpoint))

    def _since(self, known: Set[CheckpointId]) -> tuple[list[CheckpointId], list[RowFile] | None]:
        """Return which known checkpoints are still there, and the files of the others.

        None in place of the files: they are many, or hold several rows, and all rows should be read at once.
        """
        self._table.refresh()
        files = row_files(self._table, PATH)
        news = [f for f in files if f.least not in known]
        if len(news) > _READ_SINGLY or not all(f.has_one for f in files):
            return [], None
        return [f.least for f in files if f.least is not None and f.least in known], news

    def _rows_in(self, files: Sequence[RowFile], columns: Sequence[str]) -> list[dict[str, Any]]:
        if not files:
            return []
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = pool.map(lambda file: read_rows(self._root, file.path, columns), files)
            return [row for rows in found for row in rows]

    def _rows(self, columns: Sequence[str], checkpoint: CheckpointId | None = None) -> list[dict[str, Any]]:
        """Read the row of one checkpoint, or all rows: in one read if possible, else file by file.

        Raises:
            DamageError: a file is missing or cannot be parsed.
            OSError: the store cannot be read now.
        """
        self._table.refresh()
        filters = None if checkpoint is None else [("id", "=", int(checkpoint))]
        try:
            rows: list[dict[str, Any]] = self._table.read(columns, filters).to_pylist()
        except (DamageError, OSError):
            files = [f for f in row_files(self._table, PATH) if f.may_have(checkpoint)]
            rows = [row for file in files for row in read_rows(self._root, file.path, columns)]
            rows = [row for row in rows if checkpoint in (None, row["id"])]
        return rows

    def _decide(self, checkpoint: CheckpointId, run: RunId, adds: Sequence[AddFile]) -> bool:
        def decide(table: Table) -> Commit | None:
            require_newest(table, self._job, run)
            if (table.transaction(self._job) or 0) >= checkpoint:
                return None
            return Commit(adds, {self._job: checkpoint})

        return self._table.commit(decide) is not None

    def _write(self, manifest: Manifest) -> AddFile:
        row = {
            **{name: getattr(manifest, name) for name in SCHEMA.names if name not in ("kind", "body")},
            "kind": manifest.kind.value,
            "body": to_json(manifest),
        }
        buffer = io.BytesIO()
        rows = pa.Table.from_pylist([row], schema=SCHEMA)
        pq.write_table(rows, buffer, compression="zstd", write_page_checksum=True)
        digest = hashlib.sha256(buffer.getvalue()).hexdigest()
        name = f"{manifest.id:08d}-{uuid.uuid4().hex}-{digest}.parquet"
        with self._root.fs.open_output_stream(self._root.path(f"{PATH}/{name}")) as stream:
            stream.write(buffer.getvalue())
        bounds = {"id": manifest.id}
        stats = {"numRecords": 1, "minValues": bounds, "maxValues": bounds, "nullCount": {"id": 0}}
        return AddFile(name, buffer.tell(), json.dumps(stats))


def abort_open(control: Control, checkpoints: Checkpoints, run: RunId) -> ControlState:
    """Abort every id that an older run claimed and left without an outcome; repeatable.

    An id whose manifest was committed before the run died is complete, even if `control/` does not have it.
    `run` must have fenced `checkpoints/`, so that no older run completes them meanwhile.
    """
    state = control.state
    for number in range(checkpoints.decided() + 1, state.last_claimed + 1):
        checkpoints.abort(CheckpointId(number), run)
    complete = {s.id for s in checkpoints.summaries()}
    open_ids = tuple(c.barrier.id for c in state.claims)
    aborted = tuple(
        Aborted(i, AbortReason.RUN_ENDED, f"closed by run {run}") for i in open_ids if i not in complete
    )
    completed = tuple(i for i in open_ids if i in complete)
    return control.update(lambda s: settle(s, aborted, completed))


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of the table of manifests, as its log has it."""

    path: str
    """Relative to the root."""
    least: CheckpointId | None
    """The first id in it; None if the log does not say."""
    most: CheckpointId | None

    @property
    def has_one(self) -> bool:
        """Whether it is known that the file has one row only."""
        return self.least is not None and self.least == self.most

    def may_have(self, checkpoint: CheckpointId | None) -> bool:
        """Say whether the row of a checkpoint may be in the file; for None, any row."""
        if checkpoint is None or self.least is None or self.most is None:
            return True
        return self.least <= checkpoint <= self.most


def row_files(table: Table, relative: str) -> tuple[RowFile, ...]:
    """List the files of the table of manifests, which lies at `relative` below the root."""
    actions = pa.table(table.delta.get_add_actions(flatten=True)).to_pylist()
    return tuple(
        RowFile(f"{relative}/{checked_relative(a['path'])}", a.get("min.id"), a.get("max.id"))
        for a in actions
    )


def read_rows(root: Root, path: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Read the bytes of a file, then its rows: a store that does not answer is not damage.

    Raises:
        DamageError: it is missing, or its bytes are no rows.
        OSError: the store cannot be read now.
    """
    data = root.read_whole(path)
    if data is None:
        raise DamageError(f"{path}: missing")
    try:
        table = pq.read_table(pa.BufferReader(data), columns=list(columns)).select(list(columns))
        rows: list[dict[str, Any]] = table.to_pylist()
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DamageError(f"{path}: {error}") from error
    return rows
