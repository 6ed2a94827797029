"""The page as one text: its style, its script and its data, and nothing that is loaded from elsewhere."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from spark_abs.report.encoding import embedded

_SCRIPTS = ("data.js", "elements.js", "graph.js", "charts.js", "views.js", "main.js")


@dataclass(frozen=True, slots=True)
class _Assets:
    template: Template
    style: str
    script: str


@cache
def _assets() -> _Assets:
    """Return the parts of the page; the package may lie in a zip."""
    script = "\n".join(_read(name) for name in _SCRIPTS)
    return _Assets(
        Template(_read("page.html")), _read("page.css"), f'(() => {{\n"use strict";\n{script}}})();\n'
    )


def _read(name: str) -> str:
    return files("spark_abs").joinpath("report", "assets", name).read_text(encoding="utf-8")


def policy(*, served: bool) -> str:
    """Return the content security policy: only the script and the style of the page itself.

    Args:
        served: whether the page may ask its own server for news.
    """
    assets = _assets()
    connect = "'self'" if served else "'none'"
    return (
        f"default-src 'none'; script-src {_hash(assets.script)}; style-src {_hash(assets.style)}; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_of(plain: dict[str, Any], live_ms: int | None = None) -> str:
    """Return the page of a report.

    Args:
        plain: from `encoding.plain_report`.
        live_ms: how often the page asks its server for news; None for a page in a file.
    """
    assets = _assets()
    return assets.template.substitute(
        policy=escape(policy(served=live_ms is not None)),
        title=escape(str(plain["job"]).encode("utf-8", "replace").decode()),
        style=assets.style,
        script=assets.script,
        data=embedded({**plain, "live": live_ms or 0}),
    )
