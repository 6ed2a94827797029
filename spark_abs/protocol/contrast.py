"""Two long texts that differ in little: what they differ in, with some words around it."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

LONG = 200
"""Characters up to which texts are shown whole."""
AROUND = 30
"""Characters of what is alike that are shown beside a difference, at least."""

_TOKEN = re.compile(r"\w+|\W")
_LABEL = re.compile(r"\b[^\W\d]\w*:(?= )")


def contrasted(before: str, now: str) -> tuple[str, str]:
    """Return both texts, of long ones what they differ in: stretches that are alike become an ellipsis.

    Both begin as they began, so that it is seen what they are. A name with a colon stays: it says to which
    part the text after the ellipsis belongs.
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
    """Return whole tokens from the beginning, until they have so many characters."""
    size = 0
    for place, token in enumerate(tokens):
        size += len(token)
        if size >= AROUND:
            return tokens[: place + 1]
    return tokens
