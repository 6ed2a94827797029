"""How the values of settings are found.

A setting is called `spark.abs.<area>.<camelCase>` in Spark's configuration, `<area>: {<camelCase>: …}` in
YAML, `SPARK_ABS_<AREA>_<UPPER_SNAKE>` in the environment, and by its snake case name as an argument. The
later of these wins: default, YAML, environment, Spark configuration, argument.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spark_abs.errors import ConfigError
from spark_abs.model import CheckpointMode
from spark_abs.quantities import duration_or_off, written
from spark_abs.settings_table import (
    ENVIRONMENT_PREFIX,
    SETTINGS,
    SPARK_PREFIX,
    RestartStrategy,
    Setting,
    WatermarkCheck,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    """None: what begins aligned stays so."""
    synchronous: bool
    tolerable_failures: int | None
    """None: unlimited."""
    num_retained: int
    max_bytes_per_batch: int
    max_entries_per_batch: int
    partition_bytes: int
    poll_interval_ms: int | None
    """None: what suits the store."""
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

    @classmethod
    def of_session(
        cls, spark: SparkSession, yaml: Mapping[str, object] | None, arguments: Mapping[str, object]
    ) -> Settings:
        """Find the value of every setting as `resolve` does, with this process's environment and a session.

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
            if name not in {setting.argument for setting in SETTINGS}:
                raise ConfigError(f"{_unknown(name, 'set', live)}; one can set, e.g., {forms}")
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


def session_settings(spark: SparkSession) -> dict[str, str]:
    """Return those of our settings that a session has, by their names there.

    `spark.conf.getAll` calls into the JVM three times for each setting of Spark's, too, and ends with an
    exception of Java's.
    """
    names = str(spark._jsparkSession.conf().getAllAsJava().keySet().toString()).strip("[]").split(", ")
    return {name: str(spark.conf.get(name)) for name in names if name.startswith(SPARK_PREFIX)}


def shown(setting: Setting, value: object) -> str:
    """Write a value as one would give it."""
    if value is None and setting.read is duration_or_off:
        return "off"
    if isinstance(value, int) and setting.timed:
        return written(value)
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
