"""The error tree, and the closed list of reasons for which a checkpoint is aborted.

AbsError                      exit code 1
├── UsageError                exit code 2: the call is wrong; nothing was changed
│   ├── ConfigError           unknown or unreadable setting
│   ├── RootNotFound          there is no job at this root, or the root cannot be reached
│   └── GraphError            the job graph cannot run
├── DamageError               exit code 3: stored bytes are missing or altered
├── StageFailed               a stage ended with an error
├── StateFunctionFailed       a stateful function failed, or broke its contract
├── StoreFailed               the store refused what a run or a restore cannot do without
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
├── StageStopped              a batch that must not begin: its stage is being stopped gracefully
├── CaptureIncomplete         files of a cut are missing: the stage declines the checkpoint
├── StaleCapture              a captured file was replaced before it was copied; capture again
├── Fenced                    this run or attempt was replaced; stop, write nothing
│   └── TakenOver             another root has taken a table over
├── CommitConflict            somebody committed first; read again and decide again
└── CommitStateUnknown        the store did not say whether a commit took place; do not guess
"""

from __future__ import annotations

from enum import StrEnum


class AbsError(Exception):
    """Root of every error that spark_abs raises on purpose."""

    exit_code = 1


class UsageError(AbsError):
    """The call is wrong; nothing was changed."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown or its value cannot be read."""


class RootNotFound(UsageError):
    """There is no job at a root, or the root cannot be reached; names the directory that is missing."""


class GraphError(UsageError):
    """The job graph cannot run as it was declared."""


class DamageError(AbsError):
    """Stored bytes are missing, torn or altered."""

    exit_code = 3


class StageFailed(AbsError):
    """A stage ended with an error; names the stage, the batch and the cause."""


class StateFunctionFailed(AbsError):
    """A stateful function failed or broke its contract; names stage, function, key and batch."""


class StoreFailed(AbsError):
    """The store refused what a run or a restore cannot do without; names what, and the store's own words."""


class SinkFailed(AbsError):
    """A sink outside refused rows, and would again; names the sink, the epoch and the cause."""


class SinkUnreachable(AbsError):
    """A sink outside cannot be reached now, or gave up a transaction: read its mark and try again."""


class SparkNotStarted(AbsError):
    """No JVM could be started for Spark: there is no Java, or one that Spark cannot use."""


class CheckpointsFailed(AbsError):
    """More checkpoints have failed in a row than are tolerated; names each with its reason."""


class Refused(AbsError):
    """The state of the root forbids what was asked."""


class RunAlive(Refused):
    """Another run of the job is alive."""


class AttemptNotReady(Refused):
    """A restore was begun and not finished."""


class TableChanged(Refused):
    """Others have changed the table of a sink: it is another one, or does not take the rows any more."""


class CheckpointNotFound(Refused):
    """No such checkpoint or savepoint on this root."""


class CheckpointPending(AbsError):
    """A checkpoint or savepoint was asked for and there is no answer in time: it may still complete."""

    exit_code = 4


class Fenced(AbsError):
    """This run or attempt was replaced by a newer one: stop and write nothing."""


class TakenOver(Fenced):
    """Another root has taken a table over: nothing of this root gets there any more."""


class StageStopped(AbsError):
    """Raised at the entry of a batch that must not begin: the stage is being stopped gracefully."""


class CommitConflict(AbsError):
    """Another commit took the version; read again and decide again."""


class CommitStateUnknown(AbsError):
    """The store did not say whether the commit took place."""


class AbortReason(StrEnum):
    """Why a checkpoint was aborted. After Flink's CheckpointFailureReason; the list is closed."""

    EXPIRED = "expired"
    """It was not complete when its timeout ended."""
    SUBSUMED = "subsumed"
    """A newer barrier took its place."""
    ALIGNMENT_LIMIT = "alignment-limit"
    """More had queued up behind its barrier than the alignment limit allows."""
    DECLINED = "declined"
    """A stage could not capture or copy its state, or its barrier went on without a cut of it."""
    RUN_ENDED = "run-ended"
    """The run that claimed it ended or died first."""
    JOB_STOPPING = "job-stopping"
    """The job was stopped while it was under way."""
    STAGE_FAILED = "stage-failed"
    """A stage failed while it was under way."""
    FINALIZE_FAILED = "finalize-failed"
    """Everything was acknowledged, but the manifest could not be committed."""
    STATE_MISSING = "state-missing"
    """Bytes that the manifest would name were gone when it was to be committed."""
