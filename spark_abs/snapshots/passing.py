"""Places for native directories that no run uses. They are void, and are removed, once a newer run begins."""

from __future__ import annotations

import contextlib
import uuid

from pyarrow import fs

from spark_abs.model import RunId
from spark_abs.store.storage import Place

_PREFIX = "ahead-"


def passing_place(natives: Place, newest: RunId | None) -> Place:
    """Return a place for a native directory that is void once there is a run after `newest`."""
    return natives.below(f"{_PREFIX}{newest or 0}-{uuid.uuid4().hex}")


def clear_ahead(natives: Place, run: RunId) -> None:
    """Remove temporary directories of restores, edits and readers of state from before a run began.

    Their writers were killed, or their plan is void: it is refused once a newer run has begun. Every start,
    restore and edit calls this. It costs a listing of the attempts.
    """
    for info in natives.fs.get_file_info(fs.FileSelector(natives.path, allow_not_found=True)):
        planned, _, chance = info.base_name.removeprefix(_PREFIX).partition("-")
        if info.base_name.startswith(_PREFIX) and chance and planned.isdecimal() and int(planned) < run:
            with contextlib.suppress(FileNotFoundError):
                natives.fs.delete_dir(info.path)
