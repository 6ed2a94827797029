"""The start of Python processes that Spark runs for this project.

Spark gives some of them ten seconds to come up, however busy the machine is, and fails the query that needs
one. This directory is put on their path: `sitecustomize` in it runs when they start, and makes that short.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext

_PATH = str(Path(__file__).parent)
"""An executor that does not have it is none the worse."""
_changing = threading.Lock()


@contextmanager
def quick_start(context: SparkContext, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """While this lasts, Python code that is handed to Spark gets processes that start quickly.

    `more` are variables that they get where nobody has set them. Spark takes the environment from the
    context when it is handed the code; every thread may do so.
    """
    environment = context.environment
    with _changing:
        before = dict(environment)
        path = [entry for entry in (environment.get("PYTHONPATH"), _PATH) if entry]
        environment.update({**more, **before, "PYTHONPATH": os.pathsep.join(path)})
        try:
            yield
        finally:
            environment.clear()
            environment.update(before)
