"""The test's hold on a driver process: command it, hear of it, freeze it, and see that it is gone."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parents[2]
PATIENCE_S = 240.0
"""How long anything may take on a machine that does other work too."""

_LOOK_S = 0.2


class Gone(Exception):
    """The process has ended."""


class DriverProcess:
    """A driver in a session of its own: `SIGKILL` to its group takes the JVM along."""

    def __init__(self, scratch: Path, module: str = "tests.crash.driver", *more: str) -> None:
        """Start a module: it is given a pipe to tell events on, its scratch directory, and more."""
        scratch.mkdir(parents=True, exist_ok=True)
        self.log = scratch / "driver.log"
        ours, theirs = os.pipe()
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs), str(scratch), *more],
                cwd=HERE,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                start_new_session=True,
                preexec_fn=_give_up_overrides,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": _python_path()},
            )
        os.close(theirs)
        self._pipe = ours
        self._rest = b""
        self.told: list[dict[str, Any]] = []
        """Everything that the process has said."""
        self.over = False
        """Whether it will say nothing more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._pipe)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        self.wait_for(lambda: any("ready" in event for event in self.told), "a session")

    def start(self, *jobs: dict[str, Any], then: str = "stay") -> None:
        """Start jobs, and forget how earlier runs on their roots ended."""
        bases = {job["base"] for job in jobs}
        self.told = [event for event in self.told if event.get("base") not in bases]
        self.say({"start": list(jobs), "then": then})

    def go(self) -> None:
        """Let the threads that were parked last go on."""
        self.say({"go": True})

    def stop(self, base: Path) -> None:
        self.say({"stop": str(base)})

    def store(self, kind: str | None, tables: str = "", every: int = 1) -> None:
        """Let the store misbehave as `store_faults.Fault` says; with None, heal it."""
        self.say({"store": {"kind": kind, "tables": tables, "every": every} if kind else None})

    def sql(self, text: str) -> str | None:
        """Run a statement in the driver's Spark; returns its error."""
        self.told = [event for event in self.told if event.get("sql") != text]
        self.say({"sql": text})
        self.wait_for(lambda: any(event.get("sql") == text for event in self.told), text)
        error: str | None = next(event["error"] for event in self.told if event.get("sql") == text)
        return error

    def message(self, base: Path) -> str:
        """What the error said with which the run on a root ended."""
        return next(str(e["message"]) for e in self.told if e.get("base") == str(base) and "message" in e)

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)

    def wait_for(
        self,
        reached: Callable[[], bool],
        what: Callable[[], str] | str,
        meanwhile: Callable[[], None] = lambda: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Wait until a condition holds on what was told; do something meanwhile."""
        deadline = time.monotonic() + patience_s
        while not reached():
            meanwhile()
            if not self._listen() and not reached():
                raise Gone(f"{self._missing(what)}: the process has ended")
            if time.monotonic() > deadline:
                raise TimeoutError(self._missing(what))

    def wait_for_end(
        self, what: str, meanwhile: Callable[[], None] = lambda: None, patience_s: float = PATIENCE_S
    ) -> None:
        """Wait until the process is dead, and with it everything that it had started."""
        deadline = time.monotonic() + patience_s
        while self._listen():
            meanwhile()
            if time.monotonic() > deadline:
                raise TimeoutError(self._missing(what))
        self._process.wait(PATIENCE_S)
        while _session_lives(self.pid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"something of process {self.pid} lives on")
            select.select([], [], [], _LOOK_S)

    def kill(self) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
        self.wait_for_end("the end")

    def ended(self, base: Path) -> str | None:
        """How the run on a root ended: the name of its error, or nothing; None while it runs."""
        return next((e["ended"] for e in self.told if e.get("base") == str(base) and "ended" in e), None)

    def require_running(self, base: Path) -> None:
        """Raise with all that was told of it if a job has ended."""
        for event in self.told:
            if event.get("base") == str(base) and "ended" in event:
                raise AssertionError(self._missing(f"nothing of the kind: {event}"))

    def has_started(self, base: Path) -> bool:
        return any("started" in e for e in self.told if e.get("base") == str(base))

    def at(self, base: Path) -> list[str]:
        return [e["at"] for e in self.told if e.get("base") == str(base) and "at" in e]

    def say(self, command: dict[str, Any]) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def _listen(self) -> bool:
        """Take in what is told, waiting a moment for it; False once there is nobody left to tell."""
        readable, _, _ = select.select([self._pipe], [], [], _LOOK_S)
        if not readable:
            return True
        data = os.read(self._pipe, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.told += [json.loads(line) for line in lines]
        self.over = not data
        return not self.over

    def _missing(self, what: Callable[[], str] | str) -> str:
        text = what if isinstance(what, str) else what()
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
        return f"waited for {text}; told so far: {self.told[-12:]}\n{tail}"


_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2


def _give_up_overrides() -> None:
    """Let permissions hold for a process of root's too; anybody else has nothing to give up."""
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def _python_path() -> str:
    """Let the process, and all that it starts, find `spark_abs`, `tests` and the modules of `jobs/`."""
    return os.pathsep.join([str(HERE), str(HERE / "jobs"), os.environ.get("PYTHONPATH", "")])


def _session_lives(session: int) -> bool:
    return any(True for _ in processes_of(session))


def processes_of(session: int) -> Iterator[int]:
    """Find the living processes of a session."""
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] not in ("Z", "X"):
                yield int(directory.name)
