"""Logging: a handler on stderr if logging is not configured."""

from __future__ import annotations

import builtins
import logging
import sys

_LOGGER = logging.getLogger("spark_abs")
_OURS = logging.INFO - 1
"""An unusual level that lets INFO lines pass, so that this module can recognise and undo its own setting."""
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def speak() -> None:
    """Send INFO lines of this package to stderr, unless logging is configured. Repeatable.

    If logging is configured later, this handler falls silent: no line is shown twice, and none below the
    configured level. In a notebook it shows nothing, since lines would appear in arbitrary cells.
    """
    if hasattr(builtins, "__IPYTHON__"):
        return
    if _LOGGER.handlers or logging.getLogger().handlers:
        return
    _LOGGER.addHandler(_Stderr())
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(_OURS)
    _LOGGER.propagate = False


class _Stderr(logging.Handler):
    """Writes to the present `sys.stderr`. It stays silent once any other handler exists."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(_FORMAT))
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
