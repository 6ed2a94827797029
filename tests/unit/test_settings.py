"""One table of settings: which value wins, how it is written, and what an error says."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from spark_abs.errors import ConfigError
from spark_abs.model import CheckpointMode
from spark_abs.quantities import count_or_unlimited, duration_ms, size_bytes, size_or_unlimited
from spark_abs.settings import SETTINGS, Settings, WatermarkCheck
from tests.settings_keywords import FILE, declarations


def resolve(
    yaml_text: str = "",
    env: dict[str, str] | None = None,
    spark_conf: dict[str, str] | None = None,
    **arguments: object,
) -> Settings:
    return Settings.resolve(yaml.safe_load(yaml_text), env or {}, spark_conf or {}, arguments)


def test_every_setting_has_a_field_and_a_readable_default() -> None:
    assert [s.field for s in SETTINGS] == [f.name for f in dataclasses.fields(Settings)]
    assert resolve().interval_ms == 10_000


def test_names_follow_from_area_and_name() -> None:
    pause = next(s for s in SETTINGS if s.name == "minPause")
    assert (pause.key, pause.variable, pause.argument, pause.field) == (
        "spark.abs.checkpoint.minPause",
        "SPARK_ABS_CHECKPOINT_MIN_PAUSE",
        "min_pause",
        "min_pause_ms",
    )


def test_arguments_are_named_without_their_area_so_names_must_differ() -> None:
    assert len({s.argument for s in SETTINGS}) == len(SETTINGS)


def test_the_later_layer_wins() -> None:
    yaml_text = "checkpoint: {interval: 1s, minPause: 1s, timeout: 1s, keep: 1}"
    env = {"SPARK_ABS_CHECKPOINT_MIN_PAUSE": "2s", "SPARK_ABS_CHECKPOINT_TIMEOUT": "2s", "HOME": "/"}
    spark_conf = {"spark.abs.checkpoint.timeout": "3s", "spark.app.name": "x"}
    found = resolve(yaml_text, env, {**spark_conf, "spark.abs.checkpoint.keep": "3"}, keep=4)
    assert (found.interval_ms, found.min_pause_ms, found.timeout_ms, str(found.keep)) == (
        1000,
        2000,
        3000,
        "4",
    )


def test_what_differs_from_the_defaults_is_said_as_one_would_write_it_and_no_secret() -> None:
    assert Settings.resolve(None, {}, {}, {}).given() == ""
    given = {
        "interval": "30s",
        "keep": "3 1d:all",
        "max_bytes_per_batch": "1mb",
        "capacity_bytes": "unlimited",
        "secret_access_key": "hidden",
    }
    said = Settings.resolve(None, {}, {}, given).given()
    assert set(said.split(", ")) == {
        *("interval 30s", "keep 3 1d:all", "max_bytes_per_batch 1048576b", "capacity_bytes unlimited")
    }
    again = dict(part.split(" ", 1) for part in said.split(", "))
    assert Settings.resolve(None, {}, {}, again).given() == said


def test_live_settings_are_changed_by_their_names_as_arguments() -> None:
    before = resolve()
    after = before.changed(
        {"interval": "90s", "min_pause": "1500ms", "max_concurrent": "2", "timeout": "10m"}
    )
    assert (after.interval_ms, after.min_pause_ms, after.max_concurrent) == (90_000, 1500, 2)
    said = "interval 10s -> 90s, min_pause 0s -> 1500ms, max_concurrent 1 -> 2"
    assert (before.differences(after), before.differences(before)) == (said, "")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"keep": "5"},
            "'keep' cannot be changed while a job runs; settings that can be changed: interval=10s",
        ),
        (
            {"intervall": "5s"},
            "unknown setting 'intervall' (set); the nearest is 'interval'; settings that can be changed: ",
        ),
        ({"interval": "5"}, "setting interval: '5': expected a duration such as 500ms, 10s or 5m"),
        ({"max_concurrent": "0"}, "setting max_concurrent: '0': the least is 1"),
        ({}, "no setting was given; settings that can be changed: interval=10s, min_pause=0s, timeout=10m"),
    ],
)
def test_what_cannot_be_set_on_a_running_job_is_said(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve().changed(given)
    assert said in str(refused.value)


def test_every_limit_that_there_need_not_be_is_called_unlimited() -> None:
    limits = [s for s in SETTINGS if s.read in (size_or_unlimited, count_or_unlimited)]
    assert len(limits) == 5
    for limit in limits:
        assert getattr(Settings.resolve(None, {}, {}, {limit.argument: "Unlimited"}), limit.field) is None
        for formerly in ("-1", "any", -1):
            with pytest.raises(ConfigError, match=r"or unlimited$|the least is [01]$"):
                Settings.resolve(None, {}, {}, {limit.argument: formerly})


def test_types_of_arguments_are_those_of_the_table() -> None:
    assert FILE.read_text() == declarations(), "run python -m tests.settings_keywords"


def test_an_argument_that_is_none_was_not_given() -> None:
    assert resolve("checkpoint: {interval: 1s}", interval=None).interval_ms == 1000


@pytest.mark.parametrize(
    ("text", "ms"), [("500ms", 500), ("10s", 10_000), ("5m", 300_000), ("2 h", 7_200_000), ("1D", 86_400_000)]
)
def test_durations(text: str, ms: int) -> None:
    assert duration_ms(text) == ms


@pytest.mark.parametrize(("text", "size"), [("7b", 7), ("1kb", 1024), ("64MB", 64 * 1024**2), ("2gb", 2**31)])
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("value", [10, "10", "", "s", "1.5s", "-1s", "10 parsecs", None, True])
def test_a_duration_needs_a_whole_number_and_a_unit(value: object) -> None:
    with pytest.raises(ValueError, match="a duration such as"):
        duration_ms(value)


def test_an_unquoted_off_in_yaml_means_off() -> None:
    assert resolve("graph: {watermarkCheck: off}").watermark_check is WatermarkCheck.OFF


def test_switches_and_counts_are_read_from_text_too() -> None:
    found = resolve(env={"SPARK_ABS_CHECKPOINT_SYNCHRONOUS": "TRUE", "SPARK_ABS_STATE_COPY_THREADS": "2"})
    assert (found.synchronous, found.copy_threads) == (True, 2)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ({"yaml_text": "checkpoint: {intervall: 1s}"}, "'checkpoint.interval'"),
        ({"yaml_text": "checkpoints: {interval: 1s}"}, "'checkpoint'"),
        ({"env": {"SPARK_ABS_CHECKPOINT_MINPAUSE": "1s"}}, "'SPARK_ABS_CHECKPOINT_MIN_PAUSE'"),
        ({"spark_conf": {"spark.abs.checkpoint.min_pause": "1s"}}, "'spark.abs.checkpoint.minPause'"),
        ({"minpause": "1s"}, "'min_pause'"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_match(given: dict[str, object], nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting .* the nearest is {nearest}"):
        resolve(**given)  # type: ignore[arg-type]  # one table for keywords of several types


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"yaml_text": "checkpoint: 10s"}, "checkpoint .YAML. must be a mapping"),
        ({"interval": "10"}, "setting interval .arguments.: '10': expected a duration"),
        ({"interval": "0s"}, "the least is 1 ms"),
        ({"keep": 0}, "the least number is 1"),
        ({"keep": True}, "expected a number of the newest"),
        ({"synchronous": "yes"}, "expected true or false"),
        ({"watermark_check": "maybe"}, "expected error, warn or off"),
        ({"max_bytes_per_batch": 1024}, "expected a size such as"),
        ({"env": {"SPARK_ABS_RUN_LEASE_TIMEOUT": "1ms"}}, "SPARK_ABS_RUN_LEASE_TIMEOUT .environment."),
    ],
)
def test_an_unreadable_value_names_the_setting_and_where_it_stood(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(**given)  # type: ignore[arg-type]  # as above


def test_modes_are_read_and_a_timeout_for_aligned_ones_goes_with_no_other() -> None:
    found = Settings.resolve({"checkpoint": {"alignedTimeout": "5s"}}, {}, {}, {})
    assert (found.mode, found.aligned_timeout_ms) == (CheckpointMode.ALIGNED, 5000)
    assert Settings.resolve(None, {}, {}, {"mode": "At_Least_Once"}).mode is CheckpointMode.AT_LEAST_ONCE
    with pytest.raises(ConfigError, match="expected aligned, unaligned or at_least_once"):
        Settings.resolve(None, {}, {}, {"mode": "fast"})
    with pytest.raises(ConfigError, match="alignedTimeout is for checkpoints that begin aligned"):
        Settings.resolve(None, {}, {}, {"mode": "unaligned", "aligned_timeout": "5s"})
