"""Marks of Kafka sinks: records of a compacted topic, each the newest of its sink."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # named, and not said to be exported
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from spark_abs.codec import from_json, require_format, to_json
from spark_abs.errors import DamageError, Refused, SinkUnreachable
from spark_abs.model import Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.kafka.client import PATIENCE_S, Connection, error_of, offsets

T = TypeVar("T")

FORMAT = 1
_MOST_BYTES = 200_000
"""The most bytes of a mark for the ends of topics: brokers limit a record to 1 MB by default."""
_TOPIC = {"cleanup.policy": "compact", "segment.ms": str(6 * 3600 * 1000), "min.cleanable.dirty.ratio": "0.1"}
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Part:
    """An epoch of which some rows are committed, because one transaction does not hold it."""

    mark: Mark
    """The mark of the epoch."""
    rows: int
    """How many of its rows are committed, from the first on."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of topics when an epoch was committed: records of later epochs lie behind them."""

    version: Version
    """Of the epoch's mark."""
    offsets: Mapping[str, tuple[int, ...]]
    """By topic, for each partition in order, the offset after its last record."""


@dataclass(frozen=True, slots=True)
class KafkaMark:
    """A record of the marker topic: the mark of a sink."""

    v: int
    root: str
    sink: str
    topic: str
    """The topic of the rows; empty if each row names its own."""
    run: int
    """The newest run: older ones are refused."""
    mark: Mark | None = None
    part: Part | None = None
    ends: tuple[Ends, ...] = ()
    """Of epochs that a restore may undo, oldest first."""

    def with_ends(self, epoch: Epoch, version: Version, offsets: Mapping[str, tuple[int, ...]]) -> KafkaMark:
        """Add the ends of topics after an epoch or its part, and forget ends that no restore needs."""
        before = [e for e in self.ends if e.version <= epoch.after.version and e.version != version]
        last = dict(self.ends[-1].offsets) if self.ends else {}
        ends = [*before, Ends(version, {**last, **offsets})]
        needed = max((e.version for e in ends if e.version <= epoch.floor), default=ends[0].version)
        ends = [e for e in ends if e.version >= needed]
        sizes = [len(to_json(e)) for e in ends]
        while len(ends) > 1 and sum(sizes) > _MOST_BYTES:
            ends, sizes = ends[1:], sizes[1:]
        return replace(self, ends=tuple(ends))

    def behind(self, back: Version) -> str | None:
        """Name the offsets of the records that were committed after an entry, for a message.

        Returns:
            Empty if no record was sent, None if the offsets are not known.
        """
        then = next((e.offsets for e in self.ends if e.version == back), None)
        if then is None:
            return None
        now = self.ends[-1].offsets
        if any(_made_anew(ends, now.get(topic, ())) for topic, ends in then.items()):
            return None
        return ", ".join(
            f"{topic}[{partition}] {begin} to {end - 1}"
            for topic, ends in sorted(now.items())
            for partition, (begin, end) in enumerate(
                zip(_padded(then.get(topic, ()), ends), ends, strict=True)
            )
            if begin < end
        )


def _made_anew(then: Sequence[int], now: Sequence[int]) -> bool:
    return len(now) < len(then) or any(end < begin for begin, end in zip(then, now, strict=False))


def _padded(then: Sequence[int], now: Sequence[int]) -> Sequence[int]:
    return (*then, *([0] * (len(now) - len(then))))


def key_of(owner: Owner) -> bytes:
    """Return the key of a sink's records."""
    return f"{owner.root}/{owner.sink}".encode()


def name_of(prefix: str, owner: Owner) -> str:
    """Return a name that only one sink of one root has."""
    digest = hashlib.sha256(f"{owner.root} {owner.sink}".encode()).hexdigest()
    return f"{prefix}-{owner.sink[:40]}-{digest[:32]}"


