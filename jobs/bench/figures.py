"""What a benchmark reports: one line of JSON per figure, the median of its runs with least and greatest."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

import numpy as np

_POLL_S = 0.1
_FEWEST = 5
"""Runs of which an interval says something."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure; `value` is the median over `runs` runs.

    With 95 % confidence the median of many more runs is between `low` and `high` (percentile bootstrap).
    """

    bench: str
    value: float
    min: float
    max: float
    unit: str
    runs: int
    low: float | None = None
    high: float | None = None


def figure(bench: str, samples: Sequence[float], unit: str = "ratio") -> Figure:
    """Summarise the samples of a figure, in `unit`, to four significant digits."""
    value, least, greatest = map(_rounded, (statistics.median(samples), min(samples), max(samples)))
    if len(samples) < _FEWEST:
        return Figure(bench, value, least, greatest, unit, len(samples))
    drawn = np.random.default_rng(7).choice(np.array(samples), (10_000, len(samples)))
    low, high = map(_rounded, np.percentile(np.median(drawn, axis=1), [2.5, 97.5]))
    return Figure(bench, value, least, greatest, unit, len(samples), low, high)


def _rounded(one: float) -> float:
    return float(f"{one:.4g}")


def ratios(measured: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Divide run by run: the two were measured one right after the other."""
    return [one / other for one, other in zip(measured, baseline, strict=True)]


def save(path: Path, figures: Iterable[Figure]) -> None:
    """Put figures into a file of lines, each in the place of an older one of its name."""
    lines = path.read_text().splitlines() if path.exists() else []
    known = {json.loads(line)["bench"]: line for line in lines}
    known |= {one.bench: _line(one) for one in figures}
    path.write_text("".join(f"{line}\n" for line in known.values()))


def _line(found: Figure) -> str:
    return json.dumps({name: value for name, value in asdict(found).items() if value is not None})


def wait(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    pause = Event()
    while not condition():
        pause.wait(_POLL_S)
