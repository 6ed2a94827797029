"""The job of the demo, in one bounded run: both tables equal a batch query over the input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
from pyspark.sql import SparkSession

import oracle
from attribution import Config, declare
from generate_events import START, USUAL, write_file

CONFIG = Path(__file__).parents[2] / "conf" / "attribution.yaml"
FILES = 72


def test_a_bounded_run_attributes_every_order_and_ends_by_itself(spark: SparkSession, tmp_path: Path) -> None:
    for number in range(FILES):
        for kind in ("clicks", "orders"):
            write_file(tmp_path / "input", kind, number, "json", USUAL.file(kind, number))
    # As much event time in a batch of `match` as the configuration allows for, in half the batches.
    one_entry = {"channel": {"maxEntriesPerBatch": 1}}
    config = replace(Config.read(CONFIG, str(tmp_path)), files_per_batch=16, settings=one_entry)

    run = declare(spark, config).start(available_now=True)
    assert run.await_termination(timeout=200)

    end = pd.Timestamp(START) + pd.Timedelta(seconds=FILES * USUAL.slice_seconds)
    # What is behind the watermark of the last stage is out: its delay, and one batch that it runs behind.
    cutoff = end - pd.Timedelta(minutes=4)
    attributed, totals = oracle.compare(tmp_path, cutoff, pd.Timedelta("60s"), pd.Timedelta("1min"))
    assert (attributed.lost, attributed.extra, totals.lost, totals.extra) == (0, 0, 0, 0)
    assert attributed.expected > 0
    assert totals.expected > 0
