"""A driver process that is made to be killed: runs small jobs, and stops where it is told to.

Commands come on stdin, a JSON object a line; what happens is told on the pipe whose number is the argument.
Several jobs run side by side, each on a root and with points of its own: when all have arrived, the process
kills itself and all that it started. A job that has arrived stands still meanwhile: its other threads wait at
whatever point comes next. A point is the name of a fault point, and after `@` what must hold:

    cut       the stage stands at an open barrier with all inputs; no stage of such a job takes one in place
    barrier   the newest batch in the channel of `events` carries a barrier
    later     there is a checkpoint to go back to
    fresh     the stage reads, or has read, rows that this run has put into its channels
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import spark_abs
from spark_abs.manifests.manifest_table import Checkpoints, Summary
from spark_abs.model import NO_BATCH, Position, StageId, positions_of
from spark_abs.plan.graph import StageDecl
from spark_abs.run.launch import Launch
from spark_abs.run.run import Run
from spark_abs.spark.session import spark_session
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.crash.small_job import declare
from tests.crash.store_faults import Fault, Store
from tests.jvm import java_options

SHAPE = ("in_python", "through", "outside", "kinds", "shown")
"""What a start may say of the job that is declared."""


class Events:
    """The way out; any thread may tell."""

    def __init__(self, pipe: int) -> None:
        self._out = os.fdopen(pipe, "w", buffering=1)
        self._lock = threading.Lock()

    def tell(self, **event: object) -> None:
        with self._lock:
            self._out.write(json.dumps(event) + "\n")


class Gathering:
    """Waits for so many jobs to be where they shall be; then the process is killed, or all is left so."""

    def __init__(self, jobs: int, kill: Callable[[], None] | None) -> None:
        self._left, self._kill = jobs, kill
        self._lock = threading.Lock()
        self.go = threading.Event()

    def arrive(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left and self._kill is not None:
                self._kill()

    @property
    def ends_in_death(self) -> bool:
        return self._kill is not None


@dataclass(slots=True)
class Walk:
    """The failpoint of one job: parks a thread at each point, one point after the other, then all threads.

    Of points in a list within the list each is reached when it is.
    """

    base: Path
    points: Sequence[str | list[str]]
    events: Events
    gathering: Gathering
    lock: threading.Lock = field(default_factory=threading.Lock)
    left: list[list[str]] = field(init=False)
    """The points that are not reached yet; those of the first list come next."""
    under_way: threading.Event = field(default_factory=threading.Event)
    """Set when the job has started, or will not come so far."""

    def __post_init__(self) -> None:
        self.left = [[each] if isinstance(each, str) else list(each) for each in self.points]

    def __call__(self, name: str) -> None:
        if self._parks(name):
            self.gathering.go.wait()

    def _parks(self, name: str) -> bool:
        """Say whether a thread waits here: the next point is here, or its job only waits to be killed."""
        with self.lock:
            if not self.left:
                return bool(self.points) and self.gathering.ends_in_death
            point = next((each for each in self.left[0] if self._is_at(name, each)), None)
            if point is None:
                return False
            self.events.tell(base=str(self.base), at=point)
            self.left[0].remove(point)
            self.left = [each for each in self.left if each]
            self.under_way.set()
            if not self.left:
                self.gathering.arrive()
            return True

    def _is_at(self, name: str, point: str) -> bool:
        at, _, condition = point.partition("@")
        return name == at and self._holds(name, condition)

    def _holds(self, name: str, condition: str) -> bool:
        match condition:
            case "":
                return True
            case "cut":
                return self._at_cut(name.split(".")[1])
            case "barrier":
                return self._carries_barrier()
            case "later":
                return bool(self._completed())
            case "fresh":
                return self._reads_fresh(name.split(".")[1])
        raise ValueError(f"unknown condition {condition!r}")

    def _completed(self) -> tuple[Summary, ...]:
        return Checkpoints.open(Root(str(self.base / "root")), "small").summaries()

    def _at_cut(self, stage: str) -> bool:
        positions = self._planned(stage)
        state = Control.open(Root(str(self.base / "root"))).state
        open_ids = {claim.barrier.id for claim in state.claims}
        return bool(positions) and all(p.at_barrier and p.epoch in open_ids for p in positions)

    def _reads_fresh(self, stage: str) -> bool:
        run = Control.open(Root(str(self.base / "root"))).state.newest_run
        return any(
            has_rows and note.get("run") == run and version <= position.version
            for position in self._planned(stage)
            for version, note, has_rows in self._entries(position.channel)
        )

    def _planned(self, stage: str) -> tuple[Position, ...]:
        """Return how far the newest batch of a stage reads its channels."""
        state = Control.open(Root(str(self.base / "root"))).state
        native = self.base / "root" / "native" / str(state.attempt.id)
        offsets = native / state.attempt.directory(StageId(stage)) / "offsets"
        newest = max((int(p.name) for p in offsets.iterdir() if p.name.isdigit()), default=None)
        return () if newest is None else positions_of((offsets / str(newest)).read_text().splitlines())

    def _carries_barrier(self) -> bool:
        for _, note, _ in reversed(self._entries("events.main")):
            if note.get("batch", NO_BATCH) >= 0:
                return "barrier" in note
        return False

    def _entries(self, channel: str) -> list[tuple[int, dict[str, Any], bool]]:
        """Return the version and note of each entry of a channel, and whether it has rows."""
        found = []
        for file in sorted((self.base / "root" / "channels" / channel / "_delta_log").glob("*.json")):
            actions = [json.loads(line) for line in file.read_text().splitlines()]
            texts = [a["commitInfo"].get("userMetadata") for a in actions if "commitInfo" in a]
            note = json.loads(texts[0]) if texts and texts[0] else {}
            found.append((int(file.stem), note, any("add" in action for action in actions)))
        return found


def only_with_batches(base: Path) -> None:
    """Let the stages of a job take every barrier with a batch, as stages do that also read a source.

    Whether rows come with a barrier is a matter of moments, and one without is taken where a stage stands.
    """
    uri, noted = Root(str(base / "root")).uri, Launch._note

    def note(self: Launch, stage: StageDecl) -> str:
        return "" if self._ctx.root.uri == uri else noted(self, stage)

    Launch._note = note  # type: ignore[method-assign]


class Driver:
    def __init__(
        self, spark: SparkSession, events: Events, declare: Callable[..., spark_abs.Job] = declare
    ) -> None:
        self._spark, self._events, self._declare = spark, events, declare
        self._store = Store(lambda uri: events.tell(faulty=uri))
        self._store.install()
        self._gathering: Gathering | None = None
        self._runs: dict[Path, Run] = {}

    def obey(self, command: dict[str, Any]) -> None:
        match command:
            case {"start": jobs, "then": then}:
                gathering = Gathering(len(jobs), self._kill if then == "kill" else None)
                self._gathering = gathering
                walks = [
                    Walk(Path(j.pop("base")), j.pop("points", ()), self._events, gathering) for j in jobs
                ]
                threading.Thread(target=self._start, args=(walks, jobs), daemon=True).start()
            case {"go": _}:
                assert self._gathering is not None
                self._gathering.go.set()
            case {"stop": base}:
                self._runs[Path(base)].request_stop()
            case {"store": fault}:
                self._store.set(Fault(**fault) if fault else None)
            case {"sql": text}:
                threading.Thread(target=self._sql, args=(text,), daemon=True).start()

    def _start(self, walks: list[Walk], options: list[dict[str, Any]]) -> None:
        """Start one job after the other: Spark gives the process behind a gate ten seconds to come up."""
        for walk, given in zip(walks, options, strict=True):
            threading.Thread(target=self._run, args=(walk, given), daemon=True).start()
            walk.under_way.wait()

    def _run(self, walk: Walk, options: dict[str, Any]) -> None:
        # The points of barriers come again and again, also when all rows are through.
        checkpoint = {"interval": "500ms", "skipUnchanged": False, **options.pop("checkpoint", {})}
        config = {"checkpoint": checkpoint, **options.pop("config", {})}
        if any(point.endswith("@cut") for group in walk.left for point in group):
            only_with_batches(walk.base)
        shape = {name: options.pop(name) for name in SHAPE if name in options}
        session = self._spark.newSession()
        for key, value in options.pop("spark", {}).items():
            session.conf.set(key, value)
        try:
            run = self._declare(session, walk.base, config, walk, **shape).start(**options)
            self._runs[walk.base] = run
            self._events.tell(base=str(walk.base), started=run.id)
            walk.under_way.set()
            run.await_termination()
        except Exception as error:  # noqa: BLE001 - the thread's edge: the test is told
            self._events.tell(base=str(walk.base), ended=type(error).__name__, message=str(error))
        else:
            self._events.tell(base=str(walk.base), ended="")
        finally:
            walk.under_way.set()

    def _sql(self, text: str) -> None:
        try:
            self._spark.newSession().sql(text).collect()
        except PySparkException as error:
            self._events.tell(sql=text, error=str(error))
        else:
            self._events.tell(sql=text, error=None)

    def _kill(self) -> None:
        os.killpg(0, signal.SIGKILL)


def quick_session(
    scratch: str, master: str, options: str = "", packages: Sequence[str] = (), **more: str
) -> SparkSession:
    """Build a session for a process that lives for seconds, all its files below `scratch`.

    `options` are for the JVM, in place of those of all tests; `more` are settings.
    """
    spark = spark_session(
        "crash",
        master,
        packages=packages,
        **{
            "spark.driver.memory": "2g",
            "spark.executor.memory": "768m",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.extraJavaOptions": options or java_options(),
            "spark.local.dir": f"{scratch}/local",
            "spark.sql.warehouse.dir": f"{scratch}/warehouse",
            "spark.sql.shuffle.partitions": "1",
            # A VACUUM by Spark lists directories in so many tasks, ten thousand if nothing is said.
            "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
            "spark.sql.session.timeZone": "UTC",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            **more,
        },
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def metastore(base: Path | str) -> dict[str, str]:
    """Return the settings of Hive's catalog in a database of its own, which outlives the process."""
    place = f"jdbc:derby:;databaseName={base}/metastore;create=true"
    return {
        "spark.sql.catalogImplementation": "hive",
        "spark.hadoop.javax.jdo.option.ConnectionURL": place,
        "spark.driver.extraJavaOptions": f"{java_options()} -Dderby.stream.error.file={base}/derby.log",
    }


def main() -> None:
    events = Events(int(sys.argv[1]))
    spark = quick_session(sys.argv[2], "local[2]")
    events.tell(ready=os.getpid())
    driver = Driver(spark, events)
    for line in sys.stdin:
        driver.obey(json.loads(line))


if __name__ == "__main__":
    main()
