"""The thread that sends rows outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from spark_abs.errors import SinkUnreachable
from spark_abs.model import AttemptId, Branch, CheckpointId, RunId, StageId, Version
from spark_abs.protocol.control import OutsideSink
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.delta.epoch_sink import DeltaEpochSink
from spark_abs.sinks.delta.options import EpochTable
from spark_abs.sinks.kafka.config import Kafka
from spark_abs.sinks.kafka.marks import KafkaMark, Part
from spark_abs.sinks.kafka.sink import KafkaSink
from spark_abs.sinks.kind import no_session
from spark_abs.sinks.sending import sender as module
from spark_abs.sinks.sending.sender import Sender, Sending
from spark_abs.store.clock import now_ms
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Table


def mark(number: int) -> Mark:
    return Mark(AttemptId(1), CheckpointId(number), Version(10 * number))


class Cuts(list[Mark]):
    """Another thread hears of a checkpoint when these have just been looked through."""

    sender: Sender
    told: threading.Thread | None = None

    def __iter__(self) -> Iterator[Mark]:
        yield from super().__iter__()
        if self.told is None and self.sender.mark == mark(1):
            self.told = threading.Thread(target=self.sender.completed, args=[mark(2), "two"])
            self.told.start()
            self.told.join(0.2)  # without a lock it is done by now


def test_a_checkpoint_that_completes_while_another_is_sent_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "EpochRows", lambda *_, **__: SimpleNamespace(count=0))
    epochs: list[Epoch] = []
    sink: Any = SimpleNamespace(each_batch=False, commit=lambda epoch, _: epochs.append(epoch))
    ctx: Any = SimpleNamespace(root=None, failpoint=lambda _: None)
    sent = Sending("sent", StageId("a"), "main", pa.schema([]), sink, "own", "")
    record = OutsideSink("sent", StageId("a"), "main", "own", "", mark(0), begun=True)
    owner = Owner("root", "job", "sent", RunId(1))
    path = [Branch(AttemptId(1), None)]
    sender = Sender(
        ctx, sent, record=record, path=path, cuts=[], savepoints={CheckpointId(1): "one"}, owner=owner
    )
    sender._cuts = cuts = Cuts([mark(1)])
    cuts.sender = sender
    sender._send_one(mark(0), mark(1))
    assert cuts.told is not None
    cuts.told.join()
    assert sender.waits
    sender._send_one(mark(1), mark(2))
    sender.asked = (Version(10), Version(20))
    sender._send_one(mark(2), mark(3))
    assert [epoch.asked for epoch in epochs] == [(), (), (10, 20)]
    assert [epoch.savepoint for epoch in epochs] == ["one", "two", None]


def test_that_a_sink_has_a_mark_is_recorded_until_the_store_has_taken_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start refuses a mark that is gone only where it is recorded that there was one."""
    recorded: list[str] = []

    def update(_: Any) -> None:
        recorded.append("tried")
        if len(recorded) < 3:
            raise OSError("503")

    monkeypatch.setattr(module, "EpochRows", lambda *_, **__: SimpleNamespace(count=0))
    monkeypatch.setattr(module, "Control", SimpleNamespace(open=lambda _: SimpleNamespace(update=update)))
    monkeypatch.setattr(module, "left_after", lambda *_: None)
    sink: Any = SimpleNamespace(
        each_batch=False, commit=lambda *_: None, recover=lambda _: mark(1), mark=lambda _: mark(1)
    )
    ctx: Any = SimpleNamespace(root=None, run=RunId(1), failpoint=lambda _: None)
    sent = Sending("sent", StageId("a"), "main", pa.schema([]), sink, "own", "")
    record = OutsideSink("sent", StageId("a"), "main", "own", "", mark(0), begun=False)
    path = [Branch(AttemptId(1), None)]
    sender = Sender(
        ctx,
        sent,
        record=record,
        path=path,
        cuts=[mark(1)],
        savepoints={},
        owner=Owner("root", "job", "sent", RunId(1)),
    )
    sender.recover()
    for _ in range(2):
        with pytest.raises(OSError, match="503"):
            sender._send()
    for _ in range(2):
        sender._send()
    assert recorded == ["tried"] * 3


