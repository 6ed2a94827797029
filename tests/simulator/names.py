"""Numbers for values: two states of a system are told apart by the numbers of what is in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any


class Names:
    """Gives every value a number; equal values of one type have one number, and nothing else shares it."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def of(self, value: Any) -> int:
        """Return the number of a value; mutable values are taken as they are now.

        What dicts and sets hold counts, its order does not: nothing in the job depends on it but the order of
        batches, which is that of their numbers.
        """
        try:
            return self._numbers.setdefault((type(value), value), len(self._numbers))
        except TypeError:
            return self.of((type(value).__name__, *self._parts(value)))

    def _parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, dict):
            return sorted((self.of(key), self.of(held)) for key, held in value.items())
        if isinstance(value, set | frozenset):
            return sorted(self.of(item) for item in value)
        if is_dataclass(value):
            return [self.of(getattr(value, field.name)) for field in fields(value)]
        return [self.of(item) for item in value]
