"""The environment of the process, as sinks read it: a root keeps names of variables, and no values."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from spark_abs.errors import UsageError


def check_variables(*names: str | None) -> None:
    """Check the names of environment variables; None stands for a variable that is not given.

    Raises:
        UsageError: one is no name.
    """
    for name in names:
        if name is not None and not name.replace("_", "a").isalnum():
            raise UsageError(f"{name!r} is not the name of an environment variable")


def object_in(name: str, kinds: type | tuple[type, ...], what: str) -> tuple[dict[str, object], str]:
    """Return the JSON object that a variable holds, and its text, which may have secrets.

    Args:
        name: the variable.
        kinds: the types that the values of the object may have.
        what: what the object holds, with an example, for the message.

    Raises:
        UsageError: the variable holds no such object, or is not set; says nothing of its text.
    """
    text = os.environ.get(name, "")
    try:
        given = json.loads(text)
        valid = isinstance(given, dict) and all(isinstance(value, kinds) for value in given.values())
    except ValueError:
        valid = False
    if not valid:  # from None, as the error has the text, which holds secrets
        raise UsageError(f"${name} is not an object of JSON with {what}") from None
    return given, text


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return a text with stars in place of secrets, the longest first: it may contain a shorter one."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text
