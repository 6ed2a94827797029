"""Which outputs of a stage hold a batch, over outputs of both kinds."""

from __future__ import annotations

from dataclasses import dataclass, field

from spark_abs.channels.entries import EntryMetadata
from spark_abs.model import NO_BATCH, AttemptId, BatchId, RunId, Version
from spark_abs.observe.held import held
from spark_abs.protocol.evaluation import Staged
from spark_abs.sinks.delta.commit_metadata import SinkMetadata

FILES = (Staged("main", "table", rows=1),)


@dataclass
class Holding:
    """An output with the notes of its commits."""

    notes: dict[int, EntryMetadata | SinkMetadata] = field(default_factory=dict)

    def last_batch(self) -> BatchId:
        return BatchId(max(self.notes, default=NO_BATCH))

    def commit_of(self, batch: BatchId) -> tuple[Version, EntryMetadata | SinkMetadata] | None:
        note = self.notes.get(batch)
        return None if note is None else (Version(batch), note)


def entry(batch: int, evaluated: tuple[Staged, ...] = ()) -> EntryMetadata:
    return EntryMetadata(AttemptId(1), RunId(1), BatchId(batch), evaluated=evaluated)


def sink(batch: int, evaluated: tuple[Staged, ...] = ()) -> SinkMetadata:
    return SinkMetadata("job/stage/sink", AttemptId(1), RunId(1), BatchId(batch), evaluated=evaluated)


def test_outputs_without_a_batch_hold_none() -> None:
    found = held({"channel": Holding(), "table": Holding()})
    assert (found.batch, found.named, found.lacks("channel")) == (NO_BATCH, None, False)
    assert held({}).batch == NO_BATCH


def test_the_newest_batch_counts_and_its_first_commit_names_the_files() -> None:
    channel = Holding({0: entry(0), 1: entry(1, FILES)})
    found = held({"channel": channel, "table": Holding({0: sink(0)}), "new": Holding()})
    assert (found.batch, found.named) == (1, channel.notes[1])
    assert [found.lacks(name) for name in ("channel", "table", "new", "gone")] == [False, True, True, True]


def test_a_commit_without_names_is_passed_over_for_one_with_them() -> None:
    first, second = Holding({2: entry(2)}), Holding({2: sink(2, FILES)})
    assert held({"first": first, "second": second}).named == second.notes[2]
    assert held({"first": first, "late": Holding({1: sink(1, FILES)})}).named is None
