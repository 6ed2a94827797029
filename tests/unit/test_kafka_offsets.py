"""What a Kafka source's offsets say, and which records are missing."""

from __future__ import annotations

import pytest

from spark_abs.plan.kafka import KafkaSource
from spark_abs.snapshots.kafka_offsets import Available, kafka_offsets, missing

WANTED = {("orders", 0): 12, ("orders", 1): 30}


@pytest.mark.parametrize(
    ("offset", "read"),
    [
        ('{"orders":{"0":12,"1":30}}', WANTED),
        ("{}", {}),
        (None, {}),
        ("-", {}),
        ("7", {}),
        ('{"logOffset":4}', {}),
        ('{"reservoirVersion":7,"index":-1}', {}),
    ],
)
def test_offsets_of_other_sources_are_none_of_kafkas(
    offset: str | None, read: dict[tuple[str, int], int]
) -> None:
    assert kafka_offsets(offset) == read


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (Available(12, 12), []),
        (Available(0, 99), []),
        (Available(13, 99), ["orders[0] from 12, and its records begin at 13"]),
        (Available(0, 11), ["orders[0] from 12, and it ends at 11: the topic was made anew"]),
        (None, ["orders[0] from 12, and there is no such partition"]),
    ],
)
def test_records_are_missing_where_the_next_one_is_not_there(
    first: Available | None, said: list[str]
) -> None:
    found = {("orders", 1): Available(0, 30), ("orders", 2): Available(5, 9)}
    if first is not None:
        found[("orders", 0)] = first
    assert list(missing(WANTED, found)) == said


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({"subscribe": "orders, clicks"}, True),
        ({"subscribe": "orders-2"}, False),
        ({"assign": '{"orders":[0]}'}, True),
        ({"assign": '{"clicks":[0]}'}, False),
        ({"subscribepattern": "ord.*"}, True),
        ({"subscribepattern": "rd"}, False),
    ],
)
def test_a_source_reads_the_topics_that_its_options_name(options: dict[str, str], reads: bool) -> None:
    assert KafkaSource(options).reads("orders") is reads


def test_options_are_in_no_message() -> None:
    assert "hush" not in repr(KafkaSource({"kafka.sasl.jaas.config": "hush"}))
