"""Find a checkpoint on a root, whether its row can still be read or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from spark_abs.advice import way
from spark_abs.errors import CheckpointNotFound, DamageError
from spark_abs.manifest import Manifest
from spark_abs.manifests.checkpoints import Summary
from spark_abs.manifests.listing import ManifestListing, list_manifests, open_existing
from spark_abs.manifests.resolve import LATEST, on_path, resolve
from spark_abs.model import NO_ATTEMPT
from spark_abs.protocol.control import ControlState
from spark_abs.store.control import Control
from spark_abs.store.root import Root


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, and whether a restore has left it behind."""

    manifest: Manifest
    abandoned: bool


def lookup(root: Root, to: str | int) -> Found:
    """Find a checkpoint by id, savepoint name or `latest`, and read its manifest.

    Raises:
        UsageError: there is no job at this root.
        CheckpointNotFound: there is no such checkpoint.
        DamageError: its row is damaged.
        OSError: the store cannot be read now.
    """
    state = Control.open(root).state
    summary = choose(to, list_manifests(root, state.job), state)
    return Found(load(root, summary), summary.attempt != NO_ATTEMPT and not on_path(summary, state))


def choose(to: str | int, found: ManifestListing, state: ControlState) -> Summary:
    """Resolve `to` among the rows that can be read; a damaged row is never passed over in silence.

    Raises:
        CheckpointNotFound: there is no such checkpoint.
        DamageError: what is asked for is, or may be, among the rows that cannot be read.
    """
    text = str(to)
    try:
        chosen = resolve(text, found.completed, state)
    except CheckpointNotFound as error:
        if not found.damaged:
            raise
        if any(text == str(d.id) for d in found.damaged):
            raise DamageError(f"checkpoint {text} is damaged: {_unreadable(found)}") from error
        raise DamageError(f"{error}; or it is one of these damaged ones: {_unreadable(found)}") from error
    if text == LATEST and any(d.id is None or d.id > chosen.id for d in found.damaged):
        raise DamageError(
            f"the newest checkpoint may be damaged: {_unreadable(found)}: see `spark-abs list ROOT` and name "
            f"another one, or restore the newest intact one with {way('fallback=True', '--fallback')}"
        )
    return chosen


def load(root: Root, summary: Summary) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointNotFound: it is gone since it was listed.
        DamageError: it is damaged.
        OSError: the store cannot be read now.
    """
    checkpoints = open_existing(root, summary.job)
    if checkpoints is None:
        raise DamageError(f"{root.uri} has lost its table of checkpoints")
    return checkpoints.load(summary.id)


def readable(root: Root, found: ManifestListing) -> tuple[Manifest, ...]:
    """Return every manifest that is not damaged, by id.

    Raises:
        OSError: the store cannot be read now.
    """
    try:
        checkpoints = open_existing(root, found.completed[0].job) if found.completed else None
        return checkpoints.load_all() if checkpoints is not None else ()
    except DamageError:
        return tuple(_one_by_one(root, found))


def _one_by_one(root: Root, found: ManifestListing) -> Iterator[Manifest]:
    for summary in found.completed:
        with suppress(DamageError):
            yield load(root, summary)


def _unreadable(found: ManifestListing) -> str:
    return ", ".join(f"{d.id if d.id is not None else 'unknown id'} ({d.path})" for d in found.damaged[:3])
