"""Plain queries with state, of which Spark deletes old files, and a watcher beside them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spark_abs.keep import keep_words
from spark_abs.model import PROVIDER_KEY, Provider
from spark_abs.rewind.prepare import Prepared, kept_moments, prepare
from spark_abs.snapshots.lineage import decompress
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.root import Root
from spark_abs.store.storage import DEFAULTS
from spark_abs.watch.watcher import Round, look, newest_kept, watching
from tests.plain_queries import SHAPES, PlainQuery, World, rows_of

CONF = {PROVIDER_KEY: Provider.HDFS.value, "spark.sql.shuffle.partitions": "1"}
OPERATOR = {
    "operatorInfo": {"operatorId": 0, "operatorName": "dedupe"},
    "stateStoreInfo": [{"storeName": "default", "numColsPrefixKey": 0, "numPartitions": 1}],
}
SNAPSHOTS = 4
"""Every so many versions of the state there is a snapshot."""


@dataclass
class StatefulQuery(PlainQuery):
    """Its state is all ids that it has read, in files named as those of Spark's HDFS-backed store."""

    total: list[int] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return Path(self.checkpoint.uri)

    @property
    def store(self) -> Path:
        return self.directory / "state" / "0" / "0"

    def start(self) -> None:
        self.store.mkdir(parents=True, exist_ok=True)
        metadata = self.directory / "state" / "0" / "_metadata" / "metadata"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"v1\n{json.dumps(OPERATOR)}")
        self.total = self._load(self._newest("commits") + 1)
        super().start()

    def _load(self, version: int) -> list[int]:
        """Load a version of the state as Spark does: the newest snapshot, then what has changed since."""
        snapshots = [int(p.stem) for p in self.store.glob("*.snapshot") if int(p.stem) <= version]
        base = max(snapshots, default=0)
        found = self._snapshot(base) if base else []
        for change in range(base + 1, version + 1):
            found += json.loads((self.store / f"{change}.delta").read_text())
        return list(found)

    def _snapshot(self, version: int) -> list[int]:
        data = (self.store / f"{version}.snapshot").read_bytes()
        if data.startswith(b"LZ4Block"):  # a rewind has written it for Spark's store
            assert decompress(data, "lz4") == b"\xff\xff\xff\xff"
            return []
        return list(json.loads(data))

    def _metadata(self) -> str:
        return json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": int(time.time() * 1000), "conf": CONF})

    def _run(self, start: int, until: int, crash: str = "") -> None:
        ids = self._read(start, until)
        self.total = [*self._load(self.batch), *ids]
        (self.store / f"{self.batch + 1}.delta").write_text(json.dumps(ids))
        if (self.batch + 1) % SNAPSHOTS == 0:
            (self.store / f"{self.batch + 1}.snapshot").write_text(json.dumps(self.total))
        super()._run(start, until, crash)

    def purge(self, retained: int) -> None:
        """Delete what Spark deletes when it keeps so many batches."""
        oldest = self._newest("commits") - retained + 1
        for log in ("offsets", "commits"):
            for path in (self.directory / log).iterdir():
                if path.name.isdigit() and int(path.name) < oldest:
                    path.unlink()
        snapshots = [int(p.stem) for p in self.store.glob("*.snapshot") if int(p.stem) <= oldest + 1]
        for path in list(self.store.iterdir()):
            if int(path.stem) < max(snapshots, default=0):
                path.unlink()


class WatchedWorld(World):
    """Queries of a shape that keep few batches, and a root that keeps cuts of them."""

    def queries(self) -> list[PlainQuery]:
        return [
            StatefulQuery(self.top, name, source, sink, "my-app" if name == "gold" else "", self.chance)
            for name, source, sink in SHAPES[self.shape]
        ]

    @property
    def root(self) -> Root:
        return Root(str(self.base.parent / "kept"))

    def settle(self) -> None:
        """Let the readers of tables catch up, so that the newest batches fit together."""
        for query in self.queries():
            query.start()
            while not query.from_files and query.step(5):
                pass

    def purge(self, retained: int = 5) -> None:
        for query in self.queries():
            assert isinstance(query, StatefulQuery)
            query.purge(retained)

    def watch(self, keep: str = "24h:all", failpoint: Callable[[str], None] = no_failpoint) -> Round:
        """Keep the newest cut, as `spark-abs watch --once` does."""
        found = look(*self.places(), newest_kept(self.root))
        if found is None:
            return Round(None)
        with watching(self.root, *self.places(), keep_words(keep), failpoint=failpoint) as watcher:
            return watcher.round(found)

    def prepare(self, at: dict[str, int] | None = None) -> Prepared:
        now_ms = self._tick()
        return prepare(*self.places(), storage=DEFAULTS, now_ms=now_ms, at=at, kept=self.root)

    def _tick(self) -> int:
        self.now_ms = max(self.now_ms + 1, int(time.time() * 1000))
        return self.now_ms

    def kept(self) -> list[dict[str, int]]:
        """Return the batches of each kept cut that can be gone back to, newest first."""
        return [batches for _, batches in kept_moments(self.root, self.places()[0])]

    def is_whole(self, seed: int) -> None:
        """Run all queries to the end of their input: tables and states have every row once."""
        super().is_whole(seed)
        for query in self.queries():
            assert isinstance(query, StatefulQuery)
            query.start()
            read = query._inputs() if query.from_files else rows_of(query.table(query.source))
            assert sorted(query.total) == read, (seed, query.name)
