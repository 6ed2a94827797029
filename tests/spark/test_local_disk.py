"""Native checkpoints on a local disk: renamed in one step, without checksum files (ADR 8)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from spark_abs.cli.main import main
from spark_abs.job import Job
from spark_abs.plan.jvm import local_disk_conf
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
