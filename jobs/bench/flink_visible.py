"""From the creation of a row to its visibility in a table, beside Flink SQL: a checkpoint a second.

Flink's file sink shows rows with the checkpoint that has them; ours shows them with each batch, or, if so
declared, with the checkpoint. Flink's planner makes one operator of stages that only hand rows on, however
many they are: it has one length.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from rich.console import Console

from bench import visible
from bench.figures import Figure, figure, ratios, wait
from bench.flink import sql_client
from bench.overhead import Created

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCRIPT = """
SET 'table.dml-sync' = 'true';
CREATE TABLE src (`key` BIGINT, created BIGINT) WITH ('connector' = 'filesystem',
  'path' = 'file://{base}/input', 'format' = 'parquet', 'source.monitor-interval' = '100 ms');
CREATE TABLE snk (`key` BIGINT, created BIGINT)
  WITH ('connector' = 'filesystem', 'path' = 'file://{base}/out', 'format' = 'parquet');
INSERT INTO snk SELECT `key`, created FROM src;
"""


@contextmanager
def _flink(base: Path) -> Iterator[None]:
    place = base / "flink"
    place.mkdir()
    command, environment = sql_client(place, _SCRIPT.format(base=base), "1s")
    with (place / "out").open("wb") as out:
        client = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait(partial(_running, client, place, base / "out"))
        yield
    finally:
        client.kill()
        client.wait()


def _running(client: subprocess.Popen[bytes], place: Path, out: Path) -> bool:
    if client.poll() is not None:
        raise RuntimeError(f"Flink failed: {(place / 'out').read_text()[-2000:]}")
    return bool(_files(out))


def _files(out: Path) -> list[Path]:
    """Return the files that Flink shows: others are hidden."""
    return list(out.glob("part-*"))


def _rows(base: Path) -> int:
    return sum(pq.read_metadata(file).num_rows for file in _files(base / "out"))


def _shown(base: Path, after: float) -> list[Created]:
    """Return when each file was shown, by its last rename, and when its rows were created."""
    shown = [(file.stat().st_ctime, file) for file in _files(base / "out")]
    return [(at, pq.read_table(file)["created"].to_numpy()) for at, file in shown if at > after]


_FLINK = visible.Way(_flink, _rows, _shown)


def figures(spark: SparkSession, base: Path, runs: int, console: Console) -> Iterator[Figure]:
    """Run Flink and one stage of ours in turns."""
    ways: Mapping[str, visible.Way] = {
        "flink": _FLINK,
        "ours": visible.stages(spark, 1),
        "ours_checkpoint": visible.stages(spark, 1, shown="checkpoint"),
    }
    found = visible.measured(base, ways, runs, console)
    for number, quantile in enumerate(("p50", "p99")):
        several = {name: [one[number] for one in turns] for name, turns in found.items()}
        for name, seconds in several.items():
            yield figure(f"flink_visible_{quantile}_{name}", seconds, "s")
        for name in ("ours", "ours_checkpoint"):
            yield figure(f"flink_visible_{quantile}_{name}_vs_flink", ratios(several[name], several["flink"]))
