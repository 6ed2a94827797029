"""A text for a table: its location, or its name in a catalog. Imports no Spark."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_PARTS = 3
"""`catalog.schema.table`."""

_QUOTED = r"`(?:[^`]|``)+`"
_BY_PATH = re.compile(rf"delta\s*\.\s*({_QUOTED})", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_PART = re.compile(rf"({_QUOTED})|([^`.\s/]+)")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class TableName:
    """A name with one to three parts, which a catalog may know."""

    parts: tuple[str, ...]

    @property
    def sql(self) -> str:
        """The name as an identifier of SQL, whatever is in its parts."""
        return ".".join(map(quoted, self.parts))

    def __str__(self) -> str:
        """Return it as people write it: in backticks only where SQL needs them."""
        return ".".join(part if _PLAIN.fullmatch(part) else quoted(part) for part in self.parts)


def parse(text: str) -> TableName | str | None:
    """Return the name that a text is, or the path or URI; None if it can be neither.

    A text with a slash or a scheme, or one that begins with `.` or `~`, is a path, and so is what stands in
    the backticks of ``delta.`…` ``. Any other is a name of one to three parts, each plain or in backticks.
    """
    if found := _BY_PATH.fullmatch(text.strip()):
        return _unquoted(found[1])
    outside = re.sub(_QUOTED, "", text)
    if not text or "/" in outside or _SCHEME.match(outside) or text[0] in ".~":
        return text
    parts, at = [], 0
    while found := _PART.match(text, at):
        parts.append(_unquoted(found[1]) if found[1] else found[2])
        at = found.end() + 1
        if at > len(text):
            return TableName(tuple(parts)) if len(parts) <= MOST_PARTS else None
        if text[found.end()] != ".":
            break
    return None


def quoted(name: str) -> str:
    """Return a name of a column, or a part of a table's name, in backticks: Spark takes any text so."""
    return f"`{name.replace('`', '``')}`"


def readings(text: str, name: str) -> str:
    """Say how to write a text as a path, and how as a name."""
    return f"write ./{text} for a path, or {name} for a table of the catalog"


def _unquoted(part: str) -> str:
    return part[1:-1].replace("``", "`")
