"""What a benchmark reports: one line of JSON per figure, the median of its runs with least and greatest."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure; `value` is the median over `runs` runs."""

    bench: str
    value: float
    min: float
    max: float
    unit: str
    runs: int


def figure(bench: str, samples: Sequence[float], unit: str = "ratio") -> Figure:
    """Summarise the samples of a figure, in `unit`, to four significant digits."""
    found = (statistics.median(samples), min(samples), max(samples))
    value, least, greatest = (float(f"{one:.4g}") for one in found)
    return Figure(bench, value, least, greatest, unit, len(samples))


def ratios(measured: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Divide run by run: the two were measured one right after the other."""
    return [one / other for one, other in zip(measured, baseline, strict=True)]


def save(path: Path, figures: Iterable[Figure]) -> None:
    """Put figures into a file of lines, each in the place of an older one of its name."""
    lines = path.read_text().splitlines() if path.exists() else []
    known = {json.loads(line)["bench"]: line for line in lines}
    known |= {one.bench: json.dumps(asdict(one)) for one in figures}
    path.write_text("".join(f"{line}\n" for line in known.values()))


def wait(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    pause = Event()
    while not condition():
        pause.wait(_POLL_S)
