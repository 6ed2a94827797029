"""Streaming queries that know nothing of spark_abs, as Spark runs them, over real files and Delta tables.

They follow the rules of Spark and Delta as far as files show them: `MicroBatchExecution.populateStartOffsets`
(the last committed batch is planned again at a start), `CompactibleFileStreamLog` (which log files a file
source needs), `DeltaSource` (a commit that removes rows ends the query), `DeltaSink` (a batch whose number is
not above the transaction of the query is skipped).
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from spark_abs.rewind.apply import apply
from spark_abs.rewind.prepare import Prepared, found_directories, new_id, prepare
from spark_abs.rewind.undo import find_undo, finish, undo
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.storage import DEFAULTS, Place

INTERVAL = 10


class Crash(Exception):
    """The driver dies."""


def log_of(table: Path) -> dict[int, list[dict[str, dict[str, object]]]]:
    """Return the actions of each version of a table."""
    return {
        int(file.stem): [json.loads(line) for line in file.read_text().splitlines() if line]
        for file in sorted((table / "_delta_log").glob("*.json"))
    }


def rows_of(table: Path) -> list[int]:
    return sorted(DeltaTable(str(table)).to_pyarrow_table()["id"].to_pylist())


def make_table(table: Path) -> None:
    DeltaTable.create(str(table), pa.schema([("id", pa.int64())]))


def append(table: Path, ids: list[int], transactions: dict[str, int]) -> None:
    write_deltalake(
        str(table),
        pa.table({"id": pa.array(ids, pa.int64())}),
        mode="append",
        commit_properties=CommitProperties(
            app_transactions=[Transaction(app, batch) for app, batch in transactions.items()]
        ),
    )


@dataclass
class PlainQuery:
    """A query that copies ids from files or from a table to a table."""

    base: Path
    name: str
    source: str
    """A table, or a directory of input files if it begins with `in`."""
    sink: str
    app: str = ""
    """The application id of its function; empty: Delta's own sink."""
    chance: random.Random = field(default_factory=random.Random)

    @property
    def checkpoint(self) -> Path:
        return self.base / "c" / self.name

    @property
    def from_files(self) -> bool:
        return self.source.startswith("in")

    def start(self) -> None:
        """Read the checkpoint as Spark does at a start; end a batch that was planned."""
        for directory in ("offsets", "commits", "sources/0"):
            (self.checkpoint / directory).mkdir(parents=True, exist_ok=True)
        metadata = self.checkpoint / "metadata"
        if not metadata.exists():
            metadata.write_text(json.dumps({"id": str(uuid.uuid4())}))
        self.id = json.loads(metadata.read_text())["id"]
        planned, committed = self._newest("offsets"), self._newest("commits")
        assert planned in (committed, committed + 1)
        if self.from_files:
            self._read_source_log()
        if committed >= 0:
            self._read(self._end(committed - 1), self._end(committed))  # the batch is planned again
        self.batch, self.until = planned, self._end(planned)
        if planned == committed + 1:
            self._run(self._end(committed), self.until)

    def step(self, most: int, *, crash: str = "") -> bool:
        """Run one batch; say whether there was something to read."""
        if self.from_files:
            fresh = [n for n in self._inputs() if n not in self.seen][: self.chance.randint(1, most)]
            if not fresh:
                return False
            until = self.until + 1
            self._write_source_log(until, fresh)
        else:
            newest = max(log_of(self.base / "t" / self.source))
            if newest < self.until:
                return False
            until = min(newest + 1, self.until + self.chance.randint(1, most))
        start, self.until, self.batch = self.until, until, self.batch + 1
        (self.checkpoint / "offsets" / str(self.batch)).write_text(
            f"v1\n{self._metadata()}\n{self._line(until)}"
        )
        if crash == "planned":
            raise Crash
        self._run(start, until, crash)
        return True

    def drain(self) -> None:
        """Read all that there is, as with the trigger available now."""
        self.start()
        while self.step(5):
            pass

    def _run(self, start: int, until: int, crash: str = "") -> None:
        ids, table, app = self._read(start, until), self.base / "t" / self.sink, self.app or self.id
        written = DeltaTable(str(table)).transaction_version(app)
        if written is None or written < self.batch:
            append(table, ids, {app: self.batch})
        if crash == "written":
            raise Crash
        (self.checkpoint / "commits" / str(self.batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')

    def _newest(self, directory: str) -> int:
        return max(
            (int(p.name) for p in (self.checkpoint / directory).iterdir() if p.name.isdigit()), default=-1
        )

    def _metadata(self) -> str:
        return json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": int(time.time() * 1000), "conf": {}})

    def _line(self, until: int) -> str:
        if self.from_files:
            return json.dumps({"logOffset": until})
        identity = DeltaTable(str(self.base / "t" / self.source)).metadata().id
        plain = {
            "sourceVersion": 1,
            "reservoirId": str(identity),
            "reservoirVersion": until,
            "index": -1,
            "isStartingVersion": False,
        }
        return json.dumps(plain)

    def _end(self, batch: int) -> int:
        if batch < 0:
            return -1 if self.from_files else 0
        plain = json.loads((self.checkpoint / "offsets" / str(batch)).read_text().split("\n")[2])
        return int(plain["logOffset"] if self.from_files else plain["reservoirVersion"])

    def _read(self, start: int, until: int) -> list[int]:
        if self.from_files:
            return [n for number, n in self.entries if start < number <= until]
        table, found = self.base / "t" / self.source, []
        for version, actions in log_of(table).items():
            if start <= version < until:
                assert not any(a.get("remove", {}).get("dataChange") for a in actions), (self.name, version)
                for add in (a["add"] for a in actions if "add" in a and a["add"]["dataChange"]):
                    found += pq.read_table(table / unquote(str(add["path"])))["id"].to_pylist()
        return found

    def _inputs(self) -> list[int]:
        return sorted(int(p.name) for p in (self.base / self.source).iterdir())

    def _log(self) -> dict[str, Path]:
        return {p.name: p for p in (self.checkpoint / "sources" / "0").iterdir() if p.name[0] != "."}

    def _read_source_log(self) -> None:
        """Read the entries from the newest compact file and all after it; none may be missing."""
        files = self._log()
        newest = max((int(name.partition(".")[0]) for name in files), default=-1)
        base = (newest + 1) // INTERVAL * INTERVAL - 1
        wanted = ([f"{base}.compact"] if base >= 0 else []) + [str(n) for n in range(base + 1, newest + 1)]
        lines = [line for name in wanted for line in files[name].read_text().split("\n")[1:] if line]
        self.entries = [
            (int(e["batchId"]), int(e["path"].rpartition("/")[2])) for e in map(json.loads, lines)
        ]
        self.seen = {n for _, n in self.entries}

    def _write_source_log(self, number: int, fresh: list[int]) -> None:
        self.entries += [(number, n) for n in fresh]
        self.seen |= set(fresh)
        compact = (number + 1) % INTERVAL == 0
        told = self.entries if compact else [e for e in self.entries if e[0] == number]
        lines = [json.dumps({"path": f"file:///x/{n}", "timestamp": 1, "batchId": at}) for at, n in told]
        name = f"{number}.compact" if compact else str(number)
        (self.checkpoint / "sources" / "0" / name).write_text("\n".join(["v1", *lines]))
        if compact:  # Spark deletes what is older after a while
            for other, path in self._log().items():
                if not other.endswith(".compact") and self.chance.random() < 0.5:
                    path.unlink()


SHAPES = {
    "chain": [("bronze", "in1", "bronze"), ("silver", "bronze", "silver"), ("gold", "silver", "gold")],
    "fan-out": [("bronze", "in1", "bronze"), ("one", "bronze", "one"), ("two", "bronze", "two")],
    "two writers": [("left", "in1", "both"), ("right", "in2", "both")],
    "fan-in": [("left", "in1", "both"), ("right", "in2", "both"), ("gold", "both", "gold")],
}


class World:
    """Queries of a shape, with inputs and tables."""

    def __init__(self, base: Path, shape: str, seed: int, files: int = 40) -> None:
        self.base, self.shape, self.chance, self.now_ms = base, shape, random.Random(seed), 0
        inputs = sorted({s for _, s, _ in SHAPES[shape] if s.startswith("in")})
        for at, name in enumerate(inputs):
            (base / name).mkdir(parents=True)
            for n in range(at * files, (at + 1) * files):
                (base / name / str(n)).touch()
        self.expected = list(range(len(inputs) * files))
        for table in {t for _, _, t in SHAPES[shape]}:
            make_table(base / "t" / table)

    def queries(self) -> list[PlainQuery]:
        return [
            PlainQuery(self.base, name, source, sink, "my-app" if name == "gold" else "", self.chance)
            for name, source, sink in SHAPES[self.shape]
        ]

    def run(self, steps: int) -> None:
        """Run batches of random queries; some die in a batch."""
        queries = self.queries()
        for query in queries:
            query.start()
        for _ in range(steps):
            query = self.chance.choice(queries)
            crash = self.chance.choice(["planned", "written"]) if self.chance.random() < 0.1 else ""
            try:
                query.step(3, crash=crash)
            except Crash:
                query.start()
        for query in queries:
            if self.chance.random() < 0.5:
                try:
                    query.step(3, crash=self.chance.choice(["planned", "written"]))
                except Crash:
                    continue

    def places(self) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
        """Return the checkpoint directories and the tables."""
        checkpoints = found_directories([f"{self.base}/c/*"], DEFAULTS, "metadata", "checkpoint")
        return checkpoints, found_directories([f"{self.base}/t/*"], DEFAULTS, "_delta_log/", "table")

    def _tick(self) -> int:
        self.now_ms += 1_000
        return self.now_ms

    def prepare(self, at: dict[str, int] | None = None) -> Prepared:
        return prepare(*self.places(), storage=DEFAULTS, now_ms=self._tick(), at=at)

    def undo(self, failpoint: Callable[[str], None] = no_failpoint) -> None:
        """Take the newest rewind back."""
        places = self.places()
        undo(find_undo(*places), *places, rewind=new_id(self._tick()), now_ms=2_000, at=failpoint)

    def any_batch(self) -> dict[str, int]:
        """Return a random batch of a random query as the bound."""
        query = self.chance.choice(self.queries())
        batches = sorted(int(p.name) for p in (query.checkpoint / "commits").iterdir() if p.name.isdigit())
        return {query.name: self.chance.choice(batches)} if batches else {}

    def rewind(self, at: dict[str, int], failpoint: Callable[[str], None] = no_failpoint) -> None:
        prepared = self.prepare(at)
        if prepared.plan.changes:
            apply(prepared.plan, DEFAULTS, require_still=prepared.require_still, at=failpoint)

    def finish(self, failpoint: Callable[[str], None] = no_failpoint) -> object:
        """Finish a rewind that was killed."""
        return finish(*self.places(), at=failpoint)

    def drained(self) -> dict[str, list[int]]:
        """Run all queries to the end of their input, and return what their tables hold."""
        for query in self.queries():
            query.drain()
        return {table: rows_of(self.base / "t" / table) for _, _, table in SHAPES[self.shape]}

    def is_whole(self, seed: int) -> None:
        for table, rows in self.drained().items():
            assert rows == self.expected, (seed, table)
