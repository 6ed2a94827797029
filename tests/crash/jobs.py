"""Small jobs that run in a driver process, one line of a test each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.store.root import Root
from tests.crash.expected import write_file
from tests.crash.facts import JOB, SINKS, native_of, table
from tests.crash.process import DriverProcess

BACKLOG = 2
"""Files that wait for a job: enough that it is at work, few enough that what is new comes soon."""


@dataclass(slots=True)
class Small:
    """One job, and its input that keeps arriving."""

    base: Path
    files: int = 0

    @property
    def root(self) -> Root:
        return Root(str(self.base / "root"))

    def feed(self) -> None:
        """Let files arrive, as many as the job takes; the source reads one a batch."""
        while self.files - self._consumed() < BACKLOG:
            write_file(self.base, self.files)
            self.files += 1

    def _consumed(self) -> int:
        attempts = (p for p in self.base.glob("root/native/*") if p.name.isdigit())
        natives = sorted(attempts, key=lambda p: int(p.name))
        offsets = natives[-1].glob("events/offsets/*") if natives else ()
        return 1 + max((int(p.name) for p in offsets if p.name.isdigit()), default=-1)

    def completed(self) -> tuple[Manifest, ...]:
        """Every checkpoint that exists."""
        if not (self.base / "root" / "checkpoints" / "_delta_log").is_dir():
            return ()
        return Checkpoints.open(self.root, JOB).load_all()

    def newest(self) -> int:
        """The id of the newest checkpoint, 0 without one; of their number retention keeps few."""
        return max((int(each.id) for each in self.completed()), default=0)

    def rows(self, manifest: Manifest | None = None) -> dict[str, list[object]]:
        """The rows of all sinks, now or at a checkpoint, in one order."""
        at = {o.output: o.version for s in manifest.stages for o in s.outputs} if manifest else {}
        return {sink: sorted(table(self.base, sink, at.get(sink))) for sink in SINKS}

    def lose(self, stage: str) -> None:
        """Let the native checkpoint of a stage be gone."""
        shutil.rmtree(native_of(self.base, stage))

    def start(self, driver: DriverProcess, **options: object) -> None:
        if not self.files:  # a stream needs a directory to read
            self.feed()
        driver.start({"base": str(self.base), **options})

    def run_until(self, driver: DriverProcess, reached: Callable[[], bool], what: str) -> None:
        """Feed a job that runs until a condition holds."""

        def meanwhile() -> None:
            driver.require_running(self.base)
            self.feed()

        driver.wait_for(reached, what, meanwhile)

    def stop(self, driver: DriverProcess) -> None:
        driver.stop(self.base)
        assert self.end(driver) == ""

    def end(self, driver: DriverProcess) -> str:
        """Wait until the job has ended, and say how."""
        driver.wait_for(lambda: driver.ended(self.base) is not None, f"the end of {self.base.name}")
        return driver.ended(self.base) or ""

    def finish(self, driver: DriverProcess, **options: object) -> None:
        """Run until all input is through."""
        self.start(driver, available_now=True, **options)
        assert self.end(driver) == "", driver.told
