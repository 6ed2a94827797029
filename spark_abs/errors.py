"""The error tree, and the closed list of reasons for which a checkpoint is aborted.

AbsError                      exit code 1
├── UsageError                exit code 2: the call is wrong; nothing was changed
│   ├── ConfigError           unknown or unreadable setting
│   ├── RootNotFound          there is no job at this root, or the root cannot be reached
│   └── GraphError            the job graph cannot run
├── DamageError               exit code 3: stored bytes are missing or altered
├── StageFailed               a stage ended with an error
├── StateFunctionFailed       a stateful function failed, or broke its contract
├── StoreFailed               the store refused a request that a run or a restore needs
├── SinkFailed                a sink outside refused rows; trying again would not help
├── SinkUnreachable           a sink outside cannot be reached now; it is tried again
├── SparkNotStarted           no JVM could be started: Java is missing, or not usable
├── CheckpointsFailed         more checkpoints have failed in a row than are tolerated
├── Refused                   the state of the root forbids it; says what to do next
│   ├── RunAlive              another run of the job is alive
│   ├── AttemptNotReady       a restore was begun and not finished
│   ├── TableChanged          others have changed a table so that it cannot take the rows of the job
│   └── CheckpointNotFound    no such checkpoint or savepoint on this root
├── CheckpointPending         exit code 4: no answer in time; it may still complete
├── StageStopped              a batch must not begin: its stage is being stopped gracefully
├── CaptureIncomplete         files of a cut are missing: the stage declines the checkpoint
├── StaleCapture              a captured file was replaced before it was copied; capture again
├── Fenced                    this run or attempt was replaced; stop, write nothing
│   └── TakenOver             another root has taken a table over
├── CommitConflict            somebody committed first; read again and decide again
└── CommitStateUnknown        the store did not say whether a commit took place; do not guess
"""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec


class AbsError(Exception):
    """Root of every error that spark_abs raises on purpose."""

    exit_code = 1


class UsageError(AbsError):
    """The call is wrong; nothing was changed."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown or its value cannot be read."""


class RootNotFound(UsageError):
    """There is no job at a root, or the root cannot be reached. The message names the missing directory."""


class GraphError(UsageError):
    """The job graph cannot run as it was declared."""


class DamageError(AbsError):
    """Stored bytes are missing, torn or altered."""

    exit_code = 3


class StageFailed(AbsError):
    """A stage ended with an error. The message names the stage, the batch and the cause."""


class StateFunctionFailed(AbsError):
    """A stateful function failed or broke its contract. The message names stage, function, key and batch."""


class StoreFailed(AbsError):
    """The store refused a request that a run or a restore needs. The message has its answer."""


class SinkFailed(AbsError):
    """A sink outside refused rows, and would refuse them again. The message names sink, epoch and cause."""


class SinkUnreachable(AbsError):
    """A sink outside cannot be reached now, or gave up a transaction: read its mark and try again."""


class SparkNotStarted(AbsError):
    """No JVM could be started for Spark: Java is missing or not usable."""


class CheckpointsFailed(AbsError):
    """More checkpoints failed in a row than are tolerated. The message has each with its reason."""


class Refused(AbsError):
    """The state of the root does not allow the request."""


class RunAlive(Refused):
    """Another run of the job is alive."""


class AttemptNotReady(Refused):
    """A restore was begun and not finished."""


class TableChanged(Refused):
    """The table of a sink was changed from outside: it was replaced, or no longer takes the sink's rows."""


class CheckpointNotFound(Refused):
    """There is no such checkpoint or savepoint on this root."""


class CheckpointPending(AbsError):
    """A requested checkpoint or savepoint was not complete in time. It may still complete."""

    exit_code = 4


class Fenced(AbsError):
    """This run or attempt was replaced by a newer one: stop and write nothing."""


class TakenOver(Fenced):
    """Another root has taken a table over: this root can no longer write to it."""


class StageStopped(AbsError):
    """Raised before a batch that must not begin, since its stage is being stopped gracefully."""


def lacks_spark(missing: ModuleNotFoundError) -> bool:
    """Say whether a missing module belongs to Spark, which this package does not install."""
    return (missing.name or "").partition(".")[0] in ("pyspark", "py4j")


def get_spark() -> str:
    """Return why Spark is missing and what to install; pyspark-client has the name of pyspark, but no JVM."""
    wanted = "pip install 'spark-abs[spark]'"
    if find_spec("pyspark") is None:
        return f"pyspark is not installed: {wanted}"
    client = "there is pyspark-client, which is for Spark Connect only and has no JVM"
    return f"{client}: pip uninstall pyspark-client, then {wanted}"


class CommitConflict(AbsError):
    """Another commit took the version; read again and decide again."""


class CommitStateUnknown(AbsError):
    """The store did not say whether the commit took place."""


class AbortReason(StrEnum):
    """Why a checkpoint was aborted. After Flink's CheckpointFailureReason; the list is closed."""

    EXPIRED = "expired"
    """It was not complete within its timeout."""
    SUBSUMED = "subsumed"
    """A newer barrier replaced it."""
    ALIGNMENT_LIMIT = "alignment-limit"
    """More bytes had queued up behind its barrier than the alignment limit allows."""
    DECLINED = "declined"
    """A stage could not capture or copy its state, or passed the barrier on without a snapshot."""
    RUN_ENDED = "run-ended"
    """The run that claimed it ended or died first."""
    JOB_STOPPING = "job-stopping"
    """The job was stopped before it was complete."""
    STAGE_FAILED = "stage-failed"
    """A stage failed before it was complete."""
    FINALIZE_FAILED = "finalize-failed"
    """All stages acknowledged, but the manifest could not be committed."""
    STATE_MISSING = "state-missing"
    """Bytes that the manifest names were gone before it was committed."""
    CANCELLED = "cancelled"
    """Somebody cancelled it."""
