"""HTML for notebooks: text of any kind is escaped, and there is no script and no style of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def paragraph(text: str, *, strong: bool = False) -> str:
    """Return a paragraph."""
    inner = escape(text)
    return f"<p><b>{inner}</b></p>" if strong else f"<p>{inner}</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; None is a dash."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def numbered(sentences: Iterable[str]) -> str:
    """Return sentences as a numbered list."""
    return f"<ol>{''.join(f'<li>{escape(text)}</li>' for text in sentences)}</ol>"


def plan(head: str, steps: Iterable[str], notes: Iterable[str]) -> str:
    """Return a plan: its steps, and below them what is to be known."""
    return paragraph(head, strong=True) + numbered(steps) + "".join(paragraph(f"Note: {n}") for n in notes)


def _cell(value: object) -> str:
    return f"<td>{'–' if value is None else escape(str(value))}</td>"
