"""Logging: a handler on stderr if logging is not configured, as text or as Spark's JSON."""

from __future__ import annotations

import builtins
import logging
import sys
from typing import TYPE_CHECKING

from spark_abs.quantities import time_said

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STRUCTURED = "spark.log.structuredLogging.enabled"
"""Spark's own setting: a session with it logs in the schema `SPARK_LOG_SCHEMA` of pyspark.logger."""

_LOGGER = logging.getLogger("spark_abs")
_OURS = logging.INFO - 1
"""An unusual level that lets INFO lines pass, so that this module can recognise and undo its own setting."""
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def speak(spark: SparkSession | None = None) -> None:
    """Send INFO lines of this package to stderr, unless logging is configured. Repeatable.

    They are JSON if the session logs so. If logging is configured later, this handler falls silent: no line
    is shown twice, and none below the configured level. In a notebook it shows nothing, since lines would
    appear in arbitrary cells.
    """
    if hasattr(builtins, "__IPYTHON__"):
        return
    if _LOGGER.handlers or logging.getLogger().handlers:
        return
    structured = spark is not None and spark.conf.get(STRUCTURED, "false") == "true"
    _LOGGER.addHandler(_Stderr(_json() if structured else _Text(_FORMAT)))
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(_OURS)
    _LOGGER.propagate = False


class _Text(logging.Formatter):
    """Lines for people, with times as commands print them."""

    # The name and the arguments are the base class's.
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
        return time_said(int(record.created * 1000))


def _json() -> logging.Formatter:
    from pyspark.logger.logger import JSONFormatter

    class Json(JSONFormatter):
        """Spark's lines, with the zone of their times: in Spark's schema they are instants."""

        def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
            return time_said(int(record.created * 1000), "T")

    return Json()


class _Stderr(logging.Handler):
    """Writes to the present `sys.stderr`. It stays silent once any other handler exists."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._replaced = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or leave the record to handlers that were added later."""
        if not self._replaced and (logging.getLogger().handlers or _LOGGER.handlers != [self]):
            self._replaced = True
            if _LOGGER.level == _OURS:
                _LOGGER.setLevel(logging.NOTSET)
        if not self._replaced:
            self._write(record)
        elif _LOGGER.isEnabledFor(record.levelno):
            _LOGGER.propagate = True  # this record goes on to the root's handlers, too

    def _write(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as every handler of the standard library does
            self.handleError(record)
