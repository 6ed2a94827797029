"""What a mark of a Kafka sink knows of the records after an entry."""

from __future__ import annotations

import pyarrow as pa
import pytest

from spark_abs.codec import to_json
from spark_abs.errors import SinkFailed
from spark_abs.model import AttemptId, CheckpointId, RunId, Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.kafka.client import Connection
from spark_abs.sinks.kafka.marks import Ends, KafkaMark
from spark_abs.sinks.kafka.rows import slices
from spark_abs.snapshots.kafka_offsets import is_kafka

BACK, LATER = Version(3), Version(7)


def _mark(then: dict[str, tuple[int, ...]], now: dict[str, tuple[int, ...]]) -> KafkaMark:
    return KafkaMark(1, "root", "sink", "orders", 1, ends=(Ends(BACK, then), Ends(LATER, now)))


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"orders": (4, 9)}, {"orders": (4, 9)}, ""),  # the epochs after had no rows
        ({}, {}, ""),
        ({"orders": (4, 9)}, {"orders": (6, 9)}, "orders[0] 4 to 5"),
        ({}, {"orders": (2,)}, "orders[0] 0 to 1"),
        ({"orders": (4,)}, {"orders": (4, 3)}, "orders[1] 0 to 2"),
        ({"orders": (4, 9)}, {"orders": (2, 9)}, None),  # the topic was made anew
        ({"orders": (4, 9)}, {"orders": (4,)}, None),
    ],
)
def test_nothing_was_sent_is_not_what_is_unknown(
    then: dict[str, tuple[int, ...]], now: dict[str, tuple[int, ...]], said: str | None
) -> None:
    assert _mark(then, now).behind(BACK) == said


def test_an_entry_whose_ends_are_forgotten_is_unknown() -> None:
    assert _mark({}, {"orders": (2,)}).behind(Version(1)) is None


def test_a_connection_shows_no_secret() -> None:
    shown = repr(Connection({"sasl.password": "hunter2"}, ("hunter2",)))
    assert "hunter2" not in shown


def test_settings_that_librdkafka_refuses_are_a_sinks_failure() -> None:
    connection = Connection({"bootstrap.servers": "localhost:1", "no.such.setting": "1"}, ())
    with pytest.raises(SinkFailed, match=r"no\.such\.setting"):
        connection.available({("orders", 0): 1})


def test_a_mark_forgets_the_oldest_ends_before_it_outgrows_a_record() -> None:
    """A thousand partitions, and a restore that may undo hundreds of epochs."""
    owner = Owner("root", "job", "sink", RunId(1))
    known = KafkaMark(1, "root", "sink", "orders", 1)
    for number in range(100):
        before, after = (Mark(AttemptId(1), CheckpointId(n), Version(n)) for n in (number, number + 1))
        epoch = Epoch(owner, before, after, Version(0), first=number == 0)
        known = known.with_ends(epoch, after.version, {"orders": tuple(range(10**9, 10**9 + 1000))})
    assert len(to_json(known)) < 250_000
    assert [e.version for e in known.ends][-1] == 100
    assert known.behind(known.ends[0].version) == ""
    assert known.behind(Version(1)) is None


def test_pieces_are_cut_by_rows_and_by_bytes() -> None:
    rows = pa.RecordBatch.from_pydict({"value": ["x" * 2**20] * 20})
    assert [piece.num_rows for piece in slices(rows, 10_000)] == [7, 7, 6]
    assert [piece.num_rows for piece in slices(rows, 3)] == [3] * 6 + [2]
    assert [piece.num_rows for piece in slices(rows.slice(0, 0), 3)] == []


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ("kafka", True),
        ("Kafka", True),
        ("org.apache.spark.sql.kafka010.KafkaSourceProvider", True),
        ("kafka2", False),
        ("rate", False),
    ],
)
def test_a_format_may_be_named_in_any_case_and_by_its_class(source: str, known: bool) -> None:
    assert is_kafka(source) is known
