"""Text from a root without what may be a secret in it: options, locations and errors hold any text."""

from __future__ import annotations

import re

LONGEST = 2_000
"""Characters of one text; an error of Spark may have its whole plan."""

_NAMES = (
    r"(?:[\w.-]*(?:passw(?:or)?d|passwd|pwd|secret|token|credential|access[._-]?key|sas|signature)[\w.-]*)"
)
_ASSIGNED = re.compile(
    rf"""(?P<name>["']?\b{_NAMES}["']?\s*[=:]\s*)(?P<value>"[^"]*"|'[^']*'|[^\s,;&)}}\]]+)""", re.IGNORECASE
)
_IN_LOCATION = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/\s@]+@(?=[^\s/])")
_ABFS = re.compile(r"^(abfss?|wasbs?)://", re.IGNORECASE)


def redacted(text: str) -> str:
    """Return a text with stars for what follows a word such as `password=`, and for users in locations.

    The container in `abfss://container@account` is no user and stays. A long text is cut.
    """
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
    found = _ASSIGNED.sub(lambda match: f"{match['name']}***", text)
    return _IN_LOCATION.sub(_without_user, found)


def _without_user(match: re.Match[str]) -> str:
    return match[0] if _ABFS.match(match[0]) else f"{match['scheme']}***@"
