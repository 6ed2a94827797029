"""Parsers of setting values: durations, sizes, numbers, choices, and words such as `unlimited`.

The reverse, too: durations, sizes and times as people read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Generic, TypeVar

E = TypeVar("E", bound=StrEnum)

UNLIMITED = "unlimited"
"""The value for no limit."""

_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES = {"b": 1, "kb": 1024, "mb": 1024**2, "gb": 1024**3}


def duration_ms(value: object) -> int:
    """Read a duration such as `500ms`, `10s`, `5m`, `2h` or `1d`; return milliseconds.

    Raises:
        ValueError: it is anything else; a number without a unit too.
    """
    return _quantity(value, _MILLISECONDS, "a duration such as 500ms, 10s or 5m")


def duration_or_auto(value: object) -> int | None:
    """Read a duration as `duration_ms`, or `auto` as None: a default that depends on the store."""
    return None if _is(value, "auto") else duration_ms(value)


def duration_or_off(value: object) -> int | None:
    """Read a duration as `duration_ms`, or `off` as None."""
    # YAML 1.1 reads an unquoted `off` as false.
    return None if value is False or _is(value, "off") else duration_ms(value)


def size_bytes(value: object) -> int:
    """Read a size such as `512kb`, `64mb` or `2gb` (powers of 1024); return bytes.

    Raises:
        ValueError: it is anything else; a number without a unit too.
    """
    return _quantity(value, _BYTES, "a size such as 512kb, 64mb or 2gb")


def size_or_unlimited(value: object) -> int | None:
    """Read a size as `size_bytes`, or `unlimited` as None."""
    if _is(value, UNLIMITED):
        return None
    return _quantity(value, _BYTES, f"a size such as 512kb, 64mb or 2gb, or {UNLIMITED}")


def _quantity(value: object, units: Mapping[str, int], wanted: str) -> int:
    match = re.fullmatch(r"\s*([0-9]+)\s*([a-z]+)\s*", value.lower()) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"expected {wanted}")
    return int(match[1]) * units[match[2]]


def whole_number(value: object) -> int:
    """Read a whole number.

    Raises:
        ValueError: it is anything else.
    """
    return _count(value, "a whole number")


def count_or_unlimited(value: object) -> int | None:
    """Read a whole number, or `unlimited` as None."""
    return None if _is(value, UNLIMITED) else _count(value, f"a whole number or {UNLIMITED}")


def _count(value: object, wanted: str) -> int:
    if isinstance(value, str) and re.fullmatch(r"[0-9]+", value.strip()):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"expected {wanted}")
    return value


def _is(value: object, word: str) -> bool:
    return isinstance(value, str) and value.strip().lower() == word


def text(value: object) -> str:
    """Read text, without the blanks around it.

    Raises:
        ValueError: it is anything else.
    """
    if not isinstance(value, str):
        raise ValueError("expected text")
    return value.strip()


def switch(value: object) -> bool:
    """Read `true` or `false`.

    Raises:
        ValueError: it is anything else.
    """
    spelled = {"true": True, "false": False}.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(spelled, bool):
        raise ValueError("expected true or false")
    return spelled


def number(value: object) -> float:
    """Read a number such as `1.5`.

    Raises:
        ValueError: it is anything else.
    """
    spelled = isinstance(value, str) and re.fullmatch(r"\s*[0-9]+(\.[0-9]+)?\s*", value)
    if not spelled and type(value) not in (int, float):
        raise ValueError("expected a number such as 1.5")
    return float(value)  # type: ignore[arg-type]  # one of the three


@dataclass(frozen=True)
class Choice(Generic[E]):
    """Parser of the values of an enumeration."""

    of: type[E]

    def __call__(self, value: object) -> E:
        """Return the value.

        Raises:
            ValueError: it is none of the values; the message lists them.
        """
        # YAML 1.1 reads an unquoted `off` as false.
        spelled = "off" if value is False else value
        if not isinstance(spelled, str) or spelled.strip().lower() not in list(self.of):
            *others, last = self.of
            raise ValueError(f"expected {', '.join(others)} or {last}")
        return self.of(spelled.strip().lower())


def written(milliseconds: int) -> str:
    """Write a duration for `duration_ms`, in the largest unit that needs no fraction."""
    if not milliseconds:
        return "0s"
    unit = max(
        (u for u in _MILLISECONDS if milliseconds % _MILLISECONDS[u] == 0), key=_MILLISECONDS.__getitem__
    )
    return f"{milliseconds // _MILLISECONDS[unit]}{unit}"


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def time_said(ms: int, between: str = " ") -> str:
    """Return a time in the zone of this machine with its offset, such as `2026-01-31 21:15:03.250+01:00`.

    Args:
        ms: since the epoch.
        between: what is between the day and the hour; `T` makes it ISO's form.
    """
    try:
        return (_EPOCH + timedelta(milliseconds=ms)).astimezone().isoformat(between, "milliseconds")
    except OverflowError:  # no calendar has it
        return f"{ms} ms"


def time_ms(moment: datetime) -> int:
    """Return a time that has a zone in milliseconds since the epoch."""
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def duration_said(ms: int) -> str:
    """Return a duration in the unit that suits it; 0 for one that ends before it begins, by another clock."""
    ms = max(0, ms)
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000)):
        if ms >= size:
            return f"{ms / size:.1f} {unit}"
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms} ms"


def size_said(count: int) -> str:
    """Return a number of bytes in the unit that suits it."""
    for unit, amount in (("GB", 1024**3), ("MB", 1024**2), ("kB", 1024)):
        if count >= amount:
            return f"{count / amount:.1f} {unit}"
    return f"{count} B"
