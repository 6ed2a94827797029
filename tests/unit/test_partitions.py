"""How many shuffle partitions a stage starts with."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from spark_abs.model import StageId
from spark_abs.snapshots.layout import PARTITIONS_KEY
from spark_abs.stages.native import NativeLog
from spark_abs.stages.partitions import FAR_MORE, Partitions, partitions_of, warn
from spark_abs.store.storage import DEFAULTS

STAGE = StageId("totals")


def log_of(directory: Path, recorded: int | None = None) -> NativeLog:
    """The checkpoint of a stage that has run a batch with a number of partitions, or has not run."""
    if recorded is not None:
        metadata = {"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {PARTITIONS_KEY: str(recorded)}}
        (directory / "offsets").mkdir(parents=True)
        (directory / "offsets/0").write_text("\n".join(["v1", json.dumps(metadata), "0"]))
    return NativeLog(DEFAULTS.place(str(directory)))


def number(found: Partitions | None) -> int:
    assert found is not None
    return found.number


def test_where_nobody_says_a_number_it_is_that_of_the_cores(tmp_path: Path) -> None:
    fresh = log_of(tmp_path)
    assert number(partitions_of(fresh, None, None, 2)) == 2
    assert number(partitions_of(fresh, None, "200", 2)) == 200
    assert number(partitions_of(fresh, 3, "200", 2)) == 3


def test_a_stage_that_has_run_keeps_its_number(tmp_path: Path) -> None:
    ran = log_of(tmp_path, 200)
    assert number(partitions_of(ran, None, None, 2)) == 200
    assert number(partitions_of(ran, 3, "4", 2)) == 200


@pytest.mark.parametrize(
    ("found", "declared", "keeps_state", "said"),
    [
        (Partitions(200, "the session's", False), None, True, "on 2 cores"),
        (Partitions(200, "the session's", False), None, False, ""),  # without state it costs nothing
        (Partitions(2 * FAR_MORE, "as declared", False), 2 * FAR_MORE, True, ""),
        (Partitions(200, "as its first batch had", True), None, True, ""),  # too late
        (Partitions(200, "as its first batch had", True), 8, True, "not with 8 as declared"),
    ],
)
def test_far_more_than_the_cores_are_warned_about_while_they_can_be_changed(
    found: Partitions,
    declared: int | None,
    keeps_state: bool,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn(STAGE, found, declared, keeps_state, 2)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == (1 if said else 0)
    assert all("stage totals" in text and said in text for text in warned)
