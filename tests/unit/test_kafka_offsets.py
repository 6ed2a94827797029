"""What a Kafka source's offsets say, and which records are missing."""

from __future__ import annotations

import pytest

from spark_abs.compatibility.kafka import by_source
from spark_abs.manifest import SourceShape
from spark_abs.plan.kafka import KafkaSource
from spark_abs.snapshots.kafka_offsets import KAFKA, Available, kafka_offsets, missing

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


def source(topics: str, at: str = "") -> KafkaSource:
    return KafkaSource(SourceShape(KAFKA, topics, at=at), {})


NUMBERS = SourceShape("channel", "numbers.main")
STANDING = {"0": '{"orders":{"0":5}}', "1": '{"v":1,"channel":"numbers.main"}', "2": '{"orders":{"0":70}}'}


@pytest.mark.parametrize(
    ("declared", "recorded", "goes_on"),
    [
        # Two clusters that have a topic of one name, in the order of before and in the other one.
        ([source("orders", "a"), source("orders", "b")], ["a", None, "b"], {0: 5, 1: 70}),
        ([source("orders", "b"), source("orders", "a")], ["a", None, "b"], {0: 70, 1: 5}),
        # A cluster has moved; a topic is read twice: then their order counts.
        ([source("orders", "b"), source("orders", "c")], ["a", None, "b"], {0: 70, 1: 5}),
        ([source("orders"), source("orders")], ["", None, ""], {0: 5, 1: 70}),
        # One that reads something else begins anew.
        ([source("clicks"), source("orders")], ["", None, ""], {1: 5}),
        # No checkpoint has said what they are.
        ([source("orders"), source("orders")], [], {0: 5, 1: 70}),
        ([source("orders")], [], {}),
    ],
)
def test_a_source_goes_on_where_the_same_one_stood(
    declared: list[KafkaSource], recorded: list[str | None], goes_on: dict[int, int]
) -> None:
    shapes = [NUMBERS if at is None else source("orders", at).shape for at in recorded]
    found = [(one, wanted[("orders", 0)]) for one, wanted in by_source(declared, shapes, STANDING)]
    assert {next(i for i, d in enumerate(declared) if d is one): at for one, at in found} == goes_on


def test_options_are_in_no_message() -> None:
    assert "hush" not in repr(KafkaSource(SourceShape(KAFKA, ""), {"kafka.sasl.jaas.config": "hush"}))
