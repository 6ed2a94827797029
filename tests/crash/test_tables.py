"""Tables as people name, look up, change and adopt them: killed, started again, restored to before and back.

Each job adopts a native query, writes tables of a catalog by name, one of them through Delta's own writer,
looks the customers up, and keeps the newest change of each key, deletes included; keys are stored otherwise
than they came. While it is down the table that is looked up moves on, and others alter what it writes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from deltalake import DeltaTable

from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.store.root import Root
from tests.crash.process import DriverProcess

pytestmark = pytest.mark.timeout(900)


class Change(NamedTuple):
    id: int
    country: str | None
    op: str
    n: int


FILES = (
    # Of the query that is adopted.
    (Change(1, "NO", "I", 1), Change(2, "", "I", 2)),
    (Change(3, None, "I", 3),),
    # Of the job, before it is killed: keys without a country, spelled in two ways.
    (Change(1, "NO", "I", 11), Change(2, "", "I", 12), Change(3, None, "I", 13), Change(4, "", "I", 14)),
    # Of the batch in which it is killed: a late change, a delete, and keys that are spelled otherwise.
    (Change(2, None, "U", 25), Change(1, "NO", "D", 24), Change(3, "", "U", 10), Change(1, "SE", "I", 21)),
    # After the start: late for a deleted key, and newer than that.
    (Change(1, "NO", "U", 23), Change(4, None, "D", 34), Change(2, "", "U", 20), Change(5, "", "I", 35)),
)
ADOPTED, BEFORE, KILLED = 2, 3, 4
"""So many files are there for the query, for the job before it is killed, and when it is killed."""

POINTS = {
    # A table is there and its catalog does not know it; the adopted query is fenced, and nothing has run.
    "made": {"start.joined.table.after"},
    # The files of a batch are there; then the table is not as it was any more.
    "written": {"batch.changes.commit-raw.after", "batch.joined.files.after@fresh"},
    # A commit has named the files, made with a version of the customers, of an output still to be written.
    "named": {"batch.changes.commit-raw.after", "batch.joined.commit-joined.after@fresh"},
    # The changes are merged, and Spark does not know that yet.
    "merged": {"batch.changes.commit-raw.after", "batch.joined.commit-last.after@fresh"},
}
MET = {
    "made": ["new", "new", "new"],
    "written": ["old", "new", "new"],
    "named": ["old", "old", "new"],
    "merged": ["old", "old", "new"],
}
"""The names that each file of a job meets: those of its batch, or those that its first commit has named."""

CUSTOMERS = "CREATE TABLE default.customers_{} USING delta AS SELECT id, 'old' AS name FROM range(9)"
OTHERS = (
    "INSERT OVERWRITE {customers} SELECT id, 'new' FROM {customers}",
    "ALTER TABLE {raw} ADD COLUMN note STRING",
    "ALTER TABLE {joined} ADD CONSTRAINT small CHECK (n < 1000)",
    "ALTER TABLE {last} ADD COLUMN note STRING",
    "OPTIMIZE {last}",
)
"""What others do while jobs are down."""

OPTIONS: dict[str, object] = {"checkpoint": {"interval": "1h", "keep": 100}}
Rows = Counter[tuple[object, ...]]


@dataclass
class Job:
    base: Path

    def feed(self, *files: int) -> None:
        directory = self.base / "input"
        directory.mkdir(parents=True, exist_ok=True)
        for number in files:
            unseen = self.base / f".{number}"
            unseen.write_text("\n".join(json.dumps(change._asdict()) for change in FILES[number]))
            os.utime(unseen, (1_700_000_000 + number,) * 2)
            unseen.rename(directory / f"{number}.json")

    def table(self, kind: str) -> str:
        return str(self.base.parent / "warehouse" / f"{kind}_{self.base.name}")

    def rows(self, kind: str, *columns: str) -> Rows:
        rows = DeltaTable(self.table(kind)).to_pyarrow_table(columns=list(columns)).to_pylist()
        return Counter(tuple(row.values()) for row in rows)

    def checkpoints(self) -> list[int]:
        return [found.id for found in Checkpoints.open(Root(str(self.base / "root")), "tables").summaries()]

    def check(self, met: list[str]) -> None:
        """Require that the tables have what the files come to which have met these names of the customers."""
        files = FILES[: ADOPTED + len(met)]
        assert self.rows("raw", *Change._fields) == Counter(change for file in files for change in file)
        joined = [(*change, name) for file, name in zip(files[ADOPTED:], met, strict=True) for change in file]
        assert self.rows("joined", *Change._fields, "name") == Counter(joined)
        newest = {(row[1] or None, row[0]): row[2:] for row in sorted(joined, key=by_n)}
        assert self.rows("last", "country", "id", "n", "name") == Counter(
            (*key, n, name) for key, (op, n, name) in newest.items() if op != "D"
        )

    def check_where_killed(self, point: str) -> None:
        """Require that what was to be committed is, and nothing else."""
        if point == "made":
            assert DeltaTable.is_deltatable(self.table("joined"))
            assert not DeltaTable.is_deltatable(self.table("last"))
            return
        late = len(FILES[BEFORE])
        joined, first = self.rows("joined", "n").total(), len(FILES[ADOPTED])
        assert joined == first + (late if point != "written" else 0)
        assert self.rows("raw", "n").total() == sum(len(file) for file in FILES[:KILLED])
        merged = self.rows("last", "n") != Counter((change.n,) for change in FILES[ADOPTED])
        assert merged == (point == "merged")


def by_n(row: tuple[object, ...]) -> int:
    n = row[3]
    assert isinstance(n, int)
    return n


class Process(DriverProcess):
    def __init__(self, base: Path, name: str) -> None:
        super().__init__(base / name, "tests.crash.tables_job", str(base))

    def each(self, jobs: Iterable[Job], say: Callable[[Job], dict[str, object]]) -> None:
        """Let something be done for jobs, and wait until that has ended well."""
        jobs = list(jobs)
        bases = {str(job.base) for job in jobs}
        self.told = [event for event in self.told if event.get("base") not in bases]
        for job in jobs:
            self.say(say(job))
        self._wait(jobs)

    def run(self, jobs: Iterable[Job]) -> None:
        """Run jobs until all input is through."""
        jobs = list(jobs)
        self.start(*({"base": str(job.base), "available_now": True, **OPTIONS} for job in jobs))
        self._wait(jobs)

    def _wait(self, jobs: list[Job]) -> None:
        self.wait_for(lambda: all(self.ended(job.base) is not None for job in jobs), "the end of all jobs")
        wrong = {job.base.name: self.message(job.base) for job in jobs if self.ended(job.base)}
        assert not wrong, "\n".join(f"{name}: {said}" for name, said in wrong.items())


@pytest.mark.long
@pytest.mark.parametrize("kept", [("named",), ("made", "written", "merged")], ids="+".join)
def test_killed_with_tables_by_name_and_started_again_and_restored_to_before_and_back(
    tmp_path: Path, kept: tuple[str, ...]
) -> None:
    points = {name: POINTS[name] for name in kept}
    jobs = {name: Job(tmp_path / name) for name in points}
    others = [job for name, job in jobs.items() if name != "made"]
    with Process(tmp_path, "killed") as doomed:
        doomed.wait_ready()
        for job in jobs.values():
            assert not doomed.sql(CUSTOMERS.format(job.base.name))
            job.feed(*range(ADOPTED))
        doomed.each(jobs.values(), lambda job: {"native": str(job.base)})
        for job in jobs.values():
            job.feed(*range(ADOPTED, BEFORE))
        doomed.run(others)
        for job in others:
            job.check(["old"])
        before = {job.base: job.checkpoints()[-1] for job in others}
        for job in jobs.values():
            job.feed(*range(BEFORE, KILLED))
        lives = (
            {"base": str(jobs[name].base), "points": [sorted(points[name])], "available_now": True, **OPTIONS}
            for name in points
        )
        doomed.start(*lives, then="kill")
        doomed.wait_for_end("the kill")
        assert {name: set(doomed.at(job.base)) for name, job in jobs.items()} == points, doomed.told
    for name, job in jobs.items():
        job.check_where_killed(name)

    with Process(tmp_path, "again") as driver:
        driver.wait_ready()
        for name, job in jobs.items():
            kinds = ("raw", "joined", "last", "customers")
            tables = {kind: f"default.{kind}_{name}" for kind in kinds}
            for text in OTHERS if name != "made" else OTHERS[:2]:
                assert not driver.sql(text.format(**tables))
            job.feed(*range(KILLED, len(FILES)))
        driver.run(jobs.values())
        for name, job in jobs.items():
            job.check(MET[name])

        after = {job.base: job.checkpoints()[-1] for job in others}
        driver.each(others, lambda job: {"restore": str(job.base), "to": before[job.base]})
        for job in others:
            job.check(["old"])
        driver.run(others)
        for job in others:
            job.check(["old", "new", "new"])
        driver.each(others, lambda job: {"restore": str(job.base), "to": after[job.base]})
        driver.run(others)
        for job in others:
            job.check(MET[job.base.name])
