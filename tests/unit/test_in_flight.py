"""What a checkpoint holds as data in flight: measured, looked for before a restore, and never left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spark_abs
from spark_abs.channels.in_flight import bytes_in_flight
from spark_abs.checkpointing.checkpoint_stats import CheckpointStats
from spark_abs.codec import to_json
from spark_abs.compatibility.inspection import require_ok
from spark_abs.compatibility.recorded import Declared, Knowledge
from spark_abs.errors import DamageError, Refused
from spark_abs.manifest import CHANNEL as CHANNEL_KIND
from spark_abs.manifest import InFlight, Manifest, SourceShape, StageShape
from spark_abs.model import CheckpointId, CheckpointMode, Position, RunId, StageId, Version
from spark_abs.observe.verification import require_restorable
from spark_abs.protocol import control as ledger
from spark_abs.protocol.changes import Comparison
from spark_abs.protocol.path import channel_path
from spark_abs.store.control import Control
from spark_abs.store.history import History, HistoryEvent
from tests.failing_storage import fail_reads
from tests.root_support import CHANNEL, SmallJob, offsets_of

A, B, C = StageId("a"), StageId("b"), StageId("c")
AFTER = Version(2)


def offsets_at(position: Position) -> str:
    return "\n".join(["v1", "{}", to_json(position)])


class Flown:
    """The small job, with a checkpoint at which `b` had read up to entry 2; two more have rows."""

    def __init__(self, path: Path) -> None:
        self.job = SmallJob(path)
        self.job.step(1, 2)
        self.barrier = replace(self.job.claim(), mode=CheckpointMode.UNALIGNED)
        for values in ((3, 4), (5,)):
            self.job.step(*values)
        version = Version(self.job.step(barrier=self.barrier))
        whole = self.job.manifest(self.barrier, version)
        (position,) = whole.stages[1].positions
        short = replace(position, version=AFTER, at_barrier=False, epoch=CheckpointId(0))
        a, b = whole.stages
        self.manifest = replace(
            whole,
            stages=(
                replace(a, offsets=offsets_of("a", a.cut_batch)),
                replace(b, positions=(short,), offsets=offsets_at(short)),
            ),
            mode=CheckpointMode.UNALIGNED,
        )
        assert self.job.checkpoints.complete(self.manifest)
        self.settle()

    def settle(self) -> None:
        Control.open(self.job.root).update(lambda s: ledger.settle(s, completed=(self.barrier.id,)))

    def files(self, version: int) -> list[Path]:
        """Return the files of an entry of the channel."""
        (entry,) = [e for e in self.job.writer.log.after(Version(-1)) if e.version == version]
        table = Path(self.job.root.path(self.job.root.channel(CHANNEL)))
        return [table / file.path for file in entry.files]

    def size(self) -> int:
        return sum(f.stat().st_size for version in (3, 4) for f in self.files(version))

    def compare(self, *stages: StageShape, restored: bool = True) -> Comparison:
        """Compare the job with these stages after `a`, as restored or as its native checkpoints are."""
        a = replace(self.manifest.graph[0], sources=(SourceShape("json", "/in"),))
        known = Knowledge(self.job.root, self.job.state, self.manifest, at_checkpoint=restored)
        return known.compare(Declared((a, *stages), {}), leave=False)

    def plan(self, read: int) -> None:
        (position,) = self.manifest.stages[1].positions
        native = Path(self.job.root.native("native", self.job.state.attempt.id, B).path)
        for directory in ("offsets", "commits"):
            (native / directory).mkdir(parents=True, exist_ok=True)
        (native / "offsets" / "9").write_text(offsets_at(replace(position, version=Version(read))))
        (native / "commits" / "9").write_text("v1\n{}")


@pytest.fixture
def flown(tmp_path: Path) -> Flown:
    return Flown(tmp_path)


def test_what_lies_between_a_stage_and_the_barrier_is_in_flight(flown: Flown) -> None:
    (flight,) = flown.manifest.in_flight()
    assert flight == InFlight(B, CHANNEL, AFTER, Version(5))
    path = channel_path(flown.job.state, CHANNEL)
    assert bytes_in_flight(flown.job.root, path, flight) == flown.size()
    assert bytes_in_flight(flown.job.root, path, flight, most=1) == flown.files(3)[0].stat().st_size


def closed(manifest: Manifest) -> Manifest:
    """Let the input have ended where it stands."""
    stage = manifest.stages[1]
    (position,) = stage.positions
    ended = replace(position, closed=RunId(manifest.run))
    return replace(manifest, stages=(manifest.stages[0], replace(stage, positions=(ended,))))


def test_behind_the_end_of_an_input_nothing_is_in_flight(flown: Flown) -> None:
    """A stage that has ended still takes barriers; they stand after its end marker."""
    assert closed(flown.manifest).in_flight() == ()


def test_the_history_says_what_was_in_flight_to_which_stage(flown: Flown) -> None:
    job = flown.job
    ctx: Any = SimpleNamespace(root=job.root, attempt=job.attempt, run=job.run)
    CheckpointStats(ctx, None).completed(flown.barrier, flown.manifest, job.state)
    rows = [row for row in History(job.root).read().to_pylist() if row["checkpoint"] == flown.barrier.id]
    found = {row["stage"]: (row["inflight_bytes"], row["mode"]) for row in rows}
    assert found == {
        "a": (0, "unaligned"),
        "b": (flown.size(), "unaligned"),
        None: (flown.size(), "unaligned"),
    }
    assert rows[-1]["event"] == HistoryEvent.COMPLETED


def remove(flown: Flown) -> None:
    flown.files(4)[0].unlink()


def cut_short(flown: Flown) -> None:
    flown.files(4)[0].write_bytes(b"")


@pytest.mark.parametrize("harm", [remove, cut_short])
def test_a_checkpoint_whose_data_in_flight_is_gone_is_not_restored(
    flown: Flown, harm: Callable[[Flown], None]
) -> None:
    harm(flown)
    with pytest.raises(DamageError, match=r"in flight to b: data/.* of entry 4 is missing"):
        spark_abs.open(flown.job.root.uri).restore(int(flown.barrier.id))
    assert flown.job.state.attempt.id == 1


def test_what_is_in_flight_is_not_damaged_because_storage_does_not_answer(
    flown: Flown, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_reads(monkeypatch, lambda path: "/control/" in path)
    with pytest.raises(OSError, match="Stale file handle"):
        require_restorable(flown.job.root, flown.manifest, ())


def reading(stage: StageId, *channels: str) -> StageShape:
    return StageShape(
        stage, channels, {}, {}, {}, sources=tuple(SourceShape(CHANNEL_KIND, c) for c in channels)
    )


def test_a_stage_that_reads_what_is_in_flight_may_be_changed_in_all_else(flown: Flown) -> None:
    assert flown.compare(reading(B, CHANNEL), reading(C, CHANNEL)).ok


def test_a_job_without_the_stage_to_which_rows_are_in_flight_is_refused(flown: Flown) -> None:
    for stages in ((), (reading(B),)):
        with pytest.raises(Refused, match=r"2 (unread entries of channel a\.main|of its entries are unread)"):
            require_ok(flown.compare(*stages))


def test_another_stage_takes_over_what_is_in_flight(flown: Flown) -> None:
    """One in its place, or one before it."""
    for stages in ((reading(C, CHANNEL),), (reading(B, "c.main"), reading(C, CHANNEL))):
        found = require_ok(flown.compare(*stages))
        (new,) = [s for s in found.stages if s.stage == C]
        assert [start.position.version for start in new.starts] == [AFTER]


def test_once_the_stage_has_read_them_it_may_go(flown: Flown) -> None:
    """Entry 5 holds the barrier and no rows."""
    flown.plan(read=4)
    assert flown.compare(restored=False).ok
    flown.plan(read=3)
    with pytest.raises(Refused, match=r"1 unread entries of channel a\.main"):
        require_ok(flown.compare(restored=False))
