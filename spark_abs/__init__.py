"""Asynchronous barrier snapshots for Spark Structured Streaming.

Public names are loaded when they are first used: commands that only read a root never import Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_abs.errors import (
        AbsError,
        AttemptNotReady,
        CheckpointNotFound,
        CheckpointPending,
        CheckpointsFailed,
        CommitConflict,
        CommitStateUnknown,
        ConfigError,
        DamageError,
        Fenced,
        GraphError,
        Refused,
        RootNotFound,
        RunAlive,
        SinkFailed,
        SinkUnreachable,
        SparkNotStarted,
        StageFailed,
        StateFunctionFailed,
        StoreFailed,
        UsageError,
    )
    from spark_abs.job import (
        Job,
    )
    from spark_abs.job_root import (
        JobRoot,
        open,  # noqa: A004
    )
    from spark_abs.plan.specs import (
        Output,
        Stage,
    )
    from spark_abs.restore.edit import (
        Edit,
    )
    from spark_abs.root_functions import (
        edit,
        forget,
        read,
        restore,
        state,
    )
    from spark_abs.run.run import (
        Run,
    )
    from spark_abs.sinks.delta.options import (
        Delta,
    )
    from spark_abs.sinks.iceberg.sink import (
        Iceberg,
    )
    from spark_abs.sinks.kafka.sink import (
        Kafka,
    )
    from spark_abs.sinks.postgres.sink import (
        Postgres,
    )
    from spark_abs.sinks.two_phase import (
        TwoPhaseSink,
    )
    from spark_abs.spark.session import (
        configure,
        spark_session,
    )
    from spark_abs.stages.current import (
        Current,
        current,
    )
    from spark_abs.state.batches import (
        GroupAnswer,
        GroupBatch,
    )
    from spark_abs.state.functions import (
        flat_map_groups_with_state,
        map_batches_with_state,
        map_groups_with_state,
    )
    from spark_abs.state.per_key import (
        GroupState,
    )
    from spark_abs.wrapped.foreach_batch import (
        foreach_batch,
    )
    from spark_abs.wrapped.location import (
        checkpoint_location,
    )

_HOMES = {
    "AbsError": "spark_abs.errors",
    "AttemptNotReady": "spark_abs.errors",
    "CheckpointNotFound": "spark_abs.errors",
    "CheckpointPending": "spark_abs.errors",
    "CheckpointsFailed": "spark_abs.errors",
    "CommitConflict": "spark_abs.errors",
    "CommitStateUnknown": "spark_abs.errors",
    "ConfigError": "spark_abs.errors",
    "Current": "spark_abs.stages.current",
    "DamageError": "spark_abs.errors",
    "Delta": "spark_abs.sinks.delta.options",
    "Edit": "spark_abs.restore.edit",
    "Fenced": "spark_abs.errors",
    "GraphError": "spark_abs.errors",
    "GroupAnswer": "spark_abs.state.batches",
    "GroupBatch": "spark_abs.state.batches",
    "GroupState": "spark_abs.state.per_key",
    "Iceberg": "spark_abs.sinks.iceberg.sink",
    "Job": "spark_abs.job",
    "JobRoot": "spark_abs.job_root",
    "Kafka": "spark_abs.sinks.kafka.sink",
    "Output": "spark_abs.plan.specs",
    "Postgres": "spark_abs.sinks.postgres.sink",
    "Refused": "spark_abs.errors",
    "RootNotFound": "spark_abs.errors",
    "Run": "spark_abs.run.run",
    "RunAlive": "spark_abs.errors",
    "SinkFailed": "spark_abs.errors",
    "SinkUnreachable": "spark_abs.errors",
    "SparkNotStarted": "spark_abs.errors",
    "Stage": "spark_abs.plan.specs",
    "StageFailed": "spark_abs.errors",
    "StateFunctionFailed": "spark_abs.errors",
    "StoreFailed": "spark_abs.errors",
    "TwoPhaseSink": "spark_abs.sinks.two_phase",
    "UsageError": "spark_abs.errors",
    "checkpoint_location": "spark_abs.wrapped.location",
    "configure": "spark_abs.spark.session",
    "current": "spark_abs.stages.current",
    "edit": "spark_abs.root_functions",
    "flat_map_groups_with_state": "spark_abs.state.functions",
    "foreach_batch": "spark_abs.wrapped.foreach_batch",
    "forget": "spark_abs.root_functions",
    "map_batches_with_state": "spark_abs.state.functions",
    "map_groups_with_state": "spark_abs.state.functions",
    "open": "spark_abs.job_root",
    "read": "spark_abs.root_functions",
    "restore": "spark_abs.root_functions",
    "spark_session": "spark_abs.spark.session",
    "state": "spark_abs.root_functions",
}

__all__ = [
    "AbsError",
    "AttemptNotReady",
    "CheckpointNotFound",
    "CheckpointPending",
    "CheckpointsFailed",
    "CommitConflict",
    "CommitStateUnknown",
    "ConfigError",
    "Current",
    "DamageError",
    "Delta",
    "Edit",
    "Fenced",
    "GraphError",
    "GroupAnswer",
    "GroupBatch",
    "GroupState",
    "Iceberg",
    "Job",
    "JobRoot",
    "Kafka",
    "Output",
    "Postgres",
    "Refused",
    "RootNotFound",
    "Run",
    "RunAlive",
    "SinkFailed",
    "SinkUnreachable",
    "SparkNotStarted",
    "Stage",
    "StageFailed",
    "StateFunctionFailed",
    "StoreFailed",
    "TwoPhaseSink",
    "UsageError",
    "checkpoint_location",
    "configure",
    "current",
    "edit",
    "flat_map_groups_with_state",
    "foreach_batch",
    "forget",
    "map_batches_with_state",
    "map_groups_with_state",
    "open",
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
