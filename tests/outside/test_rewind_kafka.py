"""A pipeline of plain queries whose first one reads Kafka: killed under load, rewound, started again."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from confluent_kafka import Producer

from spark_abs.model import Provider
from spark_abs.snapshots.kafka_offsets import kafka_offsets
from spark_abs.snapshots.layout import parse_offsets
from tests import plain_spark
from tests.crash.test_rewind_on_spark import (
    MOMENTS,
    Input,
    Row,
    called,
    expected,
    finished,
    killed,
    providers,
    rewind,
)
from tests.outside.kafka_server import PATIENCE_S, KafkaServer

TOPIC = "rows-of-a-rewind"
pytestmark = pytest.mark.timeout(1800)


class Records(Input):
    """Rows in a topic of two partitions."""

    def __init__(self, directory: Path, server: KafkaServer, seed: int) -> None:
        super().__init__(directory, 0, seed)
        self.producer = Producer({"bootstrap.servers": server.bootstrap})

    def send(self, fresh: list[Row]) -> None:
        for row in fresh:
            self.producer.produce(TOPIC, json.dumps(row), partition=row["seq"] % 2)
        assert self.producer.flush(PATIENCE_S) == 0


@pytest.mark.long
def test_every_table_is_whole_after_a_rewind_of_queries_behind_kafka(
    tmp_path: Path, broker: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions in Kafka go back with the tables, and with state in HDFS-backed stores."""
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    broker.make(TOPIC)
    options = {
        "kafka.bootstrap.servers": broker.bootstrap,
        "subscribe": TOPIC,
        "startingOffsets": "earliest",
    }
    monkeypatch.setenv(
        "PLAIN_KAFKA", json.dumps({"connector": plain_spark.kafka_connector(), "options": options})
    )
    base, fed = tmp_path / "live", Records(tmp_path / "in1", broker, seed)
    killed("kafka", base, [fed])
    newest = max((base / "c/bronze/offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    (read,) = parse_offsets(newest.read_text()).lines
    assert kafka_offsets(read), read
    assert providers(base, "silver") == {Provider.HDFS.value}
    cuts = json.loads(called(base, "--list", "--output", "json"))
    oldest, copies = cuts[-1]["at_ms"] / 1000, []
    chosen = [(len(cuts) // 2,), (1, -1)]
    chosen += [(chance.randrange(len(cuts)),) for _ in range(MOMENTS - len(chosen))]
    for number, places in enumerate(chosen):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(base, copy)
        for place in places:
            print(f"seed {seed}, copy {number}: to cut {place} of {len(cuts)}")  # noqa: T201
            rewind(copy, max(cuts[place]["at_ms"] / 1000, oldest) + 0.001)
        copies.append(copy)
    fed.write()
    wanted = expected("kafka", fed.rows)
    for number, found in enumerate(finished("kafka", copies)):
        assert found == wanted, (seed, number)
