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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyarrow import fs

from spark_abs.rewind.apply import apply
from spark_abs.rewind.prepare import Prepared, checkpoints_at, new_id, prepare, tables_at
from spark_abs.rewind.undo import Finished, find_undo, finish, undo
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.storage import Place

INTERVAL = 10
NO_APP = "none"


class Crash(Exception):
    """The driver dies."""


class Concurrent(Exception):
    """Another driver has written this number: the query ends."""


def added(place: Place, relative: str, text: str) -> None:
    """Add an entry to a log, as `HDFSMetadataLog.add` does: only where there is none."""
    if not place.create(relative, text.encode()):
        raise Concurrent(place, relative)


def place_of(where: Path | Place) -> Place:
    return where if isinstance(where, Place) else Place(str(where))


def delta(table: Path | Place, version: int | None = None) -> DeltaTable:
    place = place_of(table)
    return DeltaTable(place.uri, version, storage_options=place.options)


def actions_of(table: Place, version: int) -> list[dict[str, dict[str, object]]]:
    """Return the actions of a version of a table."""
    data = table.read(f"_delta_log/{version:020}.json")
    assert data is not None, (table, version)
    return [json.loads(line) for line in data.decode().splitlines() if line]


def names_in(place: Place, directory: str) -> list[str]:
    """Return the names of the files of a directory; there need not be one."""
    selector = fs.FileSelector(f"{place.path}/{directory}", allow_not_found=True)
    infos = place.fs.get_file_info(selector)
    return [str(info.base_name) for info in infos if info.type is fs.FileType.File]


def text_of(place: Place, relative: str) -> str:
    data = place.read(relative)
    assert data is not None, (place, relative)
    return data.decode()


def rows_of(table: Path | Place, version: int | None = None) -> list[int]:
    return sorted(delta(table, version).to_pyarrow_table()["id"].to_pylist())


def make_table(table: Place) -> None:
    """Create a table as Spark does: its log has a checkpoint every ten commits."""
    DeltaTable.create(
        table.uri,
        pa.schema([("id", pa.int64())]),
        storage_options=table.options,
        configuration={"delta.checkpointInterval": "10"},
    )


def append(table: Path | Place | DeltaTable, ids: list[int], transactions: dict[str, int]) -> None:
    write_deltalake(
        table if isinstance(table, DeltaTable) else delta(table),
        pa.table({"id": pa.array(ids, pa.int64())}),
        mode="append",
        commit_properties=CommitProperties(
            app_transactions=[Transaction(app, batch) for app, batch in transactions.items()]
        ),
    )


