"""Whether a checkpoint can come back: every byte that it names, its own row, and its channels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from spark_abs.advice import way
from spark_abs.channels.in_flight import problems_in_flight
from spark_abs.errors import DamageError
from spark_abs.manifest import Manifest
from spark_abs.manifests.checkpoints import PATH
from spark_abs.model import CheckpointId, checked_relative
from spark_abs.protocol.path import channel_path
from spark_abs.snapshots.state_storage import active_packs
from spark_abs.snapshots.verify import Finding, verify_state, verify_table
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.table import Table

_ROW_FILE = re.compile(rf"{PATH}/([0-9]{{8,}})-[0-9a-f]+-([0-9a-f]{{64}})\.parquet")


def check_checkpoint(
    root: Root, manifest: Manifest, rows: Iterable[Finding], progress: Callable[[int], None]
) -> tuple[Finding, ...]:
    """Read what a manifest needs; empty if it can be restored.

    Its sinks are not looked at here: they belong to the user.

    Args:
        root: the job's root.
        manifest: the checkpoint.
        rows: what `damaged_rows` found.
        progress: told the bytes of each stored file as it has been read.

    Raises:
        OSError: the store cannot be read now, which is not damage.
    """
    return (*_needed(root, manifest, rows), *verify_state(root, (manifest,), progress))


def _needed(root: Root, manifest: Manifest, rows: Iterable[Finding]) -> tuple[Finding, ...]:
    """Check all but the bytes of state: that is quick."""
    channels = _channels(root, manifest)
    flown = () if channels else _in_flight(root, manifest)
    return (*(f for f in rows if _concerns(f, manifest.id)), *channels, *flown)


def require_intact(
    root: Root, manifest: Manifest, rows: Iterable[Finding], progress: Callable[[int], None]
) -> None:
    """Refuse a checkpoint that cannot come back.

    Raises:
        DamageError: names what is damaged, and the way round it.
        OSError: the store cannot be read now, which is not damage.
    """
    _refuse(manifest, check_checkpoint(root, manifest, rows, progress))


def require_restorable(root: Root, manifest: Manifest, rows: Iterable[Finding]) -> None:
    """Refuse a checkpoint that cannot come back even if the bytes of its state are whole.

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
            f"or take the newest intact one before it with {way('fallback=True', '--fallback')}"
        )


def damaged_rows(root: Root) -> tuple[Finding, ...]:
    """Find the manifests that are not what was committed: each file's name has the hash of its bytes.

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
            problem = "altered: its sha256 is not that of its name"
            found[path] = Finding(path, problem, _checkpoint_of(path))
    return tuple(found.values())


def _checkpoint_of(path: str) -> CheckpointId | None:
    """Return whose row a file of `checkpoints/` has, as its name says; None if that does not say it."""
    match = _ROW_FILE.fullmatch(path)
    return None if match is None else CheckpointId(int(match[1]))


def _concerns(finding: Finding, checkpoint: CheckpointId) -> bool:
    """Say whether damage in `checkpoints/` may be in the row of one checkpoint."""
    return _checkpoint_of(finding.path) in (None, checkpoint)


def _channels(root: Root, manifest: Manifest) -> tuple[Finding, ...]:
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
    """Look for what a restored stage reads first; bytes of channels have no hash, so presence and size."""
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
