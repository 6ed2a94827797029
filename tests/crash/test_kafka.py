"""From Kafka to Kafka and Delta: killed at any moment, taken over while frozen; the broker crashes, too."""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]
from deltalake import DeltaTable

from spark_abs import restore
from spark_abs.errors import Refused
from spark_abs.manifests.checkpoints import Checkpoints
from spark_abs.store.root import Root
from tests.crash.kafka_job import SECRET
from tests.crash.process import DriverProcess
from tests.outside.kafka_server import PATIENCE_S, KafkaServer

pytestmark = pytest.mark.timeout(900)

KILLS = int(os.environ.get("KAFKA_KILLS", "4"))
KEYS = 10


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaServer]:
    with KafkaServer() as server:
        yield server


@dataclass
class Relay:
    """The job, its topics, and what was written to the first of them."""

    base: Path
    broker: KafkaServer
    prefix: str
    written: int = 0
    processes: int = 0
    logs: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        for topic in ("in", "out", "totals"):
            self.broker.make(self.prefix + topic)

    def feed(self, count: int = 20) -> None:
        """Write records: the value is the number of the record within its key."""
        producer = Producer({"bootstrap.servers": self.broker.bootstrap, "enable.idempotence": True})
        for _ in range(count):
            key = f"k{self.written % KEYS}"
            producer.produce(self.prefix + "in", str(self.written // KEYS).encode(), key.encode())
            self.written += 1
        assert producer.flush(PATIENCE_S) == 0

    def process(self) -> DriverProcess:
        self.processes += 1
        made = DriverProcess(
            self.base / f"process-{self.processes}",
            "tests.crash.kafka_job",
            str(self.base),
            self.broker.bootstrap,
            self.prefix,
        )
        self.logs.append(made.log)
        return made

    def start(self, driver: DriverProcess, **options: object) -> None:
        """Run the job in a process, and wait until it has started or has ended."""
        driver.told = [event for event in driver.told if "base" not in event]
        driver.say(options)
        over = lambda: driver.has_started(self.base) or driver.ended(self.base) is not None  # noqa: E731
        driver.wait_for(over, "the start of the relay")

    def finish(self, driver: DriverProcess, **options: object) -> str:
        """Run until all input is through; returns how it ended."""
        self.start(driver, bounded=True, **options)
        driver.wait_for(lambda: driver.ended(self.base) is not None, "the end of the relay")
        return driver.ended(self.base) or ""

    def checkpoints(self) -> list[int]:
        if not (self.base / "root" / "checkpoints" / "_delta_log").is_dir():
            return []
        return [s.id for s in Checkpoints.open(Root(str(self.base / "root")), "relay").summaries()]

    def until_next_checkpoint(self, driver: DriverProcess) -> None:
        """Feed the job that runs until it has completed another checkpoint."""
        before = max(self.checkpoints(), default=0)

        def meanwhile() -> None:
            driver.require_running(self.base)
            self.feed()

        driver.wait_for(lambda: max(self.checkpoints(), default=0) > before, "a checkpoint", meanwhile)

    def until_all_is_read(self, driver: DriverProcess) -> None:
        """Wait until the job that runs has nothing left to read."""
        driver.wait_for(lambda: len(self.table()) == self.written, "all records in the table")

    def read(self, topic: str) -> dict[str, list[int]]:
        """What readers of committed records see, by key and in order."""
        found: dict[str, list[int]] = defaultdict(list)
        for message in self.broker.read(self.prefix + topic):
            key, value = message.key(), message.value()
            assert isinstance(key, bytes)
            assert isinstance(value, bytes)
            found[key.decode()].append(int(value))
        return found

    def table(self) -> list[tuple[str, int]]:
        rows = DeltaTable(str(self.base / "table")).to_pyarrow_table()
        return sorted(zip(rows["key"].to_pylist(), map(int, rows["value"].to_pylist()), strict=True))

    def per_key(self) -> dict[str, int]:
        """How many records were written with each key."""
        return {f"k{n}": len(range(n, self.written, KEYS)) for n in range(KEYS)}

    def check_once(self) -> None:
        """Everything is everywhere once, in the order of its key."""
        counts = self.per_key()
        assert self.read("out") == {key: list(range(count)) for key, count in counts.items()}
        assert self.table() == sorted((key, n) for key, count in counts.items() for n in range(count))
        totals = self.read("totals")
        assert {key: numbers[-1] for key, numbers in totals.items()} == counts
        assert all(numbers == sorted(set(numbers)) for numbers in totals.values())

    def check_no_secret(self) -> None:
        written = [path for path in (self.base / "root").rglob("*") if path.is_file()]
        assert not [p for p in (*written, *self.logs) if SECRET.encode() in p.read_bytes()]


def test_killed_and_taken_over_every_record_is_everywhere_once(tmp_path: Path, broker: KafkaServer) -> None:
    seed = int(os.environ.get("SEED", "7"))
    chance, relay = random.Random(seed), Relay(tmp_path, broker, "kills-")
    relay.feed()
    for kill in range(KILLS):
        with relay.process() as driver:
            driver.wait_ready()
            relay.start(driver)
            relay.until_next_checkpoint(driver)
            if kill % 4 == 1:
                broker.restart()
                relay.until_next_checkpoint(driver)
            if kill == 2:
                relay.until_all_is_read(driver)  # Kafka keeps no order of a key that changes its partition
                _grow(broker, "kills-in", 3)
                relay.until_next_checkpoint(driver)
            moment = chance.random()
            driver.wait_for(_after(moment), "the moment to kill", lambda: relay.feed(5))
            driver.kill()

    with relay.process() as first, relay.process() as second:
        first.wait_ready()
        second.wait_ready()
        relay.start(first)
        relay.until_next_checkpoint(first)
        relay.feed(200)
        first.signal(signal.SIGSTOP)
        relay.start(second, takeover=True)
        relay.until_next_checkpoint(second)
        relay.feed(100)
        first.signal(signal.SIGCONT)
        first.wait_for(lambda: first.ended(relay.base) is not None, "the end of the run that was replaced")
        assert first.ended(relay.base) == "Fenced"
        relay.until_next_checkpoint(second)
        second.kill()
        assert relay.finish(first) == ""
    relay.check_once()
    relay.check_no_secret()


def test_a_restore_reads_again_and_says_which_records_are_gone(
    tmp_path: Path, broker: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, root = Relay(tmp_path, broker, "back-"), str(tmp_path / "root")
    with relay.process() as driver:
        driver.wait_ready()
        relay.feed(100)
        assert relay.finish(driver) == "", driver.told
        early = relay.checkpoints()[-1]
        relay.feed(100)
        assert relay.finish(driver) == ""
        relay.check_once()

        # What Kafka has it keeps, and that is said; forced, the records are there again.
        with pytest.raises(Refused, match=r"sink out \(Kafka\) has committed") as refused:
            restore(root, early)
        assert "back-out[0] " in str(refused.value)
        plan = restore(root, early, force=["outside"]).plan
        assert not [note for note in plan.notes if "not known" in note]
        assert relay.finish(driver) == ""
        table = relay.table()
        assert table == sorted((k, n) for k, count in relay.per_key().items() for n in range(count))
        assert relay.read("out")["k3"] == [*range(20), *range(10, 20)]

        # The records behind the checkpoint are dropped.
        wanted = _ends(broker, "back-in")
        relay.feed(100)
        assert relay.finish(driver) == ""
        late = relay.checkpoints()[-1]
        relay.feed(100)
        assert relay.finish(driver) == ""
        ends = _ends(broker, "back-in")
        _delete_before(broker, "back-in", {0: ends[0]})
        assert ends[0] > wanted[0] > 0
        with pytest.raises(Refused, match=rf"back-in\[0\] from \d+, and its records begin at {ends[0]}"):
            restore(root, late, force=["outside"])
        plan = restore(root, late, force=["outside", "inputs"]).plan
        assert any("their rows will be missing" in note for note in plan.notes)
        assert relay.finish(driver) == "Refused"
        said = driver.message(relay.base)
        assert f"and its records begin at {ends[0]}" in said
        assert 'option("failOnDataLoss", "false")' in said
        assert relay.finish(driver, options={"failOnDataLoss": "false"}) == "", driver.message(relay.base)

        # So they are when a start goes back to the newest checkpoint.
        relay.feed(100)
        _delete_before(broker, "back-in", _ends(broker, "back-in"))
        assert relay.finish(driver, restart="checkpoint") == "Refused"
        assert "and its records begin at" in driver.message(relay.base)
        allowed = {"failOnDataLoss": "false"}
        assert relay.finish(driver, restart="checkpoint", options=allowed) == "", driver.message(relay.base)

        # A topic of the same name is not the same topic.
        broker.drop("back-in")
        broker.make("back-in")
        assert relay.finish(driver) == "Refused"
        assert "the topic was made anew" in driver.message(relay.base)
        relay.check_no_secret()

    # Nobody to ask: a plan says so.
    monkeypatch.setattr("spark_abs.sinks.kafka_client.PATIENCE_S", 1.0)
    monkeypatch.setattr("spark_abs.sinks.kafka_marks.PATIENCE_S", 1.0)
    broker.stop()
    try:
        plan = restore(root, late, dry_run=True, force=["outside"]).plan
    finally:
        broker.start()
    assert any("whether the records are there is not known" in note for note in plan.notes)


def _after(seconds: float) -> Any:
    from time import monotonic

    until = monotonic() + seconds
    return lambda: monotonic() > until


def _grow(broker: KafkaServer, topic: str, partitions: int) -> None:
    admin = broker.admin()  # what it was asked ends with it
    admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(PATIENCE_S)


def _ends(broker: KafkaServer, topic: str) -> dict[int, int]:
    ends: dict[int, int] = {}
    for message in broker.read(topic):
        number, offset = message.partition(), message.offset()
        assert number is not None
        assert offset is not None
        ends[number] = offset + 1
    return ends


def _delete_before(broker: KafkaServer, topic: str, offsets: dict[int, int]) -> None:
    asked = [TopicPartition(topic, number, offset) for number, offset in offsets.items()]
    admin = broker.admin()
    for done in admin.delete_records(asked).values():
        done.result(PATIENCE_S)