@dataclass
class PlainQuery:
    """A query that copies ids from files or from a table to a table."""

    base: Path | Place
    name: str
    source: str
    """A table, or a directory of input files if it begins with `in`."""
    sink: str
    app: str = ""
    """The application id of its function, `NO_APP` if it names none; empty: Delta's own sink."""
    chance: random.Random = field(default_factory=random.Random)
    held: list[int] | None = None
    """The rows of a batch in which the driver was frozen."""
    _handles: dict[str, DeltaTable] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Place:
        return place_of(self.base).below(f"c/{self.name}")

    def table(self, name: str) -> Place:
        return place_of(self.base).below(f"t/{name}")

    def newest(self, name: str) -> DeltaTable:
        """Return a table as it is now; its log is read from its start once, as by Spark."""
        handle = self._handles.get(name)
        if handle is None:
            handle = self._handles[name] = delta(self.table(name))
        else:
            handle.update_incremental()
        return handle

    @property
    def from_files(self) -> bool:
        return self.source.startswith("in")

    def start(self) -> None:
        """Read the checkpoint as Spark does at a start; end a batch that was planned."""
        if self.checkpoint.read("metadata") is None:
            self.checkpoint.write("metadata", json.dumps({"id": str(uuid.uuid4())}).encode())
        self.id = json.loads(text_of(self.checkpoint, "metadata"))["id"]
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
            newest = self.newest(self.source).version()
            if newest < self.until:
                return False
            until = min(newest + 1, self.until + self.chance.randint(1, most))
        start, self.until, self.batch = self.until, until, self.batch + 1
        planned = f"v1\n{self._metadata()}\n{self._line(until)}"
        added(self.checkpoint, f"offsets/{self.batch}", planned)
        if crash == "planned":
            raise Crash
        self._run(start, until, crash)
        return True

    def wake(self) -> None:
        """Go on after a crash, as a driver does that was frozen at that point, until it ends."""
        held, self.held = self.held, None
        with suppress(Concurrent):
            if held is not None:
                self._write(held)
            while self.step(5):
                pass

    def drain(self, most: int = 5) -> None:
        """Read all that there is, as with the trigger available now."""
        self.start()
        while self.step(most):
            pass

    def _run(self, start: int, until: int, crash: str = "") -> None:
        ids = self._read(start, until)
        if crash:
            self.held = ids
        if crash == "read":
            raise Crash
        self._write(ids, crash)

    def _write(self, ids: list[int], crash: str = "") -> None:
        table, app = self.newest(self.sink), self.app or self.id
        written = table.transaction_version(app)
        if app == NO_APP:
            self._tick()
            append(table, ids, {})
            self._tick()
        elif written is None or written < self.batch:
            append(table, ids, {app: self.batch})
        if crash == "written":
            raise Crash
        added(self.checkpoint, f"commits/{self.batch}", 'v1\n{"nextBatchWatermarkMs":0}')

    def batches(self, directory: str) -> list[int]:
        """Return the batches in a log of the query, in order."""
        return sorted(int(name) for name in names_in(self.checkpoint, directory) if name.isdigit())

    def _newest(self, directory: str) -> int:
        return max(self.batches(directory), default=-1)

    def _tick(self) -> None:
        """Let the driver's clock go on: a batch takes more than a millisecond."""
        begun = int(time.time() * 1000)
        while int(time.time() * 1000) == begun:
            pass

    def _metadata(self) -> str:
        return json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": int(time.time() * 1000), "conf": {}})

    def _line(self, until: int) -> str:
        if self.from_files:
            return json.dumps({"logOffset": until})
        identity = self._handles[self.source].metadata().id
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
        plain = json.loads(text_of(self.checkpoint, f"offsets/{batch}").split("\n")[2])
        return int(plain["logOffset"] if self.from_files else plain["reservoirVersion"])

    def _read(self, start: int, until: int) -> list[int]:
        if self.from_files:
            return [n for number, n in self.entries if start < number <= until]
        table, found = self.table(self.source), []
        for version in range(start, until):
            actions = actions_of(table, version)
            assert not any(a.get("remove", {}).get("dataChange") for a in actions), (self.name, version)
            for add in (a["add"] for a in actions if "add" in a and a["add"]["dataChange"]):
                file = f"{table.path}/{unquote(str(add['path']))}"
                found += pq.read_table(file, filesystem=table.fs)["id"].to_pylist()
        return found

    def _uri(self, number: int) -> str:
        """Return the name of an input file as Spark's log has it."""
        top = place_of(self.base).uri
        return f"{'file://' if top.startswith('/') else ''}{quote(top, safe='/:@')}/{self.source}/{number}"

    def _inputs(self) -> list[int]:
        return sorted(int(name) for name in names_in(place_of(self.base), self.source))

    def _log(self) -> list[str]:
        return [name for name in names_in(self.checkpoint, "sources/0") if name[0] != "."]

    def _read_source_log(self) -> None:
        """Read the entries from the newest compact file and all after it; none may be missing."""
        files = self._log()
        newest = max((int(name.partition(".")[0]) for name in files), default=-1)
        base = (newest + 1) // INTERVAL * INTERVAL - 1
        wanted = ([f"{base}.compact"] if base >= 0 else []) + [str(n) for n in range(base + 1, newest + 1)]
        texts = [text_of(self.checkpoint, f"sources/0/{name}") for name in wanted]
        lines = [line for text in texts for line in text.split("\n")[1:] if line]
        self.entries = [
            (int(e["batchId"]), int(e["path"].rpartition("/")[2])) for e in map(json.loads, lines)
        ]
        self.seen = {n for _, n in self.entries}

    def _write_source_log(self, number: int, fresh: list[int]) -> None:
        self.entries += [(number, n) for n in fresh]
        self.seen |= set(fresh)
        compact = (number + 1) % INTERVAL == 0
        told = self.entries if compact else [e for e in self.entries if e[0] == number]
        lines = [json.dumps({"path": self._uri(n), "timestamp": 1, "batchId": at}) for at, n in told]
        name = f"{number}.compact" if compact else str(number)
        added(self.checkpoint, f"sources/0/{name}", "\n".join(["v1", *lines]))
        if compact:  # Spark deletes what is older after a while
            for other in self._log():
                if not other.endswith(".compact") and self.chance.random() < 0.5:
                    self.checkpoint.fs.delete_file(f"{self.checkpoint.path}/sources/0/{other}")


SHAPES = {
    "chain": [("bronze", "in1", "bronze"), ("silver", "bronze", "silver"), ("gold", "silver", "gold")],
    "fan-out": [("bronze", "in1", "bronze"), ("one", "bronze", "one"), ("two", "bronze", "two")],
    "two writers": [("left", "in1", "both"), ("right", "in2", "both")],
    "fan-in": [("left", "in1", "both"), ("right", "in2", "both"), ("gold", "both", "gold")],
}


