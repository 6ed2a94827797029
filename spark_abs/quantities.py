"""How values of settings are written: durations, sizes, numbers, and words such as `any` and `off`."""

from __future__ import annotations

import re
from collections.abc import Mapping

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


def whole_number(value: object) -> int:
    """Read a whole number.

    Raises:
        ValueError: it is anything else.
    """
    if isinstance(value, str) and re.fullmatch(r"[0-9]+", value.strip()):
        value = int(value)
    if type(value) is not int:
        raise ValueError("expected a whole number")
    return value


def count_or_any(value: object) -> int | None:
    """Read a whole number, or `any` as None."""
    return None if isinstance(value, str) and value.strip().lower() == "any" else whole_number(value)


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


def written(milliseconds: int) -> str:
    """Write a duration in the largest unit in which it is whole, as `duration_ms` reads it."""
    if not milliseconds:
        return "0s"
    unit = max(
        (u for u in _MILLISECONDS if milliseconds % _MILLISECONDS[u] == 0), key=_MILLISECONDS.__getitem__
    )
    return f"{milliseconds // _MILLISECONDS[unit]}{unit}"
