"""Versions of the packages that this process has."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the packages among some that are installed, each with its version."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
