"""`spark-abs doctor`: what of the package works in an environment; each part is tried on a small scale."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pyarrow as pa

from spark_abs.cli.health import examine_job
from spark_abs.cli.root_command import Context, output_option, storage_errors
from spark_abs.errors import AbsError, CommitConflict, StoreFailed, get_spark, lacks_spark
from spark_abs.packages import installed
from spark_abs.store.control import PATH as CONTROL
from spark_abs.store.root import Root
from spark_abs.store.storage import Place, Storage, in_object_store, told
from spark_abs.store.table import Commit, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LIBRARIES = ("deltalake", "pyarrow", "pandas", "pyspark", "py4j")
_ROWS = 3
_ROUNDS, _WRITERS = 10, 4
_STARTS_S, _ANSWERS_S = 900.0, 180.0
"""How long Spark may take to start, its first jars of a store included, and how long each other trial."""


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
_THREADS = "spark-abs-doctor"


@click.command
@output_option
@click.argument("root", required=False)
def doctor(root: str | None) -> None:
    """Say what is wrong with the job at a ROOT; without a job, try what the package needs.

    With the ROOT of a job, of wrapped or of watched queries, say in sentences what is wrong, with the numbers
    that led there and the command to type. Nothing is tried and no session is started. Exit code 0: nothing
    is wrong; 1: something is.

    Otherwise print what this environment is, as text to send with a question. In a ROOT without a job,
    writers race for the commits of a table: a store must let exactly one of them make each commit. With
    pyspark, a session is started on this machine; a table and a small job are tried in the ROOT, or in a
    directory of their own. What the trials leave in the ROOT is deleted. Exit code 0: all works; 1: something
    does not.
    """
    context = click.get_current_context().ensure_object(Context)
    if root is not None and _has_job(root):
        with storage_errors(root):
            examine_job(context, Root(root, Storage.given()))
        return
    found = []
    for finding in examine(root):
        found.append(finding)
        if not context.out.json:
            context.out.line(f"{finding.verdict:{_WIDTH}}  {finding.part}: {finding.says}")
    context.out.result(found, lambda _: None)
    if any(finding.verdict is not Verdict.WORKS for finding in found):
        _end()


def _end() -> None:
    """End with exit code 1, also while a trial hangs: Python's own end would wait for a library, or crash."""
    if any(thread.name.startswith(_THREADS) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    click.get_current_context().exit(1)


def _has_job(root: str) -> bool:
    """Say whether there is a job; not if that cannot be found out in time: the trials then say why."""
    look = _tried("a job", lambda: str(Root(root, Storage.given()).place(CONTROL).exists()), _ANSWERS_S)
    return look.verdict is Verdict.WORKS and look.says == str(True)


def examine(root: str | None) -> Iterator[Finding]:
    """Try the parts one after another.

    Args:
        root: where a job is to have its root: tables and a job are tried in a directory there, which is
            deleted at the end; None to try no store.
    """
    where = Path(__file__).parents[1]
    yield Finding("spark_abs", Verdict.WORKS, f"{_version('spark-abs')} in {where}")
    yield Finding("Python", Verdict.WORKS, f"{platform.python_version()}, {sys.executable}")
    yield Finding("system", Verdict.WORKS, platform.platform())
    libraries = ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES)
    yield Finding("libraries", Verdict.WORKS, libraries)
    if root is None:
        with tempfile.TemporaryDirectory() as scratch:
            yield from _with_spark(Storage.given().place(scratch))
        return
    try:
        trials = _Trials(Root(root, Storage.given()))
    except (AbsError, OSError) as error:
        yield Finding(_COMMITS, Verdict.FAILS, _reason(error))
        yield from _untried("a root", *_OF_SPARK)
        return
    try:
        yield (commits := _tried(_COMMITS, trials.race, _ANSWERS_S))
        if commits.verdict is Verdict.WORKS:
            yield from _with_spark(trials.place)
        else:
            yield from _untried(_COMMITS, *_OF_SPARK)
    finally:
        left = _tried("what is left in the root", trials.clear, _ANSWERS_S)
    yield left


_COMMITS = "commits in the root"
_OF_SPARK = ("pyspark", "session", "Delta in Spark", "a job")


def _with_spark(scratch: Place) -> Iterator[Finding]:
    yield (pyspark := _tried("pyspark", _pyspark))
    if pyspark.verdict is not Verdict.WORKS:
        yield from _untried("pyspark", *_OF_SPARK[1:])
        return
    started: list[SparkSession] = []
    yield (session := _tried("session", lambda: _session(started, scratch), _STARTS_S))
    if session.verdict is not Verdict.WORKS:
        yield from _untried("a session", *_OF_SPARK[2:])
        return
    with ExitStack() as ending:
        ending.callback(_tried, "the end", lambda: _stop(started[0]), _ANSWERS_S)
        table = scratch.below("table")
        yield (delta := _tried("Delta in Spark", lambda: _delta(started[0], table), _ANSWERS_S))
        if delta.verdict is Verdict.WORKS:
            yield _tried("a job", lambda: _job(started[0], scratch), _ANSWERS_S)
        else:
            yield from _untried("Delta in Spark", "a job")


def _untried(needed: str, *parts: str) -> Iterator[Finding]:
    return (Finding(part, Verdict.UNTRIED, f"needs {needed}") for part in parts)


