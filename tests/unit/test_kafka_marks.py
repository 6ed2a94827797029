"""What a mark of a Kafka sink knows of the records behind an entry."""

from __future__ import annotations

import pytest

from spark_abs.errors import SinkFailed
from spark_abs.model import Version
from spark_abs.sinks.kafka_client import Connection
from spark_abs.sinks.kafka_marks import Ends, KafkaMark

BACK, LATER = Version(3), Version(7)


def _mark(then: dict[str, tuple[int, ...]], now: dict[str, tuple[int, ...]]) -> KafkaMark:
    return KafkaMark(1, "root", "sink", "orders", 1, ends=(Ends(BACK, then), Ends(LATER, now)))


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"orders": (4, 9)}, {"orders": (4, 9)}, ""),  # the epochs behind had no rows
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
