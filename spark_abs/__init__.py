"""Asynchronous barrier snapshots for Spark Structured Streaming.

The names in this module and those in `spark_abs.testing` are public. Every other module is internal and may
change in any version.

The public names are listed in `__init__.pyi`, and loaded when they are first used: commands that only read a
root never import Spark.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pkgutil import get_data
from typing import Any


def _listed() -> dict[str, str]:
    """Return the module of each public name. The package may lie in a zip, as with `--py-files`."""
    stub = ast.parse(get_data(__name__, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_HOMES = _listed()
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'spark_abs' has no attribute {name!r}")
    try:
        value = getattr(import_module(home), name)
    except ModuleNotFoundError as missing:
        from spark_abs.errors import get_spark, lacks_spark

        if not lacks_spark(missing):
            raise
        raise ImportError(f"spark_abs.{name} needs Spark, and {get_spark()}") from missing
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
