"""Whether the stored state of a stage fits its declared operators."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from spark_abs.manifest import OperatorShape, StageShape
from spark_abs.model import NO_BATCH
from spark_abs.protocol.changes import LEAVE, StageProgress, UnderWay

Columns = Sequence[Sequence[str]]
"""See `StageShape.by_place`."""

LONG = 200
"""Texts up to this number of characters are shown whole."""
AROUND = 30
"""The least number of equal characters shown beside a difference."""

_TOKEN = re.compile(r"\w+|\W")
_LABEL = re.compile(r"\b[^\W\d]\w*:(?= )")
_SEED = re.compile(r"\b(randn?)\(-?\d+L?\)")
"""Spark gives `rand()` a new seed in each analysis."""
_COMMON = re.compile(r"\b_common_expr_\d+\b")
_UNTRUE = re.compile(r"'(?:[^'\\]|\\.)* is not true!'", re.DOTALL)
"""The message of `assert_true` repeats the condition.

Spark 4.0 puts column numbers into it, which differ between sessions.
"""


def state_reasons(before: StageShape | None, shape: StageShape, reached: StageProgress) -> Iterator[str]:
    """Iterate the reasons why a stage's state does not fit its declaration."""
    begun = reached.finished != NO_BATCH or reached.under_way is not UnderWay.NOTHING
    if before is None or not before.sources or not begun:
        return
    if not operators_fit(before.operators, shape.operators):
        was, now = contrasted(_listed(before.operators), _listed(shape.operators))
        yield (
            "its stateful operators have changed and cannot use the stored state:\n"
            f"  was: {was}\n  now: {now}\n"
            "  declare them as they were; or give the stage another name, under which it begins without "
            f"state, and leave this one's behind: {LEAVE}"
        )
    elif moved(before.by_place, shape.by_place):
        was, now = contrasted(_places(before.by_place), _places(shape.by_place))
        yield (
            "Spark stores the columns of its operators by position, and the columns or their order changed: "
            f"sums and values would be exchanged:\n  was: {was}\n  now: {now}\n"
            "  restore their old order, with select() before a join and after an aggregate; "
            f"or give the stage another name, under which it begins without state: {LEAVE}"
        )
    elif before.operators and before.output_mode != shape.output_mode:
        yield (
            f"its output mode was {before.output_mode!r} and is now {shape.output_mode!r}, but rows of its "
            "state were emitted in the old mode; declare the old mode, or rename the stage"
        )


def operators_fit(before: Sequence[OperatorShape], now: Sequence[OperatorShape]) -> bool:
    """Say whether operators can use the state of others; seeds and counts of Spark's own do not matter."""
    if [o.name for o in before] != [o.name for o in now]:
        return False
    known, given = ([_comparable(o.parts) for o in operators] for operators in (before, now))
    if any(one not in ((), other) for one, other in zip(known, given, strict=True)):
        return False
    recorded = [(o.computed, n.computed) for o, n in zip(before, now, strict=True)]
    if any(one is not None and _comparable(one) != _comparable(other or ()) for one, other in recorded):
        return False
    return not any(
        _crossed(one.sides, other.sides) or _swapped(one.apart, other.apart)
        for one, other in zip(before, now, strict=True)
    )


def moved(before: Columns | None, now: Columns | None) -> bool:
    """Say whether columns that Spark stores by position have other positions; None: they are not known."""
    if before is None or now is None:
        return False
    return list(map(_comparable, before)) != list(map(_comparable, now))


def _places(kept: Columns | None) -> str:
    return "; ".join(", ".join(columns) for columns in kept or ())


def _listed(operators: Sequence[OperatorShape]) -> str:
    return ", ".join(map(str, operators)) or "none"


def _comparable(parts: Sequence[str]) -> tuple[str, ...]:
    """Return the parts of an operator without the seeds of random columns, so that a random salt is equal.

    The messages of `assert_true` and the counters in generated names are removed too.
    """
    return tuple(_UNTRUE.sub("'is not true!'", _SEED.sub(r"\1()", recounted(part))) for part in parts)


def recounted(sql: str) -> str:
    """Number Spark's names of common expressions from 0: Spark counts them over the whole process."""
    numbers: dict[str, str] = {}
    return _COMMON.sub(lambda name: numbers.setdefault(name[0], f"_common_expr_{len(numbers)}"), sql)


def _crossed(before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> bool:
    """Say whether a source has moved to the other side of a join, whose state holds other rows."""
    sides = dict(enumerate(map(set, before)))
    return any(
        source not in sides.get(i, set()) and any(source in held for j, held in sides.items() if j != i)
        for i, side in enumerate(now)
        for source in side
    )


def _swapped(before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> bool:
    """Say whether an identifying part of one side of a join has moved to the other side.

    The part must be gone from one side and new on the other: a filter added to or removed from one side is no
    move.
    """
    was, are = ([set(_comparable(side)) for side in sides] for sides in (before, now))
    gone = [held - kept for held, kept in zip(was, are, strict=False)]
    come = [kept - held for held, kept in zip(was, are, strict=False)]
    return any(left & new for i, left in enumerate(gone) for j, new in enumerate(come) if i != j)


def contrasted(before: str, now: str) -> tuple[str, str]:
    """Return both texts; in long texts, equal stretches are replaced by an ellipsis.

    The beginnings stay, and so do names with a colon, which tell the part that the text after the ellipsis
    belongs to.
    """
    if max(len(before), len(now)) <= LONG:
        return before, now
    was, are = _TOKEN.findall(before), _TOKEN.findall(now)
    shown: tuple[list[str], list[str]] = ([], [])
    for kind, i, j, k, end in SequenceMatcher(None, was, are, autojunk=False).get_opcodes():
        pieces = was[i:j], are[k:end]
        if kind == "equal":
            pieces = (_shortened(pieces[0], last=j == len(was) and end == len(are)),) * 2
        for text, piece in zip(shown, pieces, strict=True):
            text.extend(piece)
    return "".join(shown[0]), "".join(shown[1])


def _shortened(tokens: list[str], last: bool) -> list[str]:
    head, tail = _up_to(tokens), [] if last else _up_to(tokens[::-1])[::-1]
    if len(head) + len(tail) >= len(tokens):
        return tokens
    if not tail:
        return [*head, " …"]
    labels = _LABEL.findall("".join(tokens[len(head) : -len(tail)]))
    return [*head, *(f" … {label}" for label in labels[-1:]), " … ", *tail]


def _up_to(tokens: list[str]) -> list[str]:
    """Return whole tokens from the beginning, up to a number of characters."""
    size = 0
    for place, token in enumerate(tokens):
        size += len(token)
        if size >= AROUND:
            return tokens[: place + 1]
    return tokens
