"""Restarts of a stage: the batch that comes next, and whose turn it is (P18)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spark_abs.errors import DamageError
from spark_abs.model import BatchId, CheckpointId
from spark_abs.runtime.native import plan_batch
from spark_abs.runtime.turns import Turns
from spark_abs.store.storage import Place


def planned(native: Place, *batches: int) -> None:
    for batch in batches:
        native.write(f"offsets/{batch}", b"by Spark")
        native.write(f"offsets/.{batch}.crc", b"of it")


def test_the_batch_that_comes_next_takes_the_place_of_what_spark_has_planned(tmp_path: Path) -> None:
    """Its checksum goes, too: the new text would not match it."""
    native = Place(str(tmp_path))
    planned(native, 3, 4, 5)
    native.write("commits/3", b"")
    for _ in range(2):
        plan_batch(native, BatchId(4), "by hand")
        left = {p.name: p.read_text() for p in (tmp_path / "offsets").iterdir()}
        assert left == {"3": "by Spark", ".3.crc": "of it", "4": "by hand"}
    with pytest.raises(DamageError, match="batch 6 cannot come next, 3 is the last finished"):
        plan_batch(native, BatchId(6), "by hand")


def test_a_stopped_stage_has_no_agent_and_its_successor_stands_where_it_stood() -> None:
    before, after = Turns(), Turns()
    before.hold(CheckpointId(4))
    before.stop()
    with before.agent() as mine:
        assert not mine
    after.succeed(before)
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(_enter, after)
        with pytest.raises(TimeoutError):
            batch.result(0.3)
        after.release(CheckpointId(4))
        assert batch.result(30)


def _enter(turns: Turns) -> bool:
    with turns.batch(lambda: True):
        return True
