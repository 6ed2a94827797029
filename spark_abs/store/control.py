"""`control/`: one small state, changed by compare-and-swap.

Each commit replaces the table's rows, so a read costs the present state and not its history, which is in the
log. The user metadata of a commit lists the ids that it aborted or made unaligned: gates follow these without
reading rows.
"""

from __future__ import annotations

import io
import json
import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError

from spark_abs.codec import from_json, require_format, to_json
from spark_abs.errors import DamageError, Refused, RootNotFound
from spark_abs.model import (
    FORMAT,
    Barrier,
    CheckpointId,
    CheckpointKind,
    CheckpointMode,
    RunId,
    Version,
)
from spark_abs.protocol.attempt import NATIVES, Attempt
from spark_abs.protocol.control import (
    Aborted,
    AttachedSink,
    Claim,
    Command,
    ControlState,
    Forgotten,
    LaterRecord,
    OutsideSink,
    Paused,
    Run,
    SkippedFile,
    begin_job,
    claim,
    overtaken,
)
from spark_abs.protocol.watch import Watch
from spark_abs.store.root import Root
from spark_abs.store.storage import location_of
from spark_abs.store.table import AddFile, Commit, Table

log = logging.getLogger(__name__)

PATH = "control"
SCHEMA = pa.schema([("kind", pa.string()), ("id", pa.string()), ("v", pa.int32()), ("body", pa.string())])
_KINDS: dict[str, type] = {
    "attempt": Attempt,
    "run": Run,
    "claim": Claim,
    "aborted": Aborted,
    "command": Command,
    "sink": AttachedSink,
    "forgotten": Forgotten,
    "outside": OutsideSink,
    "paused": Paused,
    "skipped": SkippedFile,
    "watch": Watch,
}
_FORMATS = {"skipped": 2}
"""The formats of kinds that an earlier version must not overlook: it refuses the root."""


@dataclass(frozen=True, slots=True)
class _Job:
    """The row of the job itself."""

    job: str
    last_claimed: CheckpointId


class Control:
    """A handle on `control/`. Not thread-safe."""

    def __init__(self, root: Root, table: Table) -> None:
        self._root = root
        self._table = table
        self._read: tuple[Version, ControlState] | None = None

    @classmethod
    def open(cls, root: Root) -> Control:
        """Open the control table of an existing root.

        Raises:
            RootNotFound: there is no job at this root; names the directory that is missing.
        """
        try:
            return cls(root, Table.open(root.place(PATH)))
        except FileNotFoundError:
            raise RootNotFound(
                f"{root.uri} is not the root of a job: {_missing(root)}; give the root that the job "
                "declares, and if it is on a disk of its own, mount the disk"
            ) from None

    @classmethod
    def create(cls, root: Root, job: str, now_ms: int, required: bool = False) -> Control:
        """Open the control table, or create it for `job` if the root is new, with a log line.

        Raises:
            RootNotFound: the root is new and `required`, or cannot be created; the message names the missing
                directory.
            Refused: the root belongs to another job.
            OSError: the store cannot be read now.
        """
        missing = _missing(root)
        if required:
            control = cls.open(root)
            if control._current() is None:
                raise RootNotFound(
                    f"{root.uri} is not the root of a job (require_root): its first start failed before it "
                    "recorded the job"
                )
        else:
            control = cls(root, _open_or_make(root, missing))
        if control._current() is None:
            log.info(
                "job %s begins with a new root, %s: %s; if the job has run before, stop it and check its "
                "root and whether the disk is mounted (require_root=True refuses to create a root)",
                job,
                root.uri,
                missing,
            )
        control.update(lambda state: state or begin_job(job, now_ms, control._table.id))
        if control.state.job != job:
            raise Refused(
                f"{root.uri} belongs to job {control.state.job!r}, not to {job!r}: choose another root"
            )
        return control

    def natives_at(self, native_root: str) -> str:
        """Return the directory of this root below a `native_root`, as attempts record it.

        Empty means below the root. A root that is created again under the same name has another directory.
        """
        if not native_root:
            return NATIVES
        return f"{location_of(native_root)}/{self.state.job}-{self._table.id}"

    @property
    def version(self) -> Version:
        """The version that `state` was read at."""
        self.refresh()
        return self._table.version

    @property
    def state(self) -> ControlState:
        state = self._current()
        if state is None:
            raise DamageError(f"{self._root.uri}/{PATH} is empty: the job was never recorded")
        return state

    def refresh(self) -> None:
        self._table.refresh()

    def update(self, change: Callable[[Any], ControlState]) -> ControlState:
        """Apply a pure change to the newest state and commit it; repeat if another writer was faster.

        `change` takes the state (None on a new root) and may raise to refuse. An unchanged state
        commits nothing.
        """
        result: list[ControlState] = []

        def decide(_: Table) -> Commit | None:
            before = self._current()
            after = change(before)
            result[:] = [after]
            if after == before:
                return None
            known = {a.id for a in before.aborted} if before else set()
            news = [a.id for a in after.aborted if a.id not in known]
            note = {"v": FORMAT, "aborted": news, "overtaken": overtaken(before, after)}
            return Commit((self._write(after),), {}, json.dumps(note), replace=True)

        self._table.commit(decide)
        return result[0]

    def claim(
        self,
        run: RunId,
        *,
        kind: CheckpointKind,
        name: str | None,
        now_ms: int,
        mode: CheckpointMode = CheckpointMode.ALIGNED,
    ) -> Barrier:
        """Take the next id for a checkpoint of a run.

        Raises:
            Fenced: a newer run, or a restore, has replaced the run.
        """
        state = self.update(lambda s: claim(s, run, kind=kind, name=name, now_ms=now_ms, mode=mode)[0])
        return state.claims[-1].barrier

    def _current(self) -> ControlState | None:
        self._table.refresh()
        version = self._table.version
        if self._read is None or self._read[0] != version:
            rows = self._table.read().to_pylist()
            try:
                state = _decode(rows, self._table.id)
            except DamageError as error:
                raise DamageError(f"{self._table.uri} cannot be read: {error}") from error
            if state is None:
                return None
            self._read = (version, state)
        return self._read[1]

    def _write(self, state: ControlState) -> AddFile:
        name, buffer = f"{uuid.uuid4().hex}.parquet", io.BytesIO()
        rows = pa.Table.from_pylist(list(_encode(state)), schema=SCHEMA)
        pq.write_table(rows, buffer, write_page_checksum=True)
        with self._root.fs.open_output_stream(self._root.path(f"{PATH}/{name}")) as stream:
            stream.write(buffer.getvalue())
        return AddFile(name, buffer.tell(), json.dumps({"numRecords": rows.num_rows}))


