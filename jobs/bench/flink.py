"""The same work in Flink SQL: rows a second, CPU seconds, durations of checkpoints.

Flink and ours read the same rows in turns, with two slots and a checkpoint every three seconds, exactly
once, state in RocksDB. `make bench-flink` names the directory of Flink's jars in `FLINK_JARS`; its SQL client
runs a script in one JVM, which is at once JobManager and TaskManager. Its time is that of the job, from
running to finished, by its own log: the start of the JVM does not count, as that of our session does not.

Flink is set up as for production: 512 MB of managed memory a slot (in one JVM the size of the process
counts for nothing, and a slot's RocksDB would have 64 MB), timers on the heap, incremental checkpoints, rows
handed on without copies, and mini-batches with an aggregation of two phases for the wide rows.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from rich.console import Console

import attribution
import spark_abs
from bench import wide
from bench.figures import Figure, figure, ratios
from bench.processes import cpu_seconds
from bench.traffic import write_events
from spark_abs.observe.listing import event_rows
from spark_abs.store.history import HistoryEvent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JARS = "FLINK_JARS"
_FILES, _CLICKS, _ORDERS, _USERS = 20, 20_000, 5_000, 200_000
_OPENS = ("lang", "util", "net", "io", "nio", "time", "text", "lang.reflect", "util.concurrent")
_CONF = """
execution:
  target: local
  runtime-mode: STREAMING
  checkpointing: {{interval: {interval}, mode: EXACTLY_ONCE, dir: "file://{base}/checkpoints"}}
state:
  backend: {{type: rocksdb, incremental: true, rocksdb: {{timer-service: {{factory: HEAP}}}}}}
pipeline: {{object-reuse: true}}
parallelism: {{default: 2}}
taskmanager:
  numberOfTaskSlots: 2
  memory: {{managed: {{size: 1g}}, network: {{min: 128m, max: 128m}}}}
rest: {{port: 0}}
"""
_LOGGING = """
rootLogger.level = INFO
rootLogger.appenderRef.file.ref = File
appender.file.name = File
appender.file.type = FILE
appender.file.fileName = {base}/log
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd HH:mm:ss.SSS}} %m%n
"""
_WIDE = """
SET 'table.dml-sync' = 'true';
SET 'table.exec.mini-batch.enabled' = 'true';
SET 'table.exec.mini-batch.allow-latency' = '1 s';
SET 'table.exec.mini-batch.size' = '20000';
SET 'table.optimizer.agg-phase-strategy' = 'TWO_PHASE';
CREATE TABLE src (`key` BIGINT, amount BIGINT, id BIGINT, price DOUBLE, digest STRING, other STRING)
  WITH ('connector' = 'filesystem', 'path' = 'file://{rows}', 'format' = 'parquet');
CREATE TABLE snk (`key` BIGINT, n BIGINT, amount BIGINT) WITH ('connector' = 'blackhole');
INSERT INTO snk SELECT `key`, COUNT(*), SUM(amount) FROM src GROUP BY `key`;
"""
# COUNT(order_id), not COUNT(*): a view of which two statements need the same columns is planned once. If the
# second needs other columns, it has a join of its own, with a state of its own.
_ATTRIBUTION = """
SET 'table.dml-sync' = 'true';
SET 'table.local-time-zone' = 'UTC';
CREATE TABLE clicks (click_id STRING, `user` STRING, campaign STRING, click_time TIMESTAMP_LTZ(3),
  WATERMARK FOR click_time AS click_time - INTERVAL '10' SECOND)
  WITH ('connector' = 'filesystem', 'path' = 'file://{rows}/clicks', 'format' = 'parquet');
CREATE TABLE orders (order_id STRING, `user` STRING, amount_cents BIGINT, order_time TIMESTAMP_LTZ(3),
  WATERMARK FOR order_time AS order_time - INTERVAL '10' SECOND)
  WITH ('connector' = 'filesystem', 'path' = 'file://{rows}/orders', 'format' = 'parquet');
CREATE TABLE attributed (order_id STRING, amount_cents BIGINT, order_time TIMESTAMP_LTZ(3), campaign STRING)
  WITH ('connector' = 'filesystem', 'path' = 'file://{base}/attributed', 'format' = 'parquet');
CREATE TABLE totals (window_start TIMESTAMP(3), campaign STRING, orders BIGINT, amount_cents BIGINT)
  WITH ('connector' = 'filesystem', 'path' = 'file://{base}/totals', 'format' = 'parquet');
CREATE VIEW matched AS SELECT o.order_id, o.amount_cents, o.order_time, c.campaign
  FROM orders AS o LEFT JOIN clicks AS c ON o.`user` = c.`user`
  AND c.click_time BETWEEN o.order_time - INTERVAL '60' SECOND AND o.order_time;
EXECUTE STATEMENT SET BEGIN
INSERT INTO attributed SELECT * FROM matched;
INSERT INTO totals SELECT window_start, COALESCE(campaign, 'none'), COUNT(order_id), SUM(amount_cents)
  FROM TABLE(TUMBLE(TABLE matched, DESCRIPTOR(order_time), INTERVAL '1' MINUTE))
  GROUP BY window_start, window_end, COALESCE(campaign, 'none');
