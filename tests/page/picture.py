"""Makes the picture of the page in README: `python -m tests.page.picture`. Needs Chromium."""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from spark_abs.model import AttemptId, ChannelId, CheckpointId, RunId, StageId, Version
from spark_abs.report.encoding import plain_report
from spark_abs.report.model import (
    AttemptLine,
    Channel,
    CheckpointLine,
    EventLine,
    Outcome,
    Report,
    RunLine,
    Sink,
    Stage,
    StageLine,
    Timeline,
)
from spark_abs.report.page import page_of
from tests.markdown_support import GUIDE

PICTURE = GUIDE / "the-page.png"
NOW, EVERY = 1_795_846_503_000, 10_000
OPEN = 412
FIRST = OPEN - 180
ATTEMPT, RUN = AttemptId(2), RunId(3)
SIZES = {"clicks": 40_000, "orders": 30_000, "match": 96_000_000, "totals": 11_000_000, "mail": 900_000}
"""The stages with the bytes of their state."""
INPUTS = (
    ("clicks", "match", 48_600, False, OPEN),
    ("orders", "match", 3_120, True, None),
    ("match", "totals", 0, False, None),
    ("match", "mail", 240, False, None),
)
"""Channels: from, to, rows that are not read, whether it is blocked, and the barrier in it."""


def stages() -> tuple[Stage, ...]:
    passed = {"clicks": OPEN, "orders": OPEN, "match": OPEN - 1, "totals": OPEN - 1, "mail": OPEN - 1}
    more: dict[str, dict[str, Any]] = {
        "clicks": {"sources": ("kafka source clicks",)},
        "orders": {"sources": ("json source /data/orders",)},
        "match": {
            "operators": ("stream-stream join",),
            "sinks": (Sink("attributed", "delta", "/lake/attributed"),),
        },
        "totals": {
            "operators": ("aggregation",),
            "sinks": (Sink("totals", "delta", "/lake/totals", ("key item",)),),
        },
        "mail": {"sinks": (Sink("mail", "function"),)},
    }
    return tuple(
        Stage(
            StageId(name), finished=2_000 + OPEN, planned=2_001 + OPEN, passed=CheckpointId(at), **more[name]
        )
        for name, at in passed.items()
    )


def channels() -> tuple[Channel, ...]:
    return tuple(
        Channel(
            ChannelId(f"{sender}.main"),
            StageId(reader),
            at=Version(9_000),
            epoch=CheckpointId(OPEN if blocked else OPEN - 1),
            blocked=blocked,
            barrier=None if barrier is None else CheckpointId(barrier),
            entries=-(-rows // 500),
            rows=rows,
            size=rows * 90,
        )
        for sender, reader, rows, blocked, barrier in INPUTS
    )


def checkpoints(chance: random.Random) -> Iterator[tuple[CheckpointLine, list[StageLine]]]:
    for number in range(FIRST, OPEN):
        began = NOW - (OPEN - number) * EVERY - 4_000
        slow, failed = number % 9 == 0, number in (338, 339)
        parts, before = list[StageLine](), 0
        for name, size in SIZES.items():
            delay = 0 if name in ("clicks", "orders") else before
            work = chance.randrange(60, 160) + (1_900 if slow and name == "mail" else 0)
            grown = int(size * (0.7 + 0.3 * (number - FIRST) / 180))
            took = delay + work
            acked = not failed or name != "mail"
            parts.append(
                StageLine(
                    CheckpointId(number),
                    StageId(name),
                    acked,
                    duration_ms=took if acked else 60_000,
                    start_delay_ms=delay,
                    alignment_ms=20,
                    sync_ms=2,
                    async_ms=work // 3,
                    size_full=grown,
                    size_new=grown // 30,
                    detail=""
                    if acked
                    else "batch 2338 has been under way for 1.0 min: function 'mail' is called",
                )
            )
            before = max(before, took)
        total = sum(part.size_full or 0 for part in parts)
        duration = 60_000 if failed else max(part.duration_ms or 0 for part in parts) + 40
        yield (
            CheckpointLine(
                CheckpointId(number),
                Outcome.ABORTED if failed else Outcome.COMPLETED,
                ATTEMPT,
                RUN,
                kind="savepoint" if number == 360 else "checkpoint",
                name="nightly" if number == 360 else "",
                mode="aligned",
                triggered_ms=began,
                duration_ms=duration,
                size_full=None if failed else total,
                size_new=None if failed else total // 30,
                acks=4 if failed else 5,
                stages=5,
                reason="expired" if failed else "",
                detail="after 1 min without mail" if failed else "",
                stored=number > OPEN - 20 or number == 360,
            ),
            parts,
        )


def report() -> Report:
    """Return a job of five stages, of which one calls a slow function."""
    lines, parts = list[CheckpointLine](), list[StageLine]()
    for line, own in checkpoints(random.Random(5)):
        lines.append(line)
        parts += own
    opened = CheckpointLine(
        CheckpointId(OPEN),
        attempt=ATTEMPT,
        run=RUN,
        kind="checkpoint",
        mode="aligned",
        triggered_ms=NOW - 4_000,
        stages=5,
    )
    began = NOW - (OPEN - FIRST) * EVERY - 60_000
    return Report(
        "shop",
        "s3://streams/shop",
        NOW,
        version="0.1",
        attempt=ATTEMPT,
        restored_from=CheckpointId(FIRST - 1),
        ready=True,
        alive="process 4711 on node-3",
        heard_ms=NOW - 900,
        stages=stages(),
        channels=channels(),
        timeline=Timeline(
            (*lines, opened),
            tuple(parts),
            (EventLine(began, "restored", ATTEMPT, RUN, CheckpointId(FIRST - 1)),),
            FIRST - 1,
        ),
        attempts=(
            AttemptLine(AttemptId(1), None, None, None, began - 3_600_000, True, True),
            AttemptLine(ATTEMPT, AttemptId(1), CheckpointId(FIRST - 1), None, began, True, True),
        ),
        runs=(RunLine(RUN, ATTEMPT, "job", "node-3:4711", began, None),),
    )


def main() -> None:
    """Write the picture."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium, "chromium is missing: apt-get install chromium"
    with tempfile.TemporaryDirectory() as directory:
        page, shot = Path(directory) / "page.html", Path(directory) / "shot.png"
        page.write_text(page_of(plain_report(report())))
        options = (
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--window-size=1440,925",
            f"--screenshot={shot}",
        )
        subprocess.run([chromium, *options, page.as_uri()], check=True, capture_output=True)
        Image.open(shot).convert("RGB").quantize(64).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
