"""Whether a batch reads rows, off its offsets and the logs of its channels."""

from __future__ import annotations

from pathlib import Path

from spark_abs.codec import to_json
from spark_abs.model import AttemptId, Position
from spark_abs.snapshots.layout import OffsetFile
from spark_abs.stages.new_rows import reads_rows
from spark_abs.store.root import Root
from tests.channel_support import Log, position


def offsets(native: str, *gates: Position) -> OffsetFile:
    lines = {"0": native} | {str(n): to_json(gate) for n, gate in enumerate(gates, 1)}
    return OffsetFile(1, 0, 0, {}, lines)


def test_a_batch_reads_rows_if_a_native_source_has_moved(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    assert not reads_rows(root, offsets('{"logOffset":3}'), offsets('{"logOffset":3}'))
    assert reads_rows(root, offsets('{"logOffset":3}'), offsets('{"logOffset":4}'))


def test_barriers_and_end_markers_of_channels_are_no_rows(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    log = Log(root)
    full = log.batch(1, 2)
    log.batch(barrier_id=1)
    empty = int(log.writer.commit_end().entry.version)

    def between(then: int, now: int) -> bool:
        return reads_rows(root, offsets("", position("a.main", then)), offsets("", position("a.main", now)))

    assert between(full - 1, full)
    assert between(full - 1, empty)
    assert not between(full, empty)
    assert not between(empty, empty)


def test_rows_are_taken_for_granted_where_the_log_cannot_tell(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    log = Log(root)
    here = position("a.main", log.batch())
    after = position("a.main", log.batch())
    assert not reads_rows(root, offsets("", here), offsets("", after))
    Path(root.path(root.channel(log.writer.channel)), f"_delta_log/{after.version:020}.json").unlink()
    assert reads_rows(root, offsets("", here), offsets("", after))
    other = Position(here.channel, AttemptId(2), here.version, here.epoch)
    assert reads_rows(root, offsets("", here), offsets("", other))
