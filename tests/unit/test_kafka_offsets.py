"""What a Kafka source's offsets say, and which records are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from spark_abs.compatibility import kafka
from spark_abs.compatibility.kafka import by_source, require_records
from spark_abs.compatibility.restored import Past
from spark_abs.manifest import Manifest, SourceShape, StageShape, StageSnapshot
from spark_abs.model import AttemptId, BatchId, CheckpointId, CheckpointKind, RunId, StageId
from spark_abs.protocol.control import begin_job
from spark_abs.snapshots.kafka_offsets import KAFKA, Available, Partition, kafka_offsets, missing
from spark_abs.spark.kafka_source import KafkaSource
from spark_abs.store.root import Root

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
        (Available(13, 99), ["orders[0] from 12, but its records begin at 13"]),
        (Available(0, 11), ["orders[0] from 12, but it ends at 11: the topic was recreated"]),
        (None, ["orders[0] from 12, but the partition does not exist"]),
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


def test_after_a_start_with_sources_in_another_order_each_is_asked_for_its_own_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That run was killed before its first checkpoint: the newest one still names them as they were."""
    stage, root = StageId("u"), Root(str(tmp_path))
    east, west = source("orders", "east"), source("orders", "west")
    then = StageShape(stage, (), {}, {}, {}, sources=(east.shape, west.shape))
    now = replace(then, sources=(west.shape, east.shape))
    kind = CheckpointKind.CHECKPOINT
    part = StageSnapshot(stage, BatchId(0))
    manifest = Manifest(CheckpointId(1), AttemptId(1), RunId(1), "job", kind, None, 0, 1, 2, (then,), (part,))
    state = begin_job("job", 0)
    state = replace(state, attempts=(replace(state.attempts[0], shapes=(now,)),))
    native = Path(root.path("native/1/u"))
    offsets = 'v1\n{}\n{"orders":{"0":7}}\n{"orders":{"0":9000}}'
    for log, text in (("offsets", offsets), ("commits", "v1\n{}")):
        (native / log).mkdir(parents=True)
        (native / log / "0").write_text(text)
    asked = dict[str, int]()

    def available(_: object, one: KafkaSource, wanted: Mapping[Partition, int]) -> Mapping[Partition, object]:
        asked[one.shape.at] = wanted["orders", 0]
        raise TypeError("no client")

    monkeypatch.setattr(kafka, "available", available)
    require_records(cast(Any, None), stage, [west, east], Past(root, state, manifest), at_checkpoint=False)
    assert asked == {"west": 7, "east": 9000}
