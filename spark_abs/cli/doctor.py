"""`spark-abs doctor`: what of the package works in an environment; each part is tried on a small scale."""

from __future__ import annotations

import platform
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pyarrow as pa

from spark_abs.cli.output import Output
from spark_abs.cli.root_command import Context, output_option
from spark_abs.errors import AbsError, CommitConflict, StoreFailed, lacks_spark
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage
from spark_abs.store.table import Commit, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LIBRARIES = ("deltalake", "pyarrow", "pandas", "pyspark", "py4j")
_ROWS = 3


class Verdict(StrEnum):
    """What became of the trial of a part."""

    WORKS = "works"
    FAILS = "fails"
    UNTRIED = "untried"
    """It needs a part that fails."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A part of the environment."""

    part: str
    verdict: Verdict
    says: str
    """What it is, or why it fails."""


_WIDTH = max(map(len, Verdict))


@click.command
@output_option
@click.argument("root", required=False)
def doctor(root: str | None) -> None:
    """Try what the package needs, and print what this environment is, as text to send with a question.

    With a ROOT, a table is made there, committed to and deleted: a store must refuse the second of two
    commits. With pyspark, a session is started on this machine, and a small job runs in a directory of its
    own. Exit code 0: all works; 1: something does not.
    """
    context = click.get_current_context().ensure_object(Context)
    found = []
    for finding in examine(root):
        context.out.say(f"{finding.part}: {finding.verdict}")
        found.append(finding)
    context.out.result(found, lambda out: _show(out, found))
    if any(finding.verdict is not Verdict.WORKS for finding in found):
        click.get_current_context().exit(1)


def _show(out: Output, found: list[Finding]) -> None:
    for finding in found:
        out.line(f"{finding.verdict:{_WIDTH}}  {finding.part}: {finding.says}")


def examine(root: str | None) -> Iterator[Finding]:
    """Try the parts one after another.

    Args:
        root: where a job is to have its root: a table is made, committed to and deleted there; None to try
            no store.
    """
    where = Path(__file__).parents[1]
    yield Finding("spark_abs", Verdict.WORKS, f"{_version('spark-abs')} in {where}")
    yield Finding("Python", Verdict.WORKS, f"{platform.python_version()}, {sys.executable}")
    yield Finding("system", Verdict.WORKS, platform.platform())
    libraries = ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES)
    yield Finding("libraries", Verdict.WORKS, libraries)
    if root is not None:
        yield _tried("commits in the root", lambda: _commit(Root(root, Storage.given())))
    yield from _with_spark()


def _with_spark() -> Iterator[Finding]:
    yield (pyspark := _tried("pyspark", _pyspark))
    if pyspark.verdict is not Verdict.WORKS:
        for part in ("session", "Delta in Spark", "a job"):
            yield Finding(part, Verdict.UNTRIED, "needs pyspark")
        return
    started: list[SparkSession] = []
    yield (session := _tried("session", lambda: _session(started)))
    if session.verdict is not Verdict.WORKS:
        for part in ("Delta in Spark", "a job"):
            yield Finding(part, Verdict.UNTRIED, "needs a session")
        return
    try:
        with tempfile.TemporaryDirectory() as scratch:
            yield _tried("Delta in Spark", lambda: _delta(started[0], f"{scratch}/table"))
            yield _tried("a job", lambda: _job(started[0], Path(scratch)))
    finally:
        started[0].stop()


def _tried(part: str, attempt: Callable[[], str]) -> Finding:
    try:
        return Finding(part, Verdict.WORKS, attempt())
    except Exception as error:  # noqa: BLE001 - whatever fails is the answer
        said = str(error).strip().splitlines() or [""]
        kind = "" if isinstance(error, AbsError) else f"{type(error).__name__}: "
        return Finding(part, Verdict.FAILS, kind + said[0])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit(root: Root) -> str:
    """Commit the same version twice: the store must refuse the second one."""
    place = root.place(f"_doctor-{uuid.uuid4().hex}")
    try:
        Table.ensure(place, pa.schema([("n", pa.int64())]))
        one, other = Table.open(place), Table.open(place)
        one.commit_next(Commit())
        try:
            other.commit_next(Commit())
        except CommitConflict:
            return f"{root.uri} refuses the second of two commits"
        raise StoreFailed(f"{root.uri} took two commits of one version: it creates no file atomically")
    finally:
        with suppress(OSError):
            place.fs.delete_dir(place.path)


def _pyspark() -> str:
    try:
        from spark_abs.spark.versions import DELTA_CONNECTOR, PYSPARK, require_supported, rewrites_state
    except ModuleNotFoundError as missing:
        if not lacks_spark(missing):
            raise
        raise AbsError(
            "not installed: jobs need it, pip install 'spark-abs[spark]'; commands that read a root do not, "
            "nor does a restore of plain tables"
        ) from missing
    require_supported()
    limits = "" if rewrites_state() else "; edits and rescales need Spark 4.2"
    return f"{PYSPARK}, with {DELTA_CONNECTOR}{limits}"


def _session(started: list[SparkSession]) -> str:
    from spark_abs.spark.gateway import errors_kept
    from spark_abs.spark.session import spark_session

    conf = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1"}
    with errors_kept():
        started.append(spark := spark_session("spark-abs doctor", "local[2]", **conf))
    spark.sparkContext.setLogLevel("OFF")
    java = spark._jvm.System.getProperty("java.version")  # type: ignore[union-attr]
    return f"Spark {spark.version} on Java {java}"


def _delta(spark: SparkSession, table: str) -> str:
    for _ in range(2):
        spark.range(_ROWS).write.format("delta").mode("append").save(table)
    _require(spark.read.format("delta").load(table).count(), 2 * _ROWS)
    return "a table was written and read"


def _job(spark: SparkSession, scratch: Path) -> str:
    from spark_abs.job import Job

    (scratch / "input").mkdir()
    (scratch / "input/rows.json").write_text("\n".join(f'{{"n": {n}}}' for n in range(_ROWS)))

    def same(frame: DataFrame) -> DataFrame:
        return frame

    job = Job("doctor", root=str(scratch / "root"), spark=spark)
    read = job.stage("read", [spark.readStream.schema("n long").json(str(scratch / "input"))], same)
    job.sink("rows", job.stage("copy", [read], same), table=str(scratch / "rows"))
    job.start(available_now=True).await_termination()
    _require(spark.read.format("delta").load(str(scratch / "rows")).count(), _ROWS)
    return "two stages, the channel between them, a checkpoint and a table"


def _require(rows: int, wanted: int) -> None:
    if rows != wanted:
        raise AbsError(f"{rows} rows in place of {wanted}")
