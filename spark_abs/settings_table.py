"""The one table of settings: names, defaults, how a value is read, and what it means."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from spark_abs.model import CheckpointMode
from spark_abs.quantities import (
    UNLIMITED,
    Choice,
    count_or_unlimited,
    duration_ms,
    duration_or_auto,
    duration_or_off,
    number,
    size_bytes,
    size_or_unlimited,
    switch,
    text,
    whole_number,
)

SPARK_PREFIX = "spark.abs."
ENVIRONMENT_PREFIX = "SPARK_ABS_"


class WatermarkCheck(StrEnum):
    """What to do about a watermark delay that is too short for what an upstream stage may still send."""

    ERROR = "error"
    WARN = "warn"
    OFF = "off"


class RestartStrategy(StrEnum):
    """When a failed stage is started again while the others go on; after Flink's restart strategies."""

    NONE = "none"
    FIXED_DELAY = "fixed-delay"
    EXPONENTIAL_DELAY = "exponential-delay"
    FAILURE_RATE = "failure-rate"


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the table."""

    area: str
    name: str
    """In camel case, as in Spark's configuration and in YAML."""
    default: str
    read: Callable[[object], Any]
    doc: str
    minimum: int = 0
    secret: bool = False
    """Whether no error may show the value."""
    live: bool = False
    """Whether it can be changed while the job runs."""

    @property
    def key(self) -> str:
        """The name in Spark's configuration."""
        return f"{SPARK_PREFIX}{self.area}.{self.name}"

    @property
    def argument(self) -> str:
        """The name as an argument."""
        return re.sub(r"(?<!^)([A-Z])", r"_\1", self.name).lower()

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return f"{ENVIRONMENT_PREFIX}{self.area}_{self.argument}".upper()

    @property
    def field(self) -> str:
        """The name in `Settings`: a duration there says that it is in milliseconds."""
        return f"{self.argument}_ms" if self.timed else self.argument

    @property
    def timed(self) -> bool:
        """Whether it is a duration."""
        return self.read in (duration_ms, duration_or_auto, duration_or_off)


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "checkpoint",
        "interval",
        "10s",
        duration_ms,
        "time between the starts of two periodic checkpoints",
        1,
        live=True,
    ),
    Setting(
        "checkpoint",
        "minPause",
        "0s",
        duration_ms,
        "least time from the end of a checkpoint to the start of the next; wins over the interval",
        live=True,
    ),
    Setting(
        "checkpoint",
        "timeout",
        "10m",
        duration_ms,
        "age at which a checkpoint is aborted",
        1,
        live=True,
    ),
    Setting(
        "checkpoint",
        "maxConcurrent",
        "1",
        whole_number,
        "checkpoints that may be open at once; savepoints do not wait for a place",
        1,
        live=True,
    ),
    Setting(
        "checkpoint",
        "alignmentLimit",
        UNLIMITED,
        size_or_unlimited,
        "uncompressed bytes that may queue up behind barriers, such as `64mb`; past it the checkpoint is "
        "aborted and rows go on",
    ),
    Setting(
        "checkpoint",
        "mode",
        "aligned",
        Choice(CheckpointMode),
        "how barriers pass a stage with several inputs or a backlog: `aligned`, `unaligned` or "
        "`at_least_once`",
        live=True,
    ),
    Setting(
        "checkpoint",
        "alignedTimeout",
        "off",
        duration_or_off,
        "age at which an aligned checkpoint becomes unaligned, such as `30s`",
        1,
        live=True,
    ),
    Setting(
        "checkpoint",
        "synchronous",
        "false",
        switch,
        "processing waits until state is copied; for comparison",
    ),
    Setting(
        "checkpoint",
        "tolerableFailures",
        UNLIMITED,
        count_or_unlimited,
        "checkpoints that may fail in a row before the job fails; savepoints do not count",
    ),
    Setting(
        "checkpoint",
        "numRetained",
        "3",
        whole_number,
        "completed checkpoints that are kept; savepoints do not count",
        1,
    ),
    Setting(
        "channel",
        "maxBytesPerBatch",
        "512mb",
        size_bytes,
        "uncompressed bytes that a batch takes from a channel, one entry at least",
        1,
    ),
    Setting(
        "channel",
        "maxEntriesPerBatch",
        "100",
        whole_number,
        "entries that a batch takes from a channel",
        1,
    ),
    Setting(
        "channel",
        "partitionBytes",
        "64mb",
        size_bytes,
        "uncompressed bytes of a channel that one task reads, one file at least",
        1,
    ),
    Setting(
        "channel",
        "pollInterval",
        "auto",
        duration_or_auto,
        "least time between two looks at a channel; auto: 10ms on a disk, 500ms in an object store",
    ),
    Setting(
        "channel",
        "capacityBytes",
        "2gb",
        size_or_unlimited,
        "unread bytes in a channel, uncompressed, at which its producer waits; unlimited: it never waits",
        1,
    ),
    Setting(
        "channel",
        "capacityEntries",
        "1000",
        count_or_unlimited,
        "unread entries with rows at which the producer waits; unlimited: it never waits",
        1,
    ),
    Setting(
        "run",
        "leaseTimeout",
        "30s",
        duration_ms,
        "silence after which a run on another machine, or in another container, counts as dead",
        1000,
    ),
    Setting(
        "run",
        "requireRoot",
        "false",
        switch,
        "a start refuses to make a new root, for example where its disk is not mounted",
    ),
    Setting(
        "run",
        "stopTimeout",
        "25s",
        duration_ms,
        "how long a stop by a signal may take, then the process ends at once; and how long the end of a run "
        "waits for a sink outside that cannot be reached",
        1,
    ),
    Setting(
        "run",
        "stopSavepoint",
        "",
        text,
        "savepoint that a stop by a signal takes: this name, a hyphen and the number of the run; empty: none",
    ),
    Setting(
        "graph",
        "watermarkCheck",
        "error",
        Choice(WatermarkCheck),
        "what to do about a watermark delay that is certainly too short for the stage before: "
        "`error`, `warn` or `off`",
    ),
    Setting(
        "stage",
        "restartStrategy",
        "none",
        Choice(RestartStrategy),
        "which failed stages start again alone: `none`, `fixed-delay`, `exponential-delay` or "
        "`failure-rate`, as in Flink; failures are counted over all stages of the job, within a"
        " run",
    ),
    Setting(
        "stage",
        "restartDelay",
        "1s",
        duration_ms,
        "time from a failure to the restart; for `exponential-delay` the first delay",
    ),
    Setting(
        "stage",
        "restartAttempts",
        "10",
        count_or_unlimited,
        "restarts before the job fails, not for `failure-rate`; with every strategy also the restarts of one "
        "stage that do not get it past one batch; unlimited: any number",
    ),
    Setting("stage", "restartMaxDelay", "1m", duration_ms, "`exponential-delay`: the longest delay"),
    Setting(
        "stage",
        "restartMultiplier",
        "1.5",
        number,
        "`exponential-delay`: each delay is so many times the one before",
    ),
    Setting(
        "stage",
        "restartJitter",
        "0.1",
        number,
        "`exponential-delay`: fraction by which a delay is made longer or shorter at random",
    ),
    Setting(
        "stage",
        "restartResetAfter",
        "1h",
        duration_ms,
        "`exponential-delay`: time without a failure after which the delay is the first one again",
    ),
    Setting(
        "stage",
        "restartFailures",
        "1",
        whole_number,
        "`failure-rate`: failures that are allowed within `restartInterval`",
    ),
    Setting(
        "stage",
        "restartInterval",
        "1m",
        duration_ms,
        "`failure-rate`: the time within which failures are counted",
        1,
    ),
    Setting("state", "copyThreads", "4", whole_number, "threads of the job that copy state files", 1),
    Setting(
        "state",
        "maxGroupBytes",
        "256mb",
        size_bytes,
        "state of a Python function in one key group; past it the batch fails",
        1,
    ),
    Setting(
        "state",
        "cacheBytes",
        "256mb",
        size_bytes,
        "state of a Python function that a Python worker holds in memory",
    ),
    Setting(
        "state",
        "nativeRoot",
        "",
        text,
        "directory for Spark's own checkpoints, on a disk that driver and executors share; "
        "empty: below the root",
    ),
    Setting("storage", "endpoint", "", text, "URL of an S3-compatible store that is not Amazon's"),
    Setting("storage", "region", "", text, "region of the buckets"),
    Setting("storage", "accessKeyId", "", text, "access key; give it in the environment", secret=True),
    Setting(
        "storage",
        "secretAccessKey",
        "",
        text,
        "secret of the access key; give it in the environment",
        secret=True,
    ),
    Setting(
        "storage",
        "sessionToken",
        "",
        text,
        "token of a temporary access key; give it in the environment",
        secret=True,
    ),
    Setting("storage", "allowHttp", "false", switch, "the endpoint may be `http`"),
)
