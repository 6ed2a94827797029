"""Spark writes native checkpoints on a local disk without starting processes (ADR 8)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]

from spark_abs.spark.versions import FILE_MANAGER, class_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
_FILE_SYSTEM, _FILE_CONTEXT = "fs.file.impl", "fs.AbstractFileSystem.file.impl"
_HADOOP = "org.apache.hadoop.fs"
_LOCAL = f"{_HADOOP}.LocalFileSystem"
_RAW, _RAW_OURS = f"{_HADOOP}.RawLocalFileSystem", "spark_abs.LocalFiles"
_SOURCE = """
package spark_abs;

import java.io.File;
import java.io.IOException;
import java.lang.reflect.Field;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.util.Map;
import org.apache.hadoop.fs.*;
import org.apache.hadoop.fs.permission.FsPermission;

public final class LocalFiles extends RawLocalFileSystem {
    public void setPermission(Path path, FsPermission permission) throws IOException {
        java.nio.file.Path file = pathToFile(path).toPath();
        int mode = ((Integer) Files.getAttribute(file, "unix:mode", new LinkOption[0])).intValue();
        boolean directory = (mode & 0170000) == 0040000;
        int wanted = permission.toShort() | (directory ? mode & 06000 : 0);
        if ((mode & 07777) != wanted) {
            Files.setAttribute(file, "unix:mode", Integer.valueOf(wanted), new LinkOption[0]);
        }
    }

    public void takePlaceBehind(LocalFileSystem files) throws Exception {
        FileSystem before = files.getRaw();
        initialize(before.getUri(), before.getConf());
        setWorkingDirectory(before.getWorkingDirectory());
        statistics = FileSystem.getStatistics("file", RawLocalFileSystem.class);
        ((Map) opened(FileSystem.class, "statisticsTable").get(null)).remove(LocalFiles.class);
        File scratch = File.createTempFile("spark_abs", null);
        try {
            setPermission(new Path(scratch.toURI()), new FsPermission((short) 0400));
        } finally {
            scratch.delete();
        }
        opened(FilterFileSystem.class, "fs").set(files, this);
    }

    private static Field opened(Class owner, String name) throws Exception {
        Field field = owner.getDeclaredField(name);
        field.setAccessible(true);
        return field;
    }
}
"""
"""Hadoop's class runs `chmod` to set the permissions of a file; this subclass sets them in process. Like
`chmod`, it keeps the set-user-ID and set-group-ID bits of a directory. It takes over settings and statistics
of the object that it replaces, and first tries its own way on a scratch file."""


def local_disk_conf(spark: SparkSession) -> Mapping[str, str]:
    """Return session settings with which Spark writes files on a local disk without starting processes.

    Empty if the user has chosen a checkpoint file manager, or a file system for `file:`. With these settings
    checkpoints have no checksum files (ADR 8). If executors live in the driver's JVM, Hadoop's shared object
    for `file:` writes no checksum files for anyone from now on; existing ones are still read.
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
        _set_permissions_in_process(jvm, first)
        return {_MANAGER: class_in(jvm, FILE_MANAGER)}
    return {_FILE_CONTEXT: f"{_HADOOP}.local.RawLocalFs"}


def _set_permissions_in_process(jvm: Any, local: Any) -> None:
    """Give Hadoop's object for `file:` a file system that does not run `chmod`, once for each JVM.

    Spark's compiler for generated code compiles the class. If that fails, Hadoop works as before. With its
    native library Hadoop needs no process, and nothing is done.
    """
    if (
        local.getRaw().getClass().getName() != _RAW
        or jvm.org.apache.hadoop.io.nativeio.NativeIO.isAvailable()
    ):
        return
    try:
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(local.getClass().getClassLoader())
        compiler.cook(_SOURCE)
        compiler.getClassLoader().loadClass(_RAW_OURS).newInstance().takePlaceBehind(local)
    except (Py4JError, TypeError) as error:
        log.info("Hadoop runs chmod for each file that it creates, which is slower: %s", error)
