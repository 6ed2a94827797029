"""Input files that a restore would read again, found in the file source's own log."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spark_abs.manifest import Manifest, SourceShape, StageShape, StageSnapshot
from spark_abs.model import AttemptId, BatchId, CheckpointId, CheckpointKind, RunId, StageId
from spark_abs.protocol.attempt import Rebuilt
from spark_abs.protocol.attempt_changes import begin_attempt, finish_attempt
from spark_abs.protocol.control import ControlState, SkippedFile, begin_job, skip
from spark_abs.restore.inputs import InputsSince, inputs_since
from spark_abs.snapshots.file_sources import is_there
from spark_abs.store.root import Root
from spark_abs.store.storage import DEFAULTS


def input_file(base: Path, number: int) -> Path:
    return base / "in put" / f"{number}.json"


def write_log(base: Path, attempt: int, first: int, until: int, compact: int) -> None:
    """Write a source log as Spark does: batch n has read file n; a compact file has all up to it."""
    log = base / "root" / "native" / str(attempt) / "events" / "sources" / "0"
    log.mkdir(parents=True)
    for number in range(first, until + 1):
        batches = range(number + 1) if number == compact else (number,)
        entries = [{"path": input_file(base, n).as_uri(), "timestamp": 1, "batchId": n} for n in batches]
        name = f"{number}.compact" if number == compact else str(number)
        (log / name).write_text("\n".join(["v1", *map(json.dumps, entries)]))
        for batch in batches:
            input_file(base, batch).parent.mkdir(exist_ok=True)
            input_file(base, batch).touch()


def checkpoint(log_offset: int) -> Manifest:
    offsets = f'v1\n{{"batchWatermarkMs":0}}\n{{"logOffset":{log_offset}}}'
    stage = StageSnapshot(StageId("events"), BatchId(log_offset), offsets=offsets)
    kind = CheckpointKind.CHECKPOINT
    return Manifest(CheckpointId(3), AttemptId(1), RunId(1), "job", kind, None, 0, 1, 2, (), (stage,))


def restored(to: int) -> ControlState:
    begun = begin_attempt(
        begin_job("job", 0),
        AttemptId(1),
        checkpoint=CheckpointId(to),
        plan="{}",
        host="here",
        pid=1,
        now_ms=0,
    )
    return finish_attempt(begun, AttemptId(2))


def test_only_what_was_read_since_the_checkpoint_and_is_gone_is_named(tmp_path: Path) -> None:
    write_log(tmp_path, 1, first=0, until=7, compact=5)
    for number in (1, 4, 6):
        input_file(tmp_path, number).unlink()
    root, state = Root(str(tmp_path / "root")), begin_job("job", 0)
    lost = [input_file(tmp_path, n).as_uri() for n in (4, 6)]
    assert inputs_since(root, checkpoint(2), state, (), ask_kafka=True) == InputsSince(
        {StageId("events"): 5}, tuple(lost)
    )
    assert inputs_since(root, checkpoint(6), state, (), ask_kafka=True) == InputsSince({StageId("events"): 1})
    assert inputs_since(root, checkpoint(7), state, (), ask_kafka=True) == InputsSince()


@pytest.mark.parametrize("name", ["a b", "50%25", "what? #1", "café"])
def test_a_name_is_read_as_spark_writes_it(tmp_path: Path, name: str) -> None:
    uri = (tmp_path / name).as_uri()
    assert [is_there(DEFAULTS, known) for known in (uri, f"file:{uri.removeprefix('file://')}")] == [
        False
    ] * 2
    (tmp_path / name).touch()
    assert [is_there(DEFAULTS, known) for known in (uri, f"file:{uri.removeprefix('file://')}")] == [True] * 2


def test_a_file_that_the_stage_skips_is_not_read_again_and_may_be_gone(tmp_path: Path) -> None:
    write_log(tmp_path, 1, first=0, until=4, compact=-1)
    input_file(tmp_path, 4).unlink()
    root, state = Root(str(tmp_path / "root")), begin_job("job", 0)
    one = SkippedFile(StageId("events"), input_file(tmp_path, 4).as_uri(), "ann@desk", 5, RunId(2))
    for stage, lost in (("events", ()), ("orders", (one.file,))):
        skipped = skip(state, [replace(one, stage=StageId(stage)), replace(one, stage=StageId("other"))])
        found = inputs_since(root, checkpoint(2), skipped, (), ask_kafka=True)
        assert (found.lost, found.files) == (lost, {StageId("events"): 1 + len(lost)})


def test_the_current_attempt_is_asked_if_the_checkpoint_is_on_its_path(tmp_path: Path) -> None:
    write_log(tmp_path, 1, first=0, until=3, compact=-1)
    write_log(tmp_path, 2, first=0, until=5, compact=-1)
    input_file(tmp_path, 5).unlink()
    root = Root(str(tmp_path / "root"))
    assert inputs_since(root, checkpoint(2), restored(to=3), (), ask_kafka=True).lost == (
        input_file(tmp_path, 5).as_uri(),
    )
    assert inputs_since(root, checkpoint(2), restored(to=1), (), ask_kafka=True).lost == ()


FIRST, SECOND = SourceShape("json", "/first"), SourceShape("json", "/second")


class Rearranged:
    """A stage that has read two directories, and reads them in another order since its checkpoint.

    That covers batches 0 to 2 of the first and 0 to 5 of the second; batches 3 and 4 of the first came since.
    """

    def __init__(self, base: Path) -> None:
        self.base, self.root = base, Root(str(base / "root"))
        self._log("events.4/sources/0", "second", range(6))
        self._log("events.4/sources/1", "first", range(5))
        offsets = 'v1\n{"batchWatermarkMs":0}\n{"logOffset":2}\n{"logOffset":5}'
        stage = StageSnapshot(StageId("events"), BatchId(5), offsets=offsets)
        self.manifest = replace(checkpoint(2), stages=(stage,), graph=(self.shape(FIRST, SECOND),))
        self.state = begin_job("job", 0)

    def shape(self, *sources: SourceShape) -> StageShape:
        return StageShape(StageId("events"), (), {}, {}, {}, sources=sources)

    def file(self, directory: str, number: int) -> Path:
        return self.base / directory / f"{number}.json"

    def now(self, *sources: SourceShape) -> ControlState:
        """Return the state after a start with these sources."""
        rebuilt = (Rebuilt(StageId("events"), 4, "q", None, True),)
        attempt = replace(self.state.attempts[-1], rebuilt=rebuilt, shapes=(self.shape(*sources),))
        return replace(self.state, attempts=(attempt,))

    def _log(self, log: str, directory: str, batches: range) -> None:
        place = self.base / "root" / "native" / "1" / log
        place.mkdir(parents=True)
        for number in batches:
            file = self.file(directory, number)
            entry = {"path": file.as_uri(), "timestamp": 1, "batchId": number}
            (place / str(number)).write_text(f"v1\n{json.dumps(entry)}")
            file.parent.mkdir(exist_ok=True)
            file.touch()


def test_a_source_is_looked_for_by_its_name_whatever_its_place_is_now(tmp_path: Path) -> None:
    moved = Rearranged(tmp_path)
    moved.file("second", 4).unlink()  # read before the checkpoint: nobody needs it
    state = moved.now(SECOND, FIRST)
    found = inputs_since(moved.root, moved.manifest, state, (), ask_kafka=False)
    assert (found.files, found.lost, found.left) == ({StageId("events"): 2}, (), ())
    moved.file("first", 3).unlink()
    found = inputs_since(moved.root, moved.manifest, state, (), ask_kafka=False)
    assert found.lost == (moved.file("first", 3).as_uri(),)


def test_of_an_attempt_that_is_over_its_newest_checkpoint_says_the_places(tmp_path: Path) -> None:
    """What `control/` knew of its stages is gone with it."""
    moved = Rearranged(tmp_path)
    state = moved.now(SECOND, FIRST)
    attempts = (replace(state.attempts[0], shapes=()),)
    later = replace(moved.manifest, id=CheckpointId(9), graph=(moved.shape(SECOND, FIRST),))
    known = (moved.manifest, later)
    found = inputs_since(
        moved.root, moved.manifest, replace(state, attempts=attempts), known, ask_kafka=False
    )
    assert (found.files, found.lost) == ({StageId("events"): 2}, ())


def test_of_a_source_that_is_not_read_any_more_it_is_said_that_nothing_is_known(tmp_path: Path) -> None:
    moved = Rearranged(tmp_path)
    found = inputs_since(moved.root, moved.manifest, moved.now(SECOND), (), ask_kafka=False)
    assert found.left == ("json source /first of stage 'events'",)
