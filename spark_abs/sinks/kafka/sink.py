"""Kafka as a sink: the records of an epoch and its mark in one transaction, after the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

import pyarrow as pa

try:
    from confluent_kafka import KafkaError, KafkaException, Producer
except ImportError as missing:
    raise ImportError("a Kafka sink needs confluent-kafka: pip install 'spark-abs[kafka]'") from missing

from spark_abs.codec import to_json
from spark_abs.errors import (
    CommitStateUnknown,
    SinkFailed,
    SinkUnreachable,
    UsageError,
)
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.kafka.client import FENCED, PATIENCE_S, Connection, connection, error_of
from spark_abs.sinks.kafka.config import Kafka
from spark_abs.sinks.kafka.marks import FORMAT, KafkaMark, MarkerTopic, Part, key_of, name_of
from spark_abs.sinks.kafka.rows import (
    RECORDS,
    by_topic,
    hand_over,
    misfits,
    misplaced,
    proposal,
    slices,
)
from spark_abs.sinks.marked import MarkedSink, refuse_moved, refuse_replaced
from spark_abs.sinks.two_phase import Rows

_ABORT_S = 5.0
_FOLLOWING = (KafkaError._STATE, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
"""Errors that follow from a transaction that has failed for another reason."""
_SHARE = 4
"""A transaction takes rows for one part in so many of its time; the rest is for its commit."""


class KafkaSink(MarkedSink[KafkaMark]):
    """The sink behind `Kafka`. Not thread-safe.

    Every run uses the same transactional id: initialising it ends older transactions, and older producers
    cannot commit any more. So the newest mark of the marker topic stays as it is from then on.
    """

    def __init__(self, config: Kafka) -> None:
        self._config = config
        self._reached: Connection | None = None
        self._marks: MarkerTopic | None = None
        self._producer: Producer | None = None
        self._undelivered: list[KafkaError] = []

    # -- what the job and a restore call

    def check(self, schema: pa.Schema) -> None:
        """Compare the columns with the fields of a record, and look for the topic; changes nothing."""
        config = self._config
        found = list(misfits(schema, config.topic))
        if found:
            lines = "\n  ".join(found)
            raise UsageError(f"topic {config.target} cannot take the rows:\n  {lines}\n{proposal(schema)}")
        if config.topic is None:
            return
        # This object may be at work for a run, in another thread.
        with closing(KafkaSink(config)) as look, look._working() as marks:
            partitions = marks.partitions(config.topic)
        if not partitions:
            raise UsageError(
                f"topic {config.topic} does not exist: create it, with the partitions that it should have"
            )

    def mark(self, owner: Owner) -> Mark | None:
        """Return the mark; of an epoch that is committed in part, the mark of that epoch."""
        found = self._read_mark(owner)
        return None if found is None else found.part.mark if found.part is not None else found.mark

    def rests(self, owner: Owner) -> bool:
        """Say whether no epoch is committed in part, and the mark is about this topic."""
        found = self._read_mark(owner)
        return found is not None and found.part is None and found.topic == (self._config.topic or "")

    def why_not(self, owner: Owner, back: Mark) -> str:
        """Say that Kafka keeps records, and at which offsets the records are that a restore would undo."""
        found = self._read_mark(owner)
        if found is None or (found.mark == back and found.part is None):
            return ""
        where = found.behind(back.version)
        if where is None:
            return (
                "Kafka keeps committed records, and the offsets of the later records are not known any more"
            )
        if not where:  # epochs without rows
            return ""
        return f"Kafka keeps committed records; readers may leave them out, they have these offsets: {where}"

    def close(self) -> None:
        """End the connections; the broker, or the next run, aborts an open transaction."""
        super().close()
        marks, self._marks, self._producer = self._marks, None, None
        if marks is not None:
            marks.close()

    # -- the mark, and the transactions

    def _read_mark(self, owner: Owner) -> KafkaMark | None:
        with self._working() as marks:
            return marks.read(owner)

    def _fence(self, owner: Owner) -> KafkaMark:
        """Initialise the transactional id, which fences older producers, and mark the run as the newest."""
        config = self._config
        with self._working(owner) as marks:
            refuse_replaced(owner, marks.read(owner))
            marks.ensure(owner)
            self._undelivered.clear()
            producer = self._connection.producer(name_of("spark_abs", owner), self._undelivered)
            self._producer = producer
            producer.init_transactions(PATIENCE_S)
            found = marks.read(owner)
            refuse_replaced(owner, found)
            if found is None:
                found = KafkaMark(FORMAT, owner.root, owner.sink, config.topic or "", 0)
            refuse_moved(owner, _topic(found.topic), _topic(config.topic or ""))
            found = replace(found, run=int(owner.run))
            producer.begin_transaction()
            self._commit(owner, found)
        return found

    def _add(self, epoch: Epoch, known: KafkaMark, rows: Rows) -> KafkaMark:
        """Send the rows and the mark in one transaction, or if they are many, in several."""
        with self._working(epoch.owner) as marks:
            known = self._send(marks, known, epoch, rows)
            final = replace(known, mark=epoch.mark, part=None)
            self._commit(epoch.owner, final)
        return final

    def _is_at(self, known: KafkaMark, back: Mark) -> bool:
        return known.part is None and super()._is_at(known, back)

    def _go_back(self, owner: Owner, known: KafkaMark, back: Mark, *, keep: bool) -> KafkaMark:
        """Store the older mark; records stay, as `why_not` says."""
        del keep
        mark = known.mark
        if mark is not None and mark.version > back.version:  # a part may lie after `back`, the mark before
            mark = back
        ends = tuple(e for e in known.ends if e.version <= back.version)
        final = replace(known, mark=mark, part=None, ends=ends)
        with self._working(owner):
            assert self._producer is not None
            self._producer.begin_transaction()
            self._commit(owner, final)
        return final

    def _send(self, marks: MarkerTopic, known: KafkaMark, epoch: Epoch, rows: Rows) -> KafkaMark:
        """Hand over the rows after those of `known.part`, and commit all transactions but the last."""
        config, topics = self._config, dict[str, int]()
        assert self._producer is not None
        done = known.part.rows if known.part is not None else 0
        self._producer.begin_transaction()
        if epoch.first and known.part is None and config.topic is not None:
            known = known.with_ends(epoch, epoch.after.version, marks.ends([config.topic]))
        begun, ends_at = done, time.monotonic() + self._connection.transaction_s / _SHARE
        for piece in _behind(rows, done, min(RECORDS, config.transaction_rows)):
            full = done + piece.num_rows > begun + config.transaction_rows
            if done > begun and (full or time.monotonic() > ends_at):
                self._flush()
                known = known.with_ends(epoch, epoch.mark.version, marks.ends(topics))
                known = replace(known, part=Part(epoch.mark, done))
                self._commit(epoch.owner, known)
                self._producer.begin_transaction()
                begun, ends_at = done, time.monotonic() + self._connection.transaction_s / _SHARE
            for topic, some in by_topic(piece, config.topic):
                if topic not in topics:
                    topics[topic] = marks.partitions(topic)
                    if not topics[topic]:
                        raise SinkFailed(f"topic {topic} does not exist: create it")
                if unknown := misplaced(some, topics[topic]):
                    topics[topic] = marks.partitions(topic)  # there may be more by now
                    if unknown := misplaced(some, topics[topic]):
                        raise SinkFailed(f"topic {topic} has no partition {unknown}")
                hand_over(self._producer, topic, some, self._connection.transaction_s)
            done += piece.num_rows
        self._flush()
        return known.with_ends(epoch, epoch.mark.version, marks.ends(topics))

    def _flush(self) -> None:
        """Wait until the brokers have all records; then the ends of topics lie behind them."""
        assert self._producer is not None
        left = self._producer.flush(self._connection.transaction_s)
        if self._undelivered:
            raise KafkaException(self._undelivered[0])
        if left:
            raise SinkUnreachable(
                f"topic {self._config.target}: the brokers have not yet acknowledged {left} records"
            )

    def _commit(self, owner: Owner, mark: KafkaMark) -> None:
        assert self._producer is not None
        assert self._marks is not None
        self._producer.produce(self._marks.topic(owner), to_json(mark).encode(), key_of(owner))
        try:
            self._producer.commit_transaction()
        except KafkaException as raised:
            error = error_of(raised)
            if error.code() in FENCED or error.txn_requires_abort():
                raise
            raise CommitStateUnknown(
                self._connection.clean(f"topic {self._config.target}: {error.str()} ({error.name()})")
            ) from None

    # -- connections

    @property
    def _connection(self) -> Connection:
        assert self._reached is not None, "within _working"
        return self._reached

    @contextmanager
    def _working(self, owner: Owner | None = None) -> Iterator[MarkerTopic]:
        """Yield the topic of marks; after an error no open connection is used again.

        Raises:
            Fenced: a run newer than the owner's has recovered the sink.
            SinkUnreachable: the next try may succeed.
            SinkFailed: the cluster refused it.
        """
        try:
            if self._marks is None:
                config = self._config
                self._reached = connection(config.bootstrap, config.bootstrap_env, config.client_env)
                self._marks = MarkerTopic(self._connection, config.marker)
            yield self._marks
        except (KafkaException, SystemError) as raised:
            # SystemError: a callback was called after one that failed, which is what a fatal error does.
            found = raised if isinstance(raised, KafkaException) else raised.__cause__
            cause = self._cause(error_of(found)) if isinstance(found, KafkaException) else None
            self._give_up()
            if cause is None:
                raise
            self._say(cause, owner)
        except TimeoutError:
            self._give_up()
            raise SinkUnreachable(f"topic {self._config.target}: the cluster does not answer") from None
        except Exception:
            self._give_up()
            raise
        except BaseException:
            self.close()
            raise

    def _cause(self, error: KafkaError) -> KafkaError:
        """Return the reason of a failed transaction for an error that says only that it failed.

        librdkafka tells the reason when a call asks for a step that a failed transaction does not allow.
        """
        if self._producer is not None and error.code() in _FOLLOWING:
            try:
                self._producer.begin_transaction()
            except KafkaException as raised:
                if error_of(raised).code() not in _FOLLOWING:
                    return error_of(raised)
        return error

    def _give_up(self) -> None:
        """Abort an open transaction, so that readers do not wait for it, and close all connections."""
        if self._producer is not None:
            with suppress(KafkaException):
                self._producer.abort_transaction(_ABORT_S)
        self.close()

    def _say(self, error: KafkaError, owner: Owner | None) -> NoReturn:
        """Raise our error for an error of the client; only the marker topic tells of a newer run.

        librdkafka also reports a fence when it has lost count, or when another program uses the transactional
        id.
        """
        if error.code() in FENCED and owner is not None:
            with self._working() as marks:
                refuse_replaced(owner, marks.read(owner))
            self.close()
        self._connection.say(error, self._config.target)


def _topic(name: str) -> str:
    return f"topic {name}" if name else "the topic of each row"


def _behind(rows: Rows, done: int, most: int) -> Iterator[pa.RecordBatch]:
    """Iterate the rows after the first `done`, in pieces."""
    for batch in rows:
        left = batch.slice(min(done, batch.num_rows))
        done -= batch.num_rows - left.num_rows
        yield from slices(left, most)
