"""A driver process that kills itself, or something that it has started, as a schedule says.

A job that fails because of a kill is started again, as a supervisor would do; what happens is told on the
pipe whose number is the first argument.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import spark_abs
from attribution import Config
from attribution import declare as declare_attribution
from spark_abs.errors import AbsError, StageFailed
from tests.crash.driver import Events, quick_session
from tests.crash.process import HERE
from tests.crash.small_job import declare as declare_small
from tests.soak.schedule import Kill, Victim

CHECKPOINT = {"interval": "1s", "minPause": "200ms", "keep": 3, "skipUnchanged": False}
ENTRIES = 2
_LOOK_S = 0.01

Declare = Callable[[SparkSession, Path, int], spark_abs.Job]


def attribution(spark: SparkSession, base: Path, files_per_batch: int) -> spark_abs.Job:
    """Declare the job of the demo, with little in a batch and checkpoints close together."""
    config = Config.read(HERE / "conf" / "attribution.yaml", str(base))
    # As much event time in a batch of `match` as the configuration allows for, in smaller pieces.
    entries = ENTRIES * config.files_per_batch // files_per_batch
    settings = {"checkpoint": CHECKPOINT, "channel": {"maxEntriesPerBatch": entries}}
    config = replace(config, trigger="100 milliseconds", files_per_batch=files_per_batch, settings=settings)
    return declare_attribution(spark, config)


def small(spark: SparkSession, base: Path, files_per_batch: int) -> spark_abs.Job:
    """Declare the job of the crash tests; it always takes one file a batch."""
    return declare_small(spark, base, {"checkpoint": CHECKPOINT})


DECLARE: dict[str, Declare] = {"attribution": attribution, "small": small}


@dataclass(slots=True)
class Schedule:
    """The kills that are left, and the failpoint that counts where the job is."""

    kills: list[Kill]
    events: Events
    die: threading.Event
    """Set when the JVM was killed: this process must end by itself."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    passed: int = 0

    def failpoint(self, name: str) -> None:
        """Count; nobody waits in it: what is killed is killed at work."""
        with self.lock:
            if not self.kills or name != self.kills[0].point:
                return
            self.passed += 1
            if self.passed < self.kills[0].times:
                return
            self.passed, kill = 0, self.kills.pop(0)
        threading.Thread(target=self._carry_out, args=(kill,), daemon=True).start()

    def _carry_out(self, kill: Kill) -> None:
        pause = threading.Event()
        pause.wait(kill.delay_ms / 1000)
        while not (found := sorted(victims(kill.victim))):
            pause.wait(_LOOK_S)
        self.events.tell(killed=kill.number)
        if kill.victim is Victim.DRIVER:
            os.killpg(0, signal.SIGKILL)
        if kill.victim is Victim.JVM:
            self.die.set()
        os.kill(found[kill.pick % len(found)], signal.SIGKILL)


def victims(victim: Victim) -> Iterator[int]:
    """Find the processes of one kind that this one has started, directly or not."""
    if victim in (Victim.DRIVER, Victim.PYTHON):
        yield os.getpid()
        return
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            command = (directory / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if int(fields[3]) == os.getpid() and fields[0] not in ("Z", "X") and _is(victim, command):
            yield int(directory.name)


def _is(victim: Victim, command: list[str]) -> bool:
    match victim:
        case Victim.JVM:
            return "org.apache.spark.deploy.SparkSubmit" in command
        case Victim.EXECUTOR:
            return "org.apache.spark.executor.CoarseGrainedExecutorBackend" in command
        case Victim.GATE:
            server = any(word.endswith("worker_start/fork_server.py") for word in command)
            return server or "pyspark.sql.streaming.python_streaming_source_runner" in command
        case Victim.WORKER:
            return "pyspark.daemon" in command
    return False


def supervise(spark: SparkSession, job: dict[str, Any], schedule: Schedule, events: Events) -> None:
    """Run a job; start it again when a kill made a stage of it fail. Tell how it ended."""
    base, options = Path(job["base"]), dict(job["options"])
    try:
        while True:
            declared = DECLARE[job["job"]](spark.newSession(), base, job["files_per_batch"])
            declared.failpoint = schedule.failpoint
            run = None
            try:
                run = declared.start(**options)
                events.tell(base=str(base), started=run.id)
                run.await_termination()
                break
            except StageFailed as error:
                if schedule.die.is_set():
                    raise
                events.tell(base=str(base), again=str(error))
                options["restart"] = "native"
            except AbsError:
                raise
            except Exception as error:  # Spark's own: a worker died while the job was being started
                if schedule.die.is_set() or run is not None:
                    raise
                events.tell(base=str(base), again=str(error))
    except Exception as error:  # noqa: BLE001 - the thread's edge: the soak is told
        events.tell(base=str(base), ended=type(error).__name__, message=str(error))
    else:
        events.tell(base=str(base), ended="")
    if schedule.die.is_set():
        os._exit(1)


def main() -> None:
    events = Events(int(sys.argv[1]))
    spark = quick_session(sys.argv[2], sys.argv[3])
    events.tell(ready=os.getpid())
    for line in sys.stdin:
        job = json.loads(line)
        kills = [Kill(**{**kill, "victim": Victim(kill["victim"])}) for kill in job["kills"]]
        schedule = Schedule(kills, events, threading.Event())
        threading.Thread(target=supervise, args=(spark, job, schedule, events), daemon=True).start()


if __name__ == "__main__":
    main()