def test_a_try_that_goes_on_is_no_sign_that_a_sink_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    sender: Any = object.__new__(Sender)
    sender._sending, sender._trouble = SimpleNamespace(name="sent"), ""
    sender._troubled_at = sender.troubled_s = 0.0
    found = []
    for said, at in (("", 100), ("away", 100), ("away", 107), (None, 160), ("", 161), ("away", 170)):
        now[0] = float(at)
        if said is not None:
            sender._say(said)
        found.append(sender.troubled_s)
    assert found == [0, 0, 7, 7, 0, 0]


def resting(sink: Any, monkeypatch: pytest.MonkeyPatch, cuts: list[Mark]) -> Sender:
    """A sender of run 2, after run 1 has ended in order."""
    monkeypatch.setattr(module, "EpochRows", lambda *_, **__: SimpleNamespace(count=0))
    monkeypatch.setattr(module, "left_after", lambda *_: None)
    ctx: Any = SimpleNamespace(root=None, run=RunId(2), in_order_since=RunId(1), failpoint=lambda _: None)
    sent = Sending("sent", StageId("a"), "main", pa.schema([]), sink, "own", "")
    record = OutsideSink("sent", StageId("a"), "main", "own", "", mark(0), begun=True)
    path = [Branch(AttemptId(1), None)]
    return Sender(
        ctx,
        sent,
        record=record,
        path=path,
        cuts=cuts,
        savepoints={},
        owner=Owner("root", "job", "sent", RunId(2)),
    )


def test_a_start_sends_the_rest_of_an_epoch_that_is_there_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark is that of the epoch from its first part on; it is the sink that says whether that is all."""
    sink: Any = SimpleNamespace(
        each_batch=False, mark=lambda _: mark(2), recover=lambda _: mark(1), rests=lambda _: False
    )
    sender = resting(sink, monkeypatch, [mark(1), mark(2)])
    sender.begin()
    assert sender.mark == mark(1)  # nothing after it is trimmed
    assert sender.waits
    sink.rests, sink.recover = lambda _: True, pytest.fail
    sender = resting(sink, monkeypatch, [mark(1), mark(2)])
    sender.begin()
    assert (sender.mark, sender.waits) == (mark(2), False)


def test_a_sender_that_has_rested_waits_between_its_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    def recover(owner: object) -> Mark:
        tries.append(owner)
        raise SinkUnreachable("away")

    sink: Any = SimpleNamespace(
        each_batch=False, mark=lambda _: mark(1), recover=recover, rests=lambda _: True, close=lambda: None
    )
    sender = resting(sink, monkeypatch, [mark(1)])
    sender.begin()
    sender.start(lambda error: pytest.fail(str(error)))
    sender.completed(mark(2), None)
    assert "away" in sender.close(0.5)
    assert 1 <= len(tries) <= 4


def test_kafka_says_that_an_epoch_is_there_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    at = KafkaMark(1, "root", "sent", "topic", 1, mark(1))
    found: list[KafkaMark | None] = [None, at, replace(at, part=Part(mark(2), 5)), replace(at, topic="other")]
    marks = SimpleNamespace(read=lambda _: found.pop(0))
    sink = KafkaSink(Kafka("topic"))
    monkeypatch.setattr(sink, "_working", lambda: nullcontext(marks))
    owner = Owner("root", "job", "sent", RunId(2))
    assert [sink.rests(owner) for _ in range(4)] == [False, True, False, False]


def test_a_delta_table_gets_a_commit_before_a_clean_up_of_its_log_takes_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Table.ensure(Place(str(tmp_path / "t")), pa.schema([("n", pa.int64())]))
    root, table = Root(str(tmp_path / "a")), EpochTable(str(tmp_path / "t"))
    sink, owner = DeltaEpochSink(table, root, no_session), Owner("a", "job", "sent", RunId(1))
    assert not sink.rests(owner)
    sink.recover(owner)
    assert sink.rests(owner)
    over = DeltaEpochSink(replace(table, take_over=True), root, no_session)
    assert not over.rests(owner)
    over.recover(owner)
    assert over.rests(owner)
    later = now_ms() + 2 * 24 * 3_600_000
    monkeypatch.setattr("spark_abs.sinks.delta.epoch_sink.now_ms", lambda: later)
    assert not sink.rests(owner)
