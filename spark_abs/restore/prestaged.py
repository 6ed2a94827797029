"""Native directories that are written before a restore begins: each byte is read once, checked and copied.

Nothing uses them before the restore has moved them into their places, and nothing was touched if a byte turns
out to be damaged. They lie beside the places where they will be, so that moving is a rename.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from spark_abs.manifest import Manifest
from spark_abs.model import StageId
from spark_abs.restore.plan import RestorePlan
from spark_abs.restore.steps import Materialise
from spark_abs.snapshots.materialise import empty, is_whole, materialise
from spark_abs.snapshots.passing import passing_place
from spark_abs.store.root import Root
from spark_abs.store.storage import Place


@dataclass(frozen=True, slots=True)
class Prestaged:
    """The native directories of one planned restore that were written ahead."""

    place: Place
    """`<natives>/ahead-<newest run when it was planned>-<chance>`, on a local disk."""

    def move(self, stage: StageId, target: Place, query: str) -> bool:
        """Move a stage's directory into its place; False if what is there is whole already. Repeatable.

        Raises:
            Refused: the place belongs to another query.
        """
        written = self.place.below(stage)
        if not written.exists() or is_whole(target, query):
            return False
        empty(target)
        target.fs.move(written.path, target.path)
        return True

    def discard(self) -> None:
        """Remove what was not moved. Repeatable."""
        with contextlib.suppress(FileNotFoundError):
            self.place.fs.delete_dir(self.place.path)


def prestage(
    root: Root, manifest: Manifest, plan: RestorePlan, progress: Callable[[int], None]
) -> Prestaged | None:
    """Write the native directories that a plan asks for and that are not whole yet; remove them on an error.

    Returns:
        None in an object store, which has no directories that can be moved.

    Raises:
        DamageError: bytes are missing from `state/` or altered.
        Refused: a place belongs to another query.
    """
    natives = root.anywhere(plan.natives)
    if not natives.local:
        return None
    ahead = Prestaged(passing_place(natives, plan.replaces))
    try:
        steps = {step.stage: step for step in plan.steps if isinstance(step, Materialise)}
        for snapshot in manifest.stages:
            if (step := steps.get(snapshot.stage)) is None:
                continue
            target, query = root.anywhere(step.directory), plan.queries[step.stage]
            if is_whole(target, query):
                progress(step.size)
            else:
                place = ahead.place.below(step.stage)
                materialise(root, snapshot.files, place, query, progress, lands=target)
    except BaseException:
        ahead.discard()
        raise
    return ahead
