"""How a Kafka sink reaches its cluster: settings from the environment, and the meaning of errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # named, and not said to be exported
    AdminClient,
    OffsetSpec,
)

from spark_abs.errors import SinkFailed, SinkUnreachable, UsageError
from spark_abs.sinks.environment import object_in, without_secrets
from spark_abs.snapshots.kafka_offsets import Available, Partition, topics_of

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""How long to wait for an answer of the cluster."""
GROUP = "spark_abs"
"""librdkafka wants the name of a group; nothing is ever committed to it."""
FENCED = frozenset(
    (
        KafkaError._FENCED,
        KafkaError._FATAL,
        KafkaError._STATE,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.TRANSACTION_COORDINATOR_FENCED,
    )
)
"""The producer is unusable: another producer has fenced it, or librdkafka has lost count."""
_REFUSED = frozenset(
    (
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.INVALID_CONFIG,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError.UNSUPPORTED_VERSION,
        KafkaError._INVALID_ARG,
        KafkaError._UNSUPPORTED_FEATURE,
    )
)
"""Errors that would occur again; all others are retried."""
_SECRET = ("password", "secret", "token", "username", "pem", "oauthbearer.config")
_OURS: Mapping[str, object] = {
    # Like Kafka's own Java client, and so like Spark's sink: equal keys go to equal partitions.
    "partitioner": "murmur2_random",
    "acks": "all",
    "enable.idempotence": True,
    # A report for each record would be a call of Python for each record.
    "delivery.report.only.error": True,
}
_ROOM: Mapping[str, object] = {
    # What waits in the client must still go out before the transaction's time is over; librdkafka's 1 GB
    # does not on a slow link.
    "queue.buffering.max.kbytes": 64 * 1024,
}
"""Settings of librdkafka that the user may override."""
_READING: Mapping[str, object] = {
    "group.id": GROUP,
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "fetch.wait.max.ms": 100,
}
_RESERVED = frozenset((*_OURS, *_READING, "transactional.id", "isolation.level"))
_PRODUCING = ("transaction.timeout.ms", "linger.ms", "compression.", "batch.", "queue.buffering.", "message.")
_TRANSACTION_TIMEOUT_MS = 60_000


@dataclass(slots=True)
class Connection:
    """A cluster with its settings from the environment; makes clients."""

    settings: Mapping[str, object] = field(repr=False)
    """The settings of librdkafka for every client."""
    secrets: tuple[str, ...] = field(repr=False)
    trouble: list[str] = field(default_factory=list)
    """The last thing that went wrong between a client and the cluster."""

    @property
    def transaction_s(self) -> float:
        """How long the cluster lets a transaction be open."""
        return int(str(self.settings.get("transaction.timeout.ms", _TRANSACTION_TIMEOUT_MS))) / 1000

    def producer(self, transactional_id: str, failed: list[KafkaError]) -> Producer:
        """Make a producer; it adds errors of records that could not be delivered to `failed`."""

        def report(error: KafkaError | None, _: object) -> None:
            if error is not None:
                failed.append(error)

        settings = {**self._common(), **_OURS, "transactional.id": transactional_id}
        return Producer({**settings, "on_delivery": report}, logger=log)

    def consumer(self, *, committed: bool) -> Consumer:
        """Make a consumer of committed records, or of all records."""
        level = "read_committed" if committed else "read_uncommitted"
        return Consumer({**self._not_producing(), **_READING, "isolation.level": level}, logger=log)

    def admin(self) -> AdminClient:
        """Make a client that asks for topics and offsets."""
        return AdminClient(self._not_producing(), logger=log)

    def available(self, wanted: Mapping[Partition, int]) -> Mapping[Partition, Available]:
        """Ask for the records of partitions; partitions that do not exist are left out.

        Raises:
            SinkUnreachable: the cluster does not answer.
            SinkFailed: the cluster refuses.
        """
        try:
            admin = self.admin()
            there = admin.list_topics(timeout=PATIENCE_S).topics
            asked = [TopicPartition(t, n) for t, n in wanted if t in there and n in there[t].partitions]
            earliest = offsets(admin, asked, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
            ends = offsets(admin, asked, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        except KafkaException as raised:
            self.say(error_of(raised), ", ".join(topics_of(wanted)))
        except TimeoutError:
            raise SinkUnreachable("the cluster does not answer") from None
        return {(at.topic, at.partition): Available(earliest[at], ends[at]) for at in asked}

    def say(self, error: KafkaError, topic: str) -> NoReturn:
        """Raise our error for an error of the client, without secrets.

        Raises:
            SinkUnreachable: the next try may succeed.
            SinkFailed: the next try would fail, too.
        """
        text = self.clean(f"topic {topic}: {error.str()} ({error.name()})")
        # From None: what it was caused by may hold settings.
        if error.code() in _REFUSED:
            raise SinkFailed(text) from None
        raise SinkUnreachable(text + self.clean("".join(f"; {said}" for said in self.trouble))) from None

    def clean(self, text: str) -> str:
        """Return a text without the secrets in it."""
        return without_secrets(text, self.secrets)

    def _common(self) -> dict[str, Any]:
        def failed(error: KafkaError) -> None:
            self.trouble[:] = [error.str()]

        return {"log_level": 2, **_ROOM, **self.settings, "error_cb": failed}

    def _not_producing(self) -> dict[str, Any]:
        return {name: v for name, v in self._common().items() if not name.startswith(_PRODUCING)}


def connection(bootstrap: str | None, bootstrap_env: str, client_env: str | None) -> Connection:
    """Read the settings of a cluster from the environment.

    Raises:
        UsageError: a variable is not set, or does not hold what it should.
    """
    given: dict[str, object] = {}
    text = ""
    if client_env is not None:
        what = 'librdkafka\'s settings, as {"security.protocol": "SASL_SSL"}'
        given, text = object_in(client_env, (str, int, float), what)
    ours = sorted(_RESERVED & given.keys())
    if ours:
        raise UsageError(f"${client_env} sets {', '.join(ours)}: the sink needs these as it sets them")
    servers = bootstrap or given.get("bootstrap.servers") or os.environ.get(bootstrap_env)
    if not servers:
        raise UsageError(
            f"no address of Kafka: set ${bootstrap_env}, as host:9092, or give Kafka(…, bootstrap=…)"
        )
    hidden = {str(value) for name, value in given.items() if any(word in name for word in _SECRET)}
    return Connection({**given, "bootstrap.servers": servers}, (text, *hidden))


def offsets(
    admin: AdminClient,
    of: Sequence[TopicPartition],
    which: OffsetSpec,
    level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[TopicPartition, int]:
    """Ask for an offset of each partition.

    Raises:
        KafkaException: the cluster refuses to answer.
        TimeoutError: it does not.
    """
    if not of:
        return {}
    asked = admin.list_offsets(dict.fromkeys(of, which), isolation_level=level, request_timeout=PATIENCE_S)
    return {at: found.result(PATIENCE_S).offset for at, found in asked.items()}


def error_of(raised: KafkaException) -> KafkaError:
    """Return the error inside an exception of the client."""
    error: KafkaError = raised.args[0]
    return error
