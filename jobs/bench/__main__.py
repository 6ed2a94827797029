"""Run benchmarks: `make bench`, or `python -m bench GROUP ...` with `jobs` on PYTHONPATH."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click
from rich.console import Console

from bench import (
    big_state,
    busy,
    commits,
    epochs,
    flink,
    flink_visible,
    gate,
    hop,
    hot_key,
    idle,
    local_disk,
    moments,
    nexmark,
    outside,
    overhead,
    planning,
    recovery,
    repeats,
    slow_consumer,
    starting,
    state_functions,
    visible,
    watching,
    whole_job,
    whole_process,
    wide,
)
from bench.figures import Figure, save
from bench.session import session

RESULTS = Path(__file__).with_name("results.jsonl")
_KILLS = 5
console = Console(highlight=False)


def _groups(
    base: Path, runs: int, files: int, megabytes: int, divide: int, many: int
) -> Mapping[str, Callable[[], Iterator[Figure]]]:
    return {
        "commits": lambda: commits.figures(base, console),
        "watching": lambda: watching.figures(base, console),
        "moments": lambda: moments.figures(console),
        "planning": lambda: planning.figures(base, runs, console),
        "deciding": lambda: gate.deciding(base, runs, console),
        "reading": lambda: gate.reading(session(), base, runs, console),
        "disk": lambda: local_disk.figures(session(), base, runs, console),
        "hop": lambda: hop.figures(session(), base, runs, console),
        "visible": lambda: visible.figures(session(), base, runs, console),
        "idle": lambda: idle.figures(session(), base, runs, console),
        "busy": lambda: busy.figures(session(), base, runs, console),
        "start": lambda: starting.figures(session(), base, runs, console),
        "wide": lambda: wide.figures(session(), base, runs, console),
        "overhead": lambda: overhead.figures(session(), base / "overhead", runs, console),
        "recovery": lambda: recovery.figures(base / "recovery", runs, divide, console),
        "outside": lambda: outside.figures(session, base, runs, console),
        "repeats": lambda: repeats.figures(session(), base / "repeats", _KILLS, console),
        "epochs": lambda: epochs.figures(session(), base / "epochs", many, console),
        "flink": lambda: flink.figures(session(), base / "flink", runs, console),
        "flink-visible": lambda: flink_visible.figures(session(), base / "flink", runs, console),
        "nexmark": lambda: nexmark.figures(session(), base / "nexmark", runs, divide, console),
        "process": lambda: whole_process.figures(base / "process", runs, console),
        "slow": lambda: slow_consumer.figures(session(), base, runs, console),
        "overtaking": lambda: hot_key.figures(session(), base, runs, console),
        "functions": lambda: state_functions.figures(session(), base, runs, divide, console),
        "state": lambda: big_state.figures(session(), base, runs, megabytes, console),
        "job": lambda: whole_job.figures(session(), base, runs, files, console),
    }


@click.command()
@click.argument("groups", nargs=-1)
@click.option("--runs", default=5, show_default=True, help="Runs that count; variants take turns.")
@click.option("--files", default=whole_job.FILES, show_default=True, help="Input files of the whole job.")
@click.option("--megabytes", default=1024, show_default=True, help="The large state.")
@click.option(
    "--divide",
    default=1,
    show_default=True,
    help="Makes functions, nexmark and recovery smaller, to try them.",
)
@click.option("--epochs", "many", default=epochs.EPOCHS, show_default=True, help="Checkpoints of one job.")
@click.option("--results", default=RESULTS, type=click.Path(path_type=Path), help="Where figures go.")
def main(
    groups: tuple[str, ...], runs: int, files: int, megabytes: int, divide: int, many: int, results: Path
) -> None:
    """Measure GROUPS, all of them if none is named; Flink only where `make bench-flink` says where it is.

    They are: commits, watching, moments, planning, deciding, reading, disk, hop, visible, idle, busy, start,
    wide, overhead, recovery, outside, repeats, epochs, flink, flink-visible, nexmark, process, slow,
    overtaking, functions, state, job.
    """
    os.chdir(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory(prefix="spark-abs-bench-", ignore_cleanup_errors=True) as base:
        known = _groups(Path(base), runs, files, megabytes, divide, many)
        if unknown := sorted(set(groups) - known.keys()):
            raise click.UsageError(f"no group {unknown[0]!r}: there are {', '.join(known)}")
        for name in groups or [name for name in known if "flink" not in name or flink.JARS in os.environ]:
            for found in known[name]():
                console.print(f"{found.bench}: {found.value} {found.unit} ({found.min} to {found.max})")
                save(results, [found])


if __name__ == "__main__":
    main()
