"""Asynchronous barrier snapshots for Spark Structured Streaming.

Public names are loaded when they are first used: commands that only read a root never import Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_abs.errors import AbsError
    from spark_abs.observe.state import state
    from spark_abs.restore.apply import restore
    from spark_abs.restore.edit import Edit, edit
    from spark_abs.restore.forget import forget
    from spark_abs.restore.read import read
    from spark_abs.runtime.context import Current, current
    from spark_abs.runtime.job import Job
    from spark_abs.runtime.run import Run
    from spark_abs.runtime.specs import Output, Stage
    from spark_abs.runtime.wrapped import checkpoint_location, foreach_batch
    from spark_abs.session import configure, spark_session
    from spark_abs.state.batches import GroupAnswer, GroupBatch
    from spark_abs.state.functions import (
        flat_map_groups_with_state,
        map_batches_with_state,
        map_groups_with_state,
    )
    from spark_abs.state.per_key import GroupState

_HOMES = {
    "AbsError": "spark_abs.errors",
    "Current": "spark_abs.runtime.context",
    "Edit": "spark_abs.restore.edit",
    "GroupAnswer": "spark_abs.state.batches",
    "GroupBatch": "spark_abs.state.batches",
    "GroupState": "spark_abs.state.per_key",
    "Job": "spark_abs.runtime.job",
    "Output": "spark_abs.runtime.job",
    "Run": "spark_abs.runtime.run",
    "Stage": "spark_abs.runtime.job",
    "checkpoint_location": "spark_abs.runtime.wrapped",
    "configure": "spark_abs.session",
    "current": "spark_abs.runtime.context",
    "edit": "spark_abs.restore.edit",
    "flat_map_groups_with_state": "spark_abs.state.functions",
    "foreach_batch": "spark_abs.runtime.wrapped",
    "forget": "spark_abs.restore.forget",
    "map_batches_with_state": "spark_abs.state.functions",
    "map_groups_with_state": "spark_abs.state.functions",
    "read": "spark_abs.restore.read",
    "restore": "spark_abs.restore.apply",
    "spark_session": "spark_abs.session",
    "state": "spark_abs.observe.state",
}

__all__ = [
    "AbsError",
    "Current",
    "Edit",
    "GroupAnswer",
    "GroupBatch",
    "GroupState",
    "Job",
    "Output",
    "Run",
    "Stage",
    "checkpoint_location",
    "configure",
    "current",
    "edit",
    "flat_map_groups_with_state",
    "foreach_batch",
    "forget",
    "map_batches_with_state",
    "map_groups_with_state",
    "read",
    "restore",
    "spark_session",
    "state",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'spark_abs' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


# The rooms `restore` and `state` have the names of functions. A room puts its name here when it is first
# loaded, and never again: loaded now and taken away, the name is the function's for good.
for _room in ("restore", "state"):
    import_module(f"spark_abs.{_room}")
    del globals()[_room]
