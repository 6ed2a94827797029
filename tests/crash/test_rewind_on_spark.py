"""Pipelines in plain PySpark: killed under load, rewound to random moments, started again unchanged."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from spark_abs.model import Provider
from spark_abs.snapshots.layout import OffsetFile, parse_offsets
from tests import plain_spark
from tests.crash import plain_pipelines
from tests.crash.plain_pipelines import SECONDS_OF_A_DAY

PROGRAM = Path(plain_pipelines.__file__)
CONF = {
    "spark.jars.packages": plain_spark.delta_connector(),
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": plain_spark.plain_java_options(),
}
Row = dict[str, int]


def program(name: str, mode: str, *bases: Path) -> list[str]:
    return [plain_spark.PYTHON, str(PROGRAM), name, mode, *map(str, bases)]


def environment(**options: str) -> dict[str, str]:
    told = {"PLAIN_CONF": json.dumps(CONF), "PLAIN_OPTIONS": json.dumps(options)}
    return {**os.environ, **plain_spark.VARIABLES, **told}


class Input:
    """Files of rows; one row of each comes twice."""

    def __init__(self, directory: Path, offset: int, seed: int) -> None:
        self.directory, self.chance = directory, random.Random(seed)
        self.next, self.rows, self.files = offset, list[Row](), 0
        directory.mkdir()

    def write(self) -> None:
        self.send(self.draw())

    def draw(self) -> list[Row]:
        """Return the next rows, which are to be read from now on."""
        fresh = [
            {"k": seq % 7, "seq": seq, "v": self.chance.randrange(100)}
            for seq in range(self.next, self.next + 10)
        ]
        self.next += 10
        fresh.append(dict(fresh[0]))
        self.rows += fresh
        return fresh

    def send(self, fresh: list[Row]) -> None:
        """Make rows visible, all at once."""
        hidden = self.directory / f".{self.files:05d}"
        hidden.write_text("\n".join(map(json.dumps, fresh)))
        hidden.rename(self.directory / f"{self.files:05d}.json")
        self.files += 1


def expected(name: str, rows: list[Row]) -> dict[str, list[list[int]]]:
    """Compute what the tables must hold in the end, from the input alone."""

    def plain(given: Any) -> list[list[int]]:
        return sorted([r["k"], r["seq"], r["v"]] for r in given)

    def totals(given: list[Row]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for r in given:
            n, v = found.get(r["k"], [0, 0])
            found[r["k"]] = [n + 1, v + r["v"]]
        return sorted([k, n, v] for k, (n, v) in found.items())

    once = list({r["seq"]: r for r in rows}.values())

    def silver(given: list[Row]) -> dict[str, list[list[int]]]:
        return {"silver": plain(given), "big": plain(r for r in given if r["v"] >= 50), "latest": []}

    def numbered() -> Iterator[Row]:
        counts = Counter[int]()
        for r in sorted(rows, key=lambda r: r["seq"]):
            counts[r["k"]] += 1
            yield {**r, "v": counts[r["k"]]}

    left, right = ([r for r in rows if (r["seq"] >= 10**6) == is_right] for is_right in (False, True))
    partners = [(one, two) for one in left for two in right if two["seq"] == one["seq"] + 10**6]
    pairs = [{**one, "v": one["v"] + two["v"]} for one, two in partners]
    newest = {r["k"]: r for r in sorted(rows, key=lambda r: r["seq"])}
    return {"bronze": plain(rows)} | {
        "medallion": {**silver(once), "totals": totals(once)},
        "fan-in": silver(once),
        "kafka": silver(once),
        "join": {**silver(pairs), "bronze": plain(left)},
        "state": silver(list(numbered())),
        "merge": {"latest": plain(newest.values()), "totals": totals(rows), "silver": [], "big": []},
    }[name.partition("+")[0]]


@contextmanager
def running(name: str, base: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as said:
        process = subprocess.Popen(
            program(name, "run", base), stdout=said, stderr=said, env=environment(), start_new_session=True
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def batches(base: Path, query: str) -> int:
    return len([p for p in (base / "c" / query / "commits").glob("*") if p.name.isdigit()])


def plans(base: Path, query: str) -> list[OffsetFile]:
    """Return the plans of a query's batches."""
    files = [p for p in (base / "c" / query / "offsets").glob("*") if p.name.isdigit()]
    return [parse_offsets(file.read_text()) for file in files]


def providers(base: Path, query: str) -> set[str]:
    """Return what kept the state of a query, as its checkpoint has it."""
    return {plan.provider for plan in plans(base, query)}


pytestmark = pytest.mark.timeout(1800)
MOMENTS = int(os.environ.get("MOMENTS", "2"))
"""To how many moments a pipeline goes back in long runs; each costs the run of all queries to their end."""
MOST_FILES = 200
"""How many files are written under load: a slow machine would write more, and take longer for each."""
PIPELINES = ("medallion", "medallion+rocks", "fan-in", "join", "merge", "merge+rocks", "state+rocks")
CASES = [
    ("medallion", 1),
    *(pytest.param(name, MOMENTS, marks=pytest.mark.long) for name in PIPELINES),
]


def killed(name: str, base: Path, inputs: list[Input]) -> None:
    """Run a pipeline under load, and kill it when its last query has ended eight batches."""
    log = base.parent / "log"
    with running(name, base, log) as process:
        load(name, base, inputs, process, log)


