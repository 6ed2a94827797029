"""The page in a real browser: every view, keyboard, rules of accessibility, no request, no error."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import spark_abs
from spark_abs.model import AttemptId, CheckpointId, StageId
from spark_abs.report.encoding import plain_report
from spark_abs.report.model import CheckpointLine, Outcome, Report, Stage, StageLine, Timeline
from spark_abs.report.page import page_of
from spark_abs.report.reading import RootReader
from spark_abs.store.activity import RunActivity, Skips, write_activity
from tests.report_support import synthetic_root
from tests.root_support import SmallJob

VIEWS = ("overview", "history", "checkpoint", "stage", "sizes", "attempts", "undo", "compare", "settings")
AXE = Path(os.environ.get("AXE", Path(__file__).parents[2] / ".venv/page/node_modules/axe-core/axe.min.js"))
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b onclick=alert(1)>"


class Opened:
    """A page in the browser, with all that it has said and asked for."""

    def __init__(self, page: Page, file: Path) -> None:
        self.page, self.file = page, file
        page.set_default_timeout(300_000)
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(file.as_uri())

    def show(self, view: str) -> None:
        self.page.goto(f"{self.file.as_uri()}#{view}")
        self.page.wait_for_selector("main :is(section, .cards)")

    def require_quiet(self) -> None:
        assert self.said == []
        assert {url.partition("#")[0] for url in self.asked} <= {self.file.as_uri(), "data:,"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "chromium is missing: apt-get install chromium"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


def written(report: Report, target: Path) -> Path:
    target.write_text(page_of(plain_report(report)))
    return target


class Files(dict[str, Path]):
    """Pages, each made when it is first asked for."""

    def __init__(self, top: Path) -> None:
        super().__init__()
        self._top = top

    def __missing__(self, name: str) -> Path:
        reports = {"new": self._new, "small": self._small, "wide": self._wide, "hostile": hostile}
        self[name] = written(reports[name](), self._top / f"{name}.html")
        return self[name]

    def _job(self, name: str) -> SmallJob:
        (self._top / name).mkdir()
        return SmallJob(self._top / name)

    def _new(self) -> Report:
        return RootReader(self._job("new").root).read(99_000)

    def _small(self) -> Report:
        """A job that was restored, and is at work with a checkpoint open."""
        job = self._job("small")
        for value in range(1, 6):
            job.checkpoint(value, name="before-upgrade" if value == 3 else None)
        spark_abs.open(job.root.uri).restore("before-upgrade")
        job.start()
        job.come_alive()
        job.checkpoint(7)
        job.step(8, barrier=job.claim())
        write_activity(job.root, RunActivity(job.run, 98_000, skips=Skips(7, 97_000, 9)))
        return RootReader(job.root).read(99_000)

    def _wide(self) -> Report:
        root = synthetic_root(self._top / "wide", stages=50, checkpoints=300, detailed=100)
        return RootReader(root).read(1_795_004_000_000)


def hostile() -> Report:
    """A report in which every text is HTML."""
    lines = (
        CheckpointLine(CheckpointId(n), Outcome.ABORTED, name=HOSTILE, reason=HOSTILE, triggered_ms=n)
        for n in (1, 2)
    )
    part = StageLine(CheckpointId(2), StageId(HOSTILE), acked=False, duration_ms=1, detail=HOSTILE)
    return Report(
        HOSTILE,
        HOSTILE,
        1,
        version=HOSTILE,
        attempt=AttemptId(1),
        restored_from=None,
        ready=False,
        alive=HOSTILE,
        stages=(Stage(StageId(HOSTILE), sources=(HOSTILE,), operators=(HOSTILE,)),),
        timeline=Timeline(tuple(lines), (part,)),
        problems=(HOSTILE,),
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("name", ["new", "small", "wide", "hostile"])
@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_every_view_is_drawn_without_an_error_a_request_or_a_broken_rule(
    browser: Browser, files: Files, name: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    opened = Opened(page, files[name])
    page.add_script_tag(path=AXE)
    broken, wide = {}, []
    for view in VIEWS:
        opened.show(view)
        found = page.evaluate("axe.run().then(found => found.violations.map(v => [v.id, v.nodes[0].html]))")
        if found:
            broken[view] = found
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wide.append(view)
        assert page.title() != "owned"
    assert (broken, wide) == ({}, [])
    opened.require_quiet()


def test_the_policy_holds_back_all_that_is_not_the_page(browser: Browser, files: Files) -> None:
    page = browser.new_page()
    opened = Opened(page, files["hostile"])
    for view in VIEWS:
        opened.show(view)
    opened.require_quiet()
    assert page.locator("main img, main b[onclick]").count() == 0
    page.evaluate("document.body.append(Object.assign(new Image(), {src: 'https://example.invalid/x.png'}))")
    page.wait_for_timeout(200)
    assert any("Content Security Policy" in text for text in opened.said)


def test_the_page_is_used_by_keyboard(browser: Browser, files: Files) -> None:
    page = browser.new_page()
    opened = Opened(page, files["small"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    before = page.locator("#theme").inner_text()
    page.keyboard.press("Enter")
    assert page.locator("#theme").inner_text() != before
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator("[aria-current=page]").inner_text() == "History"
    assert page.evaluate("document.activeElement.textContent") == "History", "the focus stays where it is"
    page.locator("[data-key=outcome]").focus()
    page.locator("[data-key=outcome]").select_option("abandoned")
    assert page.locator("main tbody tr:has(a)").count() == 2
    assert page.evaluate("document.activeElement.dataset.key") == "outcome"
    page.keyboard.press("Tab")
    opened.show("checkpoint=3")
    assert "before-upgrade" in page.locator("h2").first.inner_text()
    page.locator("[data-key=newer]").focus()
    page.keyboard.press("Enter")
    assert page.locator("h2").first.inner_text().endswith(" 4")
    opened.require_quiet()


def test_figures_are_those_of_the_values(browser: Browser, files: Files) -> None:
    page = browser.new_page()
    opened = Opened(page, files["wide"])
    opened.show("history")
    page.locator("[data-key=least]").fill("0.6")
    page.locator("[data-key=least]").press("Enter")
    report = page.evaluate(
        """() => {const d = JSON.parse(document.getElementById("report").textContent);
        const sum = c => {let b = 0; return c.map(s => s === null ? null : (b += s))};
        return [sum(d.checkpoints.duration_ms), sum(d.checkpoints.outcome).map(p => d.texts[p])]}"""
    )
    values = sorted(ms for ms, outcome in zip(*report, strict=True) if outcome == "completed" and ms >= 600)
    assert len(values) > 20
    row = page.locator("main table").first.locator("tbody tr").first.locator("td").all_inner_texts()
    assert row[0] == shown(values[0])
    assert row[1] == shown(round(statistics.fmean(values)))
    assert row[2] == shown(statistics.median_low(values))
    assert row[5] == shown(values[-1])


def shown(ms: int) -> str:
    return f"{ms} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def test_an_aborted_checkpoint_names_the_first_stages_that_did_not_acknowledge(
    browser: Browser, files: Files
) -> None:
    page = browser.new_page()
    opened = Opened(page, files["wide"])
    opened.show("checkpoint=300")
    notice = page.locator(".notice.warn").inner_text()
    assert "stage-30" in notice, "its inputs had all acknowledged"
    assert "stage-40" not in notice, "it waits for stages that wait"


def test_skipped_checkpoints_have_a_card_if_there_are_any(browser: Browser, files: Files) -> None:
    page = browser.new_page()
    opened = Opened(page, files["small"])
    opened.show("overview")
    card = page.locator(".card", has_text="Skipped").inner_text().split()
    assert " ".join(card).startswith("Skipped 9 in the newest run 7 in a row, until ")
    opened.require_quiet()
    opened = Opened(page, files["new"])
    opened.show("overview")
    assert page.locator(".card", has_text="Skipped").count() == 0


def test_ten_thousand_checkpoints_of_a_hundred_stages_are_drawn(browser: Browser, tmp_path: Path) -> None:
    root = synthetic_root(tmp_path / "root", stages=100, checkpoints=10_000, detailed=300)
    file = written(RootReader(root).read(1_795_100_000_000), tmp_path / "big.html")
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    opened = Opened(page, file)
    page.wait_for_selector("main .cards")
    opened.show("history")
    assert "10,000" in page.locator("main [role=status]").inner_text()
    opened.require_quiet()
