"""Rows of a job go to PostgreSQL once, and come back as a restore says."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.errors import Refused, SinkFailed, SinkUnreachable, UsageError
from spark_abs.protocol.control import OutsideSink
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.job_support import Feed, eventually
from tests.outside.server import PASSWORD, PostgresServer
from tests.spark.conftest import Start

TABLES = """
DROP TABLE IF EXISTS rows, sums, sums_spark_abs_history, spark_abs_marker;
DROP TABLE IF EXISTS last, last_spark_abs_history, last_spark_abs_deleted;
CREATE TABLE last (k bigint PRIMARY KEY, id bigint, ts timestamptz);
CREATE TABLE rows (id bigint, k bigint, ts timestamptz, price numeric(20,2), tags text[], more jsonb,
                   raw bytea, day date, seen timestamp, flag boolean, share double precision, note text,
                   added timestamptz DEFAULT now());
CREATE TABLE sums (k bigint PRIMARY KEY, n bigint NOT NULL, total bigint)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as running:
        yield running


@pytest.fixture(autouse=True)
def environment(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.export(monkeypatch)
    monkeypatch.setenv("SUMS_PASSWORD", os.environ.pop("PGPASSWORD"))
    server.run(TABLES)


def wide(rows: DataFrame) -> DataFrame:
    return rows.selectExpr(
        "id",
        "k",
        "ts",
        "CAST(v AS decimal(18,2)) / 4 * 4 AS wide",
        "CAST(v / 4 AS decimal(12,2)) AS price",
        "IF(v % 3 = 0, null, array('a\"', null, '{b},\\\\')) AS tags",
        "named_struct('k', k, 'm', map('x', id)) AS more",
        "CAST(CAST(id AS string) AS binary) AS raw",
        "CAST(ts AS date) AS day",
        "CAST(ts AS timestamp_ntz) AS seen",
        "v > 5 AS flag",
        "v / 8 AS share",
        "IF(id % 2 = 0, '', concat('\"', id, ',\n')) AS note",
    ).drop("wide")


def declare(spark: SparkSession, root: Path, feed: Feed, sent: str = "rows") -> spark_abs.Job:
    job = spark_abs.Job("out", root=str(root), spark=spark, interval="300ms")
    rows = job.source("rows", feed.stream(), outputs={"wide": wide})
    sums = job.stage(
        "sums",
        [rows],
        lambda frame: frame.groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("total")),
        output_mode="update",
        shuffle_partitions=2,
    )
    if sent:
        job.sink(sent, rows["wide"], postgres=spark_abs.Postgres("rows", password_env="SUMS_PASSWORD"))
    job.sink(
        "sums",
        sums,
        postgres=spark_abs.Postgres(
            "sums", key=("k",), mode="upsert", history=True, password_env="SUMS_PASSWORD"
        ),
    )
    return job


def declare_batches(spark: SparkSession, root: Path, feed: Feed) -> spark_abs.Job:
    """No checkpoint is taken but on demand: what comes out comes with the batches."""
    job = spark_abs.Job("out", root=str(root), spark=spark, interval="1h")
    rows = job.source("rows", feed.stream(), outputs={"wide": wide})
    sums = job.stage(
        "sums",
        [rows],
        lambda frame: frame.groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("total")),
        output_mode="update",
        shuffle_partitions=2,
    )
    appended = spark_abs.Postgres("rows", visible="batch", password_env="SUMS_PASSWORD")
    job.sink("rows", rows["wide"], postgres=appended)
    kept = replace(appended, table="sums", key=("k",), mode="upsert", history=True)
    job.sink("sums", sums, postgres=kept)
    return job


def expected(feed: Feed, files: int) -> tuple[list[int], dict[int, tuple[int, int]]]:
    fed = [row for rows in feed.files[:files] for row in rows]
    sums: dict[int, tuple[int, int]] = {}
    for row in fed:
        n, total = sums.get(int(str(row["k"])), (0, 0))
        sums[int(str(row["k"]))] = (n + 1, total + int(str(row["v"])))
    return sorted(int(str(row["id"])) for row in fed), sums


def found(server: PostgresServer) -> tuple[list[int], dict[int, tuple[int, int]]]:
    ids = [row[0] for row in server.run("SELECT id FROM rows ORDER BY id")]
    return ids, {k: (n, total) for k, n, total in server.run("SELECT k, n, total FROM sums")}


def fill(feed: Feed, files: int) -> None:
    for _ in range(files):
        at = len(feed.files)
        feed.write(*({"id": at * 3 + n, "k": n, "v": at + n, "ts": at} for n in range(3)))


