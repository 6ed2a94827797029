"""How long checkpoints are kept: the words, and what they choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_abs.keep import Keep, Tier, keep_words

HOUR, DAY = 3_600_000, 86_400_000
WORDS = ["24h:all 7d:1h 90d:1d", "7d:1h", "1h:10m 4h:30m", "3h:all", "1h:1m 2h:20m 3d:2h", "5"]


def test_words_are_read_and_written_alike() -> None:
    assert keep_words("24h:all 7d:1h 90d:1d") == Keep(
        3, (Tier(DAY, 0), Tier(7 * DAY, HOUR), Tier(90 * DAY, DAY))
    )
    assert keep_words(5) == keep_words(" 5 ") == Keep(5, ())
    for text in ("3 1d:all 7d:1h 90d:1d", "1", "7 90s:all"):
        assert str(keep_words(text)) == text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "the least number is 1"),
        (True, "expected a number"),
        ("1 2", "two numbers, 1 and 2"),
        ("24h", "'24h': expected a number"),
        ("24h:", "'24h:': expected a number"),
        ("all", "'all': expected a number"),
        ("0h:all", "'0h:all': expected a number"),
        ("1h:0s", "'1h:0s': expected a number"),
        ("24:1", "'24:1': expected a number"),
        ("1h:1d", "the step is longer than the age"),
        ("7d:1h 24h:all", "give the lower age first"),
        ("7d:1h 7d:1d", "give the lower age first"),
        ("7d:1h 90d:1h", "multiple of the one before"),
        ("1d:1h 7d:90m", "multiple of the one before"),
        ("1d:1h 7d:all", "multiple of the one before"),
    ],
)
def test_words_that_say_nothing_or_contradict_each_other_are_refused(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        keep_words(value)


def test_the_newest_of_each_step_stays() -> None:
    """A checkpoint every ten minutes for three days: all of two hours, then one an hour, then one a day."""
    keep, now = keep_words("2h:all 1d:1h 3d:1d"), 100 * DAY + 5 * HOUR
    made = {now - age: now - age for age in range(0, 4 * DAY, HOUR // 6)}
    stay = sorted(keep.chosen(made, now), reverse=True)
    assert [now - at for at in stay if now - at <= 2 * HOUR] == list(range(0, 2 * HOUR + 1, HOUR // 6))
    of_hours = [at for at in stay if 2 * HOUR < now - at <= DAY]
    assert {at % HOUR for at in of_hours} == {50 * 60_000}
    assert len(of_hours) == 22
    assert [now - at for at in stay if now - at > DAY] == [d * DAY + 5 * HOUR + 10 * 60_000 for d in (1, 2)]


TIMES = st.lists(st.integers(0, 12 * HOUR // 60_000).map(lambda m: m * 60_000), max_size=60)


def removals(
    steps: list[int], idle: list[int], stays: Callable[[dict[int, int], int], set[int]]
) -> Iterator[tuple[dict[int, int], dict[int, int], int]]:
    """Make a thing after each step, then let time pass; at each moment yield what there was and what is left.

    Then what does not stay is removed.
    """
    now = 50 * DAY
    made: dict[int, int] = {}
    left: dict[int, int] = {}
    for number, step in enumerate([*steps, *idle]):
        now += step
        if number < len(steps):
            made[number] = left[number] = now
        yield dict(made), dict(left), now
        stay = stays(left, now)
        left = {thing: at for thing, at in left.items() if thing in stay}


IDLE = st.lists(st.integers(0, 5 * DAY), max_size=5)


@given(st.sampled_from(WORDS), TIMES, IDLE)
def test_removing_often_leaves_the_same_as_removing_once(
    words: str, steps: list[int], idle: list[int]
) -> None:
    """Whatever was removed before, and however long nobody looked."""
    keep = keep_words(words)
    for made, left, now in removals(steps, idle, keep.chosen):
        assert keep.chosen(left, now) == keep.chosen(made, now), (
            "decided on what is left, and on all there ever was"
        )


@given(st.sampled_from(WORDS), TIMES, st.integers(0, 5 * DAY))
def test_each_step_has_its_newest_and_nothing_else_stays(words: str, steps: list[int], idle: int) -> None:
    """Against the sentence in the guide, by looking at every pair."""
    keep, now, made = keep_words(words), 50 * DAY, dict[int, int]()
    for number, pause in enumerate(steps):
        now += pause
        made[number] = now
    now += idle
    stay = keep.chosen(made, now)
    for thing, at in made.items():
        tiers = [tier for tier in keep.tiers if now - at <= tier.up_to_ms]
        step = tiers[0].step_ms if tiers else None
        newer = [o for o, t in made.items() if step and o > thing and t // step == at // step]
        assert (thing in stay) == (step is not None and not newer)


def test_the_newest_of_a_time_without_any_stays_as_long_as_a_way_back_there_may_lead() -> None:
    """An idle job makes no checkpoint from 10:05 to 20:00; the state of 19:50 is that of 10:05."""
    keep, minute = keep_words("1h:10m"), 60_000
    idle = 100 * DAY + 10 * HOUR + 5 * minute
    made: dict[int, int] = {
        at: at for at in (idle - minute, idle, *(idle + 595 * minute + n * minute for n in range(60)))
    }
    now = max(made)
    newest: set[int] = keep.chosen(made, now)
    assert keep.stood(made, now) - newest == {idle}
    assert idle not in keep.stood(made, now + 5 * minute), "nobody goes back for longer than an hour"
    assert keep_words("5h:all").stood({1: idle, 2: now}, now) == {1}


@given(st.sampled_from(WORDS), TIMES, IDLE)
def test_what_stood_for_long_is_the_same_whatever_was_removed_before(
    words: str, steps: list[int], idle: list[int]
) -> None:
    keep = keep_words(words)

    def stay(things: dict[int, int], now: int) -> set[int]:
        return keep.chosen(things, now) | keep.stood(things, now) | {max(things, default=0)}

    for made, left, now in removals(steps, idle, stay):
        assert stay(left, now) == keep.chosen(made, now) | keep.stood(made, now) | {max(left, default=0)}


@given(st.sampled_from(WORDS), TIMES)
def test_each_moment_of_the_past_that_a_word_names_has_the_newest_of_that_time(
    words: str, steps: list[int]
) -> None:
    """Against the sentence in the guide: the end of every step within the age, one after another."""
    keep, now, made = keep_words(words), 50 * DAY, dict[int, int]()
    for number, pause in enumerate(steps):
        now += pause
        made[number] = now
    stay = keep.chosen(made, now) | keep.stood(made, now)
    for tier in keep.tiers:
        if tier.step_ms:
            oldest = now - tier.up_to_ms
            for end in range(oldest - oldest % tier.step_ms + tier.step_ms, now + 1, tier.step_ms):
                before = [thing for thing, at in made.items() if at < end]
                assert end == oldest or not before or max(before) in stay


def test_a_clock_that_was_set_back_removes_nothing_that_is_younger_than_now() -> None:
    keep = keep_words("1h:all")
    assert keep.chosen({1: 10 * HOUR}, 5 * HOUR) == {1}
