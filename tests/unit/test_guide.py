"""README, guide and other documents: links, commands, generated pages, what is shipped."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import spark_abs
from spark_abs.cli.guide import WIDTH, pages
from spark_abs.cli.main import main
from tests.markdown_support import GUIDE, HERE, PACKAGE, README, anchors, blocks, code_spans, links
from tests.reference import PAGES

SHIPPED = sorted([*GUIDE.glob("*.md"), *(PACKAGE / "adr").glob("*.md"), PACKAGE / "protocol/README.md"])
FILES = [GUIDE / "prometheus-rules.yml", GUIDE / "grafana-dashboard.json"]
DOCUMENTS = [README, HERE / "CHANGELOG.md", HERE / "CONTRIBUTING.md", *SHIPPED]
LANGUAGES = {"python", "sh", "text"}
TOUR = HERE / "notebooks/tour.ipynb"
LONGEST_README = 1100
PUBLIC_MODULES = {"spark_abs", "spark_abs.testing", "spark_abs.testing.state"}

of_each_document = pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(HERE)))


@of_each_document
def test_relative_links_and_their_anchors_resolve(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{page.relative_to(HERE)}: {link} is not there"
        assert not anchor or anchor in anchors(found), f"{page.relative_to(HERE)}: {link} is no heading"


@of_each_document
def test_blocks_of_code_say_what_they_are(page: Path) -> None:
    found = list(blocks(page))
    assert {block.language for block in found} <= LANGUAGES
    assert sum(block.hidden for block in found) == page.read_text(encoding="utf-8").count("<!-- python\n")


@pytest.mark.parametrize("page", [README, *sorted(GUIDE.glob("*.md"))], ids=lambda p: p.name)
def test_code_is_not_wider_than_a_page_in_a_terminal(page: Path) -> None:
    lines = [line for block in blocks(page) if not block.hidden for line in block.code.splitlines()]
    assert [line for line in lines if len(line) > WIDTH - 2] == []


@of_each_document
def test_commands_in_blocks_are_commands_that_exist(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").touch()
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        for line in block.code.replace("\\\n", " ").splitlines() if block.language == "sh" else ():
            program, *words = shlex.split(line) or [""]
            words = words[: words.index(">")] if ">" in words else words
            if program == "spark-abs":
                main.make_context(program, words.copy())
                command, *arguments = words
                main.commands[command].make_context(command, arguments, parent=click.Context(main))


@of_each_document
def test_commands_in_the_text_have_the_names_and_options_of_commands_that_exist(page: Path) -> None:
    for span in code_spans(page):
        program, *words = span.split() or [""]
        if program != "spark-abs" or not words:
            continue
        assert words[0] in main.commands, f"{page.relative_to(HERE)}: {span}"
        options = {name for option in main.commands[words[0]].params for name in option.opts}
        given = {word.strip("[]") for word in words if word.strip("[]").startswith("--")}
        assert given <= options, f"{page.relative_to(HERE)}: {span}"


@pytest.mark.parametrize("page", PAGES)
def test_generated_pages_say_what_the_code_says(page: str) -> None:
    """If it fails: `python -m tests.reference`."""
    assert (GUIDE / page).read_text(encoding="utf-8") == PAGES[page]()


def test_the_table_of_contents_has_every_page_once() -> None:
    listed = [PACKAGE / page.path for page in pages()]
    assert sorted(listed) == sorted({*SHIPPED, *FILES} - {GUIDE / "README.md"})
    assert len({page.name for page in pages()}) == len(listed)


def test_what_is_built_has_every_page(tmp_path: Path) -> None:
    program = "import sys, setuptools; setuptools.setup(script_args=['-q', 'build_py', '-d', sys.argv[1]])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=HERE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built = {page.relative_to(tmp_path) for page in tmp_path.rglob("*") if page.suffix in (".md", ".yml")}
    built |= {page.relative_to(tmp_path) for page in tmp_path.rglob("*.json")}
    assert built == {page.relative_to(HERE) for page in (*SHIPPED, *FILES)}


def test_the_readme_is_short_and_its_first_screen_has_the_two_commands_and_what_they_need() -> None:
    text = README.read_text(encoding="utf-8")
    first = text.splitlines()[:40]
    assert [line.split("  ")[0] for line in first if line.startswith("make ")] == ["make demo", "make test"]
    assert any("Python 3.11" in line and "Java 17" in line for line in first)
    assert len(text.split()) <= LONGEST_README


def _own_modules(tree: ast.AST) -> set[str]:
    """Return the modules of the package from which a program imports."""
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name for name in names if name.split(".")[0] == "spark_abs"}


@pytest.mark.parametrize("page", [README, *sorted(GUIDE.glob("*.md"))], ids=lambda p: p.name)
def test_pages_import_public_modules_only(page: Path) -> None:
    code = [ast.parse(block.code) for block in blocks(page) if block.language == "python"]
    assert set().union(*map(_own_modules, code)) <= PUBLIC_MODULES


@pytest.mark.parametrize("script", sorted((HERE / "jobs").glob("*.py")), ids=lambda p: p.name)
def test_examples_import_public_modules_only(script: Path) -> None:
    assert _own_modules(ast.parse(script.read_text(encoding="utf-8"))) <= PUBLIC_MODULES


def test_the_tour_uses_public_names_only() -> None:
    cells = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
    tree = ast.parse("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    assert _own_modules(tree) == {"spark_abs"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "spark_abs"
    }
    assert {"Job", "open"} <= used
    assert used <= set(spark_abs.__all__)
    names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert [name for name in names if name.startswith("_")] == []