class MarkerTopic:
    """Reads the mark of a sink, and creates the topic of the mark. Not thread-safe.

    Each sink has its own topic: an open transaction hides all records behind it, and a transaction of another
    sink could stay open until the brokers end it.
    """

    def __init__(self, connection: Connection, prefix: str) -> None:
        """Take the names; nothing is asked before a method is called."""
        self._prefix = prefix
        self._admin: AdminClient = connection.admin()
        self._reader: Consumer = connection.consumer(committed=True)
        self._read = ""
        """The topic that is being read."""
        self._next = 0
        self._newest: bytes | None = None
        """The newest record before `_next`."""

    def topic(self, owner: Owner) -> str:
        """Return the topic of a sink's marks."""
        return name_of(self._prefix, owner)

    def close(self) -> None:
        self._reader.close()

    def partitions(self, topic: str) -> int:
        """Return the number of partitions of a topic, 0 if there is none. Creates none, unlike a producer."""
        found = self._reader.list_topics(topic, timeout=PATIENCE_S).topics[topic]
        if found.error is not None and found.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise KafkaException(found.error)
        return len(found.partitions)

    def ends(self, topics: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return where topics end now, open transactions included."""
        wanted = [TopicPartition(t, p) for t in topics for p in range(self.partitions(t))]
        found: dict[str, dict[int, int]] = {}
        for at, offset in self._offsets(wanted, IsolationLevel.READ_UNCOMMITTED).items():
            found.setdefault(at.topic, {})[at.partition] = offset
        return {topic: tuple(ends[p] for p in sorted(ends)) for topic, ends in found.items()}

    def ensure(self, owner: Owner) -> None:
        """Create the topic of a sink if there is none.

        Raises:
            Refused: the topic exists, and does not keep marks.
        """
        topic = self.topic(owner)
        if not self.partitions(topic):
            made = self._admin.create_topics([NewTopic(topic, 1, config=_TOPIC)])[topic]
            with suppress(KafkaException):  # another run has made it at the same moment, or the look says why
                _result(made)
            self._await_topic(topic, made)
        resource = ConfigResource(ResourceType.TOPIC, topic)
        found = _result(self._admin.describe_configs([resource])[resource])
        policy = found["cleanup.policy"].value
        if policy != "compact" or self.partitions(topic) != 1:
            raise Refused(
                f"topic {topic} is where marks are kept, and has cleanup.policy={policy} and "
                f"{self.partitions(topic)} partitions: marks stay with 'compact' and in one partition. "
                "Change it, or name another one: Kafka(…, marker=…)"
            )

    def _await_topic(self, topic: str, made: Future[None]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not self.partitions(topic):
            if time.monotonic() > until:
                made.result()
                raise SinkUnreachable(f"topic {topic} was made and cannot be found")
            error = made.exception()
            if isinstance(error, KafkaException) and error_of(error).code() not in _MADE:
                raise error
            _pause()

    def read(self, owner: Owner) -> KafkaMark | None:
        """Return the mark that was committed last for a sink.

        An open transaction hides no mark: a sink has one transaction at a time, so no record is behind it.

        Raises:
            SinkUnreachable: the topic cannot be read now.
            DamageError: the mark cannot be read.
        """
        at = TopicPartition(self.topic(owner), 0)
        if not self.partitions(at.topic):
            return None
        self._advance(at, self._offsets([at], IsolationLevel.READ_COMMITTED)[at])
        if self._newest is None:
            return None
        mark = from_json(KafkaMark, self._newest)
        require_format(mark.v, FORMAT, f"the mark of sink {owner.sink!r}")
        if key_of(owner) != f"{mark.root}/{mark.sink}".encode():
            raise DamageError(f"topic {at.topic} has marks of sink {mark.sink!r} of another root")
        return mark

    def _advance(self, at: TopicPartition, stable: int) -> None:
        if self._read != at.topic or stable < self._next:  # the topic may have been made anew
            self._read, self._next, self._newest = at.topic, 0, None
            self._reader.assign([TopicPartition(at.topic, at.partition, 0)])
        until = time.monotonic() + PATIENCE_S
        while self._next < stable:
            self._take(self._reader.consume(1000, 0.02))
            if time.monotonic() > until:
                raise SinkUnreachable(f"topic {at.topic} cannot be read to offset {stable}")

    def _take(self, messages: Sequence[Message]) -> None:
        for message in messages:
            error = message.error()
            if error is None:
                value = message.value()
                if isinstance(value, bytes):
                    self._newest = value
                self._next = (message.offset() or 0) + 1
            elif error.code() == KafkaError._PARTITION_EOF:
                self._next = max(self._next, message.offset() or 0)
            elif error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:  # a group that is not used
                raise KafkaException(error)

    def _offsets(self, of: Sequence[TopicPartition], level: IsolationLevel) -> dict[TopicPartition, int]:
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        return offsets(self._admin, of, latest, level)


_MADE = (KafkaError.TOPIC_ALREADY_EXISTS,)


def _result(future: Future[T]) -> T:
    return future.result(PATIENCE_S)


def _pause() -> None:
    threading.Event().wait(_PAUSE_S)
