"""The restart policy (P18): which failure is waited out, for how long, and when the job gives up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spark_abs.errors import CommitStateUnknown, ConfigError, DamageError, Fenced, GraphError, Refused
from spark_abs.protocol.final_errors import source_moved
from spark_abs.protocol.restarts import (
    SLOW_STARTS,
    Failed,
    Failures,
    GiveUp,
    RestartAt,
    RestartPolicy,
    decide,
    is_final,
    policy_of,
)
from spark_abs.settings import RestartStrategy, Settings


def delays(policy: RestartPolicy, at_ms: Sequence[int], luck: float = 0.5) -> list[int | str]:
    """Let stages fail at these times; return the delay of each restart, and why the job was given up."""
    past, found = Failures(), list[int | str]()
    for number, at in enumerate(at_ms):
        past, decision = decide(policy, past, Failed(at, "pair", number, "why"), luck)
        match decision:
            case RestartAt():
                assert decision.number == number + 1
                found.append(decision.ms - at)
            case GiveUp():
                found.append(decision.why)
    return found


def test_without_a_strategy_a_failure_ends_the_job() -> None:
    assert delays(RestartPolicy(), [5]) == ["restarts are off"]


def test_a_process_that_came_up_too_slowly_is_started_again_three_times_without_a_strategy() -> None:
    past = Failures()
    for number in range(SLOW_STARTS):
        slow = Failed(number, "pair", 0, "Timed out", slow_start=True)
        past, decision = decide(RestartPolicy(), past, slow, 0.5)
        assert decision == RestartAt(number, number + 1)
    assert past.counted == ()
    assert decide(RestartPolicy(), past, slow, 0.5)[1] == GiveUp("restarts are off")


def test_a_fixed_delay_is_waited_so_many_times() -> None:
    policy = RestartPolicy(RestartStrategy.FIXED_DELAY, delay_ms=30, attempts=2)
    assert delays(policy, [0, 100, 10_000_000]) == [30, 30, "2 restarts were allowed"]


def test_any_number_of_attempts_never_gives_up() -> None:
    policy = RestartPolicy(RestartStrategy.FIXED_DELAY, delay_ms=30, attempts=None)
    assert delays(policy, range(0, 5_000, 100)) == [30] * 50


def test_attempts_are_limited_unless_somebody_says_otherwise() -> None:
    policy = RestartPolicy(RestartStrategy.FIXED_DELAY, delay_ms=30)
    assert delays(policy, range(11)) == [30] * 10 + ["10 restarts were allowed"]


STUCK = {
    RestartStrategy.EXPONENTIAL_DELAY: RestartPolicy(
        RestartStrategy.EXPONENTIAL_DELAY, 10, attempts=3, reset_after_ms=50
    ),
    RestartStrategy.FAILURE_RATE: RestartPolicy(RestartStrategy.FAILURE_RATE, 10, attempts=3, failures=50),
}


@pytest.mark.parametrize("strategy", STUCK)
def test_restarts_that_do_not_get_a_stage_past_a_batch_come_to_an_end(strategy: RestartStrategy) -> None:
    """A batch so long that it was quiet before it failed, and a rate that allows one failure a minute."""
    past, found = Failures(), list[int]()
    for number in range(3):
        other = Failed(
            number * 100, "tail", number, "no route"
        )  # it goes on, and does not count for the other
        past, _ = decide(STUCK[strategy], past, other, 0.5)
        past, decision = decide(STUCK[strategy], past, Failed(number * 100, "pair", 7, "poison"), 0.5)
        assert isinstance(decision, RestartAt)
        found.append(decision.in_row)
    assert found == [1, 2, 3]
    last = Failed(400, "pair", 7, "poison")
    _, decision = decide(STUCK[strategy], past, last, 0.5)
    assert isinstance(decision, GiveUp)
    assert decision.why == "3 restarts have not finished batch 7 of the stage"
    assert {(f.stage, f.batch) for f in decision.counted} == {("pair", 7)}
    _, decision = decide(STUCK[strategy], past, Failed(400, "pair", 8, "poison"), 0.5)
    assert isinstance(decision, RestartAt)
    assert decision.in_row == 1


def test_delays_grow_to_a_longest_one_and_begin_anew_when_all_was_quiet() -> None:
    """Quiet counts from the moment of the last restart, not from the failure before it."""
    policy = RestartPolicy(
        RestartStrategy.EXPONENTIAL_DELAY, 100, max_delay_ms=400, multiplier=2, reset_after_ms=1_000
    )
    assert delays(policy, [0, 200, 500, 1_000, 2_399, 3_799]) == [100, 200, 400, 400, 400, 100]


def test_jitter_takes_a_delay_down_and_up() -> None:
    policy = RestartPolicy(RestartStrategy.EXPONENTIAL_DELAY, 1_000, jitter=0.2)
    assert [delays(policy, [0], luck) for luck in (0, 0.5, 1)] == [[800], [1_000], [1_200]]


def test_attempts_of_a_growing_delay_count_from_the_last_quiet() -> None:
    policy = RestartPolicy(
        RestartStrategy.EXPONENTIAL_DELAY, 10, attempts=1, multiplier=1, reset_after_ms=1_000
    )
    gave_up = "1 restarts were allowed without 1000 ms free of failures"
    assert delays(policy, [0, 2_000, 4_000, 4_100]) == [10, 10, 10, gave_up]


def test_a_rate_of_failures_forgets_what_is_long_ago() -> None:
    policy = RestartPolicy(RestartStrategy.FAILURE_RATE, 10, failures=2, interval_ms=100)
    assert delays(policy, [0, 60, 120, 150]) == [10, 10, 10, "2 failures in 100 ms were allowed"]


def test_who_gives_up_names_every_failure_that_counted() -> None:
    policy = RestartPolicy(RestartStrategy.FIXED_DELAY, attempts=1)
    first, second = Failed(0, "pair", 3, "disk"), Failed(9, "tail", 7, "net")
    past, _ = decide(policy, Failures(), first, 0)
    _, decision = decide(policy, past, second, 0)
    assert isinstance(decision, GiveUp)
    assert decision.counted == (first, second)


def test_what_would_fail_again_is_not_started_again() -> None:
    policy = RestartPolicy(RestartStrategy.FIXED_DELAY)
    failed = Failed(0, "pair", 3, "bytes are gone", final=True)
    assert decide(policy, Failures(), failed, 0) == (Failures(), GiveUp("it would fail again"))


@pytest.mark.parametrize("error", [Fenced("x"), DamageError("x"), GraphError("x"), Refused("x")])
def test_errors_of_these_kinds_are_final(error: Exception) -> None:
    assert is_final(error)
    # From another process it comes as text.
    assert is_final(RuntimeError(f"Traceback …\nspark_abs.errors.{type(error).__name__}: x"))


@pytest.mark.parametrize("error", [ValueError("x"), OSError("x"), CommitStateUnknown("x")])
def test_others_may_be_gone_the_next_time(error: Exception) -> None:
    assert not is_final(error)


FINAL_CAUSES = (
    "DeltaIllegalStateException: [DELTA_SCHEMA_CHANGED_WITH_VERSION] Detected schema change in version 1",
    "DeltaRuntimeException: [DELTA_STREAMING_METADATA_EVOLUTION] The schema has evolved",
    "UnsupportedOperationException: [DELTA_SOURCE_TABLE_IGNORE_CHANGES] Detected a data update",
    "DeltaInvariantViolationException: [DELTA_VIOLATE_CONSTRAINT_WITH_VALUES] CHECK constraint positive",
    "AnalysisException: [UNRESOLVED_COLUMN.WITH_SUGGESTION] A column cannot be resolved",
    "ExtendedAnalysisException: [STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION] Invalid output mode",
    "ValueError: no such column; caused by AnalysisException: [UNRESOLVED_COLUMN] none",
    "AssertionError: assertion failed: Invalid batch: id#1L != id#1L,w#2",
    "StateStoreKeySchemaNotCompatible: [STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] Provided key schema",
)
PASSING_CAUSES = (
    "IOException: full",
    "AssertionError: of a user's own function",
    "ValueError: [1, 2] is no row",
    "SparkConcurrentModificationException: [CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log",
    "SparkException: [CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred during loading state",
    "EOFException: Unexpected end of input stream; while reading file file:///lake/AnalysisException.gz",
)


@pytest.mark.parametrize("cause", FINAL_CAUSES)
def test_errors_of_spark_that_cannot_go_away_are_final(cause: str) -> None:
    assert is_final(RuntimeError("o52.save"), cause)


@pytest.mark.parametrize("cause", PASSING_CAUSES)
def test_errors_of_spark_that_are_on_no_list_are_left_to_the_policy(cause: str) -> None:
    assert not is_final(RuntimeError("o52.save"), cause)


def test_a_source_with_other_columns_is_told_from_other_errors() -> None:
    assert [source_moved(cause) for cause in FINAL_CAUSES] == [True, True, *[False] * 7]


def resolve(**arguments: object) -> RestartPolicy:
    return policy_of(Settings.resolve(None, {}, {}, arguments))


def test_settings_make_a_policy_and_the_default_is_none() -> None:
    assert resolve() == RestartPolicy()
    given = resolve(restart_strategy="failure-rate", restart_failures=3, restart_delay="2s")
    assert given == RestartPolicy(RestartStrategy.FAILURE_RATE, 2_000, failures=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"restart_delay": "2s"}, "restartDelay has no effect with restart strategy 'none'"),
        ({"restart_strategy": "fixed-delay", "restart_jitter": 0.5}, "restartJitter has no effect"),
        ({"restart_strategy": "exponential-delay", "restart_multiplier": "0.5"}, "at least 1"),
        ({"restart_strategy": "exponential-delay", "restart_jitter": 2}, "at most 1"),
        ({"restart_strategy": "sometimes"}, "expected none, fixed-delay"),
    ],
)
def test_a_setting_that_the_strategy_does_not_use_is_an_error(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(**arguments)
