"""Places for native directories that no run uses; each is void and removed once a newer run begins."""

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
    """Remove what restores wrote ahead, and edits and readers of state for themselves, before a run began.

    Whoever did was killed, or the plan is void: carrying it out refuses when a newer run has begun. Every
    start, restore and edit calls this. Costs a listing of the attempts.
    """
    for info in natives.fs.get_file_info(fs.FileSelector(natives.path, allow_not_found=True)):
        planned, _, chance = info.base_name.removeprefix(_PREFIX).partition("-")
        if info.base_name.startswith(_PREFIX) and chance and planned.isdecimal() and int(planned) < run:
            with contextlib.suppress(FileNotFoundError):
                natives.fs.delete_dir(info.path)
