"""The program of `make demo`: the attribution job survives `kill -9` and is restored to a savepoint.

Three kinds of processes: this one, the generator of events, and the job's driver under spark-submit. At the
end an independent batch query counts lost, duplicated and dropped rows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import pandas as pd
from deltalake import DeltaTable
from rich.console import Console

import oracle
import spark_abs

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "conf" / "attribution.yaml"
WITHIN = pd.Timedelta(seconds=60)
WINDOW = pd.Timedelta(minutes=1)
START = pd.Timestamp("2026-01-01", tz="UTC")
SLICE = pd.Timedelta(seconds=5)
"""Event time of one input file: at two files a second, event time runs ten times as fast as the clock."""

FILES_PER_SECOND = 2
RIGHT_FILES, WRONG_FILES, TAIL_FILES = 80, 10, 50
"""The last files let the watermarks pass all earlier events."""

WRONG_ABOVE_CENTS = 50_000
SAVEPOINT = "before-release"
STAGES = ("clicks", "orders", "match", "totals")
PATIENCE_S = 180

console = Console(highlight=False)


class DemoFailed(Exception):
    """The demo cannot continue."""


@dataclass
class Demo:
    """The processes of one demonstration, all below `base`."""

    base: Path
    drivers: int = 0
    driver: subprocess.Popen[bytes] | None = None
    generators: list[subprocess.Popen[bytes]] = field(default_factory=list)
    shown: int = 0
    """The newest checkpoint that was printed."""

    @property
    def root(self) -> Path:
        """The job's root."""
        return self.base / "root"

    def start_job(self) -> None:
        """Start the driver as a session of its own, so that it can be killed with everything it started."""
        self.drivers += 1
        command = [
            str(Path(sys.executable).with_name("spark-submit")),
            *("--master", "local[2]", "--driver-memory", "2g"),
            # A short life: the optimising compiler would cost more than it gives. It brings most of the
            # room for compiled code along, which some minutes of queries need.
            *("--driver-java-options", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"),
            # What SIGKILL leaves behind goes with the rest.
            *("--conf", f"spark.local.dir={self.base / 'scratch'}"),
            *("--conf", "spark.abs.checkpoint.skipUnchanged=false"),  # all are shown, on any machine
            *("--packages", spark_abs.DELTA_CONNECTOR),
            str(HERE / "attribution.py"),
            *("--config", str(CONFIG), "--base", str(self.base)),
        ]
        log = self.base / f"driver-{self.drivers}.log"
        with log.open("wb") as output:
            self.driver = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
                start_new_session=True,
            )
        say(f"driver {self.drivers} is process {self.driver.pid}, its log is {log}")

    def generate(self, first: int, files: int, per_second: int, *options: str) -> subprocess.Popen[bytes]:
        """Start the generator."""
        arguments = ["--first", str(first), "--files", str(files), "--per-second", str(per_second), *options]
        command = [sys.executable, str(HERE / "generate_events.py"), str(self.base / "input"), *arguments]
        self.generators.append(subprocess.Popen(command))
        return self.generators[-1]

    def abs(self, command: str, *arguments: str) -> None:
        """Run a command of `spark-abs` before the reader's eyes."""
        say(f"[bold]$ spark-abs {' '.join((command, str(self.root), *arguments))}[/bold]")
        done = subprocess.run(
            [sys.executable, "-m", "spark_abs", command, str(self.root), *arguments], check=False
        )
        if done.returncode:
            raise DemoFailed(f"spark-abs {command} ended with exit code {done.returncode}")

    def checkpoints(self) -> list[int]:
        """Return the ids of completed checkpoints, and print those that are new."""
        path = str(self.root / "checkpoints")
        if not DeltaTable.is_deltatable(path):
            return []
        columns = ["id", "kind", "triggered_ms", "completed_ms", "size_new"]
        rows = sorted(
            DeltaTable(path).to_pyarrow_table(columns=columns).to_pylist(), key=lambda row: row["id"]
        )
        for row in rows:
            if row["id"] > self.shown:
                took = row["completed_ms"] - row["triggered_ms"]
                say(
                    f"{row['kind']} {row['id']} complete after {took} ms, {row['size_new'] / 1024:.0f} kB new"
                )
                self.shown = row["id"]
        return [row["id"] for row in rows]

    def wait_for_checkpoints(self, more: int) -> None:
        """Wait until so many further checkpoints are complete."""
        target = self.shown + more

        def enough() -> bool:
            ids = self.checkpoints()
            return bool(ids) and ids[-1] >= target

        self.wait(enough, f"{more} more checkpoints")

    def wait(self, reached: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        """Wait for a condition while the driver lives.

        Raises:
            DemoFailed: the driver ended, or the condition took too long.
        """
        deadline = time.monotonic() + patience_s
        while not reached():
            if self.driver is not None and self.driver.poll() is not None:
                raise DemoFailed(f"the driver ended with exit code {self.driver.returncode}: see its log")
            if time.monotonic() > deadline:
                raise DemoFailed(f"waited {patience_s:.0f} s for {what}")
            time.sleep(0.5)

    def batch_under_way(self) -> tuple[str, int] | None:
        """Return a stage with an unfinished batch, and the batch, from Spark's own logs."""
        for stage in reversed(STAGES):
            native = self.root / "native" / "1" / stage
            planned = newest(native / "offsets")
            if planned > newest(native / "commits"):
                return stage, planned
        return None

    def kill_in_mid_batch(self) -> None:
        """Kill the driver in the middle of a batch: freeze it, look for a batch, then kill or resume it."""
        assert self.driver is not None

        def killed() -> bool:
            assert self.driver is not None
            os.killpg(self.driver.pid, signal.SIGSTOP)
            under_way = self.batch_under_way()
            if under_way is None:
                os.killpg(self.driver.pid, signal.SIGCONT)
                return False
            stage, batch = under_way
            os.killpg(self.driver.pid, signal.SIGKILL)
            say(f"SIGKILL to driver {self.drivers} in the middle of batch {batch} of stage {stage}")
            return True

        self.wait(killed, "a batch to be under way")
        self.driver.wait()

    def stop_job(self, *arguments: str) -> None:
        """Stop the job in order."""
        assert self.driver is not None
        self.abs("stop", *arguments)
        try:
            self.driver.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise DemoFailed("the driver did not end after spark-abs stop: see its log") from None
        self.checkpoints()

    def wrong_rows(self) -> int:
        """Count the attributed rows that come from wrong orders."""
        rows = oracle.table_rows(self.base / "attributed", ["amount_cents"])
        return sum(count for (amount,), count in rows.items() if amount > WRONG_ABOVE_CENTS)

    def compare(self) -> list[oracle.Difference]:
        """Compare both tables with a batch query over the input."""
        cutoff = START + (RIGHT_FILES + WRONG_FILES) * SLICE
        return oracle.compare(self.base, cutoff, WITHIN, WINDOW)

    def dropped_late(self) -> int:
        """Add up the rows dropped as late; a stage's counter grows until its run ends."""
        history = DeltaTable(str(self.root / "history")).to_pandas(columns=["run", "stage", "dropped_late"])
        if set(history.dropna()["stage"]) != set(STAGES):
            raise DemoFailed("history/ does not say of every stage how many rows it dropped")
        return int(history.groupby(["run", "stage"])["dropped_late"].max().sum())

    def end(self) -> None:
        """End all processes."""
        for generator in self.generators:
            generator.kill()
            generator.wait()
        if self.driver is not None and self.driver.poll() is None:
            os.killpg(self.driver.pid, signal.SIGKILL)
            self.driver.wait()


def newest(log: Path) -> int:
    """Return the newest batch in a log of Spark; -1 if the log is empty."""
    return max((int(path.name) for path in log.glob("*") if path.name.isdigit()), default=-1)


def say(text: str) -> None:
    """Print a line below the step's title."""
    console.print(f"  {text}", soft_wrap=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print a title, and how long the step took."""
    console.print(f"\n[bold cyan]▸ {title}[/bold cyan]", soft_wrap=True)
    began = time.monotonic()
    yield
    console.print(f"  [dim]{time.monotonic() - began:.0f} s[/dim]")


def show(demo: Demo) -> int:
    """Run the demonstration; return the number of wrong rows."""
    with step("Clicks and orders arrive as files; four streaming queries attribute them"):
        generator = demo.generate(0, RIGHT_FILES, FILES_PER_SECOND)
        demo.wait(
            lambda: all(any((demo.base / "input" / kind).glob("*.json")) for kind in STAGES[:2]), "files"
        )
        demo.start_job()
        demo.wait_for_checkpoints(2)
    with step("A savepoint, which belongs to us and is never cleaned up"):
        demo.abs("savepoint", SAVEPOINT)
        demo.wait_for_checkpoints(2)
    with step("The driver is killed in the middle of a batch, and started again"):
        demo.kill_in_mid_batch()
        demo.start_job()
        demo.wait_for_checkpoints(2)
    with step(f"A bad release: {WRONG_FILES} files of orders with amounts in the wrong unit"):
        generator.wait()
        generator = demo.generate(RIGHT_FILES, WRONG_FILES, FILES_PER_SECOND, "--wrong")
        demo.wait(
            lambda: generator.poll() is not None and demo.wrong_rows() > 0, "wrong orders to come through"
        )
        say(f"{demo.wrong_rows()} rows of table attributed are wrong")
        demo.stop_job()
    with step(f"Back to savepoint {SAVEPOINT}: state, positions and both tables"):
        demo.abs("restore", "--to", SAVEPOINT, "--yes")
        say(f"{demo.wrong_rows()} rows of table attributed are wrong")
    with step("The wrong files make way for right ones; what followed the savepoint is replayed"):
        for number in range(RIGHT_FILES, RIGHT_FILES + WRONG_FILES):
            (demo.base / "input" / "orders" / f"orders-{number:06d}.json").unlink()
        # Their positions were rolled back with everything else: for the job these files were never there.
        demo.generate(RIGHT_FILES, WRONG_FILES, 0, "--kind", "orders").wait()
        demo.start_job()
        demo.generate(RIGHT_FILES + WRONG_FILES, TAIL_FILES, 0).wait()
        demo.wait_for_checkpoints(1)
        settle(demo)
        demo.stop_job("--savepoint", "end")
    with step("All checkpoints; those of the abandoned attempt are marked"):
        demo.abs("list")
    return verdict(demo)


def settle(demo: Demo) -> None:
    """Wait until no row is missing, or a time limit; after the limit the verdict shows the missing rows."""
    looked_at = 0

    def complete() -> bool:
        nonlocal looked_at
        demo.checkpoints()
        if demo.shown == looked_at:
            return False
        looked_at = demo.shown
        return all(rows.lost == 0 for rows in demo.compare())

    try:
        demo.wait(complete, "all results")
    except DemoFailed as failure:
        say(str(failure))


def verdict(demo: Demo) -> int:
    """Print how the tables differ from a batch query over the input, and return the sum of differences."""
    with step("Both tables against a batch query over the input files"):
        found = demo.compare()
        for table, rows in zip(("attributed", "totals"), found, strict=True):
            say(f"{table}: {rows.expected} rows due, {rows.lost} lost, {rows.extra} too many")
    lost, extra, dropped = sum(d.lost for d in found), sum(d.extra for d in found), demo.dropped_late()
    console.print(f"\nlost = {lost}, duplicated = {extra}, dropped late = {dropped}")
    return lost + extra + dropped


@click.command()
@click.option("--base", type=click.Path(path_type=Path), help="An empty directory; None: a temporary one.")
def main(base: Path | None) -> None:
    """Show how a job survives SIGKILL and goes back to a savepoint."""
    with tempfile.TemporaryDirectory(prefix="spark-abs-demo-") as temporary:
        demo = Demo(base or Path(temporary))
        demo.base.mkdir(parents=True, exist_ok=True)
        try:
            wrong = show(demo)
        except DemoFailed as failure:
            console.print(f"[bold red]{failure}[/bold red]")
            show_log(demo)
            sys.exit(1)
        finally:
            demo.end()
    sys.exit(1 if wrong else 0)


def show_log(demo: Demo) -> None:
    """Print the end of the newest driver's log."""
    log = demo.base / f"driver-{demo.drivers}.log"
    if log.exists():
        for line in log.read_text(errors="replace").splitlines()[-40:]:
            console.print(line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
