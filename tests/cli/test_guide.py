"""`spark-abs guide`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from spark_abs.cli.guide import Page, pages
from spark_abs.cli.main import main


def guide(*arguments: str, exits: int = 0) -> Result:
    result = CliRunner().invoke(main, ["guide", *arguments])
    assert result.exit_code == exits, (result.output, result.exception)
    return result


def test_without_a_page_it_lists_them_with_a_line_each() -> None:
    lines = guide().stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [page.name for page in pages()]
    assert all(line.rstrip().endswith(page.summary) for line, page in zip(lines, pages(), strict=True))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_each_page_is_shown_without_its_comments(page: Page) -> None:
    shown = guide(page.name).stdout
    assert len(shown.splitlines()) > 5
    assert "<!--" not in shown
    assert "<!--" not in json.loads(guide(page.name, "--output", "json").stdout)["text"]


def test_a_page_has_its_title_its_code_and_where_links_lead() -> None:
    shown = guide("rescaling.md").stdout
    assert "Rescaling" in shown.splitlines()[0] + shown.splitlines()[1]
    assert "spark-abs stop /data/attribution --savepoint before-scaling" in shown
    assert "state-as-data.md" in shown


def test_an_unknown_page_is_a_wrong_call_and_names_the_pages() -> None:
    said = guide("recipes", exits=2).stderr
    assert said.startswith("spark-abs: there is no page 'recipes'")
    assert all(page.name in said for page in pages())


def test_it_does_not_load_spark() -> None:
    program = (
        "import sys; from click.testing import CliRunner; from spark_abs.cli.main import main; "
        "done = CliRunner().invoke(main, ['guide', 'concepts']); "
        "sys.exit(done.exit_code or 'pyspark' in sys.modules or 'py4j' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
