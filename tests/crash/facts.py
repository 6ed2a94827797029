"""What a root and its tables say when nobody is at work on them, held against the invariants and the input.

Logs are read here line by line, not through the writers that made them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
from deltalake import DeltaTable

from spark_abs.errors import DamageError
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import (
    FENCED,
    NO_ATTEMPT,
    NO_BATCH,
    AttemptId,
    Branch,
    ChannelId,
    CheckpointId,
    Position,
    RunId,
    StageId,
    Version,
    counts,
    positions_of,
)
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.path import channel_path
from spark_abs.snapshots.packs import PackReader, resolve
from spark_abs.snapshots.state_storage import active_packs
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.table import Table
from tests.crash.expected import Event, Pair, Total, events_of, file_of, pairs_of, totals_of
from tests.invariants import (
    Edge,
    Logged,
    NamedBytes,
    Need,
    Outcome,
    consistent_cut,
    intact,
    no_dead_work,
    nothing_lost,
    one_outcome,
    only_completed,
    require,
    same_order,
    same_rows,
)
from tests.lagging import lags_without_rows

_SHAPES: Mapping[str, type[Event | Pair | Total]] = {"arrivals": Event, "pairs": Pair, "totals": Total}
SINKS = tuple(_SHAPES)
JOB = "small"
_BURNT = re.compile(r".*@(\d+)")


def check(base: Path, gone: Collection[str] = ()) -> tuple[Manifest, ...]:
    """Check everything that must hold whenever the job is down; returns the completed checkpoints."""
    manifests = check_root(base, SINKS, gone)
    for manifest in manifests:
        require(_rows_at(base, manifest))
    for channel in ("events.main", "events.orders"):
        seen = files_in_order(base, channel, Event._fields, lambda row: file_of(Event(**row)))
        require(same_order(channel, seen, in_order(seen)))
    if all((base / sink / "_delta_log").is_dir() for sink in SINKS):
        require(_nothing_twice(base))
        require(_one_evaluation(base))
    return manifests


def check_root(base: Path, sinks: Iterable[str], gone: Collection[str] = ()) -> tuple[Manifest, ...]:
    """Check what must hold of the root of any job that is down.

    Args:
        base: holds `root` and the sinks.
        sinks: names of tables below `base`.
        gone: names of files of channels that were deleted by hand, with entries that no attempt needs.
    """
    root = Root(str(base / "root"))
    if not (base / "root" / "checkpoints" / "_delta_log").is_dir():
        return ()
    state = Control.open(root).state
    manifests = Checkpoints.open(root, state.job).load_all()
    outcomes = list(_outcomes(base, state.job))
    claimed = [CheckpointId(n) for n in range(1, state.last_claimed + 1)]
    require(one_outcome(claimed, outcomes))
    require(only_completed([m.id for m in manifests], outcomes))
    require(intact(_named(root, manifests)))
    require(no_dead_work(_logged(base, state.job, sinks)))
    require(nothing_lost(*_reachable(base, state, manifests, gone)))
    for manifest in manifests:
        require(consistent_cut(_edges(base / "root", manifest)))
    return manifests


def native_of(base: Path, stage: str) -> Path:
    """Return the native checkpoint of a stage in the current attempt."""
    attempt = Control.open(Root(str(base / "root"))).state.attempt
    return base / "root" / "native" / str(attempt.id) / attempt.directory(StageId(stage))


def check_complete(base: Path, files: int, gone: Collection[str] = ()) -> None:
    """Check that all input has come through, once."""
    check(base, gone)
    events = [event for file in range(files) for event in events_of(file)]
    require(same_rows(4, "arrivals", table(base, "arrivals"), events))
    require(same_rows(4, "pairs", table(base, "pairs"), pairs_of(events).elements()))
    require(same_rows(4, "totals", last_totals(base), totals_of(pairs_of(events).elements())))


def table(base: Path, sink: str, version: int | None = None) -> list[Any]:
    """Read the rows of a sink."""
    shape = _SHAPES[sink]
    files = DeltaTable(str(base / sink), version=version).file_uris()
    return [shape(*row.values()) for file in files for row in _rows(Path(file), shape._fields)]


def last_totals(base: Path, version: int | None = None) -> list[Total]:
    newest: dict[str, Total] = {}
    for row in table(base, "totals", version):
        newest[row.key] = max(row, newest.get(row.key, row), key=lambda t: t.n)
    return list(newest.values())


def _rows(file: Path, columns: Iterable[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.ParquetFile(file).read(list(columns)).to_pylist()
    return rows


def _commits(table: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for file in sorted((table / "_delta_log").glob("*.json")):
        if file.stem.isdigit():
            yield int(file.stem), [json.loads(line) for line in file.read_text().splitlines() if line]


def _outcomes(base: Path, job: str) -> Iterator[Outcome]:
    for _, actions in _commits(base / "root" / "checkpoints"):
        ids = [a["txn"]["version"] for a in actions if "txn" in a and a["txn"]["appId"] == job]
        yield from (Outcome(CheckpointId(n), any("add" in a for a in actions)) for n in ids)


def _named(root: Root, manifests: Iterable[Manifest]) -> Iterator[NamedBytes]:
    files = [(m.id, f) for m in manifests for s in m.stages for f in s.files]
    if not files:
        return
    with PackReader(root) as reader:
        where = resolve(reader, active_packs(Table.open(root.place("state"))), (f for _, f in files))
        for checkpoint, file in files:
            digest, size = hashlib.sha256(), 0
            try:
                for chunk in reader.chunks(where[file.sha256, file.at.pack], file.sha256, file.size):
                    digest.update(chunk)
                    size += len(chunk)
                found: tuple[int | None, str | None] = size, digest.hexdigest()
            except (DamageError, KeyError):
                found = None, None
            yield NamedBytes(checkpoint, file.path, file.size, file.sha256, *found)


def _logged(base: Path, job: str, sinks: Iterable[str]) -> Iterator[Logged]:
    tables = [*(base / sink for sink in sinks), *(base / "root" / "channels").glob("*")]
    for place in tables:
        for version, actions in _commits(place):
            note = _note(actions)
            ids = {a["txn"]["appId"]: a["txn"]["version"] for a in actions if "txn" in a}
            burnt = {_BURNT.fullmatch(app) for app, number in ids.items() if number == FENCED}
            yield Logged(
                place.name,
                Version(version),
                AttemptId(note["attempt"] if _is_work(note) else 0),
                RunId(note.get("run", 0)),
                RunId(ids.get(f"{job}/run", 0)),
                frozenset(AttemptId(int(match[1])) for match in burnt if match),
            )


def _is_work(note: dict[str, Any]) -> bool:
    marks = any(note.get(key) for key in ("barrier", "cancel", "end"))
    return marks or note.get("batch", NO_BATCH) != NO_BATCH


def _note(actions: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [a["commitInfo"].get("userMetadata") for a in actions if "commitInfo" in a]
    note: dict[str, Any] = json.loads(texts[0]) if texts and texts[0] else {}
    return note


def _edges(root: Path, manifest: Manifest) -> Iterator[Edge]:
    produced = {
        Path(o.table).name: o.version for s in manifest.stages for o in s.outputs if o.kind == "channel"
    }
    for stage in manifest.stages:
        for position in stage.positions:
            version = produced[position.channel]
            assert version is not None
            closed = position.is_closed(manifest.run)
            rowless = lags_without_rows(root, manifest, position, version)
            yield Edge(
                manifest.id, position.channel, stage.stage, version, position, closed, manifest.mode, rowless
            )


def _rows_at(base: Path, manifest: Manifest) -> Iterator[str]:
    """Invariant 1 by rows: the tables at a checkpoint are a batch query over the files read by then."""
    at = {o.output: o.version for s in manifest.stages for o in s.outputs if o.kind == "delta"}
    where = f"checkpoint {manifest.id}"
    arrivals = table(base, "arrivals", at["arrivals"])
    files = 1 + max((file_of(event) for event in arrivals), default=-1)
    events = [event for file in range(files) for event in events_of(file)]
    yield from same_rows(1, f"{where}, arrivals", arrivals, events)
    if manifest.in_flight():
        return  # what is in flight comes out after a restore
    pairs = pairs_of(events)
    yield from same_rows(1, f"{where}, pairs", table(base, "pairs", at["pairs"]), pairs.elements())
    totals = last_totals(base, at["totals"])
    yield from same_rows(1, f"{where}, totals", totals, totals_of(pairs.elements()))


def files_in_order(
    base: Path, channel: str, columns: Iterable[str], file_of_row: Callable[[dict[str, Any]], int]
) -> list[int]:
    """Return the input files that a channel holds, in the order of its entries that count.

    They are those after the last entry whose rows are gone.
    """
    place = base / "root" / "channels" / channel
    if not place.is_dir():
        return []
    path = channel_path(Control.open(Root(str(base / "root"))).state, ChannelId(channel))
    seen: list[int] = []
    for version, actions in _commits(place):
        if counts(path, AttemptId(_note(actions).get("attempt", 0)), Version(version)):
            added = _added(place, actions)
            if not all(f.exists() for f in added):
                seen.clear()  # rows before it are there for a restore
                continue
            rows = [r for f in added for r in _rows(f, columns)]
            seen += [file for file, _ in groupby(sorted(map(file_of_row, rows)))]
    return seen


def in_order(seen: list[int]) -> list[int]:
    """Return what an order of files must be, from the first that is left (invariant 4)."""
    return list(range(seen[0], seen[0] + len(seen))) if seen else []


def _added(place: Path, actions: list[dict[str, Any]]) -> list[Path]:
    return [place / unquote(a["add"]["path"]) for a in actions if "add" in a]


def _nothing_twice(base: Path) -> Iterator[str]:
    """Invariant 4 while input is under way: a row of a sink stands there once."""
    for sink in SINKS:
        rows = Counter(table(base, sink))
        yield from same_rows(4, sink, rows.elements(), rows.keys())


def _one_evaluation(base: Path) -> Iterator[str]:
    """What was drawn for an event is the same wherever the event went: in its table, and through channels."""
    drawn = {(row["id"], row["kind"]): row["token"] for row in _all(base / "arrivals", "id", "kind", "token")}
    for row in _all(base / "pairs", "id", "token", "ordered"):
        for kind, token in (("click", row["token"]), ("order", row["ordered"])):
            if drawn.get((row["id"], kind), token) != token:  # the table may not have it yet
                yield f"{kind} {row['id']} was evaluated twice: a pair and table arrivals differ in its token"


def _all(table: Path, *columns: str) -> Iterator[dict[str, Any]]:
    for file in DeltaTable(str(table)).file_uris():
        yield from _rows(Path(file), columns)


@dataclass(frozen=True)
class _Reader:
    """A stage that reads on after a position, now or after a restore."""

    by: str
    position: Position
    attempt: AttemptId
    until: Version | None
    """The last entry with rows that it needs; None: all later ones."""

    def needs(self, path: Sequence[Branch], version: int, writer: AttemptId) -> bool:
        """Say whether it reads the rows of an entry."""
        return (self.until is None or version <= self.until) and counts(path, writer, Version(version))


def _reachable(
    base: Path, state: ControlState, manifests: Sequence[Manifest], gone: Collection[str]
) -> tuple[list[Need], set[object]]:
    """Invariant 6: entries after every retained and every durable position, and those with rows that count.

    Of rows after its barrier a checkpoint needs none, except the newest of the path: a stage that is rebuilt
    repeats what has come since.
    """
    needs: list[Need] = []
    present: set[object] = set()
    newest = max((m.id for m in manifests if state.on_path(m.attempt, m.id)), default=None)
    readers = [
        _Reader(
            f"{s.stage} of checkpoint {m.id}",
            p,
            *((state.attempt.id, None) if m.id == newest else (m.cut.attempt, m.channel_cuts()[p.channel])),
        )
        for m in manifests
        for s in m.stages
        for p in s.positions
    ]
    for stage in (base / "root" / "native" / str(state.attempt.id)).glob("*"):
        if stage.name != state.attempt.directory(StageId(stage.name.partition(".")[0])):
            continue  # lost, and rebuilt elsewhere
        done = max((int(p.name) for p in (stage / "commits").glob("*") if p.name.isdigit()), default=None)
        if done is not None:
            lines = (stage / "offsets" / str(done)).read_text().splitlines()
            readers += [_Reader(stage.name, p, state.attempt.id, None) for p in positions_of(lines)]
    for place in (base / "root" / "channels").glob("*"):
        commits = dict(_commits(place))
        files = {version: _added(place, actions) for version, actions in commits.items()}
        writers = {v: AttemptId(_note(actions).get("attempt", 0)) for v, actions in commits.items()}
        present |= {(place.name, version) for version in files}
        present |= {(place.name, f.name) for added in files.values() for f in added if f.exists()}
        for reader in (r for r in readers if r.position.channel == place.name):
            path = channel_path(state, ChannelId(place.name), reader.attempt)
            for version in range(reader.position.version + 1, max(files, default=-1) + 1):
                needs.append(Need(reader.by, (place.name, version)))
                if reader.needs(path, version, writers.get(version, NO_ATTEMPT)):
                    names = {f.name for f in files.get(version, ())} - set(gone)
                    needs += [Need(reader.by, (place.name, name)) for name in names]
    return needs, present
