"""The one table of settings, and how their values are found.

A setting is called `spark.abs.<area>.<camelCase>` in Spark's configuration, `<area>: {<camelCase>: …}` in
YAML, `SPARK_ABS_<AREA>_<UPPER_SNAKE>` in the environment, and by its snake case name as an argument. The
later of these wins: default, YAML, environment, Spark configuration, argument.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from spark_abs.errors import ConfigError
from spark_abs.model import CheckpointMode

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


_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES = {"b": 1, "kb": 1024, "mb": 1024**2, "gb": 1024**3}


def duration_ms(value: object) -> int:
    """Read a duration such as `500ms`, `10s`, `5m`, `2h` or `1d`, in milliseconds.

    Raises:
        ValueError: it is anything else; a number without a unit too.
    """
    return _quantity(value, _MILLISECONDS, "a duration such as 500ms, 10s or 5m")


def duration_or_auto(value: object) -> int | None:
    """Read a duration as `duration_ms`, or `auto` as None: what suits the place."""
    return None if isinstance(value, str) and value.strip().lower() == "auto" else duration_ms(value)


def duration_or_off(value: object) -> int | None:
    """Read a duration as `duration_ms`, or `off` as None."""
    # YAML 1.1 reads an unquoted `off` as false.
    off = value is False or (isinstance(value, str) and value.strip().lower() == "off")
    return None if off else duration_ms(value)


def size_bytes(value: object) -> int:
    """Read a size such as `512kb`, `64mb` or `2gb` (powers of 1024), in bytes.

    Raises:
        ValueError: it is anything else; a number without a unit too.
    """
    return _quantity(value, _BYTES, "a size such as 512kb, 64mb or 2gb")


def size_or_any(value: object) -> int | None:
    """Read a size as `size_bytes`, or `any` as None."""
    return None if isinstance(value, str) and value.strip().lower() == "any" else size_bytes(value)


def _quantity(value: object, units: Mapping[str, int], wanted: str) -> int:
    match = re.fullmatch(r"\s*([0-9]+)\s*([a-z]+)\s*", value.lower()) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"expected {wanted}")
    return int(match[1]) * units[match[2]]


def size_or_none(value: object) -> int | None:
    """Read a size as `size_bytes`, or -1 as None: no bound."""
    return None if str(value).strip() == "-1" else size_bytes(value)


def _count(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"[0-9]+", value.strip()):
        value = int(value)
    if type(value) is not int:
        raise ValueError("expected a whole number")
    return value


def count_or_any(value: object) -> int | None:
    """Read a whole number, or `any` as None."""
    return None if isinstance(value, str) and value.strip().lower() == "any" else _count(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected text")
    return value.strip()


def _switch(value: object) -> bool:
    spelled = {"true": True, "false": False}.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(spelled, bool):
        raise ValueError("expected true or false")
    return spelled


def _number(value: object) -> float:
    spelled = isinstance(value, str) and re.fullmatch(r"\s*[0-9]+(\.[0-9]+)?\s*", value)
    if not spelled and type(value) not in (int, float):
        raise ValueError("expected a number such as 1.5")
    return float(value)  # type: ignore[arg-type]  # one of the three


def _restart_strategy(value: object) -> RestartStrategy:
    if not isinstance(value, str) or value.strip().lower() not in list(RestartStrategy):
        raise ValueError(f"expected {', '.join(RestartStrategy)}")
    return RestartStrategy(value.strip().lower())


def _watermark_check(value: object) -> WatermarkCheck:
    # YAML 1.1 reads an unquoted `off` as false.
    text = "off" if value is False else value
    if not isinstance(text, str) or text.strip().lower() not in list(WatermarkCheck):
        raise ValueError("expected error, warn or off")
    return WatermarkCheck(text.strip().lower())


def _mode(value: object) -> CheckpointMode:
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in list(CheckpointMode):
        raise ValueError("expected aligned, unaligned or at_least_once")
    return CheckpointMode(text)


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
        timed = self.read in (duration_ms, duration_or_auto, duration_or_off)
        return f"{self.argument}_ms" if timed else self.argument


SETTINGS: tuple[Setting, ...] = (
    Setting("checkpoint", "interval", "10s", duration_ms, "time between two periodic triggers", 1, live=True),
    Setting(
        "checkpoint",
        "minPause",
        "0s",
        duration_ms,
        "least time from an outcome to the next trigger",
        live=True,
    ),
    Setting("checkpoint", "timeout", "10m", duration_ms, "age at which one is aborted", 1, live=True),
    Setting("checkpoint", "maxConcurrent", "1", _count, "checkpoints that may be open at once", 1, live=True),
    Setting(
        "checkpoint", "alignmentLimit", "-1", size_or_none, "bytes behind blocked inputs; -1: any number"
    ),
    Setting("checkpoint", "mode", "aligned", _mode, "aligned, unaligned or at_least_once", live=True),
    Setting(
        "checkpoint", "alignedTimeout", "off", duration_or_off, "age at which one switches", 1, live=True
    ),
    Setting("checkpoint", "synchronous", "false", _switch, "processing waits until the state is copied"),
    Setting("checkpoint", "tolerableFailures", "any", count_or_any, "checkpoints that may fail in a row"),
    Setting("checkpoint", "numRetained", "3", _count, "completed checkpoints kept beside savepoints", 1),
    Setting("channel", "maxBytesPerBatch", "256mb", size_bytes, "bytes in a batch, one entry at least", 1),
    Setting("channel", "maxEntriesPerBatch", "100", _count, "entries in a batch", 1),
    Setting("channel", "partitionBytes", "32mb", size_bytes, "bytes that one task of a gate reads", 1),
    Setting("channel", "pollInterval", "auto", duration_or_auto, "least time between looks for entries"),
    Setting(
        "channel", "capacityBytes", "1gb", size_or_any, "unread bytes at which a producer waits, or any", 1
    ),
    Setting("channel", "capacityEntries", "1000", count_or_any, "the same in entries with rows, or any", 1),
    Setting("run", "leaseTimeout", "30s", duration_ms, "silence after which a run counts as dead", 1000),
    Setting("run", "requireRoot", "false", _switch, "a start refuses to make a root"),
    Setting("run", "stopTimeout", "25s", duration_ms, "how long a stop by a signal may take", 1),
    Setting("run", "stopSavepoint", "", _text, "savepoint of a stop by a signal; empty: none"),
    Setting("graph", "watermarkCheck", "error", _watermark_check, "error, warn or off"),
    Setting("stage", "restartStrategy", "none", _restart_strategy, "which failed stages start again"),
    Setting("stage", "restartDelay", "1s", duration_ms, "from a failure to the restart, at first"),
    Setting("stage", "restartAttempts", "any", count_or_any, "restarts before the job fails"),
    Setting("stage", "restartMaxDelay", "1m", duration_ms, "longest delay of exponential-delay"),
    Setting("stage", "restartMultiplier", "1.5", _number, "how much longer each delay of it is"),
    Setting("stage", "restartJitter", "0.1", _number, "how far a delay of it may be off, as a part"),
    Setting("stage", "restartResetAfter", "1h", duration_ms, "quiet after which it begins anew"),
    Setting("stage", "restartFailures", "1", _count, "failures allowed by failure-rate"),
    Setting("stage", "restartInterval", "1m", duration_ms, "within so long", 1),
    Setting("state", "copyThreads", "4", _count, "threads that copy state files, per job", 1),
    Setting("state", "maxGroupBytes", "256mb", size_bytes, "state of a function in one key group", 1),
    Setting("state", "cacheBytes", "256mb", size_bytes, "state that a Python worker holds, per function"),
    Setting("state", "nativeRoot", "", _text, "where Spark's checkpoints are; empty: below the root"),
    Setting("storage", "endpoint", "", _text, "URL of an S3-compatible store that is not Amazon's"),
    Setting("storage", "region", "", _text, "region of the buckets"),
    Setting("storage", "accessKeyId", "", _text, "access key", secret=True),
    Setting("storage", "secretAccessKey", "", _text, "its secret", secret=True),
    Setting("storage", "sessionToken", "", _text, "its token, if it is a temporary one", secret=True),
    Setting("storage", "allowHttp", "false", _switch, "the endpoint may be http"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a job, resolved: durations in milliseconds, sizes in bytes."""

    interval_ms: int
    min_pause_ms: int
    timeout_ms: int
    max_concurrent: int
    alignment_limit: int | None
    """Bytes; None: no bound."""
    mode: CheckpointMode
    aligned_timeout_ms: int | None
    """None: what begins aligned stays so."""
    synchronous: bool
    tolerable_failures: int | None
    """None: any number."""
    num_retained: int
    max_bytes_per_batch: int
    max_entries_per_batch: int
    partition_bytes: int
    poll_interval_ms: int | None
    """None: what suits the store."""
    capacity_bytes: int | None
    """None: any."""
    capacity_entries: int | None
    lease_timeout_ms: int
    require_root: bool
    stop_timeout_ms: int
    stop_savepoint: str
    watermark_check: WatermarkCheck
    restart_strategy: RestartStrategy
    restart_delay_ms: int
    restart_attempts: int | None
    """None: any number."""
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

        `env` and `spark_conf` may hold anything else beside our names; `yaml` (a mapping of areas) and
        `arguments` may not. An argument that is None was not given.

        Raises:
            ConfigError: a name is unknown (the message has the nearest one), a value cannot be read, or two
                do not go together.
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

    def _agreeing(self) -> Settings:
        if self.aligned_timeout_ms is not None and self.mode is not CheckpointMode.ALIGNED:
            raise ConfigError(
                f"alignedTimeout is for checkpoints that begin aligned, and mode is {self.mode}: leave one "
                "of the two out"
            )
        return self

    def changed(self, given: Mapping[str, object]) -> Settings:
        """Return these settings with some of the live ones changed; `given` as arguments.

        Raises:
            ConfigError: one is unknown, cannot be changed while a job runs, or its value cannot be read; the
                message says which can and how values are written.
        """
        live = {setting.argument: setting for setting in SETTINGS if setting.live}
        forms = ", ".join(f"{name}={setting.default}" for name, setting in live.items())
        if not given:
            raise ConfigError(f"nothing to set; of a running job one can set, e.g., {forms}")
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in live:
                raise ConfigError(f"{name!r} cannot be set while a job runs; one can set, e.g., {forms}")
            values[live[name].field] = _read(live[name], value, name)
        return replace(self, **values)._agreeing()

    def differences(self, after: Settings) -> str:
        """Say what was changed, e.g. `interval 10s -> 30s, timeout 10m -> 5m`; empty if nothing was."""
        return ", ".join(
            f"{s.argument} {shown(s, getattr(self, s.field))} -> {shown(s, getattr(after, s.field))}"
            for s in SETTINGS
            if s.live and getattr(self, s.field) != getattr(after, s.field)
        )


def shown(setting: Setting, value: object) -> str:
    """Write a value as one would give it."""
    if value is None and setting.read is duration_or_off:
        return "off"
    if isinstance(value, int) and setting.read in (duration_ms, duration_or_auto, duration_or_off):
        unit = max((u for u in _MILLISECONDS if value % _MILLISECONDS[u] == 0), key=_MILLISECONDS.__getitem__)
        return f"{value // _MILLISECONDS[unit]}{unit}" if value else "0s"
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
