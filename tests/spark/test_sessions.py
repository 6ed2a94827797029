"""The session job, in one bounded run: sessions and decided orders equal plain loops over the input."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from sessions import Bounds, declare

from generate_events import START, USUAL, write_file
from tests.job_support import manifests, read_table

FILES = 36


def test_a_bounded_run_finds_the_sessions_and_decides_the_orders(spark: SparkSession, tmp_path: Path) -> None:
    events: dict[str, list[dict[str, Any]]] = {"clicks": [], "orders": []}
    for number in range(FILES):
        for kind, known in events.items():
            arrived = USUAL.file(kind, number)
            write_file(tmp_path / "input", kind, number, "json", arrived)
            known += arrived
    bounds = Bounds()

    run = declare(spark, str(tmp_path), bounds).start(available_now=True)
    assert run.await_termination(timeout=200)

    # After the last watermark: lateness, the gap, and one batch of eight files that it runs behind.
    cutoff = START + timedelta(seconds=FILES * USUAL.slice_seconds - 90)
    clicks: dict[str, list[tuple[datetime, str]]] = defaultdict(list)
    for event in events["clicks"]:
        clicks[event["user"]].append((event["click_time"], event["campaign"]))
    gap, within = (timedelta(milliseconds=ms) for ms in (bounds.gap_ms, bounds.match_within_ms))
    spans = []
    for user, all_of in clicks.items():
        times = [at for at, _ in sorted(all_of)]
        first = 0
        for i in range(1, len(times) + 1):
            if i == len(times) or times[i] - times[i - 1] > gap:
                spans.append((user, times[first], times[i - 1], i - first))
                first = i
    found = read_table(tmp_path / "sessions").to_pylist()
    have = [(r["user"], r["session_start"], r["session_end"], r["clicks"]) for r in found]
    want = [span for span in spans if span[2] < cutoff]
    assert sorted(row for row in have if row[2] < cutoff) == sorted(want)
    assert len(want) > 100
    assert set(have) <= set(spans)

    decided = {r["order_id"]: (r["campaign"], r["why"]) for r in read_table(tmp_path / "decided").to_pylist()}
    early = [order for order in events["orders"] if order["order_time"] < cutoff]
    for order in early:
        at = order["order_time"]
        fit = sorted(click for click in clicks[order["user"]] if at - within <= click[0] <= at)
        assert decided[order["order_id"]] == (fit[-1][1] if fit else None, "known")
    assert any(campaign for campaign, _ in decided.values())
    last = manifests(str(tmp_path / "root"))[-1]
    assert {str(s.stage): s.dropped_late for s in last.stages}["sessions"] == 0
    assert [f.uid for shape in last.graph for f in shape.functions] == ["sessions", "waiting"]
