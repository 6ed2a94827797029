"""Single promises of the Kafka sink, on a real broker."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AclOperation, ResourceType  # type: ignore[attr-defined]

from spark_abs.errors import (
    CommitConflict,
    CommitStateUnknown,
    Fenced,
    Refused,
    SinkFailed,
    SinkUnreachable,
    UsageError,
)
from spark_abs.model import AttemptId, CheckpointId, RunId, Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.kafka.client import connection
from spark_abs.sinks.kafka.config import Kafka
from spark_abs.sinks.kafka.marks import key_of, name_of
from spark_abs.sinks.kafka.sink import KafkaSink
from spark_abs.sinks.two_phase import Rows
from tests.outside.kafka_server import KafkaServer, texts

_NAMES = count()
SECRET = "c0rrect-h0rse-never-written"
AGAIN = (SinkUnreachable, CommitStateUnknown, CommitConflict, OSError)


class Some(Rows):
    """The rows of some batches."""

    def __init__(self, *batches: Sequence[str]) -> None:
        self.schema = pa.schema([("key", pa.string()), ("value", pa.string())])
        self._batches = batches
        self.count = sum(map(len, batches))

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            yield pa.RecordBatch.from_pydict({"key": list(batch), "value": list(batch)}, schema=self.schema)


def mark(number: int) -> Mark:
    """Checkpoint `number`, whose cut is the entry of ten times that."""
    return Mark(AttemptId(1), CheckpointId(number), Version(10 * number))


class Sending:
    """A run that sends to a topic, epoch by epoch."""

    def __init__(self, config: Kafka, run: int = 1, name: str = "sent") -> None:
        self.owner = Owner("0123456789abcdef0123456789abcdef", "job", name, RunId(run))
        self.sink = KafkaSink(config)
        self.mark: Mark | None = None
        self.recover()

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: object) -> None:
        self.sink.close()

    def recover(self) -> None:
        """Do so as a run does: again, while the cluster is not ready."""
        pause = threading.Event()
        for _ in range(100):
            with suppress(*AGAIN):
                self.mark = self.sink.recover(self.owner)
                return
            pause.wait(0.1)
        raise TimeoutError("the sink was not recovered")

    def epoch(self, floor: int = 0) -> Epoch:
        number = 1 if self.mark is None else self.mark.checkpoint + 1
        before, first = self.mark or mark(0), self.mark is None
        return Epoch(self.owner, before, mark(number), Version(10 * floor), first=first)

    def send(self, rows: Rows, floor: int = 0) -> None:
        epoch = self.epoch(floor)
        self.sink.commit(epoch, rows)
        self.mark = epoch.mark

    def send_until_taken(self, rows: Rows) -> None:
        """Send an epoch as a run does: from the mark on after every failure."""
        wanted, pause = self.epoch().mark, threading.Event()
        for _ in range(600):
            with suppress(*AGAIN):
                self.mark = self.sink.recover(self.owner)
                if self.mark != wanted:
                    self.send(rows)
                return
            pause.wait(0.1)
        raise TimeoutError("the epoch was not taken")


@pytest.fixture
def config(broker: KafkaServer) -> Kafka:
    """A topic, and a topic for marks, of the test's own."""
    number = next(_NAMES)
    broker.make(f"orders-{number}")
    return Kafka(f"orders-{number}", bootstrap=broker.bootstrap, marker=f"marks-{number}")


def sent(broker: KafkaServer, config: Kafka) -> list[str]:
    assert config.topic is not None
    return sorted(texts(broker.read(config.topic)))


