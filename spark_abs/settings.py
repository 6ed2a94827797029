"""The settings of a job: their names, defaults and meanings, and how their values are found.

A setting is called `spark.abs.<area>.<camelCase>` in Spark's configuration, `<area>: {<camelCase>: …}` in
YAML, `SPARK_ABS_<AREA>_<UPPER_SNAKE>` in the environment, and by its snake case name as an argument. The
later of these wins: default, YAML, environment, Spark configuration, argument.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from spark_abs.errors import ConfigError
from spark_abs.keep import Keep, keep_words
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
    written,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_PREFIX = "spark.abs."
ENVIRONMENT_PREFIX = "SPARK_ABS_"


class WatermarkCheck(StrEnum):
    """How to react to a watermark delay that is too short for rows that an upstream stage may still send."""

    ERROR = "error"
    WARN = "warn"
    OFF = "off"


class RestartStrategy(StrEnum):
    """When a failed stage is restarted while the others run on; after Flink's restart strategies."""

    NONE = "none"
    FIXED_DELAY = "fixed-delay"
    EXPONENTIAL_DELAY = "exponential-delay"
    FAILURE_RATE = "failure-rate"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting."""

    area: str
    name: str
    """In camel case, as in Spark's configuration and in YAML."""
    default: str
    read: Callable[[object], Any]
    doc: str
    minimum: int = 0
    secret: bool = False
    """Whether the value is secret: no error shows it."""
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
        """The name in `Settings`, with `_ms` for a duration."""
        return f"{self.argument}_ms" if self.timed else self.argument

    @property
    def timed(self) -> bool:
        """Whether it is a duration."""
        return self.read in (duration_ms, duration_or_auto, duration_or_off)


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "checkpoint",
        "interval",
        default="10s",
        read=duration_ms,
        doc="time between the starts of two periodic checkpoints",
        minimum=1,
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
        default="10m",
        read=duration_ms,
        doc="age at which a checkpoint is aborted",
        minimum=1,
        live=True,
    ),
    Setting(
        "checkpoint",
        "maxConcurrent",
        default="1",
        read=whole_number,
        doc="checkpoints that may be open at once; a savepoint never waits for another",
        minimum=1,
        live=True,
    ),
    Setting(
        "checkpoint",
        "alignmentLimit",
        UNLIMITED,
        size_or_unlimited,
        "uncompressed bytes that may queue up behind barriers, such as `64mb`; beyond it the checkpoint "
        "is aborted and processing continues",
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
        default="off",
        read=duration_or_off,
        doc="age at which an aligned checkpoint becomes unaligned, such as `30s`",
        minimum=1,
        live=True,
    ),
    Setting(
        "checkpoint",
        "skipUnchanged",
        "true",
        switch,
        "a periodic checkpoint is skipped if the job has done nothing since the last completed one",
        live=True,
    ),
    Setting(
        "checkpoint",
        "synchronous",
        "false",
        switch,
        "processing waits until state is copied; only for comparisons",
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
        "keep",
        default="3 1h:10m",
        read=keep_words,
        doc="how many of the newest checkpoints to keep, and how close together older ones up to an age, "
        "such as `3 24h:all 7d:1h`; savepoints do not count",
    ),
    Setting(
        "channel",
        "maxBytesPerBatch",
        default="512mb",
        read=size_bytes,
        doc="uncompressed bytes that a batch reads from a channel; at least one entry is read",
        minimum=1,
    ),
    Setting(
        "channel",
        "maxEntriesPerBatch",
        default="100",
        read=whole_number,
        doc="entries that a batch reads from a channel",
        minimum=1,
    ),
    Setting(
        "channel",
        "partitionBytes",
        default="64mb",
        read=size_bytes,
        doc="uncompressed bytes of a channel that one task reads; at least one file is read",
        minimum=1,
    ),
    Setting(
        "channel",
        "pollInterval",
        "auto",
        duration_or_auto,
        "least time between two polls of a channel; auto: 10ms on a disk, 500ms in an object store",
    ),
    Setting(
        "channel",
        "capacityBytes",
        default="2gb",
        read=size_or_unlimited,
        doc="unread bytes in a channel, uncompressed, at which its producer waits; unlimited: it never waits",
        minimum=1,
    ),
    Setting(
        "channel",
        "capacityEntries",
        default="1000",
        read=count_or_unlimited,
        doc="unread entries with rows at which the producer waits; unlimited: it never waits",
        minimum=1,
    ),
    Setting(
        "run",
        "leaseTimeout",
        default="30s",
        read=duration_ms,
        doc="silence after which a run on another machine, or in another container, counts as dead",
        minimum=1000,
    ),
    Setting(
        "run",
        "requireRoot",
        "false",
        switch,
        "a start refuses to create a new root, so that an unmounted disk is noticed",
    ),
    Setting(
        "run",
        "stopTimeout",
        default="25s",
        read=duration_ms,
        doc="longest time of a stop by a signal, after which the process ends at once; also how long the end "
        "of a run waits for an unreachable sink outside",
        minimum=1,
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
        "reaction to a watermark delay that is certainly too short for the stage before: "
        "`error`, `warn` or `off`",
    ),
    Setting(
        "stage",
        "restartStrategy",
        "none",
        Choice(RestartStrategy),
        "which failed stages are restarted alone: `none`, `fixed-delay`, `exponential-delay` or "
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
        "stage at the same batch; unlimited: any number",
    ),
    Setting("stage", "restartMaxDelay", "1m", duration_ms, "`exponential-delay`: the longest delay"),
    Setting(
        "stage",
        "restartMultiplier",
        "1.5",
        number,
        "`exponential-delay`: factor from each delay to the next",
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
        "`exponential-delay`: time without a failure after which the delay starts at `restartDelay` again",
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
        default="1m",
        read=duration_ms,
        doc="`failure-rate`: the time within which failures are counted",
        minimum=1,
    ),
    Setting("state", "copyThreads", "4", whole_number, "threads of the job that copy state files", minimum=1),
    Setting(
        "state",
        "maxGroupBytes",
        default="256mb",
        read=size_bytes,
        doc="largest state of a Python function in one key group; beyond it the batch fails",
        minimum=1,
    ),
    Setting(
        "state",
        "cacheBytes",
        "256mb",
        size_bytes,
        "memory of a Python worker for state of Python functions",
    ),
    Setting(
        "state",
        "nativeRoot",
        "",
        text,
        "directory for Spark's own checkpoints, on a disk that driver and executors share; "
        "empty: below the root",
    ),
    Setting("storage", "endpoint", "", text, "URL of an S3-compatible store other than Amazon's"),
    Setting("storage", "region", "", text, "region of the buckets"),
    Setting("storage", "accessKeyId", "", text, "access key; set it in the environment", secret=True),
    Setting(
        "storage",
        "secretAccessKey",
        "",
        text,
        "secret of the access key; set it in the environment",
        secret=True,
    ),
    Setting(
        "storage",
        "sessionToken",
        "",
        text,
        "token of a temporary access key; set it in the environment",
        secret=True,
    ),
    Setting("storage", "azureAccountKey", "", text, "key of the Azure storage account", secret=True),
    Setting("storage", "azureSasToken", "", text, "SAS token for Azure, instead of the key", secret=True),
    Setting("storage", "azureTenantId", "", text, "tenant of a service principal of Azure", secret=True),
    Setting("storage", "azureClientId", "", text, "id of the service principal", secret=True),
    Setting("storage", "azureClientSecret", "", text, "secret of the service principal", secret=True),
    Setting("storage", "azureEndpoint", "", text, "URL of an emulator of Azure's blob storage"),
    Setting("storage", "googleEndpoint", "", text, "URL of an emulator of Google's storage"),
    Setting("storage", "allowHttp", "false", switch, "endpoints may be `http`"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a job, resolved: durations in milliseconds, sizes in bytes."""

    interval_ms: int
    min_pause_ms: int
    timeout_ms: int
    max_concurrent: int
    alignment_limit: int | None
    """Bytes; None: unlimited."""
    mode: CheckpointMode
    aligned_timeout_ms: int | None
    """None: an aligned checkpoint never becomes unaligned."""
    skip_unchanged: bool
    synchronous: bool
    tolerable_failures: int | None
    """None: unlimited."""
    keep: Keep
    max_bytes_per_batch: int
    max_entries_per_batch: int
    partition_bytes: int
    poll_interval_ms: int | None
    """None: depends on the store."""
    capacity_bytes: int | None
    """None: unlimited."""
    capacity_entries: int | None
    lease_timeout_ms: int
    require_root: bool
    stop_timeout_ms: int
    stop_savepoint: str
    watermark_check: WatermarkCheck
    restart_strategy: RestartStrategy
    restart_delay_ms: int
    restart_attempts: int | None
    """None: unlimited."""
    restart_max_delay_ms: int
    restart_multiplier: float
    restart_jitter: float
    restart_reset_after_ms: int
    restart_failures: int
    restart_interval_ms: int
    copy_threads: int
    max_group_bytes: int
    cache_bytes: int
    native_root: str
    endpoint: str
    region: str
    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)
    azure_account_key: str = field(repr=False)
    azure_sas_token: str = field(repr=False)
    azure_tenant_id: str = field(repr=False)
    azure_client_id: str = field(repr=False)
    azure_client_secret: str = field(repr=False)
    azure_endpoint: str
    google_endpoint: str
    allow_http: bool

    @classmethod
    def resolve(
        cls,
        yaml: Mapping[str, object] | None,
        env: Mapping[str, str],
        spark_conf: Mapping[str, str],
        arguments: Mapping[str, object],
    ) -> Settings:
        """Find the value of every setting.

        `env` and `spark_conf` may also have other names; `yaml` (a mapping of areas) and `arguments` may not.
        An argument that is None counts as not given.

        Raises:
            ConfigError: a name is unknown (the message has the nearest one), a value cannot be read, or two
                settings contradict each other.
        """
        values = {setting: setting.read(setting.default) for setting in SETTINGS}
        layers = (
            ("YAML", _flat(yaml or {}), lambda s: f"{s.area}.{s.name}"),
            ("environment", _prefixed(env, ENVIRONMENT_PREFIX), lambda s: s.variable),
            ("Spark configuration", _prefixed(spark_conf, SPARK_PREFIX), lambda s: s.key),
            ("arguments", {k: v for k, v in arguments.items() if v is not None}, lambda s: s.argument),
        )
        for layer, given, name_of in layers:
            known = {name_of(setting): setting for setting in SETTINGS}
            for name, value in given.items():
                if name not in known:
                    raise ConfigError(_unknown(name, layer, known))
                values[known[name]] = _read(known[name], value, f"{name} ({layer})")
        return cls(**{setting.field: value for setting, value in values.items()})._agreeing()

    @classmethod
    def of_session(
        cls, spark: SparkSession, yaml: Mapping[str, object] | None, arguments: Mapping[str, object]
    ) -> Settings:
        """Find the value of every setting as `resolve` does, from this process's environment and a session.

        Raises:
            ConfigError: as for `resolve`.
        """
        return cls.resolve(yaml, os.environ, session_settings(spark), arguments)

    def _agreeing(self) -> Settings:
        if self.aligned_timeout_ms is not None and self.mode is not CheckpointMode.ALIGNED:
            raise ConfigError(
                f"alignedTimeout is for checkpoints that begin aligned, and mode is {self.mode}: leave one "
                "of the two out"
            )
        return self

    def changed(self, given: Mapping[str, object]) -> Settings:
        """Return these settings with changed values of live settings; `given` is by argument name.

        Raises:
            ConfigError: a setting is unknown, cannot be changed while a job runs, or its value cannot be
                read. The message lists the settings that can, with the form of their values.
        """
        live = {setting.argument: setting for setting in SETTINGS if setting.live}
        forms = ", ".join(f"{name}={setting.default}" for name, setting in live.items())
        if not given:
            raise ConfigError(f"no setting was given; settings that can be changed: {forms}")
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in {setting.argument for setting in SETTINGS}:
                raise ConfigError(f"{_unknown(name, 'set', live)}; settings that can be changed: {forms}")
            if name not in live:
                raise ConfigError(
                    f"{name!r} cannot be changed while a job runs; settings that can be changed: {forms}"
                )
            values[live[name].field] = _read(live[name], value, name)
        return replace(self, **values)._agreeing()

    def given(self) -> str:
        """Describe the settings that differ from their defaults, e.g. `interval 30s, keep 5`; no secret."""
        return ", ".join(
            f"{s.argument} {shown(s, value)}"
            for s in SETTINGS
            if not s.secret and (value := getattr(self, s.field)) != s.read(s.default)
        )

    def differences(self, after: Settings) -> str:
        """Describe the changes, e.g. `interval 10s -> 30s, timeout 10m -> 5m`; empty if there are none."""
        return ", ".join(
            f"{s.argument} {shown(s, getattr(self, s.field))} -> {shown(s, getattr(after, s.field))}"
            for s in SETTINGS
            if s.live and getattr(self, s.field) != getattr(after, s.field)
        )


def session_settings(spark: SparkSession) -> dict[str, str]:
    """Return the settings of this package that a session has, by their names in Spark.

    `spark.conf.getAll` of a classic session would call into the JVM three times for each setting, Spark's
    included, and end with a Java exception. A session of Spark Connect has nothing else.
    """
    if getattr(spark, "_jsparkSession", None) is None:
        found = spark.conf.getAll
        return {name: str(value) for name, value in found.items() if name.startswith(SPARK_PREFIX)}
    names = str(spark._jsparkSession.conf().getAllAsJava().keySet().toString()).strip("[]").split(", ")
    return {name: str(spark.conf.get(name)) for name in names if name.startswith(SPARK_PREFIX)}


def shown(setting: Setting, value: object) -> str:
    """Write a value as a user would write it."""
    if value is None:
        words = ((duration_or_off, "off"), (duration_or_auto, "auto"))
        return next((word for read, word in words if setting.read is read), UNLIMITED)
    if isinstance(value, int) and setting.timed:
        return written(value)
    if setting.read in (size_bytes, size_or_unlimited):
        return f"{value}b"
    return str(value)


def _flat(yaml: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    areas = {setting.area for setting in SETTINGS}
    for area, section in yaml.items():
        if area not in areas:
            raise ConfigError(_unknown(str(area), "YAML", areas))
        if not isinstance(section, Mapping):
            raise ConfigError(f"{area} (YAML) must be a mapping of settings, found {type(section).__name__}")
        flat.update({f"{area}.{name}": value for name, value in section.items()})
    return flat


def _prefixed(given: Mapping[str, str], prefix: str) -> dict[str, object]:
    return {name: value for name, value in given.items() if name.startswith(prefix)}


def _unknown(name: str, layer: str, known: Iterable[str]) -> str:
    (nearest,) = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"unknown setting {name!r} ({layer}); the nearest is {nearest!r}"


def _read(setting: Setting, value: object, where: str) -> object:
    try:
        found = setting.read(value)
        if isinstance(found, int) and found < setting.minimum:
            unit = " ms" if setting.field.endswith("_ms") else ""
            raise ValueError(f"the least is {setting.minimum}{unit}")
    except ValueError as error:
        shown = "" if setting.secret else f"{value!r}: "
        raise ConfigError(f"setting {where}: {shown}{error}") from None
    return found
