"""The restart policy: whether and when a failed stage is restarted (P18). After Flink's restart strategies.

As in Flink, one policy applies to the whole job: it limits the failures before the job fails.
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
"""Errors that a restart cannot solve: a takeover, lost bytes, a wrong call, a refusal of the root."""
_NAMED = re.compile(r"\bspark_abs\.errors\.([A-Za-z]+)")

SLOW_STARTS = 3
"""The number of slow starts of Python processes in a run that lead to a restart under any strategy."""

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
    """A strategy with its parameters; unused parameters have no effect. Times are in milliseconds."""

    strategy: RestartStrategy = RestartStrategy.NONE
    delay_ms: int = 1_000
    """The delay from a failure to the restart; for `exponential-delay` the first delay."""
    attempts: int | None = 10
    """The number of restarts before the job fails, None for no limit.

    `exponential-delay` counts from its last reset.

    Under every strategy, this number of restarts of one stage without finishing its batch is the limit.
    """
    max_delay_ms: int = 60_000
    multiplier: float = 1.5
    jitter: float = 0.1
    """The random part of a delay, so that stages that failed together do not restart together."""
    reset_after_ms: int = 3_600_000
    """After this time without a failure, the first delay is used again."""
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
    """Whether the stage would fail again, see `is_final`."""
    slow_start: bool = False
    """Whether the only cause is a Python process that started too slowly for Spark."""


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures and restarts of a run so far."""

    counted: tuple[Failed, ...] = ()
    """The failures that count for the next decision, oldest first."""
    total: int = 0
    """All failures of the run."""
    delay_ms: float = 0
    """The last delay, without jitter."""
    until_ms: int = 0
    """When the last restart was due."""
    slow_starts: int = 0
    """The number of slow starts that led to a restart outside of the strategy."""
    stuck: tuple[Failed, ...] = ()
    """For each stage, its failures in a row at the batch of its last failure."""

    def at(self, failed: Failed) -> tuple[Failed, ...]:
        """Return the failures in a row of a stage at the batch of its last failure."""
        return tuple(f for f in self.stuck if (f.stage, f.batch) == (failed.stage, failed.batch))


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Start the stage again at `ms`, for the `number`-th time in this run."""

    ms: int
    number: int
    in_row: int = 1
    """The number of restarts of the stage, with this one, that have not finished the batch."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the job."""

    why: str
    counted: tuple[Failed, ...] = field(default=())
    """The failures that exhausted the policy, the newest last."""


def decide(
    policy: RestartPolicy, past: Failures, failed: Failed, luck: float
) -> tuple[Failures, RestartAt | GiveUp]:
    """Decide whether a failed stage is restarted.

    Args:
        policy: the configured policy.
        past: the result of the decision before.
        failed: the new failure.
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
            why = (
                f"{policy.attempts} restarts were allowed without {policy.reset_after_ms} ms free of failures"
            )
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
    """Say whether a stage would fail again with an error; it is then not restarted.

    An error in a gate or an executor arrives as text with the name of the error.

    Args:
        error: the error as it was raised.
        cause: the deepest cause of the error, in one line; it decides for errors of Spark.
    """
    if isinstance(error, _FINAL) or cannot_go_away(cause):
        return True
    named = (getattr(errors, name, None) for name in _NAMED.findall(str(error)))
    return any(isinstance(kind, type) and issubclass(kind, _FINAL) for kind in named)


def policy_of(settings: Settings) -> RestartPolicy:
    """Return the policy that the settings ask for.

    Raises:
        ConfigError: the chosen strategy does not use a given setting, or a value is not valid.
    """
    strategy = settings.restart_strategy
    for setting in SETTINGS:
        about = setting.name.startswith("restart") and setting.name != "restartStrategy"
        given = getattr(settings, setting.field) != setting.read(setting.default)
        if about and given and setting.name not in _USES[strategy]:
            raise ConfigError(
                f"{setting.key} has no effect with restart strategy {strategy.value!r}: choose a different "
                "strategy, or leave the setting out"
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
