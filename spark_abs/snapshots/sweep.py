"""Remove bytes from `state/` that no manifest and no open capture names."""

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
    """The result of a sweep."""

    packs: int = 0
    rewritten: int = 0
    leftovers: int = 0
    """Files without a commit, of killed copies and sweeps."""
    bytes_freed: int = 0


def sweep(state_storage: StateStorage, manifests: Callable[[], Iterable[Manifest]]) -> Swept:
    """Remove dead packs and rewrite packs that are less than half live. Needed packs stay if damaged.

    If bytes to be moved turn out to be altered, their pack stays, and the sweep begins again.

    In this order: the live part is copied to a merged pack; one commit, fenced against older runs, replaces
    the old packs in the log by the merged one; then files that the log does not name are deleted. After a
    kill at any point, the next sweep deletes the leftovers. Captures of this process wait for the commit, and
    not for the footers of packs, of which there may be many.

    Args:
        state_storage: this run's handle on `state/`.
        manifests: reads every retained manifest, savepoints and abandoned attempts included. It is called
            while no pin can be released, so that each file is seen by its pin or by its manifest.

    Raises:
        Fenced: a newer run owns the root; nothing was removed.
        DamageError: a manifest cannot be read, the log has a file that is not a pack, or a pack's footer
            lacks a needed file: nothing is removed on a guess.
        OSError: the store cannot be read or written now.
        CommitStateUnknown: the outcome of the commit is unknown; the next sweep finds out.
    """
    state_storage.read_indexes()
    with state_storage.lock:
        while True:
            try:
                swept, leftovers = _sweep(state_storage, manifests)
                break
            except _AlteredPack as altered:
                state_storage.distrust(altered.pack, str(altered))
    for pack in leftovers:
        _delete(state_storage.root, pack)
    return swept


def _sweep(
    state_storage: StateStorage, manifests: Callable[[], Iterable[Manifest]]
) -> tuple[Swept, tuple[str, ...]]:
    """Commit the changes of a sweep; return its result and the files to delete."""
    sizes = state_storage.active()
    live = state_storage.pinned()
    files = [f for m in manifests() for s in m.stages for f in s.files]
    where = resolve(state_storage, sizes, files)
    live |= {(sha256, at.pack) for (sha256, _), at in where.items()}
    indexes = state_storage.indexes()
    # Pins name packs that a sweep whose answer was lost may have taken out: their bytes are in its pack.
    moved_unseen = {sha256 for sha256, pack in live if pack not in sizes}
    live |= {(sha256, pack) for pack, inside in indexes.items() for sha256 in moved_unseen & inside.keys()}
    _require_named(indexes, live)
    found_all = all((f.sha256, f.at.pack) in where for f in files)
    gone = _unneeded(sizes.keys() - indexes.keys(), live, found_all)
    plan = plan_sweep(indexes, live)
    plan = replace(plan, dead=(*plan.dead, *gone))
    merged, moved = _merge(state_storage, plan.moved)
    if plan.removed:
        state_storage.replace(plan.removed, merged, moved)
    leftovers = state_storage.leftovers()
    swept = Swept(
        packs=len(plan.removed),
        rewritten=len(plan.rewrite),
        leftovers=len(set(leftovers) - set(plan.removed)),
        bytes_freed=sum(sizes[pack] for pack in plan.removed) - (merged.size if merged else 0),
    )
    return swept, leftovers


class _AlteredPack(Exception):
    """A pack holds altered bytes."""

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
    """Choose the damaged packs to remove: nothing names them, and no missing file can be in them."""
    needed = {pack for _, pack in live}
    if not found_all:
        needed |= {pack for pack in damaged if (name := pack_name(pack)) is not None and name.merged}
    return sorted(set(damaged) - needed)


def _merge(
    state_storage: StateStorage, live: Mapping[str, Packed]
) -> tuple[AddFile | None, dict[str, Location]]:
    """Copy the live files into one new pack and verify every byte. If that fails, the new pack is deleted.

    Raises:
        _AlteredPack: a source pack holds altered bytes.
    """
    if not live:
        return None, {}
    writer = PackWriter(state_storage.root, state_storage.run, merged=True)
    try:
        with PackReader(state_storage.root) as reader:
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
