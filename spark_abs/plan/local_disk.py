"""Native checkpoints on a local disk are written without starting processes (ADR 8)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
_FILE_SYSTEM, _FILE_CONTEXT = "fs.file.impl", "fs.AbstractFileSystem.file.impl"
_HADOOP = "org.apache.hadoop.fs"
_LOCAL = f"{_HADOOP}.LocalFileSystem"
_BY_FILE_SYSTEM = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
_RAW, _RAW_OURS = f"{_HADOOP}.RawLocalFileSystem", "spark_abs.LocalFiles"
_SOURCE = """
package spark_abs;

import java.nio.file.Files;
import java.nio.file.LinkOption;
import org.apache.hadoop.fs.permission.FsPermission;

public final class LocalFiles extends org.apache.hadoop.fs.RawLocalFileSystem {
    public void setPermission(org.apache.hadoop.fs.Path path, FsPermission permission)
            throws java.io.IOException {
        java.nio.file.Path file = pathToFile(path).toPath();
        int mode = ((Integer) Files.getAttribute(file, "unix:mode", new LinkOption[0])).intValue();
        boolean directory = (mode & 0170000) == 0040000;
        int wanted = permission.toShort() | (directory ? mode & 06000 : 0);
        if ((mode & 07777) != wanted) {
            Files.setAttribute(file, "unix:mode", Integer.valueOf(wanted), new LinkOption[0]);
        }
    }
}
"""
"""Hadoop's class, but for the permissions of a file: it runs `chmod` for every file and directory that it
makes. Like `chmod`, this one leaves a directory its set-user-ID and set-group-ID bits."""


def local_disk_conf(spark: SparkSession) -> Mapping[str, str]:
    """Return session settings under which Spark writes files on a local disk without starting processes.

    Empty if the user has chosen a checkpoint file manager, or what stands behind `file:`. Under the settings
    checkpoints have no checksum files (ADR 8). Where executors live in the driver's JVM, Hadoop's one object
    for `file:` writes none from now on, whatever writes through it; those that are there are still read.
    """
    hadoop = spark._jsparkSession.sessionState().newHadoopConf()
    chosen = [hadoop.get(_MANAGER), hadoop.get(_FILE_CONTEXT), hadoop.get(_FILE_SYSTEM)]
    if chosen not in ([None, f"{_HADOOP}.local.LocalFs", system] for system in (None, _LOCAL)):
        return {}
    jvm: Any = spark._jvm
    context: Any = spark.sparkContext._jsc
    first, second = (jvm.org.apache.hadoop.fs.FileSystem.getLocal(hadoop) for _ in range(2))
    if context.isLocal() and first.equals(second) and first.getClass().getName() == _LOCAL:
        first.setWriteChecksum(False)
        _set_permissions_in_process(jvm, first, hadoop)
        return {_MANAGER: _BY_FILE_SYSTEM}
    return {_FILE_CONTEXT: f"{_HADOOP}.local.RawLocalFs"}


def _set_permissions_in_process(jvm: Any, local: Any, hadoop: Any) -> None:
    """Put a file system that runs no `chmod` behind Hadoop's object for `file:`, once a JVM.

    Its class is compiled by the compiler that Spark has for its generated code. Where that does not succeed,
    Hadoop goes on as before.
    """
    before = local.getRaw()
    if before.getClass().getName() != _RAW:
        return
    try:
        loader = before.getClass().getClassLoader()
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(loader)
        compiler.cook(_SOURCE)
        raw = jvm.org.apache.hadoop.util.ReflectionUtils.newInstance(
            compiler.getClassLoader().loadClass(_RAW_OURS), hadoop
        )
        raw.initialize(local.getUri(), hadoop)
        raw.setWorkingDirectory(before.getWorkingDirectory())
        behind = loader.loadClass(f"{_HADOOP}.FilterFileSystem").getDeclaredField("fs")
        behind.setAccessible(True)
        behind.set(local, raw)
    except (Py4JError, TypeError) as error:
        log.info("Hadoop runs chmod for each file that it makes: %s", error)