def test_an_epoch_goes_on_behind_the_rows_that_a_part_has_committed(
    broker: KafkaServer, config: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Kafka(config.topic, bootstrap=config.bootstrap, marker=config.marker, transaction_rows=3)
    rows = Some(["a", "b"], ["c", "d", "e", "f", "g"], ["h"])
    commits: list[int] = []
    commit = KafkaSink._commit

    def third_fails(self: KafkaSink, owner: Owner, what: Any) -> None:
        commits.append(1)
        if len(commits) == 3:  # after that of `recover` and the first part
            raise OSError
        commit(self, owner, what)

    monkeypatch.setattr(KafkaSink, "_commit", third_fails)
    with Sending(small) as sending:
        with pytest.raises(OSError):
            sending.send(rows)
        assert sent(broker, config) == ["a", "b"]
        # A restore hears of the epoch that has begun, a run goes on after what was committed before.
        assert sending.sink.mark(sending.owner) == mark(1)
        assert sending.sink.recover(sending.owner) is None
        sending.send(rows)
        assert sent(broker, config) == list("abcdefgh")
        sending.send(Some(["i"]))
    assert sent(broker, config) == list("abcdefghi")


def test_what_others_do_with_the_transactional_id_fences_only_whoever_was_replaced(
    broker: KafkaServer, config: Kafka
) -> None:
    with Sending(config) as sending:
        sending.send(Some(["a"]))
        other = Producer(
            {
                "bootstrap.servers": broker.bootstrap,
                "transactional.id": name_of("spark_abs", sending.owner),
            }
        )
        other.init_transactions(30)
        with pytest.raises(SinkUnreachable, match="fenced"):
            sending.send(Some(["b"]))
        sending.send_until_taken(Some(["b"]))
        with Sending(config, run=2) as newer:
            with pytest.raises((Fenced, CommitConflict)):
                sending.send(Some(["c"]))
            with pytest.raises(Fenced, match="run 1 of sink 'sent' was replaced by run 2"):
                sending.sink.recover(sending.owner)
            newer.send(Some(["c"]))
    assert sent(broker, config) == ["a", "b", "c"]


def test_a_transaction_that_stays_open_holds_back_no_mark(broker: KafkaServer, config: Kafka) -> None:
    """Two sinks of a job that was killed while both were sending."""
    with Sending(config, name="days") as days, Sending(config, name="hours") as hours:
        for one in (days, hours):
            one.send(Some(["a"]))
            producer = one.sink._producer
            assert producer is not None
            producer.begin_transaction()
            producer.produce(name_of(config.marker, one.owner), b"{}", key_of(one.owner))
            producer.flush(30)
        for one in (days, hours):
            assert KafkaSink(config).mark(one.owner) == mark(1)
        with Sending(config, run=2, name="days") as again:
            assert again.mark == mark(1)
            assert KafkaSink(config).mark(hours.owner) == mark(1)
            again.send(Some(["b"]))
    assert sent(broker, config) == ["a", "a", "b"]


def test_a_broker_that_dies_freezes_and_comes_back_loses_nothing_and_has_nothing_twice(
    broker: KafkaServer, config: Kafka
) -> None:
    class Halfway(Some):
        """Says when a first part of its rows has been handed over."""

        def __init__(self, *batches: Sequence[str]) -> None:
            super().__init__(*batches)
            self.reached = threading.Event()

        def __iter__(self) -> Iterator[pa.RecordBatch]:
            for batch in super().__iter__():
                yield batch
                self.reached.set()

    rows = [
        Halfway(*([f"{number}-{n}" for n in range(k, k + 5_000)] for k in range(0, 20_000, 5_000)))
        for number in range(3)
    ]
    with Sending(config) as sending:
        for number, some in enumerate(rows):
            failed: list[BaseException] = []

            def work(some: Some = some, failed: list[BaseException] = failed) -> None:
                try:
                    sending.send_until_taken(some)
                except BaseException as error:  # noqa: BLE001 - the thread's edge
                    failed.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            assert some.reached.wait(60)
            if number == 0:
                broker.stop(signal.SIGKILL)
                broker.start()
            elif number == 1:
                broker.stop(signal.SIGTERM)
                broker.start()
            else:
                with broker.frozen():
                    thread.join(2)
            thread.join(120)
            assert not thread.is_alive()
            assert not failed
    assert sent(broker, config) == sorted(f"{number}-{n}" for number in range(3) for n in range(20_000))


@pytest.fixture(scope="module")
def forgetful() -> Iterator[KafkaServer]:
    """A broker that forgets a transactional id, and ends an open transaction, as soon as it can."""
    soon = {
        "transactional.id.expiration.ms": "2000",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    }
    with KafkaServer(soon) as server:
        yield server


_TOO_LONG_S = 5


def briefly(broker: KafkaServer, monkeypatch: pytest.MonkeyPatch, name: str) -> Kafka:
    """A topic whose sink may have a transaction open for a second, of two rows at most."""
    monkeypatch.setenv("CLIENT", json.dumps({"transaction.timeout.ms": 1000}))
    broker.make(name)
    return Kafka(name, bootstrap=broker.bootstrap, client_env="CLIENT", transaction_rows=2)


def test_a_send_that_stands_still_for_longer_than_a_transaction_may_is_made_again(
    forgetful: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Some):
        def __iter__(self) -> Iterator[pa.RecordBatch]:
            for batch in super().__iter__():
                yield batch
                threading.Event().wait(_TOO_LONG_S)

    config = briefly(forgetful, monkeypatch, "slow")
    with Sending(config) as sending:
        sending.send_until_taken(Some(["a"]))
        with pytest.raises(AGAIN):
            sending.send(Slow(["b"], ["c"]))
        sending.send_until_taken(Some(["b"], ["c"]))
        assert sent(forgetful, config) == ["a", "b", "c"]


def test_timeouts_of_the_broker_lose_and_repeat_nothing_in_any_phase(
    forgetful: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down for longer than a transaction may be open, and than its id is kept: each phase has a sink."""
    commit, second = KafkaSink._commit, ["b", "c", "d", "e", "f"]

    def stopped(self: KafkaSink, owner: Owner, what: Any) -> None:
        if owner.sink == "parts" and what.mark == mark(2):
            raise OSError  # all parts of the epoch are committed but the last
        commit(self, owner, what)
        if owner.sink == "unheard" and what.mark == mark(2):
            raise OSError  # nobody hears that it is

    phases = {}
    for name in ("before", "open", "parts", "unheard"):
        phases[name] = Sending(briefly(forgetful, monkeypatch, name), name=name)
        phases[name].send_until_taken(Some(["a"]))
    producer = phases["open"].sink._producer
    assert producer is not None
    producer.begin_transaction()
    producer.produce("open", b"never")
    producer.flush(30)
    monkeypatch.setattr(KafkaSink, "_commit", stopped)
    for name in ("parts", "unheard"):
        ended: type[BaseException] = SinkUnreachable
        while ended is SinkUnreachable:  # the id may be forgotten before this test comes to it
            phases[name].recover()
            with pytest.raises(AGAIN) as raised:
                phases[name].send(Some(second))
            ended = raised.type
        assert ended is OSError
    monkeypatch.setattr(KafkaSink, "_commit", commit)
    assert sent(forgetful, Kafka("parts")) == ["a", "b", "c", "d", "e"]
    threading.Event().wait(_TOO_LONG_S)

    # It goes on as a run that has only been waiting, and as one that comes next.
    phases["before"].send_until_taken(Some(second))
    for name, sending in phases.items():
        config = Kafka(name, bootstrap=forgetful.bootstrap, client_env="CLIENT", transaction_rows=2)
        with Sending(config, run=2, name=name) as again:
            if name in ("before", "unheard"):
                assert again.mark == mark(2)
            else:
                assert again.mark == mark(1)
                again.send_until_taken(Some(second))
            again.send_until_taken(Some(["z"]))
        sending.sink.close()
        assert sent(forgetful, config) == ["a", *second, "z"]


def test_columns_are_those_of_sparks_own_sink(broker: KafkaServer, config: Kafka) -> None:
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    sink = KafkaSink(config)
    sink.check(pa.schema([("value", pa.binary()), ("headers", headers), ("partition", pa.int32())]))
    with pytest.raises(UsageError) as refused:
        sink.check(pa.schema([("id", pa.int64()), ("key", pa.int64()), ("topic", pa.string())]))
    said = str(refused.value)
    assert "there is no column 'value'" in said
    assert "column 'key' is int64, and must be string or binary" in said
    assert "column 'id' has no place in a record" in said
    assert "a column 'topic' is there too" in said
    assert 'selectExpr("CAST(id AS STRING) AS key", "to_json(struct(*)) AS value")' in said
    with pytest.raises(UsageError, match="topic nowhere does not exist"):
        KafkaSink(Kafka("nowhere", bootstrap=broker.bootstrap)).check(pa.schema([("value", pa.string())]))


def test_topic_partition_key_and_headers_of_a_row_arrive(broker: KafkaServer, config: Kafka) -> None:
    assert config.topic is not None
    each = Kafka(bootstrap=config.bootstrap, marker=config.marker)
    second = f"{config.topic}-more"
    broker.make(second)

    class Wide(Rows):
        count = 3
        schema = pa.schema(
            [
                ("topic", pa.string()),
                ("key", pa.binary()),
                ("value", pa.string()),
                ("partition", pa.int32()),
                ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
            ]
        )

        def __iter__(self) -> Iterator[pa.RecordBatch]:
            yield pa.RecordBatch.from_pylist(
                [
                    {"topic": second, "key": b"k", "value": None, "partition": 1, "headers": None},
                    {"topic": config.topic, "value": "x", "headers": [{"key": "h", "value": b"1"}]},
                    {"topic": second, "value": "y", "partition": 1, "headers": []},
                ],
                schema=self.schema,
            )

    with Sending(each) as sending:
        sending.send(Wide())
    (first,) = broker.read(config.topic)
    assert (first.value(), first.key(), first.headers()) == (b"x", None, [("h", b"1")])
    found = [(m.key(), m.value(), m.partition()) for m in broker.read(second)]
    assert found == [(b"k", None, 1), (None, b"y", 1)]


def test_a_record_that_is_too_large_ends_the_run_and_readers_wait_for_nothing(
    broker: KafkaServer, config: Kafka
) -> None:
    with Sending(config) as sending:
        with pytest.raises(SinkFailed, match="size too large"):
            sending.send(Some(["a", "x" * 2_000_000]))
        sending.send_until_taken(Some(["a"]))
    assert sent(broker, config) == ["a"]


def test_a_partition_that_is_not_there_ends_the_run(broker: KafkaServer, config: Kafka) -> None:
    class Placed(Some):
        schema = pa.schema([("value", pa.string()), ("partition", pa.int32())])
        count = 2

        def __init__(self, partition: int) -> None:
            self._partition = partition

        def __iter__(self) -> Iterator[pa.RecordBatch]:
            yield pa.RecordBatch.from_pydict(
                {"value": ["a", "b"], "partition": [None, self._partition]}, self.schema
            )

    with Sending(config) as sending:
        for none in (2, -1):
            with pytest.raises(SinkFailed, match=f"topic {config.topic} has no partition {none}"):
                sending.send(Placed(none))
            sending.recover()
        assert config.topic is not None
        sending.send(Placed(1))
        broker.grow(config.topic, 3)
        sending.send_until_taken(Placed(2))
    assert sent(broker, config) == ["a", "a", "b", "b"]


def test_who_may_not_write_is_told_and_a_group_needs_no_permission() -> None:
    allowing = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with KafkaServer(allowing) as broker:
        broker.make("orders")
        broker.deny(ResourceType.GROUP, "spark_abs", AclOperation.ALL)
        config = Kafka("orders", bootstrap=broker.bootstrap)
        with Sending(config) as sending:
            sending.send_until_taken(Some(["a"]))
            broker.deny(ResourceType.TOPIC, "orders", AclOperation.WRITE)
            with pytest.raises(SinkFailed, match="TOPIC_AUTHORIZATION_FAILED"):
                sending.send(Some(["b"]))
            assert sent(broker, config) == ["a"]


def test_settings_of_the_client_say_where_brokers_are_before_the_variable_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "of-all:9092")
    monkeypatch.setenv("CLIENT", json.dumps({"bootstrap.servers": "of-this:9092"}))
    assert (
        connection(None, "KAFKA_BOOTSTRAP_SERVERS", "CLIENT").settings["bootstrap.servers"] == "of-this:9092"
    )
    assert connection(None, "KAFKA_BOOTSTRAP_SERVERS", None).settings["bootstrap.servers"] == "of-all:9092"
    assert connection("said:9092", "X", "CLIENT").settings["bootstrap.servers"] == "said:9092"


def test_what_is_committed_stays_and_the_refusal_says_where_it_is(broker: KafkaServer, config: Kafka) -> None:
    with Sending(config) as sending:
        for number in range(4):
            sending.send(Some([str(number)] * 3))
        why = sending.sink.why_not(sending.owner, mark(2))
        ranges = [part.rpartition("] ")[2] for part in why.partition("offsets: ")[2].split(", ")]
        assert sum(int(r.split(" to ")[1]) - int(r.split(" to ")[0]) + 1 for r in ranges) >= 6, why
        with pytest.raises(Refused, match="Kafka keeps committed records"):
            sending.sink.abort(sending.owner, mark(2), keep=False)
        sending.sink.abort(sending.owner, mark(2), keep=True)
        assert sending.sink.mark(sending.owner) == mark(2)
        assert sending.sink.why_not(sending.owner, mark(2)) == ""
        sending.mark = sending.sink.recover(sending.owner)
        sending.send(Some([]))
        assert sending.sink.why_not(sending.owner, mark(2)) == ""
        sending.sink.abort(sending.owner, mark(2), keep=False)
        assert sending.sink.mark(sending.owner) == mark(2)
    assert sent(broker, config) == sorted(str(n) for n in range(4) for _ in range(3))


def test_marks_are_kept_only_where_they_stay(broker: KafkaServer, config: Kafka) -> None:
    owner = Owner("0123456789abcdef0123456789abcdef", "job", "sent", RunId(1))
    broker.make(name_of(config.marker, owner), 1, cleanup_policy="delete")
    with pytest.raises(Refused, match=r"cleanup\.policy=delete"):
        Sending(config)


@pytest.mark.parametrize(
    "name", ["", "..", "../a", "a/b", "a\nb", "a\0b", "*", "a'; DROP TABLE x", "a" * 250]
)
def test_a_row_that_names_no_topic_ends_the_run_and_nothing_is_sent(
    broker: KafkaServer, config: Kafka, name: str
) -> None:
    class Named(Rows):
        schema = pa.schema([("topic", pa.string()), ("value", pa.string())])
        count = 2

        def __iter__(self) -> Iterator[pa.RecordBatch]:
            yield pa.RecordBatch.from_pydict(
                {"topic": [config.topic, name], "value": ["a", "b"]}, self.schema
            )

    with Sending(Kafka(bootstrap=config.bootstrap, marker=config.marker)) as sending:
        with pytest.raises(SinkFailed, match="which is not the name of a topic"):
            sending.send(Named())
    assert sent(broker, config) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "../a", "a\nb", "a" * 250, "é"])
def test_what_is_no_name_of_a_topic_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a topic"):
        Kafka(name)
    with pytest.raises(UsageError, match="is not the name of a topic"):
        Kafka("orders", marker=name)


def test_secrets_are_in_no_message(
    broker: KafkaServer, config: Kafka, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    said = []
    for settings in (
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "u"},
        {"security.protocol": SECRET},
        {"acks": SECRET},
    ):
        monkeypatch.setenv("CLIENT", json.dumps({**settings, "sasl.password": SECRET}))
        monkeypatch.setattr("spark_abs.sinks.kafka.marks.PATIENCE_S", 1.0)
        sink = KafkaSink(Kafka(config.topic, bootstrap=broker.bootstrap, client_env="CLIENT"))
        with pytest.raises((SinkUnreachable, SinkFailed, UsageError)) as refused:
            sink.check(Some().schema)
        sink.close()
        said.append(f"{refused.value!r} {refused.value.__cause__!r}")
    monkeypatch.setenv("CLIENT", f"not JSON {SECRET}")
    with pytest.raises(UsageError, match="CLIENT is not an object of JSON") as none:
        KafkaSink(Kafka(config.topic, client_env="CLIENT")).check(Some().schema)
    said.append(str(none.value))
    assert SECRET not in "".join(said) + caplog.text
