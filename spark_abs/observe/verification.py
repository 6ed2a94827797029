"""Verify stored bytes: those that a restore of one checkpoint needs, or all of a root."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

import pyarrow as pa
from pyarrow.fs import FileType

from spark_abs.advice import way
from spark_abs.channels.entries import entry_of
from spark_abs.channels.in_flight import problems_in_flight
from spark_abs.errors import DamageError
from spark_abs.manifest import Manifest, StoredFile
from spark_abs.manifests.find import lookup, readable
from spark_abs.manifests.manifest_table import PATH
from spark_abs.model import (
    NO_BATCH,
    Branch,
    ChannelId,
    CheckpointId,
    StageId,
    Version,
    checked_relative,
    counts,
)
from spark_abs.observe.progress import Progress
from spark_abs.protocol.attempt import NATIVES
from spark_abs.protocol.control import WATCHED_JOB, WRAPPED_JOB, ControlState
from spark_abs.protocol.path import channel_path
from spark_abs.snapshots.layout import parse_offsets
from spark_abs.snapshots.state_storage import active_packs
from spark_abs.snapshots.table_edges import tables_of
from spark_abs.snapshots.verify import (
    Finding,
    verify_channel,
    verify_native,
    verify_packs,
    verify_state,
    verify_table,
    written_once,
)
from spark_abs.store import history
from spark_abs.store.control import PATH as CONTROL
from spark_abs.store.control import Control
from spark_abs.store.log import LogCommit
from spark_abs.store.root import Root
from spark_abs.store.table import Table

_ROW_FILE = re.compile(rf"{PATH}/([0-9]{{8,}})-[0-9a-f]+-([0-9a-f]{{64}})\.parquet")


def check_checkpoint(
    root: Root, manifest: Manifest, rows: Iterable[Finding], progress: Callable[[int], None]
) -> tuple[Finding, ...]:
    """Read every byte that a restore of a checkpoint needs, and return the damage; empty if there is none.

    Sinks are not checked: they belong to the user.

    Args:
        root: the job's root.
        manifest: the checkpoint.
        rows: the result of `damaged_rows`.
        progress: called with the size of each stored file once it is read.

    Raises:
        OSError: the store cannot be read now, which is not damage.
    """
    return (*_needed(root, manifest, rows), *verify_state(root, (manifest,), progress))


def _needed(root: Root, manifest: Manifest, rows: Iterable[Finding]) -> tuple[Finding, ...]:
    """Check all but the bytes of state: they take the time."""
    channels = _output_channels(root, manifest)
    flown = () if channels else _in_flight(root, manifest)
    return (*(f for f in rows if _concerns(f, manifest.id)), *channels, *flown)


def require_intact(
    root: Root, manifest: Manifest, rows: Iterable[Finding], progress: Callable[[int], None]
) -> None:
    """Refuse a checkpoint that cannot be restored.

    Raises:
        DamageError: names the damaged files, and the way to an intact checkpoint.
        OSError: the store cannot be read now, which is not damage.
    """
    _refuse(manifest, check_checkpoint(root, manifest, rows, progress))


def require_restorable(root: Root, manifest: Manifest, rows: Iterable[Finding]) -> None:
    """Refuse a checkpoint that cannot be restored, without reading the bytes of its state.

    Raises:
        DamageError, OSError: as `require_intact`.
    """
    _refuse(manifest, _needed(root, manifest, rows))


def _refuse(manifest: Manifest, findings: tuple[Finding, ...]) -> None:
    if findings:
        named = "; ".join(f"{f.path}: {f.problem}" for f in findings[:3])
        more = f"; and {len(findings) - 3} more" if len(findings) > 3 else ""
        raise DamageError(
            f"checkpoint {manifest.id} is damaged: {named}{more}: see `spark-abs verify ROOT {manifest.id}`, "
            f"or restore the newest intact checkpoint before it with {way('fallback=True', '--fallback')}"
        )


def damaged_rows(root: Root) -> tuple[Finding, ...]:
    """Find altered manifests: the name of a file has the hash of the bytes that were committed.

    Raises:
        OSError: the store cannot be read now, which is not damage.
    """
    found = {f.path: replace(f, checkpoint=_checkpoint_of(f.path)) for f in verify_table(root, PATH)}
    if PATH in found:
        return tuple(found.values())
    table = Table.open(root.place(PATH))
    for name in active_packs(table):
        path = f"{PATH}/{checked_relative(name)}"
        match = _ROW_FILE.fullmatch(path)
        if path in found or match is None:
            continue
        data = root.read_whole(path)
        if data is not None and hashlib.sha256(data).hexdigest() != match[2]:
            problem = "altered: its sha256 is not the one in its name"
            found[path] = Finding(path, problem, _checkpoint_of(path))
    return tuple(found.values())


def _checkpoint_of(path: str) -> CheckpointId | None:
    """Return the checkpoint in the name of a file of `checkpoints/`, None if the name has none."""
    match = _ROW_FILE.fullmatch(path)
    return None if match is None else CheckpointId(int(match[1]))


def _concerns(finding: Finding, checkpoint: CheckpointId) -> bool:
    """Say whether damage in `checkpoints/` may be in the row of one checkpoint."""
    return _checkpoint_of(finding.path) in (None, checkpoint)


def _output_channels(root: Root, manifest: Manifest) -> tuple[Finding, ...]:
    found = []
    for stage in manifest.stages:
        for output in stage.outputs:
            if output.kind != "channel":
                continue
            path = checked_relative(output.table)
            try:
                table = Table.open(root.place(path))
            except FileNotFoundError:
                problem = "missing"
            except DamageError as error:
                problem = str(error)
            else:
                if table.id == output.table_id:
                    continue
                problem = f"its table id is {table.id}, recorded was {output.table_id}"
            found.append(Finding(path, problem, manifest.id, stage.stage))
    return tuple(found)


def _in_flight(root: Root, manifest: Manifest) -> tuple[Finding, ...]:
    """Check presence and size of the channel files that a restored stage reads first: they have no hash."""
    flights = manifest.in_flight()
    if not flights:
        return ()
    state = Control.open(root).state
    return tuple(
        Finding(root.channel(flight.channel), problem, manifest.id, flight.stage)
        for flight in flights
        for problem in problems_in_flight(
            root, channel_path(state, flight.channel, manifest.cut.attempt), flight
        )
    )


SCHEMA = pa.schema(
    [("path", pa.string()), ("problem", pa.string()), ("checkpoint", pa.int64()), ("stage", pa.string())]
)
"""A `Finding` as columns."""


def finding_table(found: Iterable[Finding]) -> pa.Table:
    """Return findings as a table."""
    return pa.Table.from_pylist([asdict(finding) for finding in found], schema=SCHEMA)


def verify_one(root: Root, checkpoint: str | int, progress: Progress) -> tuple[Finding, ...]:
    """Check one checkpoint: its row, the bytes of its state, its channels.

    Raises:
        UsageError: there is no job at this root.
        CheckpointNotFound: there is no such checkpoint.
        DamageError: its row cannot be read at all.
    """
    manifest = lookup(root, checkpoint).manifest
    with progress.count(f"checkpoint {manifest.id}", manifest.size_full) as counted:
        found = check_checkpoint(root, manifest, damaged_rows(root), counted)
    return found or verify_packs(root, (manifest,))


def verify_root(root: Root, progress: Progress) -> tuple[Finding, ...]:
    """Check the tables of a root, all checkpoints, unread entries of channels, and native checkpoints.

    Native directories are those of the newest attempt. A job may be running.

    Raises:
        UsageError: there is no job at this root.
        DamageError: `control/`, or the log of `checkpoints/`, cannot be read, so nothing else can be checked.
    """
    state = Control.open(root).state
    found: list[Finding] = []
    checks = {
        CONTROL: verify_table,
        PATH: lambda root, _: damaged_rows(root),
        history.PATH: verify_table,
    }
    for table, check in checks.items():
        if root.fs.get_file_info(root.path(table)).type is FileType.Directory:
            progress.say(f"{table}/")
            found += check(root, table)
    manifests = readable(root, state.job)
    with progress.count(f"{len(manifests)} checkpoints", _distinct_bytes(manifests)) as counted:
        found += verify_state(root, manifests, counted) or verify_packs(root, manifests)
    current = [m for m in manifests if state.on_path(m.attempt, m.id)]
    if current:
        found += _unread_channels(root, state, current[-1], progress)
    return (*found, *_natives(root, state, manifests, progress))


def _distinct_bytes(manifests: Iterable[Manifest]) -> int:
    files = {(f.sha256, f.at.pack): f.size for m in manifests for s in m.stages for f in s.files}
    return sum(files.values())


def _unread_channels(
    root: Root, state: ControlState, newest: Manifest, progress: Progress
) -> Iterable[Finding]:
    """Check the entries that were unread at the newest checkpoint: a restart may read them."""
    read: dict[ChannelId, list[Version]] = {}
    for stage in newest.stages:
        for position in stage.positions:
            read.setdefault(position.channel, []).append(position.version)
    for channel, versions in sorted(read.items()):
        progress.say(f"channels/{channel}")
        yield from verify_channel(
            root, channel, min(versions), partial(_counts, channel_path(state, channel))
        )


def _counts(path: Sequence[Branch], commit: LogCommit) -> bool:
    return counts(path, entry_of(commit).attempt, commit.version)


def _natives(
    root: Root, state: ControlState, manifests: Iterable[Manifest], progress: Progress
) -> Iterable[Finding]:
    attempt = state.attempt
    if not attempt.ready or state.job == WATCHED_JOB:  # Spark's checkpoints of watched queries are not ours
        return
    if attempt.natives != NATIVES and not root.anywhere(attempt.natives).exists():
        progress.say(
            f"{attempt.natives} cannot be seen from this machine: native checkpoints are not checked"
        )
        return
    by_id: dict[CheckpointId, Manifest] = {m.id: m for m in manifests}
    mine = [m for m in manifests if m.attempt == attempt.id]
    source = by_id.get(attempt.checkpoint) if attempt.checkpoint is not None else None
    newest = mine[-1] if mine else source
    for stage in newest.stages if newest is not None else ():
        if stage.cut_batch == NO_BATCH:
            continue
        native = root.native(attempt.natives, attempt.id, attempt.directory(stage.stage))
        path = native.uri.removeprefix(f"{root.uri}/")
        progress.say(path)
        rebuilt = attempt.rebuilt_stage(stage.stage)
        origin = source
        if rebuilt is not None:
            origin = by_id.get(rebuilt.checkpoint) if rebuilt.checkpoint is not None else None
        stored = list(_files_of(stage.stage, [origin] if origin is not None else []))
        if rebuilt is None:
            stored += [f for f in _files_of(stage.stage, mine) if written_once(f.path)]
        if state.job == WRAPPED_JOB and stage.offsets and tables_of(parse_offsets(stage.offsets)):
            # A restore has moved it behind its commit, if it reads the table of another query.
            stored = [f for f in stored if not f.path.startswith("offsets/")]
        try:
            for finding in verify_native(native, stored):
                yield replace(finding, path=finding.path.removeprefix(f"{root.uri}/"))
        except DamageError as error:
            yield Finding(path, str(error), stage=stage.stage)


def _files_of(stage: StageId, manifests: Iterable[Manifest]) -> Iterator[StoredFile]:
    for manifest in manifests:
        snapshot = manifest.stage(stage)
        yield from snapshot.files if snapshot is not None else ()