def test_rows_go_out_once_and_come_back_with_a_restore(
    spark: SparkSession,
    server: PostgresServer,
    tmp_path: Path,
    start: Start,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root, feed = tmp_path / "root", Feed(spark, tmp_path / "feed")
    caplog.set_level("DEBUG")
    said = []

    # A table that cannot take the rows is said before the job starts.
    server.run("ALTER TABLE rows ALTER price TYPE numeric(4,1), ALTER note SET DATA TYPE int USING 1")
    with pytest.raises(UsageError, match=r"(?s)'price' is numeric\(4,1\).*'note' is integer") as refused:
        start(declare(spark, root, feed))
    said.append(str(refused.value))
    server.run("DROP TABLE rows; " + TABLES)

    fill(feed, 3)
    run = start(declare(spark, root, feed))
    eventually(run, lambda: found(server) == expected(feed, 3), "three files outside")
    run.stop(savepoint="early")
    assert found(server) == expected(feed, 3)
    first = "SELECT ts, price, tags, more, raw, day, seen, flag, share, note FROM rows WHERE id = 1"
    (ts, price, tags, more, raw, day, seen, flag, share, note) = server.run(first)[0]
    assert (str(price), tags, more, raw) == ("0.25", ['a"', None, "{b},\\"], {"k": 1, "m": {"x": 1}}, b"1")
    assert (ts.isoformat()[:19], str(day)) == ("2023-11-14T22:13:20", "2023-11-14")
    assert (seen.isoformat(), flag, share, note) == ("2023-11-14T22:13:20", False, 0.125, '"1,\n')

    # The server goes down and comes back: the stream goes on, and what it has read follows.
    run = start(declare(spark, root, feed))
    server.stop()
    fill(feed, 2)
    assert run.checkpoint() > 0
    server.start()
    eventually(run, lambda: found(server) == expected(feed, 5), "five files outside")
    run.stop()

    # Appended rows cannot be taken back, and that is said; nothing was changed.
    with pytest.raises(
        Refused, match=r"sink rows \(PostgreSQL\) has committed the epochs of checkpoints"
    ) as no:
        spark_abs.open(str(root)).restore("early")
    said.append(str(no.value))
    assert found(server) == expected(feed, 5)

    # Forced, they stay; what upserts replaced is back, and the job goes on from there.
    done = spark_abs.open(str(root)).restore("early", force=["outside"])
    said.append(str(done.plan.plain()))
    ids, _ = expected(feed, 5)
    assert found(server) == (ids, expected(feed, 3)[1])
    fill(feed, 1)
    run = start(declare(spark, root, feed), available_now=True)
    run.await_termination()
    counted = Counter(found(server)[0])
    assert found(server)[1] == expected(feed, 6)[1]
    assert counted == Counter(expected(feed, 6)[0]) + Counter(expected(feed, 5)[0][9:])

    # To the newest nothing is undone, and no word is needed.
    spark_abs.open(str(root)).restore("latest")
    start(declare(spark, root, feed), available_now=True).await_termination()
    assert Counter(found(server)[0]) == counted

    # Nothing that was written anywhere holds the password.
    written = [path.read_bytes() for path in root.rglob("*") if path.is_file()]
    assert not [1 for data in written if PASSWORD.encode() in data]
    assert PASSWORD not in caplog.text + "".join(said)
    records = Control.open(Root(str(root))).state.outside
    assert [(type(r), r.sink, r.begun) for r in records] == [
        (OutsideSink, "rows", True),
        (OutsideSink, "sums", True),
    ]


def test_a_sink_that_refuses_rows_ends_the_run_and_says_which(
    spark: SparkSession, server: PostgresServer, tmp_path: Path, start: Start
) -> None:
    feed = Feed(spark, tmp_path / "feed")
    fill(feed, 1)
    server.run("ALTER TABLE rows ADD CHECK (id < 2)")
    with pytest.raises(
        SinkFailed, match=r"sink 'rows' did not take 3 rows of checkpoint 1: .*violates check"
    ):
        start(declare(spark, tmp_path / "root", feed), available_now=True).await_termination()
    assert found(server)[0] == []

    server.run("ALTER TABLE rows DROP CONSTRAINT rows_id_check")
    start(declare(spark, tmp_path / "root", feed), available_now=True).await_termination()
    assert found(server) == expected(feed, 1)

    # Without its mark it does not start over in silence, nor without its server.
    server.run("DELETE FROM spark_abs_marker WHERE sink = 'rows'")
    with pytest.raises(Refused, match="its mark is missing"):
        start(declare(spark, tmp_path / "root", feed), available_now=True)
    server.stop()
    try:
        with pytest.raises(SinkUnreachable):
            start(declare(spark, tmp_path / "root", feed), available_now=True)
    finally:
        server.start()


def test_a_sink_that_left_the_job_does_not_come_back_with_a_gap(
    spark: SparkSession, server: PostgresServer, tmp_path: Path, start: Start
) -> None:
    root, feed = tmp_path / "root", Feed(spark, tmp_path / "feed")
    fill(feed, 1)
    start(declare(spark, root, feed), available_now=True).await_termination()
    fill(feed, 1)
    start(declare(spark, root, feed, sent=""), available_now=True).await_termination()
    assert found(server) == (expected(feed, 1)[0], expected(feed, 2)[1])

    with pytest.raises(Refused, match="sink 'rows' was not declared at checkpoint"):
        start(declare(spark, root, feed), available_now=True)

    # What it has sent still counts where the job goes on without it: no word is needed, also not twice.
    for _ in range(2):
        spark_abs.open(str(root)).restore("latest")
        assert found(server) == (expected(feed, 1)[0], expected(feed, len(feed.files))[1])
        fill(feed, 1)
        start(declare(spark, root, feed, sent=""), available_now=True).await_termination()
    with pytest.raises(Refused, match="sink 'rows' was not declared at checkpoint"):
        start(declare(spark, root, feed), available_now=True)

    # Under another name it begins with what comes.
    start(declare(spark, root, feed, sent="more"), available_now=True).await_termination()
    fill(feed, 1)
    start(declare(spark, root, feed, sent="more"), available_now=True).await_termination()
    assert found(server)[0] == expected(feed, 1)[0] + expected(feed, 5)[0][12:]


def test_batches_go_out_as_they_come_and_a_restore_undoes_those_behind_its_checkpoint(
    spark: SparkSession, server: PostgresServer, tmp_path: Path, start: Start
) -> None:
    root, feed = tmp_path / "root", Feed(spark, tmp_path / "feed")
    fill(feed, 2)
    run = start(declare_batches(spark, root, feed))
    eventually(run, lambda: found(server) == expected(feed, 2), "two files outside, and no checkpoint")
    assert run.savepoint("early") == 1
    fill(feed, 1)
    eventually(run, lambda: found(server) == expected(feed, 3), "a file after the savepoint")

    server.restart()
    fill(feed, 1)
    eventually(run, lambda: found(server) == expected(feed, 4), "a file after a restart of the server")
    run.stop()
    run = start(declare_batches(spark, root, feed))
    fill(feed, 1)
    eventually(run, lambda: found(server) == expected(feed, 5), "a file of the next run")
    run.stop()
    assert found(server) == expected(feed, 5)

    with pytest.raises(Refused, match=r"sink rows \(PostgreSQL\) has committed rows after that checkpoint"):
        spark_abs.open(str(root)).restore("early")
    assert found(server) == expected(feed, 5)
    spark_abs.open(str(root)).restore("early", force=["outside"])
    assert found(server) == (expected(feed, 5)[0], expected(feed, 2)[1])
    start(declare_batches(spark, root, feed), available_now=True).await_termination()
    assert found(server)[1] == expected(feed, 5)[1]
    twice = Counter(expected(feed, 5)[0][6:])
    assert Counter(found(server)[0]) == Counter(expected(feed, 5)[0]) + twice


def declare_changes(spark: SparkSession, root: Path, feed: Feed) -> spark_abs.Job:
    job = spark_abs.Job("out", root=str(root), spark=spark, interval="300ms")
    last = spark_abs.Postgres(
        "last",
        key="k",
        mode="upsert",
        sequence_by="id",
        apply_as_deletes="v < 0 AND ts IS NOT NULL",
        except_columns="v",
        history=True,
        password_env="SUMS_PASSWORD",
    )
    job.sink("last", job.source("changes", feed.stream()), postgres=last)
    return job


def test_changes_of_a_key_that_come_late_lose_and_a_restore_takes_changes_back(
    spark: SparkSession, server: PostgresServer, tmp_path: Path, start: Start
) -> None:
    root, feed = tmp_path / "root", Feed(spark, tmp_path / "feed")
    chance = random.Random(7)

    def change(files: int) -> None:
        for _ in range(files):
            drawn = [(chance.randrange(99), chance.randrange(4), chance.choice([-1, 1, 1])) for _ in range(5)]
            feed.write(*({"id": at, "k": k, "v": v, "ts": at} for at, k, v in drawn))

    def newest() -> dict[int, int]:
        last: dict[int, tuple[int, int]] = {}
        for row in (row for rows in feed.files for row in rows):
            at, key, value = (int(str(row[column])) for column in ("id", "k", "v"))
            if key not in last or at >= last[key][0]:
                last[key] = (at, value)
        return {key: at for key, (at, value) in last.items() if value > 0}

    def there() -> dict[int, int]:
        return dict(server.run("SELECT k, id FROM last"))

    change(2)
    run = start(declare_changes(spark, root, feed))
    eventually(run, lambda: there() == newest(), "two files of changes outside")
    run.stop(savepoint="early")
    early = newest()
    change(4)
    start(declare_changes(spark, root, feed), available_now=True).await_termination()
    assert there() == newest() != early
    spark_abs.open(str(root)).restore("early")
    assert there() == early
    change(1)
    start(declare_changes(spark, root, feed), available_now=True).await_termination()
    assert there() == newest()
