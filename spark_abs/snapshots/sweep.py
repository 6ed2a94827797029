"""Remove from `state/` what no manifest and no open capture names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from spark_abs.errors import DamageError
from spark_abs.manifest import Location, Manifest
from spark_abs.snapshots.packs import PATH, Packed, PackReader, PackWriter, pack_name, resolve
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
    """Remove dead packs and rewrite those of which less than half is live; damaged ones that are needed stay.

    Altered bytes are found when they are to be moved: their pack stays, and the sweep begins again.

    In this order: the live part is copied to a merged pack; one commit, fenced against older runs, takes the
    old packs out of the log and the merged one in; then files that the log does not name are deleted. Killed
    anywhere, the next sweep deletes what is left. Captures of this process wait until the commit stands.

    Args:
        kept: this run's handle on `state/`.
        manifests: reads every retained manifest, savepoints and abandoned attempts included. Called while no
            capture can be released, so that none falls between its pin and its manifest.

    Raises:
        Fenced: a newer run owns the root; nothing was removed.
        DamageError: a manifest cannot be read, the log names what is no pack, or a pack does not say that it
            holds what is needed of it: nothing is removed on a guess.
        OSError: the store cannot be read or written now.
        CommitStateUnknown: the store did not say; the next sweep finds out.
    """
    with kept.lock:
        while True:
            try:
                swept, leftovers = _sweep(kept, manifests)
                break
            except _AlteredPack as altered:
                kept.distrust(altered.pack, str(altered))
    for pack in leftovers:
        _delete(kept.root, pack)
    return swept


def _sweep(kept: StateStorage, manifests: Callable[[], Iterable[Manifest]]) -> tuple[Swept, tuple[str, ...]]:
    """Commit what a sweep changes; return what it removes and the files that are left to be deleted."""
    sizes = kept.active()
    live = kept.pinned()
    files = [f for m in manifests() for s in m.stages for f in s.files]
    where = resolve(kept, sizes, files)
    live |= {(sha256, at.pack) for (sha256, _), at in where.items()}
    indexes = kept.indexes()
    # Pins name packs that a sweep whose answer was lost may have taken out: their bytes are in its pack.
    moved_unseen = {sha256 for sha256, pack in live if pack not in sizes}
    live |= {(sha256, pack) for pack, inside in indexes.items() for sha256 in moved_unseen & inside.keys()}
    _require_named(indexes, live)
    found_all = all((f.sha256, f.at.pack) in where for f in files)
    gone = _unneeded(sizes.keys() - indexes.keys(), live, found_all)
    plan = plan_sweep(indexes, live)
    plan = replace(plan, dead=(*plan.dead, *gone))
    merged, moved = _merge(kept, plan.moved)
    if plan.removed:
        kept.replace(plan.removed, merged, moved)
    leftovers = kept.leftovers()
    swept = Swept(
        packs=len(plan.removed),
        rewritten=len(plan.rewrite),
        leftovers=len(set(leftovers) - set(plan.removed)),
        bytes_freed=sum(sizes[pack] for pack in plan.removed) - (merged.size if merged else 0),
    )
    return swept, leftovers


class _AlteredPack(Exception):
    """A pack holds other bytes than it says."""

    def __init__(self, pack: str, problem: str) -> None:
        super().__init__(problem)
        self.pack = pack


def _require_named(indexes: Mapping[str, Mapping[str, Packed]], live: Iterable[tuple[str, str]]) -> None:
    lost = sorted((p, sha256) for sha256, p in live if p in indexes and sha256 not in indexes[p])
    if lost:
        raise DamageError(
            f"the footer of {PATH}/{lost[0][0]} lacks sha256 {lost[0][1]}, which a checkpoint needs: "
            "clean-up removed no packs; run `spark-abs verify`"
        )


def _unneeded(damaged: Collection[str], live: Iterable[tuple[str, str]], found_all: bool) -> list[str]:
    """Choose the damaged packs that go: nothing names them, and nothing that is sought can be in them."""
    needed = {pack for _, pack in live}
    if not found_all:
        needed |= {pack for pack in damaged if (name := pack_name(pack)) is not None and name.merged}
    return sorted(set(damaged) - needed)


def _merge(kept: StateStorage, live: Mapping[str, Packed]) -> tuple[AddFile | None, dict[str, Location]]:
    """Copy what is live into one new pack, checking every byte on the way; one that fails is deleted.

    Raises:
        _AlteredPack: one that is read holds other bytes.
    """
    if not live:
        return None, {}
    writer = PackWriter(kept.root, kept.run, merged=True)
    try:
        with PackReader(kept.root) as reader:
            moved = {sha256: _move(reader, writer, sha256, packed) for sha256, packed in live.items()}
        return writer.close(), moved
    except BaseException:
        writer.give_up()
        raise


def _move(reader: PackReader, writer: PackWriter, sha256: str, packed: Packed) -> Location:
    try:
        return writer.add(sha256, packed.size, reader.chunks(packed.at, sha256, packed.size))
    except DamageError as error:
        raise _AlteredPack(packed.at.pack, str(error)) from error


def _delete(root: Root, pack: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        root.fs.delete_file(root.path(f"{PATH}/{pack}"))
