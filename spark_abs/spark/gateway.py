"""Start a session's JVM without noise: known jars instead of Ivy's report, and a log configuration."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

_OPTIONS = "SPARK_SUBMIT_OPTS"
_LOG_CONFIGURATION = Path(__file__).with_name("log4j2.properties")
_LOG_AS_JSON = Path(__file__).with_name("log4j2-json.properties")
"""Changes the layout of the other, and nothing else."""
_LOG_PATTERNS = ("log4j2*.properties", "log4j2*.xml", "log4j2*.y*ml", "log4j2*.json")


@contextmanager
def quiet_log(*, structured: bool = False) -> Iterator[None]:
    """Let a JVM that starts in this block log only warnings and errors, without those of every laptop.

    With `structured` they are JSON, as Spark writes it. A user's own log configuration, in Spark's
    configuration directory or as a Java option, wins: options of the driver come after this one.
    """
    before = os.environ.get(_OPTIONS)
    configured = any(any(_conf_dir().glob(pattern)) for pattern in _LOG_PATTERNS)
    if configured or "log4j" in (before or "") or not _LOG_CONFIGURATION.exists():
        yield
        return
    files = (_LOG_CONFIGURATION, _LOG_AS_JSON) if structured else (_LOG_CONFIGURATION,)
    named = ",".join(file.as_uri() for file in files)
    os.environ[_OPTIONS] = f"{before or ''} -Dlog4j2.configurationFile={named}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_OPTIONS]
        else:
            os.environ[_OPTIONS] = before


@contextmanager
def errors_kept() -> Iterator[None]:
    """Hide the stderr of a JVM that starts in this block from the user of a command.

    Failures in the JVM arrive as errors of Python. The text is shown only if the JVM does not start.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            yield
        except BaseException:
            hidden.seek(0)
            os.write(stderr, hidden.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def may_name_jars(conf: Mapping[str, str]) -> bool:
    """Say whether a session may be given its jars by path: true if no other setting names jars."""
    if "PYSPARK_GATEWAY_PORT" in os.environ or any(name.startswith("spark.jars") for name in conf):
        return False
    if os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell").strip() != "pyspark-shell":
        return False
    try:
        return "spark.jars" not in (_conf_dir() / "spark-defaults.conf").read_text(errors="replace")
    except OSError:
        return True


class KnownJars:
    """The jars to which Ivy has resolved packages before, recorded in the user's cache directory.

    Without the record Ivy prints 150 lines at each start. The record is a list of files, valid while all of
    them exist with their sizes.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        """Take everything that determines the jars, versions included."""
        name = hashlib.sha256(json.dumps(list(packages)).encode()).hexdigest()[:16]
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        self._path = Path(cache) / "spark_abs" / f"jars-{name}.json"

    def find(self) -> tuple[str, ...]:
        """Return the paths of the jars; nothing if they are unknown or one of them is missing."""
        try:
            sizes = json.loads(self._path.read_text())
            there = all(Path(path).stat().st_size == size for path, size in sizes.items())
        except (OSError, ValueError, AttributeError):
            return ()
        return tuple(sizes) if there else ()

    def keep(self, jars: str) -> None:
        """Record `spark.jars` of a session that was started with the packages."""
        paths = [Path(unquote(urlsplit(uri).path)) for uri in jars.split(",") if uri]
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            sizes = {str(path): path.stat().st_size for path in paths}
            if sizes:
                new.parent.mkdir(parents=True, exist_ok=True)
                new.write_text(json.dumps(sizes))
                new.replace(self._path)


def _conf_dir() -> Path:
    given = os.environ.get("SPARK_CONF_DIR")
    if given:
        return Path(given)
    from pyspark.find_spark_home import _find_spark_home

    return Path(_find_spark_home()) / "conf"
