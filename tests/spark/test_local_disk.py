"""Native checkpoints on a local disk: without processes and checksum files, renamed in one step (ADR 8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from spark_abs.cli.main import main
from spark_abs.job import Job
from spark_abs.spark.local_disk import local_disk_conf
from spark_abs.stages.native import clear_leftovers
from spark_abs.store.storage import Place
from tests.job_support import Feed, read_table
from tests.spark.conftest import Start

CHECKPOINTING = "org.apache.spark.sql.execution.streaming.checkpointing"
MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
FILE_CONTEXT = "fs.AbstractFileSystem.file.impl"


def told(spark: SparkSession, conf: Mapping[str, str]) -> SparkSession:
    """Return a session that has these settings, beside its others."""
    session = spark.newSession()
    for key, value in conf.items():
        session.conf.set(key, value)
    return session


class Manager:
    """What Spark writes a checkpoint with, under the settings of a session."""

    def __init__(self, session: SparkSession, directory: Path) -> None:
        self._jvm: Any = session._jvm
        self._directory = directory
        factory = getattr(self._jvm, f"{CHECKPOINTING}.CheckpointFileManager")
        conf = session._jsparkSession.sessionState().newHadoopConf()
        self._manager = factory.create(self._path(""), conf)

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"file:{self._directory}/{name}")

    def begin(self, name: str, text: str, overwrite: bool) -> Any:
        """Write a file that is there once what is returned is closed."""
        stream = self._manager.createAtomic(self._path(name), overwrite)
        stream.write(bytearray(text.encode()))
        return stream

    def write(self, name: str, text: str, overwrite: bool) -> None:
        self.begin(name, text, overwrite).close()

    def read(self, name: str) -> str:
        stream = self._manager.open(self._path(name))
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()


def test_a_file_is_replaced_whole_only_where_it_may_be_and_no_checksum_outlives_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """One that was there before, with its checksum file, is no exception; who verifies reads it, too."""
    plain = Manager(spark, tmp_path)
    plain.write("1.changelog", "of a killed batch", overwrite=True)
    assert (tmp_path / ".1.changelog.crc").exists()

    ours = Manager(told(spark, local_disk_conf(spark)), tmp_path)
    ours.write("1.changelog", "of its repetition", overwrite=True)
    ours.write("2", "planned", overwrite=False)
    with pytest.raises(Py4JJavaError, match="FileAlreadyExistsException"):
        ours.write("2", "planned by another", overwrite=False)
    held = {p.name: p.read_text() for p in tmp_path.iterdir() if not p.name.endswith(".tmp")}
    assert held == {"1.changelog": "of its repetition", "2": "planned"}
    for manager in (ours, plain):
        assert (manager.read("1.changelog"), manager.read("2")) == ("of its repetition", "planned")


@contextmanager
def processes_of_jvm(spark: SparkSession, scratch: Path) -> Iterator[list[str]]:
    """Give the command lines of the processes that the JVM starts meanwhile; there at the end."""
    jvm, started = cast("Any", spark._jvm), list[str]()
    recording = jvm.jdk.jfr.Recording()
    recording.enable("jdk.ProcessStart")
    recording.start()
    yield started
    recording.stop()
    kept = jvm.java.io.File(f"{scratch}/processes.jfr").toPath()
    recording.dump(kept)
    recording.close()
    events = jvm.jdk.jfr.consumer.RecordingFile.readAllEvents(kept)
    started += [event.getString("command") for event in events]


def test_no_process_is_started_for_a_file(spark: SparkSession, tmp_path: Path, start: Start) -> None:
    plain = Manager(spark, tmp_path)
    with processes_of_jvm(spark, tmp_path) as started:
        plain.write("1", "by the default", overwrite=True)
    assert any(str(tmp_path) in command for command in started)

    feed = Feed(spark, tmp_path / "in", "id long")
    feed.write({"id": 1})
    job = Job("counts", root=str(tmp_path / "root"), spark=spark)
    rows = job.source("rows", feed.stream())
    counted = job.stage("counts", [rows], lambda f: f.groupBy("id").count(), output_mode="update")
    job.sink("counts", counted, table=str(tmp_path / "counts"))
    with processes_of_jvm(spark, tmp_path) as started:
        start(job, available_now=True).await_termination()
    assert len(started) > 0  # Python's
    assert [command for command in started if str(tmp_path) in command] == []


@pytest.mark.parametrize("mode", ["0644", "0700", "0755", "0777", "1777"])
def test_permissions_are_those_that_hadoop_gives_by_a_process(
    spark: SparkSession, tmp_path: Path, mode: str
) -> None:
    """Of files, of directories, and of those that hand their group on."""
    local_disk_conf(spark)
    jvm, hadoop = cast("Any", spark._jvm), spark._jsparkSession.sessionState().newHadoopConf()
    files = jvm.org.apache.hadoop.fs
    ours, theirs = files.FileSystem.getLocal(hadoop).getRaw(), files.RawLocalFileSystem()
    theirs.initialize(ours.getUri(), hadoop)
    assert ours.getClass().getName() != theirs.getClass().getName()
    permission = files.permission.FsPermission(mode)
    modes = []
    for system, base in ((ours, tmp_path / "ours"), (theirs, tmp_path / "theirs")):
        base.mkdir()
        (base / "file").touch()
        for name, before in (("plain", 0o711), ("shared", 0o2711), ("of-all", 0o3711)):
            (base / name).mkdir()
            (base / name).chmod(before)
        for name in ("file", "plain", "shared", "of-all"):
            system.setPermission(files.Path(f"file:{base}/{name}"), permission)
        system.create(files.Path(f"file:{base}/made"), permission, True, 4096, 1, 4096, None).close()
        system.mkdirs(files.Path(f"file:{base}/new"), permission)
        modes.append({path.name: oct(path.stat().st_mode) for path in base.iterdir()})
    assert modes[0] == modes[1]
    assert len(modes[0]) == 6
    with pytest.raises(Py4JJavaError, match="NoSuchFile"):
        ours.setPermission(files.Path(f"file:{tmp_path}/missing"), permission)


def test_settings_of_one_session_are_not_those_of_others(spark: SparkSession, tmp_path: Path) -> None:
    """Hadoop has one object for local files in a JVM, and a session in which a job starts its own umask."""
    hadoop = cast("Any", spark._jvm).org.apache.hadoop.fs
    files = hadoop.FileSystem.getLocal(spark._jsparkSession.sessionState().newHadoopConf())
    conf, raw = files.getConf(), hadoop.RawLocalFileSystem()
    raw.initialize(files.getUri(), conf)
    behind = files.getClass().getSuperclass().getSuperclass().getDeclaredField("fs")
    behind.setAccessible(True)
    behind.set(files, raw)  # as before the first job
    counted = [one.getScheme() for one in hadoop.FileSystem.getAllStatistics()]

    local_disk_conf(told(spark, {"fs.permissions.umask-mode": "077", "fs.local.block.size": "1048576"}))
    assert not files.getRaw().equals(raw)
    assert files.getConf().equals(conf)
    assert [one.getScheme() for one in hadoop.FileSystem.getAllStatistics()] == counted
    spark.range(1).write.parquet(str(tmp_path / "rows"))
    assert {oct(path.stat().st_mode) for path in (tmp_path / "rows").glob("*.parquet")} == {"0o100644"}


def test_who_froze_over_a_file_of_a_log_finds_nothing_to_rename(spark: SparkSession, tmp_path: Path) -> None:
    """Its successor has cleared the logs before it plans a batch."""
    offsets = tmp_path / "offsets"
    late = Manager(told(spark, local_disk_conf(spark)), offsets).begin("4", "planned long ago", False)
    assert [p.suffix for p in offsets.iterdir()] == [".tmp"]
    clear_leftovers(Place(str(tmp_path)))
    with pytest.raises(Py4JJavaError, match="FileNotFoundException"):
        late.close()
    assert list(offsets.iterdir()) == []


def test_what_the_user_has_chosen_stays(spark: SparkSession) -> None:
    own = f"{CHECKPOINTING}.FileContextBasedCheckpointFileManager"
    assert local_disk_conf(told(spark, {MANAGER: own})) == {}
    assert local_disk_conf(told(spark, {FILE_CONTEXT: "org.apache.hadoop.fs.local.RawLocalFs"})) == {}
    assert local_disk_conf(told(spark, {"fs.file.impl": "org.example.Own"})) == {}


def test_where_hadoop_has_no_one_object_for_local_files_a_file_context_without_checksums_is_used(
    spark: SparkSession, tmp_path: Path
) -> None:
    """As on a cluster, whose executors have objects of their own."""
    session = told(spark, uncached())
    conf = local_disk_conf(session)
    assert list(conf) == [FILE_CONTEXT]
    ours = Manager(told(session, conf), tmp_path)
    for text in ("one", "other"):
        ours.write("1.delta", text, overwrite=True)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("1.delta", "other")]


def test_a_root_goes_on_without_checksum_files_and_with_them_again(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    """What a kill has left, of files and of checksums that fit no more, is in nobody's way."""
    feed = Feed(spark, tmp_path / "in", "id long")
    root = tmp_path / "root"
    default = told(spark, {MANAGER: f"{CHECKPOINTING}.FileContextBasedCheckpointFileManager"})
    for number, session in enumerate((default, spark, default)):
        feed.spark = session
        feed.write({"id": number})
        job = Job("counts", root=str(root), spark=session)
        rows = job.source("rows", feed.stream())
        counted = job.stage("counts", [rows], lambda f: f.groupBy(f.id * 0).count(), output_mode="update")
        job.sink("counts", counted, table=str(tmp_path / "counts"))
        start(job, available_now=True).await_termination()
        assert sorted(read_table(tmp_path / "counts")["count"].to_pylist()) == list(range(1, number + 2))
        # Not those of state: what the first run kept may upload a snapshot late.
        assert any((root / "native").glob("1/*/offsets/.*.crc")) == (session is default)
        for path in (root / "native").rglob(".*.crc") if number == 0 else ():
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    verified = CliRunner().invoke(main, ["verify", str(root)])
    assert verified.exit_code == 0, verified.output


def uncached() -> dict[str, str]:
    return {"fs.file.impl.disable.cache": "true"}