def _tried(part: str, attempt: Callable[[], str], limit_s: float | None = None) -> Finding:
    """Try a part, in a thread that is left behind after a while: nothing ends what hangs in the JVM."""
    answer: list[Finding] = []

    def run() -> None:
        try:
            answer.append(Finding(part, Verdict.WORKS, attempt()))
        except Exception as error:  # noqa: BLE001 - whatever fails is the answer
            answer.append(Finding(part, Verdict.FAILS, _reason(error)))

    thread = threading.Thread(target=run, name=f"{_THREADS} {part}", daemon=True)
    thread.start()
    thread.join(limit_s)
    return answer[0] if answer else Finding(part, Verdict.FAILS, f"no answer within {limit_s:.0f} s")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {told(error)}"
    said = str(error).strip().splitlines() or [""]
    kind = "" if isinstance(error, AbsError) else f"{type(error).__name__}: "
    return kind + said[0]


def _version(package: str) -> str:
    return installed([package]).get(package, "not installed")


class _Trials:
    """A directory in a root for the trials."""

    def __init__(self, root: Root) -> None:
        self.place = root.place(f"_doctor-{uuid.uuid4().hex}")
        self._top, self._stored, self._is_new = root.top, in_object_store(root.uri), False
        above = () if self._stored else (Path(root.uri), *Path(root.uri).parents)
        self._missing = [path for path in above if not path.exists()]

    def race(self) -> str:
        """Let writers race in the directory; see `_race`."""
        self._is_new = self._stored and not self._top.exists()
        return _race(self.place)

    def clear(self) -> str:
        """Delete the directory, and those above it that were not there before; say so.

        Raises:
            StoreFailed: something could not be deleted.
        """
        try:
            if self.place.exists():
                self.place.fs.delete_dir(self.place.path)
            for path in self._missing:
                if path.exists():
                    os.rmdir(path)
        except OSError as error:
            raise StoreFailed(
                f"the trials may have left {self.place}, delete it by hand: {told(error)}"
            ) from error
        if self._is_new and self._top.exists():  # S3's client marks the directory above one that it deletes
            return f"an empty directory, {self._top}, which was not there before"
        if self._missing:
            return f"nothing; {self._missing[0]} was not there before: the first start of a job makes it"
        return "nothing"


def _race(scratch: Place) -> str:
    """Let several writers at once commit the same version, again and again: one each must win."""
    place = scratch.below("commits")
    Table.ensure(place, pa.schema([("n", pa.int64())]))
    for turn in range(1, _ROUNDS + 1):
        ready = threading.Barrier(_WRITERS)
        with ThreadPoolExecutor(_WRITERS) as pool:
            tables = [Table.open(place) for _ in range(_WRITERS)]
            won = sum(pool.map(_wins, tables, [ready] * _WRITERS))
        if won != 1:
            raise StoreFailed(
                f"{place} took {won} commits of version {turn}: the store does not create a file only where "
                "there is none, and a root there would lose commits"
            )
    return f"of {_WRITERS} writers at once exactly one made each of {_ROUNDS} commits"


def _wins(table: Table, ready: threading.Barrier) -> bool:
    ready.wait()
    try:
        table.commit_next(Commit())
    except CommitConflict:
        return False
    return True


def _pyspark() -> str:
    try:
        from spark_abs.spark.versions import (
            DELTA_CONNECTOR,
            PYSPARK,
            STATE_REWRITER_SINCE,
            require_supported,
            rewrites_state,
        )
    except ModuleNotFoundError as missing:
        if not lacks_spark(missing):
            raise
        raise AbsError(
            f"jobs need it, and {get_spark()}; commands that read a root do not, nor does a restore of plain "
            "tables"
        ) from missing
    require_supported()
    limits = "" if rewrites_state() else f"; edits and rescales need Spark {STATE_REWRITER_SINCE}"
    return f"{PYSPARK}, with {DELTA_CONNECTOR}{limits}"


def _session(started: list[SparkSession], scratch: Place) -> str:
    from spark_abs.spark.gateway import errors_kept
    from spark_abs.spark.session import apply_storage_conf, session_at

    conf = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1"}
    with errors_kept():
        started.append(spark := session_at([scratch.uri], "spark-abs doctor", **conf))
    spark.sparkContext.setLogLevel("OFF")
    apply_storage_conf(spark, scratch.storage, [scratch.uri])
    java = spark._jvm.System.getProperty("java.version")  # type: ignore[union-attr]
    return f"Spark {spark.version} on Java {java}"


def _stop(spark: SparkSession) -> str:
    spark.stop()
    return "the session has ended"


def _delta(spark: SparkSession, table: Place) -> str:
    for _ in range(2):
        spark.range(_ROWS).write.format("delta").mode("append").save(table.uri)
    _require(spark.read.format("delta").load(table.uri).count(), 2 * _ROWS)
    return f"a table was written and read at {table}"


def _job(spark: SparkSession, scratch: Place) -> str:
    from spark_abs.job import Job

    scratch.write("input/rows.json", "\n".join(f'{{"n": {n}}}' for n in range(_ROWS)).encode())
    rows = scratch.below("rows").uri

    def same(frame: DataFrame) -> DataFrame:
        return frame

    job = Job("doctor", root=scratch.below("root").uri, spark=spark)
    read = job.stage("read", [spark.readStream.schema("n long").json(scratch.below("input").uri)], same)
    job.sink("rows", job.stage("copy", [read], same), table=rows)
    job.start(available_now=True).await_termination()
    _require(spark.read.format("delta").load(rows).count(), _ROWS)
    return "two stages, the channel between them, a checkpoint and a table"


def _require(rows: int, wanted: int) -> None:
    if rows != wanted:
        raise AbsError(f"{rows} rows in place of {wanted}")
