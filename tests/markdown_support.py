"""Markdown files of the project, read for tests: their blocks of code, links and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

HERE = Path(__file__).resolve().parents[1]
PACKAGE = HERE / "spark_abs"
GUIDE = PACKAGE / "guide"
README = HERE / "README.md"

_HIDDEN = re.compile(r"<!-- python\n(.*?)-->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code: `line` is that of its first line in the file, `hidden` one within a comment."""

    language: str
    code: str
    line: int
    hidden: bool = False


def _tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page; a comment that begins with `<!-- python` is one that readers do not see."""
    for token in _tokens(page):
        if token.type == "fence" and token.map is not None:
            yield Block(token.info.strip(), token.content, token.map[0] + 2)
        elif token.type == "html_block" and token.map is not None:
            for found in _HIDDEN.finditer(token.content):
                yield Block("python", found[1], token.map[0] + 2, hidden=True)


def links(page: Path) -> Iterator[str]:
    """Yield the targets of a page's links."""
    for token in _tokens(page):
        for child in token.children or ():
            if child.type == "link_open":
                yield str(child.attrs["href"])


def code_spans(page: Path) -> Iterator[str]:
    """Yield what stands between backticks in the text of a page."""
    for token in _tokens(page):
        yield from (child.content for child in token.children or () if child.type == "code_inline")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    tokens = _tokens(page)
    headings = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}