END;
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one system."""

    seconds: float
    cpu_s: float
    checkpoints_ms: tuple[int, ...]


def figures(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Run both jobs in both systems, in turns; the first turn is not counted."""
    base.mkdir()
    wide.write(spark, base / "wide")
    write_events(base / "events", _FILES, _CLICKS, _ORDERS, _USERS)
    for kind in ("clicks", "orders"):
        _in_one_file(base / "events" / kind, base / "ordered" / kind)
    ways: dict[str, tuple[int, dict[str, Callable[[Path], Measured]]]] = {
        "wide": (
            wide.ROWS,
            {
                "flink": lambda place: _flink(place, _WIDE.format(rows=base / "wide")),
                "ours": lambda place: _ours(place, lambda: wide.declare(spark, place, base / "wide")),
            },
        ),
        "attribution": (
            _FILES * (_CLICKS + _ORDERS),
            {
                "flink": lambda place: _flink(place, _ATTRIBUTION.format(rows=base / "ordered", base=place)),
                "ours": lambda place: _ours(place, lambda: _attribution(spark, place, base / "events")),
            },
        ),
    }
    for job, (rows, systems) in ways.items():
        measured: dict[str, list[Measured]] = {name: [] for name in systems}
        for turn in range(-1, runs):
            for name, way in systems.items():
                found = way(base / "run")
                shutil.rmtree(base / "run")
                duration = median(found.checkpoints_ms or [0])
                console.print(
                    f"{job}, {name}: {rows / found.seconds:.0f} rows/s, {found.cpu_s:.1f} s of CPU, "
                    f"{len(found.checkpoints_ms)} checkpoints of {duration} ms"
                )
                if turn >= 0:
                    measured[name].append(found)
        seconds = {name: [m.seconds for m in several] for name, several in measured.items()}
        cpu = {name: [m.cpu_s for m in several] for name, several in measured.items()}
        yield figure(f"flink_{job}_rows", ratios(seconds["flink"], seconds["ours"]))
        yield figure(f"flink_{job}_cpu", ratios(cpu["ours"], cpu["flink"]))
        for name, several in measured.items():
            lasted = [median(m.checkpoints_ms or [0]) for m in several]
            yield figure(f"flink_{job}_rows_{name}", [rows / m.seconds for m in several], "rows/s")
            yield figure(f"flink_{job}_checkpoint_{name}", lasted, "ms")


def _in_one_file(several: Path, one: Path) -> None:
    """Write the rows of several files into one: Flink reads files in no order, and these are one of time."""
    one.mkdir(parents=True)
    pq.write_table(pa.concat_tables(map(pq.read_table, sorted(several.iterdir()))), one / "0.parquet")


def _attribution(spark: SparkSession, place: Path, rows: Path) -> spark_abs.Job:
    config = replace(
        attribution.Config.read(Path("conf/attribution.yaml"), str(place)),
        clicks=str(rows / "clicks"),
        orders=str(rows / "orders"),
        format="parquet",
        trigger="0 seconds",
        settings={"checkpoint": {"interval": "3s"}},
    )
    return attribution.declare(spark, config)


def _ours(place: Path, declare: Callable[[], spark_abs.Job]) -> Measured:
    place.mkdir()
    job, used, began = declare(), cpu_seconds(), time.monotonic()
    job.start(available_now=True).await_termination()
    took, used = time.monotonic() - began, cpu_seconds() - used
    rows = event_rows(job.root)
    completed = [r for r in rows if r.event is HistoryEvent.COMPLETED and r.stage is None]
    return Measured(took, used, tuple(r.duration_ms for r in completed if r.duration_ms is not None))


def sql_client(place: Path, script: str, interval: str) -> tuple[list[str], dict[str, str]]:
    """Return a command that runs a script of Flink SQL, and its environment.

    Args:
        place: a directory for its files, among them `log`.
        script: the script.
        interval: of checkpoints.
    """
    jars, brought = Path(os.environ[JARS]), Path(pyspark.__file__).parent / "jars"
    (place / "config.yaml").write_text(_CONF.format(base=place, interval=interval))
    (place / "log4j2.properties").write_text(_LOGGING.format(base=place))
    (place / "job.sql").write_text(script)
    classes = [f"{jars}/*", *map(str, [*brought.glob("hadoop-client-*"), *brought.glob("commons-logging-*")])]
    command = [
        "java", "-Xmx4g", f"-Duser.home={place}", f"-Dlog4j.configurationFile={place}/log4j2.properties",
        *(f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in _OPENS),
        "-cp", ":".join(classes), "org.apache.flink.table.client.SqlClient", "-f", f"{place}/job.sql",
    ]  # fmt: skip
    return command, {**os.environ, "FLINK_CONF_DIR": str(place)}


def _flink(place: Path, script: str) -> Measured:
    place.mkdir()
    command, environ = sql_client(place, script, "3s")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (place / "out").open("wb") as out:
        done = subprocess.run(command, env=environ, stdout=out, stderr=subprocess.STDOUT, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = (place / "log").read_text()
    moments = {
        state: datetime.fromisoformat(moment)
        for moment, state in re.findall(r"^(\S+ \S+) Job .* switched from state \w+ to (\w+)\.", log, re.M)
    }
    if done.returncode or not {"RUNNING", "FINISHED"} <= moments.keys():
        raise RuntimeError(f"Flink failed: {(place / 'out').read_text()[-2000:]}")
    return Measured(
        (moments["FINISHED"] - moments["RUNNING"]).total_seconds(),
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        tuple(map(int, re.findall(r"Completed checkpoint .*checkpointDuration=(\d+) ms", log))),
    )