UNTOLD = {"untold": [("bronze", "in1", "bronze"), ("gold", "bronze", "gold")]}
"""The function of `gold` writes without an application id: a killed batch may come twice, as in Spark."""
_SHAPES = SHAPES | UNTOLD


class World:
    """Queries of a shape, with inputs and tables."""

    most = 5
    """How many files or versions a batch reads at the most when all queries run to the end."""

    def __init__(self, base: Path | Place, shape: str, seed: int, files: int = 40) -> None:
        self.top, self.shape, self.chance, self.now_ms = place_of(base), shape, random.Random(seed), 0
        inputs = sorted({s for _, s, _ in _SHAPES[shape] if s.startswith("in")})
        for at, name in enumerate(inputs):
            for n in range(at * files, (at + 1) * files):
                self.top.write(f"{name}/{n}", b"")
        self.expected = list(range(len(inputs) * files))
        for table in {t for _, _, t in _SHAPES[shape]}:
            make_table(self.top.below(f"t/{table}"))

    @property
    def base(self) -> Path:
        """The directory, if it is of this machine."""
        assert self.top.local
        return Path(self.top.uri)

    def queries(self) -> list[PlainQuery]:
        return [
            PlainQuery(self.top, name, source, sink, self._app_of(name), self.chance)
            for name, source, sink in _SHAPES[self.shape]
        ]

    def _app_of(self, query: str) -> str:
        if query != "gold":
            return ""
        return NO_APP if self.shape in UNTOLD else "my-app"

    def _crashes(self, query: PlainQuery) -> str:
        return "planned" if query.app == NO_APP else self.chance.choice(["planned", "written"])

    def run(self, steps: int) -> None:
        """Run batches of random queries; some die in a batch."""
        queries = self.queries()
        for query in queries:
            query.start()
        for _ in range(steps):
            query = self.chance.choice(queries)
            crash = self._crashes(query) if self.chance.random() < 0.1 else ""
            try:
                query.step(3, crash=crash)
            except Crash:
                query.start()
        for query in queries:
            if self.chance.random() < 0.5:
                try:
                    query.step(3, crash=self._crashes(query))
                except Crash:
                    continue

    def places(self) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
        """Return the checkpoint directories and the tables."""
        storage = self.top.storage
        return checkpoints_at([f"{self.top}/c/*"], storage), tables_at([f"{self.top}/t/*"], storage)

    def _tick(self) -> int:
        self.now_ms += 1_000
        return self.now_ms

    def prepare(self, at: dict[str, int] | None = None) -> Prepared:
        return prepare(*self.places(), storage=self.top.storage, now_ms=self._tick(), at=at)

    def undo(self, failpoint: Callable[[str], None] = no_failpoint) -> None:
        """Take the newest rewind back."""
        places = self.places()
        undo(find_undo(*places), places[1], rewind=new_id(self._tick()), now_ms=2_000, at=failpoint)

    def any_batch(self) -> dict[str, int]:
        """Return a random batch of a random query as the bound."""
        query = self.chance.choice(self.queries())
        batches = query.batches("commits")
        return {query.name: self.chance.choice(batches)} if batches else {}

    def rewind(self, at: dict[str, int], failpoint: Callable[[str], None] = no_failpoint) -> set[str]:
        """Go back; return the queries that did."""
        prepared = self.prepare(at)
        if prepared.plan.changes:
            apply(prepared.plan, self.top.storage, require_still=prepared.require_still, at=failpoint)
        return {query.name for query in prepared.plan.journal.queries if query.moves}

    def frozen(self) -> list[PlainQuery]:
        """Return the queries of a driver that is frozen, each between or within batches."""
        queries = self.queries()
        for query in queries:
            query.start()
            with suppress(Crash):
                query.step(3, crash=self.chance.choice(["", "read", "written"]))
        return queries

    def finish(self, failpoint: Callable[[str], None] = no_failpoint) -> Finished | None:
        """Finish a rewind that was killed."""
        return finish(*self.places(), at=failpoint)

    def drained(self) -> dict[str, list[int]]:
        """Run all queries to the end of their input, and return what their tables hold."""
        for query in self.queries():
            query.drain(self.most)
        return {table: rows_of(self.top.below(f"t/{table}")) for _, _, table in _SHAPES[self.shape]}

    def is_whole(self, seed: int) -> None:
        for table, rows in self.drained().items():
            assert rows == self.expected, (seed, table)
