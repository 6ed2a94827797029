"""The restart policy: may a failed stage be started again, and when (P18)? After Flink's restart strategies.

One policy counts for the whole job, as in Flink: it says after how many failures somebody has to look.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import assert_never

import spark_abs.errors as errors
from spark_abs.errors import ConfigError, DamageError, Fenced, Refused, UsageError
from spark_abs.protocol.final_errors import cannot_go_away
from spark_abs.settings import SETTINGS, RestartStrategy, Settings

_FINAL: tuple[type[Exception], ...] = (Fenced, DamageError, UsageError, Refused)
"""Errors that a restart cannot cure: a takeover, lost bytes, a wrong call, a refusal of the root."""
_NAMED = re.compile(r"\bspark_abs\.errors\.([A-Za-z]+)")

SLOW_STARTS = 3
"""Failures of a run that are waited out whatever the strategy says, if a process had come up too slowly."""

_USES = {
    RestartStrategy.NONE: frozenset[str](),
    RestartStrategy.FIXED_DELAY: frozenset(("restartDelay", "restartAttempts")),
    RestartStrategy.EXPONENTIAL_DELAY: frozenset(
        (
            "restartDelay",
            "restartAttempts",
            "restartMaxDelay",
            "restartMultiplier",
            "restartJitter",
            "restartResetAfter",
        )
    ),
    RestartStrategy.FAILURE_RATE: frozenset(
        ("restartDelay", "restartAttempts", "restartFailures", "restartInterval")
    ),
}


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A strategy with its parameters; those that it does not use have no effect. Times in milliseconds."""

    strategy: RestartStrategy = RestartStrategy.NONE
    delay_ms: int = 1_000
    """From a failure to the restart; for `exponential-delay` the first one."""
    attempts: int | None = 10
    """Restarts before the job fails, None for any number; `exponential-delay` counts from its last reset.

    Whatever the strategy, so many restarts of one stage that do not get it past one batch are the last.
    """
    max_delay_ms: int = 60_000
    multiplier: float = 1.5
    jitter: float = 0.1
    """How far a delay may be off, as a part of it: what failed together shall not come back together."""
    reset_after_ms: int = 3_600_000
    """A job that has run so long without a failure begins with the first delay again."""
    failures: int = 1
    """`failure-rate`: failures within `interval_ms` after which the next one ends the job."""
    interval_ms: int = 60_000


@dataclass(frozen=True, slots=True)
class Failed:
    """A stage has failed."""

    at_ms: int
    stage: str
    batch: int
    cause: str
    final: bool = False
    """Whether it would fail again, see `is_final`."""
    slow_start: bool = False
    """Whether all that went wrong is that a Python process came up too slowly for Spark."""


@dataclass(frozen=True, slots=True)
class Failures:
    """The memory of the policy within a run."""

    counted: tuple[Failed, ...] = ()
    """Those that count for the next decision, oldest first."""
    total: int = 0
    """All of the run."""
    delay_ms: float = 0
    """The last delay, without jitter."""
    until_ms: int = 0
    """When the last restart was due."""
    slow_starts: int = 0
    """Those that were waited out whatever the strategy says."""
    stuck: tuple[Failed, ...] = ()
    """By stage, the failures in a row at the batch at which it failed last."""

    def at(self, failed: Failed) -> tuple[Failed, ...]:
        """Return the failures of a stage in a row at the batch of its last one."""
        return tuple(f for f in self.stuck if (f.stage, f.batch) == (failed.stage, failed.batch))


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Start the stage again at `ms`, for the `number`-th time in this run."""

    ms: int
    number: int
    in_row: int = 1
    """How many restarts of the stage this makes that have not finished the batch."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the job."""

    why: str
    counted: tuple[Failed, ...] = field(default=())
    """The failures that used the policy up, this one the last."""


