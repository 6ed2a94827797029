"""A reader polls two tables while the job is killed: at checkpoints they agree, in between they do not.

`READER_POLLS=10000` polls longer.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import spark_abs
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess

_log = logging.getLogger(__name__)
POLLS = int(os.environ.get("READER_POLLS", "200"))
LIVES = 2
_AT_ONCE = 10


@dataclass
class Reader:
    """Counts the pairs of each key, and holds them against the totals, which another stage has written."""

    base: Path
    polls: int = 0
    torn: int = 0
    torn_as_they_are: int = 0
    checkpoints: set[int] = field(default_factory=set)
    _known: dict[str, Counter[str]] = field(default_factory=dict)
    """What is in a file; a file of Delta never changes."""

    def poll(self) -> None:
        """Read both tables at the newest checkpoint, and both as they are."""
        cut = {row["sink"]: row for row in spark_abs.open(str(self.base / "root")).tables().to_pylist()}
        pairs, totals = (DeltaTable(cut[s]["table"], version=cut[s]["version"]) for s in ("pairs", "totals"))
        self.polls += 1
        self.checkpoints.add(cut["pairs"]["checkpoint"])
        self.torn += self._pairs(pairs) != self._totals(totals)
        now = [DeltaTable(str(self.base / sink)) for sink in ("pairs", "totals")]
        self.torn_as_they_are += self._pairs(now[0]) != self._totals(now[1])

    def _pairs(self, table: DeltaTable) -> Counter[str]:
        found: Counter[str] = Counter()
        for file in table.file_uris():
            found += self._in(file, lambda path: Counter(pq.read_table(path)["key"].to_pylist()))
        return found

    def _totals(self, table: DeltaTable) -> Counter[str]:
        found: Counter[str] = Counter()
        for file in table.file_uris():
            found |= self._in(file, _greatest)
        return found

    def _in(self, file: str, read: Callable[[str], Counter[str]]) -> Counter[str]:
        if file not in self._known:
            self._known[file] = read(unquote(file.removeprefix("file://")))
        return self._known[file]


def _greatest(path: str) -> Counter[str]:
    rows = pq.read_table(path)
    found: Counter[str] = Counter()
    for key, n in zip(rows["key"].to_pylist(), rows["n"].to_pylist(), strict=True):
        found[key] = max(n, found[key])
    return found


@pytest.mark.timeout(3600)
@pytest.mark.long
def test_a_reader_at_checkpoints_sees_no_torn_join_while_the_job_is_killed(tmp_path: Path) -> None:
    small, reader = Small(tmp_path), Reader(tmp_path)
    for life in range(1, LIVES + 1):
        with DriverProcess(tmp_path / f"process-{life}") as driver:
            driver.wait_ready()
            small.start(driver)
            small.run_until(driver, lambda: bool(small.completed()), "a checkpoint")

            def meanwhile(driver: DriverProcess = driver) -> None:
                driver.require_running(small.base)
                small.feed()
                for _ in range(_AT_ONCE):
                    reader.poll()

            until, before = POLLS * life // LIVES, len(reader.checkpoints)
            driver.wait_for(
                lambda: reader.polls >= until and len(reader.checkpoints) > before + 1,  # noqa: B023
                f"{until} polls",
                meanwhile,
                patience_s=3000,
            )
            driver.kill()
            reader.poll()  # what a reader finds while nothing runs
    _log.info(
        "%d polls at %d checkpoints: %d torn; of the tables as they were %d",
        reader.polls,
        len(reader.checkpoints),
        reader.torn,
        reader.torn_as_they_are,
    )
    assert reader.torn == 0
    assert reader.torn_as_they_are > 0, "no poll has found the tables apart: this test has shown nothing"
