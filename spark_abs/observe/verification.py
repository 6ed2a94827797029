"""Everything at a root that can be checked byte by byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace

import pyarrow as pa
from pyarrow.fs import FileType

from spark_abs.errors import DamageError
from spark_abs.manifest import Manifest, StoredFile
from spark_abs.manifests import checkpoints
from spark_abs.manifests.find import list_manifests, lookup, readable
from spark_abs.model import NO_BATCH, ChannelId, CheckpointId, StageId, Version
from spark_abs.observe.checkpoint_check import check_checkpoint, damaged_rows
from spark_abs.observe.progress import Progress
from spark_abs.protocol.attempt import NATIVES
from spark_abs.protocol.control import ControlState
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
from spark_abs.store.root import Root

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
    """Check the tables of a root, all checkpoints, what channels have still to deliver, and native state.

    Native directories are those of the newest attempt. A job may be running.

    Raises:
        UsageError: there is no job at this root.
        DamageError: `control/`, or the log of `checkpoints/`, cannot be read: nothing else can be found then.
    """
    state = Control.open(root).state
    found: list[Finding] = []
    checks = {
        CONTROL: verify_table,
        checkpoints.PATH: lambda root, _: damaged_rows(root),
        history.PATH: verify_table,
    }
    for table, check in checks.items():
        if root.fs.get_file_info(root.path(table)).type is FileType.Directory:
            progress.say(f"{table}/")
            found += check(root, table)
    manifests = readable(root, list_manifests(root, state.job))
    with progress.count(f"{len(manifests)} checkpoints", _distinct_bytes(manifests)) as counted:
        found += verify_state(root, manifests, counted) or verify_packs(root, manifests)
    current = [m for m in manifests if state.on_path(m.attempt, m.id)]
    if current:
        found += _channels(root, current[-1], progress)
    return (*found, *_natives(root, state, manifests, progress))


def _distinct_bytes(manifests: Iterable[Manifest]) -> int:
    files = {(f.sha256, f.at.pack): f.size for m in manifests for s in m.stages for f in s.files}
    return sum(files.values())


def _channels(root: Root, newest: Manifest, progress: Progress) -> Iterable[Finding]:
    """Check what the newest checkpoint's readers have not consumed: a plain restart may need it."""
    read: dict[ChannelId, list[Version]] = {}
    for stage in newest.stages:
        for position in stage.positions:
            read.setdefault(position.channel, []).append(position.version)
    for channel, versions in sorted(read.items()):
        progress.say(f"channels/{channel}")
        yield from verify_channel(root, channel, min(versions))


def _natives(
    root: Root, state: ControlState, manifests: Iterable[Manifest], progress: Progress
) -> Iterable[Finding]:
    attempt = state.attempt
    if not attempt.ready:
        return
    if attempt.natives != NATIVES and not root.anywhere(attempt.natives).exists():
        progress.say(f"{attempt.natives} is not seen from here: native checkpoints are not checked")
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
        try:
            for finding in verify_native(native, stored):
                yield replace(finding, path=finding.path.removeprefix(f"{root.uri}/"))
        except DamageError as error:
            yield Finding(path, str(error), stage=stage.stage)


def _files_of(stage: StageId, manifests: Iterable[Manifest]) -> Iterator[StoredFile]:
    for manifest in manifests:
        snapshot = manifest.stage(stage)
        yield from snapshot.files if snapshot is not None else ()
