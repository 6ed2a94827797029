"""A hot key, a list that grows and is walked for every row, and the checkpoint that never completes (P20)."""

from __future__ import annotations

import base64
import random
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession

import spark_abs
from spark_abs.cli.main import main
from spark_abs.diagnosis.diagnoses import Diagnosis, diagnoses
from spark_abs.diagnosis.gather import gather
from spark_abs.job import Job
from spark_abs.run.run import Run
from spark_abs.store.clock import now_ms
from spark_abs.store.history import HistoryEvent
from spark_abs.store.root import Root
from tests.job_support import Feed, events, eventually, manifests, read_table
from tests.spark.conftest import Start

RUNBOOK = Path(__file__).parents[2] / "spark_abs/guide/restore-runbook.md"
MB = 1024**2
CHECKPOINTS, ROWS, PAD = 8, 500, 3_500
"""Before the trouble: so many checkpoints, so many rows before each, and bytes in a row."""
BURST = 7_000
"""Rows of one batch that is in trouble: each of them walks the whole list of its key."""

Remember = Callable[[Any, Iterator[Any], Any], tuple[int, int]]


def walk_all(key: Any, rows: Iterator[Any], state: Any) -> tuple[int, int]:
    """Keep every word of a key, and look for each new one among them."""
    seen, number = list(state.get[0]) if state.exists else [], 0
    for row in rows:
        number += 1
        if not any(word == row.word for word in seen):
            seen.append(row.word)
    state.update((seen,))
    return key[0], number


def walk_some(key: Any, rows: Iterator[Any], state: Any) -> tuple[int, int]:
    """Keep the newest hundred words of a key."""
    seen, number = list(state.get[0])[-100:] if state.exists else [], 0
    for row in rows:
        number += 1
        if not any(word == row.word for word in seen):
            seen = [*seen[-99:], row.word]
    state.update((seen,))
    return key[0], number


