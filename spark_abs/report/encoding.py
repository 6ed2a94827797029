"""The report as compact JSON for the page. Pure.

Long lists of values are columns: of numbers each holds the difference from the number before it (`null` where
there is none), of texts the place in one list of texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from spark_abs.codec import to_plain
from spark_abs.report.model import CheckpointLine, Cut, Report, SinkCut, SourceCut, StageCut, StageLine

_BY_TEXT = {
    "outcome",
    "kind",
    "name",
    "mode",
    "reason",
    "detail",
    "damage",
    "stage",
    "sink",
    "place",
    "source",
    "position",
}


class Texts:
    """The texts of a page, each once."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """Return the place of a text."""
        return self._places.setdefault(text, len(self._places))

    def all(self) -> list[str]:
        return list(self._places)


def differences(numbers: Iterable[int | None]) -> list[int | None]:
    """Return each number without the one before it; None stays."""
    found: list[int | None] = []
    before = 0
    for number in numbers:
        found.append(None if number is None else number - before)
        before = before if number is None else number
    return found


def columns(cls: type, rows: Sequence[Any], texts: Texts) -> dict[str, list[int | None]]:
    """Return rows of a dataclass as columns of differences; a column with nothing in it is left out."""
    found = {}
    for field in fields(cls):
        values = [getattr(row, field.name) for row in rows]
        if field.name in _BY_TEXT:
            values = [texts.place(str(value)) for value in values]
        elif any(value is not None and value is not False for value in values):
            values = [None if value is None else int(value) for value in values]
        else:
            continue
        found[field.name] = differences(values)
    return found


def plain_report(report: Report) -> dict[str, Any]:
    """Return the report as plain values."""
    texts = Texts()
    stages = sorted(report.timeline.stages, key=lambda part: (part.stage, part.checkpoint))
    cuts = report.cuts
    lists = ("timeline", "cuts")
    plain = {
        field.name: to_plain(getattr(report, field.name))
        for field in fields(Report)
        if field.name not in lists
    }
    return {
        **plain,
        "earlier": report.timeline.earlier,
        "events": to_plain(report.timeline.events),
        "checkpoints": columns(CheckpointLine, report.timeline.checkpoints, texts),
        "parts": columns(StageLine, stages, texts),
        "cuts": [cut.checkpoint for cut in cuts],
        "outside": [cut.outside for cut in cuts],
        "cut_stages": _of_cuts(StageCut, cuts, "stages", texts),
        "cut_sinks": _of_cuts(SinkCut, cuts, "sinks", texts),
        "cut_sources": _of_cuts(SourceCut, cuts, "sources", texts),
        "texts": texts.all(),
    }


def _of_cuts(cls: type, cuts: Sequence[Cut], name: str, texts: Texts) -> dict[str, list[int | None]]:
    """Return rows of all cuts as columns, with the place of the cut of each in `cut`."""
    rows = [(place, row) for place, cut in enumerate(cuts) for row in getattr(cut, name)]
    rows.sort(key=lambda pair: (pair[1].stage, pair[0]))
    found = columns(cls, [row for _, row in rows], texts)
    return {"cut": differences([place for place, _ in rows]), **found}


def embedded(plain: object) -> str:
    """Return JSON that may stand in a script element: no tag begins or ends in it, whatever texts hold."""
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace").decode()