def decide(
    policy: RestartPolicy, past: Failures, failed: Failed, luck: float
) -> tuple[Failures, RestartAt | GiveUp]:
    """Decide whether a failed stage is restarted.

    Args:
        policy: as it was configured.
        past: what the decision before returned.
        failed: what has happened now.
        luck: a number from 0 to 1, for the jitter.
    """
    if failed.final:
        return past, GiveUp("it would fail again")
    if failed.slow_start and past.slow_starts < SLOW_STARTS:
        now = replace(past, total=past.total + 1, slow_starts=past.slow_starts + 1)
        return now, RestartAt(failed.at_ms, now.total)
    in_row = (*past.at(failed), failed)
    past = replace(past, stuck=(*(f for f in past.stuck if f.stage != failed.stage), *in_row))
    match policy.strategy:
        case RestartStrategy.NONE:
            return past, GiveUp("restarts are off")
        case RestartStrategy.FIXED_DELAY:
            now = replace(past, counted=(*past.counted, failed), delay_ms=policy.delay_ms)
            used_up = policy.attempts is not None and len(now.counted) > policy.attempts
            why = f"{policy.attempts} restarts were allowed"
        case RestartStrategy.EXPONENTIAL_DELAY:
            now = _backed_off(policy, past, failed)
            used_up = policy.attempts is not None and len(now.counted) > policy.attempts
            why = f"{policy.attempts} restarts were allowed without {policy.reset_after_ms} ms of quiet"
        case RestartStrategy.FAILURE_RATE:
            recent = (f for f in past.counted if failed.at_ms - f.at_ms < policy.interval_ms)
            now = replace(past, counted=(*recent, failed), delay_ms=policy.delay_ms)
            used_up = len(now.counted) > policy.failures
            why = f"{policy.failures} failures in {policy.interval_ms} ms were allowed"
        case _:
            assert_never(policy.strategy)
    if used_up:
        return now, GiveUp(why, now.counted)
    if policy.attempts is not None and len(in_row) > policy.attempts:
        why = f"{policy.attempts} restarts have not finished batch {failed.batch} of the stage"
        return now, GiveUp(why, in_row)
    delay = now.delay_ms
    if policy.strategy is RestartStrategy.EXPONENTIAL_DELAY:
        delay *= 1 + policy.jitter * (2 * luck - 1)
    due = failed.at_ms + int(delay)
    return replace(now, total=past.total + 1, until_ms=due), RestartAt(due, past.total + 1, len(in_row))


def _backed_off(policy: RestartPolicy, past: Failures, failed: Failed) -> Failures:
    if not past.counted or failed.at_ms - past.until_ms >= policy.reset_after_ms:
        return replace(past, counted=(failed,), delay_ms=min(policy.delay_ms, policy.max_delay_ms))
    longer = min(past.delay_ms * policy.multiplier, policy.max_delay_ms)
    return replace(past, counted=(*past.counted, failed), delay_ms=longer)


def is_final(error: BaseException, cause: str = "") -> bool:
    """Say whether a stage that failed with this would fail again: then nobody waits for a restart.

    An error in a gate or an executor arrives as text that names it.

    Args:
        error: as it was raised.
        cause: the deepest cause of it, in one line; of Spark's errors that decides.
    """
    if isinstance(error, _FINAL) or cannot_go_away(cause):
        return True
    named = (getattr(errors, name, None) for name in _NAMED.findall(str(error)))
    return any(isinstance(kind, type) and issubclass(kind, _FINAL) for kind in named)


def policy_of(settings: Settings) -> RestartPolicy:
    """Return the policy that the settings ask for.

    Raises:
        ConfigError: a setting was given that the chosen strategy has no use for, or a value makes no sense.
    """
    strategy = settings.restart_strategy
    for setting in SETTINGS:
        about = setting.name.startswith("restart") and setting.name != "restartStrategy"
        given = getattr(settings, setting.field) != setting.read(setting.default)
        if about and given and setting.name not in _USES[strategy]:
            raise ConfigError(
                f"{setting.key} means nothing to restart strategy {strategy.value!r}: choose another "
                "strategy, or leave it out"
            )
    if settings.restart_multiplier < 1:
        raise ConfigError("spark.abs.stage.restartMultiplier must be at least 1")
    if settings.restart_jitter > 1:
        raise ConfigError("spark.abs.stage.restartJitter must be at most 1")
    return RestartPolicy(
        strategy,
        settings.restart_delay_ms,
        attempts=settings.restart_attempts,
        max_delay_ms=settings.restart_max_delay_ms,
        multiplier=settings.restart_multiplier,
        jitter=settings.restart_jitter,
        reset_after_ms=settings.restart_reset_after_ms,
        failures=settings.restart_failures,
        interval_ms=settings.restart_interval_ms,
    )
