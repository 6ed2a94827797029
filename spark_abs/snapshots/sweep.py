"""Remove from `state/` what no manifest and no open capture names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from spark_abs.errors import DamageError
from spark_abs.manifest import Location, Manifest
from spark_abs.snapshots.packs import PATH, Packed, PackReader, PackWriter, resolve
from spark_abs.snapshots.retention import plan_sweep
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.store.root import Root
from spark_abs.store.table import AddFile


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep removed."""

    packs: int = 0
    rewritten: int = 0
    leftovers: int = 0
    """Files without a commit: of a copy that was killed, or of a sweep that was."""
    bytes_freed: int = 0


def sweep(kept: StateStorage, manifests: Callable[[], Iterable[Manifest]]) -> Swept:
    """Remove dead packs and rewrite those of which less than half is live.

    In this order: the live part is copied to a merged pack; one commit, fenced against older runs, takes the
    old packs out of the log and the merged one in; then files that the log does not name are deleted. Killed
    anywhere, the next sweep deletes what is left. Captures of this process wait until the commit stands.

    Args:
        kept: this run's handle on `state/`.
        manifests: reads every retained manifest, savepoints and abandoned attempts included. Called while no
            capture can be released, so that none falls between its pin and its manifest.

    Raises:
        Fenced: a newer run owns the root; nothing was removed.
        DamageError: a manifest or a pack cannot be read, or a pack does not say that it holds what is needed
            of it: nothing is removed on a guess.
        CommitStateUnknown: the store did not say; the next sweep finds out.
    """
    with kept.lock:
        sizes = kept.active()
        live = kept.pinned()
        files = [f for m in manifests() for s in m.stages for f in s.files]
        with PackReader(kept.root) as reader:
            live |= {(sha256, at.pack) for (sha256, _), at in resolve(reader, sizes, files).items()}
            indexes = kept.indexes(reader)
            _require_named(indexes, live)
            plan = plan_sweep(indexes, live)
            merged, moved = _merge(kept, reader, plan.moved)
        if plan.removed:
            kept.replace(plan.removed, merged, moved)
        leftovers = kept.leftovers()
    for pack in leftovers:
        _delete(kept.root, pack)
    return Swept(
        packs=len(plan.removed),
        rewritten=len(plan.rewrite),
        leftovers=len(set(leftovers) - set(plan.removed)),
        bytes_freed=sum(sizes[pack] for pack in plan.removed) - (merged.size if merged else 0),
    )


def _require_named(indexes: Mapping[str, Mapping[str, Packed]], live: Iterable[tuple[str, str]]) -> None:
    lost = sorted((pack, sha256) for sha256, pack in live if sha256 not in indexes.get(pack, {}))
    if lost:
        raise DamageError(
            f"the footer of {PATH}/{lost[0][0]} does not name sha256 {lost[0][1]}, which is still needed: "
            "nothing is removed from packs; see `spark-abs verify`"
        )


def _merge(
    kept: StateStorage, reader: PackReader, live: Mapping[str, Packed]
) -> tuple[AddFile | None, dict[str, Location]]:
    """Copy what is live into one new pack, checking every byte on the way."""
    if not live:
        return None, {}
    writer = PackWriter(kept.root, kept.run, merged=True)
    try:
        moved = {
            sha256: writer.add(sha256, packed.size, reader.chunks(packed.at, sha256, packed.size))
            for sha256, packed in live.items()
        }
    finally:
        add = writer.close()
    return add, moved


def _delete(root: Root, pack: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        root.fs.delete_file(root.path(f"{PATH}/{pack}"))
