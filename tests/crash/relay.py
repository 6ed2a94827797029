"""The test's hold on the job of `sinks_job`: what goes in, what each sink has, and what must be there."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import monotonic

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.store.root import Root
from tests.crash.process import DriverProcess
from tests.crash.sinks_job import KAFKA_SECRET, SOURCE_SECRET
from tests.outside.kafka_server import PATIENCE_S, KafkaServer
from tests.outside.server import PASSWORD, PostgresServer

LAKE_SECRET = "0pen-lake-never-written"
DELTA_SECRET = "0pen-delta-never-written"
SECRETS = (KAFKA_SECRET, SOURCE_SECRET, LAKE_SECRET, DELTA_SECRET, PASSWORD)
KEYS = 10
KAFKA, POSTGRES = ("out", "totals"), ("sent", "last")
OUTSIDE = (*KAFKA, *POSTGRES, "lake")
EXPIRES = {
    "transactional.id.expiration.ms": "2000",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
}
"""Of the broker: it forgets a transactional id as soon as this."""
TRANSACTION_MS = 6000
FORGOTTEN_S = 9.5
"""After it an open transaction is aborted, and its id forgotten."""
TABLES = """
DROP SCHEMA IF EXISTS relay CASCADE;
CREATE SCHEMA relay;
CREATE TABLE relay.sent (key text, n bigint, amount bigint, token uuid);
CREATE TABLE relay.last (key text PRIMARY KEY, n bigint, total bigint)
"""
Matched = tuple[str, int, int]
Drawn = tuple[str, int, int, str]
"""With what was drawn for it: two evaluations do not agree."""


@dataclass(frozen=True)
class Found:
    """What is in every sink, as its own readers see it."""

    out: Mapping[str, list[int]]
    """The numbers of the records of each key, in order."""
    totals: Mapping[str, list[tuple[int, int]]]
    sent: Counter[Drawn]
    last: Mapping[str, tuple[int, int]]
    lake: Counter[Drawn]
    table: Counter[Drawn]


@dataclass
class Relay:
    """The job, its topics and tables, and what was written to the topics that it reads."""

    base: Path
    broker: KafkaServer
    postgres: PostgresServer
    prefix: str
    placed: list[tuple[str, int]] = field(default_factory=list)
    paid: list[Matched] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """Plans, refusals and what processes have told."""
    processes: list[DriverProcess] = field(default_factory=list)

    def open(self, monkeypatch: pytest.MonkeyPatch) -> Relay:
        """Make topics and tables, and put into the environment what processes look for."""
        for topic in ("in", "paid", "out", "totals"):
            self.broker.make(self.prefix + topic)
        self.postgres.run(TABLES)
        self.postgres.export(monkeypatch)
        client = {"transaction.timeout.ms": TRANSACTION_MS, "sasl.password": KAFKA_SECRET}
        monkeypatch.setenv("RELAY_KAFKA", json.dumps(client))
        place = {
            "type": "sql",
            "uri": f"sqlite:///{self.base}/catalog.db",
            "warehouse": f"file://{self.base}/lake",
        }
        monkeypatch.setenv("RELAY_LAKE", json.dumps({**place, "s3.secret-access-key": LAKE_SECRET}))
        monkeypatch.setenv("SPARK_ABS_STORAGE_ACCESS_KEY_ID", "relay")
        monkeypatch.setenv("SPARK_ABS_STORAGE_SECRET_ACCESS_KEY", DELTA_SECRET)
        catalog = load_catalog("default", **place)
        catalog.create_namespace("shop")
        columns = [("key", pa.string()), ("n", pa.int64()), ("amount", pa.int64()), ("token", pa.string())]
        self.lake: Table = catalog.create_table("shop.rows", pa.schema(columns))
        return self

    # -- input

    def feed(self, count: int = 20) -> None:
        """Write records, and what belongs to those of the last time, to the other topic."""
        producer = Producer({"bootstrap.servers": self.broker.bootstrap, "enable.idempotence": True})
        for key, n in self.placed[len(self.paid) :]:
            amount = 7 * len(self.paid) + 1
            producer.produce(self.prefix + "paid", f"{n} {amount}".encode(), key.encode())
            self.paid.append((key, n, amount))
        for _ in range(count):
            key, n = f"k{len(self.placed) % KEYS}", len(self.placed) // KEYS
            producer.produce(self.prefix + "in", str(n).encode(), key.encode())
            self.placed.append((key, n))
        assert producer.flush(PATIENCE_S) == 0

    # -- the process

    def process(self) -> DriverProcess:
        made = DriverProcess(
            self.base / f"process-{len(self.processes)}",
            "tests.crash.sinks_job",
            str(self.base),
            self.broker.bootstrap,
            self.prefix,
        )
        self.processes.append(made)
        return made

    def start(self, driver: DriverProcess, **options: object) -> None:
        """Run the job in a process, and wait until it has started or has ended."""
        driver.told = [event for event in driver.told if "base" not in event]
        driver.say(options)
        over = lambda: driver.has_started(self.base) or driver.ended(self.base) is not None  # noqa: E731
        driver.wait_for(over, "the start of the relay")

    def end(self, driver: DriverProcess) -> str:
        """Wait until the job has ended; returns how."""
        driver.wait_for(lambda: driver.ended(self.base) is not None, "the end of the relay")
        return driver.ended(self.base) or ""

    def finish(self, driver: DriverProcess, **options: object) -> str:
        """Run until all input is through; returns how it ended."""
        self.feed(0)
        self.start(driver, bounded=True, **options)
        return self.end(driver)

    def feed_while(self, driver: DriverProcess) -> Callable[[], None]:
        """Return what feeds a job, and sees that it runs."""

        def meanwhile() -> None:
            driver.require_running(self.base)
            self.feed()

        return meanwhile

    def checkpoints(self) -> list[int]:
        if not (self.base / "root" / "checkpoints" / "_delta_log").is_dir():
            return []
        return [s.id for s in Checkpoints.open(Root(str(self.base / "root")), "relay").summaries()]

    def until_next_checkpoint(self, driver: DriverProcess) -> None:
        """Feed the job that runs until it has completed another checkpoint."""
        before = max(self.checkpoints(), default=0)
        reached = lambda: max(self.checkpoints(), default=0) > before  # noqa: E731
        driver.wait_for(reached, "a checkpoint", self.feed_while(driver))

    def until_all_is_read(self, driver: DriverProcess) -> None:
        """Wait until the job that runs has nothing left to read."""
        self.feed(0)
        driver.wait_for(
            lambda: self.table().total() == len(self.placed),
            lambda: f"{len(self.placed)} records in the table, there are {self.table().total()}",
            lambda: driver.require_running(self.base),
        )

    # -- what is there

    def table(self) -> Counter[Drawn]:
        place = str(self.base / "table")
        return _rows(DeltaTable(place).to_pyarrow_table()) if DeltaTable.is_deltatable(place) else Counter()

    def found(self) -> Found:
        """Read every sink: what is committed, by SQL, by scans."""
        out, places = defaultdict[str, list[int]](list), defaultdict[str, set[object]](set)
        for partition, key, value in self._records("out"):
            out[key].append(int(value))
            places[key].add(partition)
        assert all(len(partitions) == 1 for partitions in places.values()), places
        totals = defaultdict[str, list[tuple[int, int]]](list)
        for _, key, value in self._records("totals"):
            n, total = value.split()
            totals[key].append((int(n), int(total)))
        last = {k: (n, total) for k, n, total in self.postgres.run("SELECT key, n, total FROM relay.last")}
        rows = self.postgres.run("SELECT key, n, amount, token::text FROM relay.sent")
        sent = Counter((key, n, amount, token) for key, n, amount, token in rows)
        return Found(out, totals, sent, last, _rows(self.lake.refresh().scan().to_arrow()), self.table())

    def marks(self) -> dict[str, int]:
        """The checkpoint that each sink outside says it has, read as it is stored."""
        found = dict(self.postgres.run("SELECT sink, checkpoint FROM relay.spark_abs_marker"))
        for topic in self.broker.topics():
            if topic.startswith(f"{self.prefix}marks-"):
                stored = json.loads(self.broker.read(topic)[-1].value() or b"")
                found[stored["sink"]] = stored["mark"]["checkpoint"]
        for name, text in self.lake.refresh().properties.items():
            if name.startswith("spark_abs."):
                found["lake"] = json.loads(text)["mark"]["checkpoint"]
        return found

    def last_of(self, until: int | None = None) -> dict[str, tuple[int, int]]:
        """What the totals must be of the first so many records."""
        sums: dict[str, tuple[int, int]] = {}
        for key, _, amount in self.paid[:until]:
            n, total = sums.get(key, (0, 0))
            sums[key] = (n + 1, total + amount)
        return sums

    def wrong(self) -> dict[str, int]:
        """Compare all sinks with what was produced: how many rows each has lost and has twice."""
        found, rows = self.found(), Counter(self.paid)
        numbers = Counter((key, n) for key, ns in found.out.items() for n in ns)
        seen: dict[str, tuple[Counter[object], Counter[object]]] = {
            "out": (Counter(self.placed), Counter(numbers)),
            "sent": (Counter(rows), Counter(as_read(found.sent))),
            "lake": (Counter(rows), Counter(as_read(found.lake))),
            "table": (Counter(rows), Counter(as_read(found.table))),
            "last": (Counter(self.last_of().items()), Counter(found.last.items())),
        }
        counts = {}
        for sink, (wanted, there) in seen.items():
            counts[f"{sink} lost"] = (wanted - there).total()
            counts[f"{sink} twice"] = (there - wanted).total()
        ends = {key: pairs[-1] for key, pairs in found.totals.items()}
        counts["evaluated twice"] = ((found.sent | found.lake | found.table) - found.table).total()
        counts["totals lost"] = len(self.last_of().items() - ends.items())
        counts["totals twice"] = sum(
            not (a[0] < b[0] and a[1] < b[1]) for pairs in found.totals.values() for a, b in pairwise(pairs)
        )
        counts["out of order"] = sum(ns != sorted(ns) for ns in found.out.values())
        return counts

    def require_once(self) -> None:
        """Everything that was produced is everywhere once, in the order of its key."""
        assert len(self.paid) == len(self.placed), "what belongs to the last records was not written"
        assert {what: count for what, count in self.wrong().items() if count} == {}

    def require_no_secret(self) -> None:
        """No secret is in a root, a table, a log, a mark, a history, a plan or an error."""
        written = [(str(path), path.read_bytes()) for path in self.base.rglob("*") if path.is_file()]
        said = [*self.said, *(json.dumps(process.told) for process in self.processes)]
        for (table,) in self.postgres.run("SELECT tablename FROM pg_tables WHERE schemaname = 'relay'"):
            said += [str(row) for row in self.postgres.run(f'SELECT * FROM relay."{table}"')]
        for topic in self.broker.topics():
            if topic.startswith(self.prefix):
                said += [repr((m.key(), m.value())) for m in self.broker.read(topic)]
        written += [("what was said", text.encode()) for text in said]
        assert [place for place, data in written for s in SECRETS if s.encode() in data] == []

    def _records(self, topic: str) -> Iterator[tuple[object, str, str]]:
        for message in self.broker.read(self.prefix + topic):
            key, value = message.key(), message.value()
            assert isinstance(key, bytes)
            assert isinstance(value, bytes)
            yield message.partition(), key.decode(), value.decode()


def after(seconds: float) -> Callable[[], bool]:
    """Return what says whether so much time has gone by."""
    until = monotonic() + seconds
    return lambda: monotonic() > until


def points_of_sends(chance: random.Random, turn: int) -> dict[str, int]:
    """Give each sink a point of its send, another with each turn, and how often it passes there before."""
    within = {"out": "part.after", "totals": "mark.before"}
    found = {}
    for number, sink in enumerate(OUTSIDE):
        name = ("commit.before", "rows.after", "commit.after", "")[(number + turn) % 4]
        found[f"send.{sink}.{name or within.get(sink, 'rows.after')}"] = chance.randint(2, 4)
    return found


def as_read(rows: Counter[Drawn]) -> Counter[Matched]:
    """The rows without what is drawn anew when they are read again."""
    return Counter(row[:3] for row in rows.elements())


def _rows(rows: pa.Table) -> Counter[Drawn]:
    columns = (rows[name].to_pylist() for name in ("key", "n", "amount", "token"))
    return Counter(zip(*columns, strict=True))
