"""`spark-abs report`: roots of every kind become a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import spark_abs
from spark_abs.cli.main import main
from spark_abs.report.encoding import plain_report
from spark_abs.report.page import page_of
from spark_abs.report.reading import RootReader
from spark_abs.store.activity import RunActivity, Skips, write_activity
from spark_abs.store.control import Control
from spark_abs.store.history import History, HistoryEvent, HistoryRow
from spark_abs.store.root import Root
from tests.cli.conftest import Cli
from tests.report_support import synthetic_root
from tests.root_support import SmallJob


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def numbers(column: list[int | None]) -> list[int | None]:
    found: list[int | None] = []
    before = 0
    for step in column:
        before += step or 0
        found.append(None if step is None else before)
    return found


def test_a_job_becomes_a_page(job: SmallJob, cli: Cli, tmp_path: Path) -> None:
    job.checkpoint(1)
    job.checkpoint(2, name="before-upgrade")
    job.checkpoint(3)
    spark_abs.open(job.root.uri).restore("before-upgrade")
    job.start()
    job.come_alive()
    job.checkpoint(4)
    job.step(5)
    job.claim()
    target = tmp_path / "page.html"
    said = cli("report", "-o", str(target)).stdout
    assert said.startswith(f"{target}: ")
    found = data_of(target.read_text())
    assert (found["job"], found["attempt"], found["restored_from"], found["problems"]) == ("job", 2, 2, [])
    assert found["alive"].startswith("process ")
    columns, texts = found["checkpoints"], found["texts"]
    assert numbers(columns["id"]) == [1, 2, 3, 4, 5]
    assert [texts[n or 0] for n in numbers(columns["outcome"])] == ["completed"] * 4 + ["open"]
    assert numbers(columns["abandoned"]) == [0, 0, 1, 0, 0]
    assert [stage["name"] for stage in found["stages"]] == ["a", "b"]
    assert found["cuts"] == [1, 2, 3, 4]
    assert [(attempt["id"], attempt["checkpoint"]) for attempt in found["attempts"]] == [(1, None), (2, 2)]


def test_the_page_goes_to_stdout_and_the_result_is_json(job: SmallJob, cli: Cli, tmp_path: Path) -> None:
    job.checkpoint(1)
    page = cli("report", "-o", "-").stdout
    assert page.startswith("<!doctype html>")
    found = cli.json("report", "-o", str(tmp_path / "x.html"))
    assert found == {
        "report": str(tmp_path / "x.html"),
        "bytes": (tmp_path / "x.html").stat().st_size,
        "problems": [],
    }


def test_the_page_has_the_skipped_checkpoints_of_the_newest_run_also_after_its_end(
    job: SmallJob, cli: Cli
) -> None:
    job.checkpoint(1)
    write_activity(job.root, RunActivity(job.run, 90_000, skips=Skips(7, 89_000, 9)))
    assert data_of(cli("report", "-o", "-").stdout)["skips"] == {"number": 7, "at_ms": 89_000, "in_run": 9}
    job.start()
    assert data_of(cli("report", "-o", "-").stdout)["skips"] is None


def test_a_root_without_anything_becomes_a_page(job: SmallJob, cli: Cli) -> None:
    found = data_of(cli("report", "-o", "-").stdout)
    assert (found["checkpoints"]["outcome"], found["stages"], found["cuts"]) == ([], [], [])
    History(job.root)
    assert data_of(cli("report", "-o", "-").stdout)["problems"] == []


def test_a_place_without_a_job_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["report", str(tmp_path), "-o", str(tmp_path / "x.html")])
    assert done.exit_code == 2
    assert not (tmp_path / "x.html").exists()


def test_damage_is_named_in_the_page_and_hides_nothing_else(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.checkpoint(2)
    (file,) = Path(job.root.path("checkpoints")).glob("00000001-*.parquet")
    file.write_bytes(file.read_bytes()[:-20])
    for log in Path(job.root.path("history/_delta_log")).glob("*.json"):
        log.write_text("no commit")
    found = data_of(cli("report", "-o", "-").stdout)
    assert found["cuts"] == [2]
    assert any(file.name in problem for problem in found["problems"])
    assert any("history" in problem for problem in found["problems"])


def test_no_secret_of_an_event_is_in_the_page(job: SmallJob, cli: Cli) -> None:
    detail = "failed: postgresql://me:hunter2@db/x password=hunter3 could not be reached"
    row = HistoryRow(1, HistoryEvent.RUN_ENDED, job.attempt, job.run, detail=detail)
    History(job.root).append([row])
    page = cli("report", "-o", "-").stdout
    assert "could not be reached" in page
    assert "hunter" not in page


def test_a_reader_that_follows_finds_what_a_new_one_finds(job: SmallJob) -> None:
    """It opens only what was added, over retired checkpoints, merged files and a restore."""
    reader = RootReader(job.root)

    def same() -> None:
        assert plain_report(reader.read(99_000)) == plain_report(RootReader(job.root).read(99_000))

    same()
    for value in range(1, 13):
        job.checkpoint(value)
        if value % 3 == 0:
            same()
    job.checkpoints.retire([c.id for c in job.checkpoints.summaries()][:4], job.run)
    History(job.root)._table.delta.optimize.compact()
    same()
    spark_abs.open(job.root.uri).restore(9)
    job.start()
    job.checkpoint(20)
    same()


def test_a_hundred_stages_and_ten_thousand_checkpoints_are_a_page_of_three_megabytes(tmp_path: Path) -> None:
    root = synthetic_root(tmp_path / "root", stages=100, checkpoints=10_000, detailed=300)
    found = RootReader(root).read(Control.open(root).state.attempts[-1].created_ms)
    assert (len(found.timeline.checkpoints), len(found.stages)) == (10_000, 100)
    assert len(found.timeline.stages) > 10_000
    assert len(page_of(plain_report(found)).encode()) < 3_000_000


@pytest.mark.parametrize("text", ["_lease.json", "checkpoints", "history"])
def test_a_root_that_lost_a_part_becomes_a_page(job: SmallJob, cli: Cli, text: str) -> None:
    job.checkpoint(1)
    root = Root(job.root.uri)
    lost = Path(root.path("control" if text.startswith("_") else text)) / (
        text if text.startswith("_") else ""
    )
    target = lost.with_name(lost.name + ".gone")
    if lost.exists():
        lost.rename(target)
    assert data_of(cli("report", "-o", "-").stdout)["job"] == "job"