def load(name: str, base: Path, inputs: list[Input], process: subprocess.Popen[bytes], log: Path) -> None:
    """Write input until the last query of a pipeline has ended eight batches."""
    last, deadline = {"merge": "latest"}.get(name.partition("+")[0], "big"), time.monotonic() + 600
    while batches(base, last) < 8:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        for fed in inputs:
            if fed.files < MOST_FILES:
                fed.write()
        time.sleep(0.5)


def finished(name: str, copies: list[Path], **options: str) -> list[dict[str, list[list[int]]]]:
    """Run copies of a pipeline to the end of their input, and return their tables."""
    done = subprocess.run(
        program(name, "finish", *copies), capture_output=True, text=True, env=environment(**options)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, list[list[int]]]] = json.loads(done.stdout.rpartition("TABLES ")[2])
    return found


@pytest.mark.parametrize(("name", "moments"), CASES)
def test_every_table_is_whole_after_a_rewind_to_any_moment(tmp_path: Path, name: str, moments: int) -> None:
    """Copies of one killed run go back to a random moment each; one goes back twice."""
    seed = random.randrange(10**6)
    chance, base = random.Random(seed), tmp_path / "live"
    inputs = [Input(tmp_path / "in1", 0, seed)] + (
        [Input(tmp_path / "in2", 10**6, seed)] if name in ("fan-in", "join") else []
    )
    killed(name, base, inputs)
    provider = Provider.ROCKSDB if name.endswith("+rocks") else Provider.HDFS
    assert providers(base, "totals" if name.startswith("merge") else "silver") == {provider.value}
    if name == "join":
        assert max(plan.watermark_ms for plan in plans(base, "silver")) > SECONDS_OF_A_DAY * 1000
    cuts = json.loads(called(base, "--list", "--output", "json"))
    oldest, copies = cuts[-1]["at_ms"] / 1000, []
    for number in range(moments):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(base, copy)
        for latest in (time.time(), *((oldest + 1,) if number % 2 else ())):
            moment = chance.uniform(oldest + 0.001, latest)
            print(f"seed {seed}, copy {number}: to {moment}")  # noqa: T201
            rewind(copy, moment)
        copies.append(copy)
    for fed in inputs:
        fed.write()
    tables = finished(name, copies)
    wanted = expected(name, [row for fed in inputs for row in fed.rows])
    for number, found in enumerate(tables):
        assert found == wanted, (seed, number)


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True], ids=["first", "last"])
def test_a_driver_that_was_frozen_and_wakes_after_a_rewind_does_no_harm(tmp_path: Path, after: bool) -> None:
    """It wakes before the new driver begins, or after it has read all input."""
    base, log, fed = tmp_path / "live", tmp_path / "log", Input(tmp_path / "in1", 0, 1)
    with running("medallion", base, log) as process:
        load("medallion", base, [fed], process, log)
        os.killpg(process.pid, signal.SIGSTOP)
        cuts = json.loads(called(base, "--list", "--output", "json"))
        rewind(base, cuts[len(cuts) // 2]["at_ms"] / 1000)
        if after:
            finished("medallion", [base])
        fed.write()
        os.killpg(process.pid, signal.SIGCONT)
        process.wait(timeout=300)
    assert "oncurrent" in log.read_text(), log.read_text()[-4000:]
    (tables,) = finished("medallion", [base])
    assert tables == expected("medallion", fed.rows)


def called(base: Path, *arguments: str) -> str:
    """Run the command over all queries and tables of a pipeline."""
    command = [sys.executable, "-m", "spark_abs", "rewind", *arguments]
    command += ["--checkpoints", f"{base}/c/*", "--tables", f"{base}/t/*"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def rewind(base: Path, moment: float) -> None:
    before = datetime.fromtimestamp(moment, UTC).isoformat()
    called(base, "--before", before, "--yes", "--wait", "0s")


@pytest.mark.long
def test_what_is_lost_and_doubled_by_hand(tmp_path: Path) -> None:
    """As advised on the web: delete the newest offsets and commits, restore the tables, start again.

    The readers of restored tables need `skipChangeCommits`: without it they end with an error at the restore.
    """
    base, fed = tmp_path / "live", Input(tmp_path / "in1", 0, 1)
    killed("medallion", base, [fed])
    cuts = json.loads(called(base, "--list", "--output", "json"))
    moment = cuts[len(cuts) // 2]["at_ms"] / 1000
    for query in sorted((base / "c").iterdir()):
        for file in (*(query / "commits").iterdir(), *(query / "offsets").iterdir()):
            number = file.name.strip(".").partition(".")[0]
            commit = query / "commits" / number
            if not commit.exists() or commit.stat().st_mtime > moment:
                file.unlink(missing_ok=True)
    for table in sorted((base / "t").iterdir()):
        handle = DeltaTable(str(table))
        then = [h["version"] for h in handle.history() if h["timestamp"] <= moment * 1000]
        if max(then) != handle.version():
            handle.restore(max(then))
    (tables,) = finished("medallion", [base], skipChangeCommits="true")
    found = {}
    for name, rows in expected("medallion", fed.rows).items():
        there, wanted = Counter(map(tuple, tables[name])), Counter(map(tuple, rows))
        found[name] = len(rows), (wanted - there).total(), (there - wanted).total()
    print("table: rows, lost, too many:", found)  # noqa: T201
    assert tables != expected("medallion", fed.rows)
