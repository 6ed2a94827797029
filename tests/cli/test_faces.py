"""What a notebook shows of a root, a restore and a rewind: text from storage is text."""

from __future__ import annotations

from html.parser import HTMLParser

import spark_abs
from spark_abs.markup import table
from spark_abs.rewind.journal import Journal
from spark_abs.rewind.plan import RewindPlan
from tests.root_support import SmallJob


class Text(HTMLParser):
    """The tags and the text of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def test_a_root_shows_its_run_stages_and_newest_checkpoints(job: SmallJob) -> None:
    handle = spark_abs.open(job.root.uri)
    assert "No checkpoint is complete" in Text(handle._repr_html_()).text
    for value in range(1, 13):
        job.checkpoint(value, name="before-upgrade" if value == 11 else None)
    job.come_alive()
    shown = Text(handle._repr_html_())
    assert "run 1 is at work" in shown.text
    assert "before-upgrade" in shown.text
    assert "12 checkpoints" in shown.text
    assert shown.tags.count("table") == 2
    assert shown.tags.count("tr") == 1 + 2 + 1 + 10


def test_a_root_that_is_gone_is_a_sentence(job: SmallJob) -> None:
    handle = spark_abs.open(f"{job.root.uri}-gone")
    assert "is not the root of a job" in Text(handle._repr_html_()).text


def test_a_plan_and_a_restore_show_their_steps(job: SmallJob) -> None:
    job.checkpoint(1)
    job.step(2)
    handle = spark_abs.open(job.root.uri)
    planned = handle.restore(1, dry_run=True)
    shown = Text(planned._repr_html_())
    assert "nothing is changed" in shown.text
    assert shown.tags.count("li") == len(planned.plan.steps)
    assert "start the job" in Text(handle.restore(1)._repr_html_()).text


def test_a_rewind_shows_its_moment_and_steps() -> None:
    journal = Journal("r", 0, (), ())
    plan = RewindPlan(journal, 1_795_000_000_000, ("table <b>/lake</b> goes back",), ("read this",))
    shown = Text(plan._repr_html_())
    assert "2026-11-18" in shown.text
    assert "table <b>/lake</b> goes back" in shown.text
    assert "b" in shown.tags, "the heading"
    assert shown.tags.count("li") == 1
    assert "Note: read this" in shown.text


def test_a_cell_is_text() -> None:
    assert "<script>" not in table(["<script>"], [["<script>", None, 3]])
