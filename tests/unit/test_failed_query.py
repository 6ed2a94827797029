"""A query that has failed, and has not said yet that it is not active any more, has not come to its end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from spark_abs.errors import StageFailed
from spark_abs.model import StageId
from spark_abs.run.drain import Drain
from spark_abs.run.end_of_input import EndOfInput
from spark_abs.run.running_stage import RunningStage
from spark_abs.stages.batch_lock import BatchLock
from spark_abs.stages.native import NativeLog
from spark_abs.store.storage import Place

STAGE = StageId("both")


class Query:
    """A query with batches 0 and, planned only, 1; `error` while it is active, `at_stop` from its end on."""

    def __init__(self, path: Path, planned: int, error: str = "", at_stop: str = "") -> None:
        for log, last in (("offsets", planned), ("commits", 0)):
            (path / log).mkdir()
            for batch in range(last + 1):
                (path / log / str(batch)).write_text("v1\n{}\n")
        self.isActive = True
        self._error, self._at_stop = error, at_stop

    def exception(self) -> StreamingQueryException | None:
        return StreamingQueryException(self._error) if self._error else None

    def processAllAvailable(self) -> None:  # noqa: N802 - as in Spark
        if error := self.exception():
            raise error

    def stop(self) -> None:
        self.isActive, self._error = False, self._error or self._at_stop


def stage_of(query: Query, path: Path, ended: list[str]) -> tuple[Any, Any]:
    """Return a stage that has read its channels, and the context of its run."""
    ctx = SimpleNamespace(failpoint=lambda _: None)
    stage: Any = object.__new__(RunningStage)
    stage._parts = SimpleNamespace(ctx=ctx, decl=SimpleNamespace(name=STAGE))
    stage.query, stage.halted = query, False
    stage.runner = SimpleNamespace(
        name=STAGE,
        native=NativeLog(Place(str(path))),
        batch_lock=BatchLock(),
        failure=None,
        only=None,
        reads_channels=True,
        heads_loop=False,
        inputs_closed=lambda _: True,
        end=lambda: ended.append(STAGE),
    )
    return stage, ctx


@pytest.mark.parametrize(
    ("said", "ends"), [({}, True), ({"at_stop": "interrupted"}, True), ({"error": "no brokers"}, False)]
)
def test_only_an_error_of_its_stop_is_none_of_the_stage(
    tmp_path: Path, said: dict[str, str], ends: bool
) -> None:
    ended: list[str] = []
    stage, ctx = stage_of(Query(tmp_path, planned=0, **said), tmp_path, ended)
    loops: Any = SimpleNamespace(around=lambda runner: [runner], has_ended=lambda *_: True)
    end = EndOfInput(ctx, {STAGE: stage}, loops)
    while stage.query.isActive:
        end.finish_stages()
    assert end.finish_stages() == ends
    assert ended == [STAGE] * ends


def test_a_drain_that_finds_a_failed_query_keeps_the_plan_of_its_batch(tmp_path: Path) -> None:
    """Batch 1 is in the outputs, and Spark could not write that it has ended."""
    query = Query(tmp_path, planned=1, error="No space left on device")
    query.isActive = False
    stage, _ = stage_of(query, tmp_path, [])
    drain: Any = object.__new__(Drain)
    with pytest.raises(StageFailed, match=r"'both' failed in batch 1 during its drain: .*No space left"):
        drain._halt(stage, lambda: None)
    assert (tmp_path / "offsets" / "1").exists()