def _open_or_make(root: Root, missing: str) -> Table:
    """Open the control table, or make it.

    Raises:
        RootNotFound: there is none, and it cannot be made.
        OSError: the store cannot be read now.
    """
    place = root.place(PATH)
    if (table := Table.find(place)) is not None:
        return table
    try:
        return Table.ensure(place, SCHEMA)
    except (OSError, DeltaError) as error:  # FileNotFoundError: it is not there after it was made
        raise RootNotFound(f"the root {root.uri} cannot be created: {missing}: {error}") from error


def _missing(root: Root) -> str:
    """Name the missing part of a root: of a local root the topmost missing directory."""
    if not root.local:
        return f"{root.uri}/{PATH} is missing"
    missing = Path(root.top.path) / PATH
    while not missing.parent.exists():
        missing = missing.parent
    return f"{missing} is missing"


def _encode(state: ControlState) -> Iterator[dict[str, object]]:
    head = _Job(state.job, state.last_claimed)
    yield {"kind": "job", "id": state.job, "v": FORMAT, "body": to_json(head)}
    for kind, items in (
        ("attempt", state.attempts),
        ("run", state.runs),
        ("claim", state.claims),
        ("aborted", state.aborted),
        ("command", state.commands),
        ("sink", state.sinks),
        ("forgotten", state.forgotten),
        ("outside", state.outside),
        ("paused", state.paused),
        ("skipped", state.skipped),
        ("watch", () if state.watch is None else (state.watch,)),
    ):
        for item in items:
            key = item.barrier.id if isinstance(item, Claim) else item.id
            yield {"kind": kind, "id": str(key), "v": _FORMATS.get(kind, FORMAT), "body": to_json(item)}
    for record in state.later:
        yield asdict(record)


def _decode(rows: list[dict[str, Any]], root: str) -> ControlState | None:
    if not rows:
        return None
    found: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
    later: list[LaterRecord] = []
    head: _Job | None = None
    for row in rows:
        require_format(row["v"], _FORMATS.get(row["kind"], FORMAT), "control/")
        if row["kind"] == "job":
            head = from_json(_Job, row["body"])
        elif row["kind"] in found:
            found[row["kind"]].append(from_json(_KINDS[row["kind"]], row["body"]))
        else:
            later.append(LaterRecord(**{name: row[name] for name in SCHEMA.names}))
    if head is None:
        raise DamageError("control/ does not say which job it belongs to")
    return ControlState(
        head.job,
        root,
        attempts=tuple(found["attempt"]),
        runs=tuple(found["run"]),
        last_claimed=head.last_claimed,
        claims=tuple(found["claim"]),
        aborted=tuple(found["aborted"]),
        commands=tuple(found["command"]),
        sinks=tuple(found["sink"]),
        forgotten=tuple(found["forgotten"]),
        outside=tuple(found["outside"]),
        paused=tuple(found["paused"]),
        skipped=tuple(found["skipped"]),
        watch=found["watch"][-1] if found["watch"] else None,
        later=tuple(later),
    )
