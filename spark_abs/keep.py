"""How long checkpoints are kept: words such as `24h:all 7d:1h 90d:1d`, after those of backup tools."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from spark_abs.quantities import duration_ms, written

ALL = "all"
NEWEST = 3
"""How many of the newest stay, whatever their age, unless a number says otherwise: if the newest is damaged,
a restart takes the one before it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tier:
    """One word: how close together checkpoints up to an age are kept."""

    up_to_ms: int
    """The age."""
    step_ms: int
    """Of each step of time the newest is kept; 0: all are."""

    def __str__(self) -> str:
        return f"{written(self.up_to_ms)}:{written(self.step_ms) if self.step_ms else ALL}"


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints are kept by their age.

    Steps of time begin at multiples of the step since 1970. Of each step the newest stays, until it is too
    old for its word; then the next word decides. The steps of a word are multiples of those before it, so
    that the newest of a longer step is the newest of a shorter one: the result does not depend on how often
    the rest was removed before.
    """

    newest: int = NEWEST
    """How many of the newest stay, whatever their age."""
    tiers: tuple[Tier, ...] = ()
    """The youngest first."""

    def __str__(self) -> str:
        return " ".join(map(str, (self.newest, *self.tiers)))

    @property
    def up_to_ms(self) -> int:
        """The age up to which any are kept; 0: only the newest."""
        return self.tiers[-1].up_to_ms if self.tiers else 0

    def chosen(self, made_ms: Mapping[T, int], now_ms: int) -> set[T]:
        """Return what stays by its age, of things with the times when they were made.

        Args:
            made_ms: each thing with its time; of two at one time the later in order is the newer.
            now_ms: the time. Things that are younger than now count as of now.
        """
        of_step: dict[tuple[int, int], T] = {}
        stays: set[T] = set()
        for thing, at in sorted(made_ms.items(), key=lambda item: item[1]):
            tier = next((t for t in self.tiers if now_ms - at <= t.up_to_ms), None)
            for step in {t.step_ms for t in self.tiers if t.step_ms}:
                of_step[step, at // step] = thing
            if tier is not None and not tier.step_ms:
                stays.add(thing)
        for thing, at in made_ms.items():
            tier = next((t for t in self.tiers if now_ms - at <= t.up_to_ms), None)
            if tier is not None and tier.step_ms and of_step[tier.step_ms, at // tier.step_ms] == thing:
                stays.add(thing)
        return stays

    def stood(self, made_ms: Mapping[T, int], now_ms: int) -> set[T]:
        """Return what was still the newest at the end of a step within the age of its word.

        A way back to such a moment leads through it, however old it is. Things of which `chosen` says the
        same: of an idle job the last checkpoint before a long time without any.
        """
        stays: set[T] = set()
        for (thing, at), (_, after) in pairwise(sorted(made_ms.items(), key=lambda item: item[1])):
            for tier in self.tiers:
                end = after - after % tier.step_ms if tier.step_ms else after
                if at < end and now_ms - end < tier.up_to_ms:
                    stays.add(thing)
        return stays


_WANTED = (
    "a number of the newest, and words such as 24h:all (all up to the age of a day) or 7d:1h (one for each "
    "hour up to the age of a week)"
)


def keep_words(value: object) -> Keep:
    """Read words such as `24h:all 7d:1h 90d:1d`, a number of the newest to keep, or both.

    Raises:
        ValueError: it is anything else, or the words are not in order.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"expected {_WANTED}")
    newest, tiers = list[int](), list[Tier]()
    for word in value.split():
        if re.fullmatch(r"[0-9]+", word):
            newest.append(int(word))
        else:
            tiers.append(_tier(word))
    if len(newest) > 1:
        raise ValueError(f"two numbers, {newest[0]} and {newest[1]}: one says how many of the newest stay")
    if newest == [0]:
        raise ValueError("the least number is 1: the newest is needed for a restart")
    _require_order(tiers)
    return Keep(newest[0] if newest else NEWEST, tuple(tiers))


def _tier(word: str) -> Tier:
    span, colon, step = word.partition(":")
    try:
        tier = Tier(duration_ms(span), 0 if step == ALL else duration_ms(step))
    except ValueError:
        raise ValueError(f"{word!r}: expected {_WANTED}") from None
    if not colon or not tier.up_to_ms or (step != ALL and not tier.step_ms):
        raise ValueError(f"{word!r}: expected {_WANTED}")
    if tier.step_ms > tier.up_to_ms:
        raise ValueError(f"{word!r}: the step is longer than the age")
    return tier


def _require_order(tiers: Iterable[Tier]) -> None:
    for one, after in pairwise(tiers):
        if one.up_to_ms >= after.up_to_ms:
            raise ValueError(f"{one} {after}: give the lower age first")
        if one.step_ms >= after.step_ms or (one.step_ms and after.step_ms % one.step_ms):
            raise ValueError(f"{one} {after}: the step must be a multiple of the one before it")
