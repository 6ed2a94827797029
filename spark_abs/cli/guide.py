"""`spark-abs guide`: pages of the guide in a terminal."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from importlib.resources import files

import click

from spark_abs.cli.output import Output, console, printable
from spark_abs.cli.root_command import Context, output_option
from spark_abs.errors import UsageError

_LISTED = re.compile(r"^- \[(?P<title>.+?)\]\((?P<path>.+?)\): (?P<summary>.+)$", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)

WIDTH = 100
"""Columns of a page, if the terminal has as many; code in the guide is narrower."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page that the package ships."""

    name: str
    """The argument of the command, such as `restore-runbook`, `protocol`, `adr-2` or a file's name."""
    title: str
    summary: str
    path: str
    """Below the package, such as `guide/loops.md`."""

    @property
    def is_file(self) -> bool:
        """Whether it is a file to use, and no page to read."""
        return not self.path.endswith(".md")

    def text(self) -> str:
        """Return the page as Markdown, without its comments, or the file as it is."""
        text = _read(self.path)
        return text if self.is_file else _COMMENT.sub("", text)


def pages() -> tuple[Page, ...]:
    """Return all pages in the order of the guide's table of contents, which is `guide/README.md`."""
    return tuple(
        Page(_name(path), found["title"], found["summary"], path)
        for found in _LISTED.finditer(_read("guide/README.md"))
        for path in (posixpath.normpath(f"guide/{found['path']}"),)
    )


def _read(path: str) -> str:
    return files("spark_abs").joinpath(*path.split("/")).read_text(encoding="utf-8")


def _name(path: str) -> str:
    folder, _, file = path.rpartition("/")
    stem = file.removesuffix(".md")
    if folder == "adr":
        return f"adr-{int(stem.partition('-')[0])}"
    return folder if stem == "README" else stem


@click.command
@output_option
@click.argument("page", required=False)
def guide(page: str | None) -> None:
    """Show a page of the guide, or print a file of it as it is; without PAGE, list the pages."""
    out = click.get_current_context().ensure_object(Context).out
    known = pages()
    if page is None:
        rows = [{"name": p.name, "title": p.title, "summary": p.summary} for p in known]
        columns = (("page", False), ("", False))
        out.result(rows, lambda out: out.table(columns, ((p.name, p.summary) for p in known)))
        return
    chosen = next((p for p in known if p.name == page.removesuffix(".md")), None)
    if chosen is None:
        raise UsageError(f"there is no page {page!r}: the pages are {', '.join(p.name for p in known)}")
    text = chosen.text()
    shown = {"name": chosen.name, "title": chosen.title, "text": text}
    out.result(shown, lambda out: click.echo(text, nl=False) if chosen.is_file else _show(out, text))


def _show(_: Output, text: str) -> None:
    # It brings a parser and a highlighter, which no other command needs.
    from rich.markdown import Markdown

    shown = console()
    with shown.capture() as captured:
        page = Markdown(printable(text), code_theme="ansi_dark", hyperlinks=False)
        shown.print(page, width=min(shown.width, WIDTH))
    for line in captured.get().splitlines():
        click.echo(line.rstrip())
