"""Options of the JVMs of tests, which live for seconds or minutes: most of what they do is to start.

`python -m tests.jvm` writes an archive of the classes that a small job loads (Java's class data sharing). A
JVM that is given the archive does not read and verify them again: a third of the work until the first Delta
table is written. Without the archive, or on another class path, everything runs, only slower.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

QUICK = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC "
    "-Djdk.lang.Process.launchMechanism=VFORK"
)
"""The best compiler would not have begun to pay; without it the JVM's room for code is 48 MB, which a few
minutes of queries fill: then it compiles nothing any more. A process is started in one step in place of two:
until the first job of a JVM Hadoop runs `chmod` for every file that it makes."""

_ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"


def java_options() -> str:
    """Return the options of a JVM that has Spark's jars on its class path."""
    return f"{QUICK} -XX:SharedArchiveFile={_ARCHIVE} -Xlog:disable" if _ARCHIVE.exists() else QUICK


def main() -> None:
    """Write the archive: Java does so when a process ends."""
    with tempfile.TemporaryDirectory(dir=_ARCHIVE.parent) as scratch:
        made = Path(scratch) / _ARCHIVE.name
        _load_classes(Path(scratch), f"{QUICK} -XX:ArchiveClassesAtExit={made} -Xlog:disable")
        made.replace(_ARCHIVE)


def _load_classes(scratch: Path, options: str) -> None:
    """Run small jobs, and wait until the JVM has ended."""
    from tests.crash.driver import quick_session
    from tests.crash.expected import write_file
    from tests.crash.small_job import declare

    spark = quick_session(str(scratch), "local[2]", options)
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    jvm: subprocess.Popen[bytes] = gateway.proc
    for in_python in (False, True):
        base = scratch / str(in_python)
        for file in range(2):
            write_file(base, file)
        declare(spark, base, {}, in_python=in_python).start(available_now=True).await_termination()
    spark.stop()
    gateway.shutdown()
    assert jvm.stdin is not None
    jvm.stdin.close()  # the JVM lives until then
    jvm.wait()


if __name__ == "__main__":
    main()
