"""The benchmarks that need no Spark, on a small scale: they report what they measured and clean up."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
from bench import commits, gate, moments, planning, watching
from bench.figures import figure, ratios, save
from bench.traffic import write_events
from rich.console import Console


def test_a_figure_is_the_median_and_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    save(results, [figure("one", [1.0]), figure("other", [5.0, 1.0, 3.00009], "ms")])
    save(results, [figure("one", ratios([2.0, 9.0, 4.0], [1.0, 3.0, 8.0]))])
    assert [json.loads(line) for line in results.read_text().splitlines()] == [
        {"bench": "one", "value": 2.0, "min": 0.5, "max": 3.0, "unit": "ratio", "runs": 3},
        {"bench": "other", "value": 3.0, "min": 1.0, "max": 5.0, "unit": "ms", "runs": 3},
    ]


def test_the_gate_decides_its_way_through_the_whole_backlog(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    (found,) = gate.deciding(tmp_path, 2, console, backlog=250)
    assert (found.bench, found.unit, found.runs) == ("gate_decision_ms_10k_entries", "ms", 2)
    assert console.export_text().count("4 of them") == 2  # three batches, and one that finds nothing more
    assert list(tmp_path.iterdir()) == []


def test_commits_are_timed_at_both_ends_of_a_history(tmp_path: Path) -> None:
    start, end = commits.figures(tmp_path, Console(quiet=True), epochs=20)
    assert (start.bench, end.bench) == ("commit_ms_start", "commit_ms_after_10k_epochs")
    assert start.runs == end.runs == 100
    assert list(tmp_path.iterdir()) == []


def test_a_kept_cut_is_measured(tmp_path: Path) -> None:
    cpu, new, ratio = watching.figures(tmp_path, Console(quiet=True), cuts=2, warm_up=1)
    assert (cpu.bench, cpu.unit, cpu.runs) == ("watch_cpu_seconds_per_cut", "s", 2)
    assert new.value > 3 * 4 * 10 * 16  # three queries, four partitions, ten changes of 16 kB
    assert 0 < ratio.value < 0.2
    assert list(tmp_path.iterdir()) == []


def test_the_distance_to_a_cut_is_less_than_a_few_batches() -> None:
    """At a low load all queries fit together after nearly every batch of the last one."""
    found = {f.bench: f for f in moments.figures(Console(quiet=True), batches=200, moments=50)}
    assert len(found) == 6
    for shape in moments.SHAPES:
        low, high = (found[f"rewind_distance_{shape}_{load}"] for load in ("low", "high"))
        assert 0 <= low.min <= low.value < moments.INTERVAL_S < low.max < 2 * moments.INTERVAL_S
        assert high.max > low.max


def test_the_plan_of_a_rewind_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    cpu, memory = planning.figures(tmp_path, 1, console, batches=4)
    assert (cpu.bench, cpu.unit, memory.bench) == ("rewind_plan_cpu_seconds", "s", "rewind_plan_memory_mb")
    assert console.export_text().startswith("10 queries go back")
    assert list(tmp_path.iterdir()) == []


def test_traffic_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_events(tmp_path / name, files=2, clicks=30, orders=10, users=5)
    one, two = (pq.read_table(tmp_path / name / "orders") for name in ("one", "two"))
    assert one.equals(two)
    assert one.num_rows == 20
    assert len(set(one.column("order_id").to_pylist())) == 20


def test_five_runs_have_an_interval_and_the_median_is_in_it() -> None:
    found = figure("one", [1.0, 1.1, 1.2, 1.3, 9.0])
    assert found.low is not None
    assert found.high is not None
    assert found.min <= found.low <= found.value <= found.high <= found.max
    assert figure("one", [1.0] * 5).high == 1.0