class Words:
    """Rows go through `unique`, which keeps them all, into `walk`, which keeps a list for each key."""

    def __init__(self, spark: SparkSession, tmp: Path) -> None:
        self.spark, self.tmp, self.root = spark, tmp, str(tmp / "root")
        self.feed = Feed(spark, tmp / "in", "k long, word string")
        self.random, self.ids = random.Random(35), count()

    def write(self, rows: int, size: int = 0) -> None:
        """Write different words, nine of ten for one key."""
        words = (f"{next(self.ids)}-{self._pad(size)}" for _ in range(rows))
        self.feed.write(*({"k": 0 if n % 10 else n % 7 + 1, "word": word} for n, word in enumerate(words)))

    def _pad(self, size: int) -> str:
        return base64.b64encode(self.random.randbytes(size * 3 // 4)).decode()

    def job(self, remember: Remember) -> Job:
        job = Job("words", root=self.root, spark=self.spark, interval="1h", keep="1h:all")
        words = job.source("words", self.feed.stream())
        unique = job.stage("unique", [words], lambda frame: frame.dropDuplicates(["word"]))

        def walked(frame: DataFrame) -> DataFrame:
            return spark_abs.map_groups_with_state(
                frame, "k", remember, "seen array<string>", "k long, number long"
            )

        job.sink("numbers", job.stage("walk", [unique], walked), table=str(self.tmp / "numbers"))
        return job

    def settle(self, run: Run) -> None:
        for stage in ("words", "unique", "walk"):
            run.query(stage).processAllAvailable()

    def doctor(self) -> dict[tuple[str, str | None], Diagnosis]:
        found = diagnoses(gather(Root(self.root), now_ms(), 30_000))
        return {(one.kind, one.stage): one for one in found}

    def partitions(self, stage: str, checkpoint: int) -> dict[int, int]:
        """Return the bytes of each state partition at a checkpoint, by the names of its files."""
        (manifest,) = (manifest for manifest in manifests(self.root) if manifest.id == checkpoint)
        sizes: dict[int, int] = {}
        for file in next(each for each in manifest.stages if each.stage == stage).files:
            top, operator, partition, *_ = [*file.path.split("/"), "", ""]
            if (top, operator) == ("state", "0") and partition.isdecimal():
                sizes[int(partition)] = sizes.get(int(partition), 0) + file.size
        return sizes


def commands(root: str) -> list[list[str]]:
    """Return the commands of the runbook's section, as somebody types them for a root."""
    section = RUNBOOK.read_text().partition("\n## A stage that is too slow for its checkpoints\n")[2]
    blocks = re.findall(r"```sh\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    lines = [line.split() for block in blocks for line in block.strip().splitlines()]
    assert {line[0] for line in lines} == {"spark-abs"}
    return [[root if word == "/data/attribution" else word for word in line[1:]] for line in lines]


def type_in(line: list[str], exits: int = 0) -> str:
    """Carry a command out, and return what it prints."""
    result = CliRunner().invoke(main, line)
    assert result.exit_code == exits, (line, result.output, result.exception)
    return result.stdout


def numbers(pattern: str, said: str) -> tuple[str, ...]:
    """Return what a sentence has in place of each group."""
    found = re.fullmatch(pattern, said)
    assert found is not None, said
    return found.groups()


CAUSES = {("growing-state", "unique"), ("hot-key", "walk")}
GROWS_BY_LISTS = ("growing-state", "walk")
"""Only said where no file of the lists was merged meanwhile."""
TROUBLE = {("checkpoints-aborted", "walk"), ("interval-too-short", "walk")}


@pytest.mark.long
def test_the_stage_and_its_cause_are_named_and_the_runbook_brings_the_job_back(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    words = Words(spark, tmp_path)
    status, doctor, *repair, resume, status_again = commands(words.root)
    assert (status, status_again) == (["status", words.root],) * 2
    run = start(words.job(walk_all))
    for _ in range(CHECKPOINTS):
        words.write(ROWS, PAD)
        words.settle(run)
        run.checkpoint()
    grown = words.doctor()
    assert {("growing-state", "unique"), ("hot-key", "walk")} <= grown.keys() <= {*CAUSES, GROWS_BY_LISTS}
    said = numbers(
        r"The state of stage unique grew from (.+) MB in checkpoint (\d+) to (.+) MB in checkpoint (\d+), "
        r"in .+",
        grown["growing-state", "unique"].said,
    )
    assert (int(said[1]), int(said[3])) == (1, CHECKPOINTS)
    ends = [sum(words.partitions("unique", at).values()) / MB for at in (1, CHECKPOINTS)]
    assert [float(said[0]), float(said[2])] == pytest.approx(ends, rel=0.1)
    assert grown["growing-state", "unique"].command == f"spark-abs state {words.root} unique"
    of, hot = words.partitions("walk", CHECKPOINTS), grown["hot-key", "walk"]
    largest = max(of, key=lambda partition: of[partition])
    said = numbers(
        r"Partition (\d+) of the state of stage walk \(operator 0\) has (.+) MB, the others about .+",
        hot.said,
    )
    assert int(said[0]) == largest
    assert float(said[1]) == pytest.approx(of[largest] / MB, abs=0.1)
    assert hot.command == f"spark-abs state {words.root} walk --operator 0"

    run.set(interval="500ms", timeout="3s")
    for _ in range(2):
        words.write(BURST)
    first, wrong = "", words.doctor()

    def named() -> bool:
        nonlocal first, wrong
        first, wrong = type_in(status).splitlines()[0], words.doctor()
        return "now walk is late" in first and wrong.keys() >= TROUBLE

    eventually(run, named, "the stage is named")
    assert re.match(
        r"job words: the last \d+ checkpoints, up to \d+, were aborted in .+: expired; now walk is late: "
        r"batch \d+ has been under way for .+: output 'main' is written",
        first,
    ), first
    assert {*TROUBLE, *CAUSES} <= wrong.keys() <= {*TROUBLE, *CAUSES, GROWS_BY_LISTS}
    (aborted,) = numbers(
        r"The last (\d+) checkpoints were aborted \(expired\), the last one was completed .+ ago: "
        r"now walk is late: batch .+",
        wrong["checkpoints-aborted", "walk"].said,
    )
    expired = [row for row in events(words.root, HistoryEvent.ABORTED) if row["reason"] == "expired"]
    assert 2 <= int(aborted) <= len(expired)
    assert "hot-key: Partition" in type_in(doctor, exits=1)

    told = {line[0]: type_in(line) for line in repair}
    assert list(told) == ["pause", "set", "checkpoint", "stop"]
    assert told["pause"] == "paused: words\n"
    assert re.fullmatch(r"checkpoint \d+ is complete\n", told["checkpoint"])
    assert run.await_termination(120)
    run = start(words.job(walk_some))
    assert type_in(resume) == "resumed: words\n"
    words.write(BURST)
    words.settle(run)
    run.set(interval="5s", timeout="10s")
    before = manifests(words.root)[-1].id
    words.write(ROWS)
    eventually(run, lambda: manifests(words.root)[-1].id > before, "a periodic checkpoint completes")
    first = type_in(status_again).splitlines()[0]
    assert re.match(r"job words runs and completed checkpoint \d+ ", first), first
    assert not TROUBLE & words.doctor().keys()
    words.settle(run)
    run.stop()
    walked = read_table(tmp_path / "numbers").column("number").to_pylist()
    assert sum(walked) == next(words.ids), "every word was walked once"
