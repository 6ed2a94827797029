"""The example of the guide's quick start as a newcomer runs it: in a process, with and without a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.jvm import java_options
from tests.newcomer import write_input

HERE = Path(__file__).parents[2]
PATIENCE_S = 300
MOST_LINES = 30
SLOW_MACHINE = re.compile(r"loadTimeMs|Current batch is falling behind|heartbeat|GC|Garbage")
"""What Spark says of a machine that does too much at once, and of no job."""


class Script:
    """The example as a process of its own, and all that it prints, on both streams."""

    def __init__(self, base: Path, mode: str = "", terminal: bool = False, **settings: str) -> None:
        write_input(base)
        command = [sys.executable, "-m", "tests.newcomer", str(base), mode]
        env = {**os.environ, "PYTHONPATH": str(HERE), "SPARK_SUBMIT_OPTS": java_options(), **settings}
        self.text = ""
        if terminal:
            self.pid, self._output = pty.fork()
            if self.pid == 0:
                os.execve(command[0], command, env)
        else:
            self._output, theirs = os.pipe()
            files = [(os.POSIX_SPAWN_DUP2, theirs, 1), (os.POSIX_SPAWN_DUP2, theirs, 2)]
            self.pid = os.posix_spawn(command[0], command, env, file_actions=files)
            os.close(theirs)
        self.exit_code: int | None = None

    def wait_for(self, text: str) -> None:
        """Wait until it has printed something."""
        self._listen(lambda: text in self.text, text)

    def wait_for_file(self, path: Path) -> None:
        self._listen(path.exists, str(path))

    def wait(self, enough: Callable[[], bool]) -> None:
        self._listen(enough, "pause")

    def wait_for_end(self) -> int:
        """Wait until it has closed its output, and return its exit code."""
        self._listen(lambda: False, "its end")
        _, status = os.waitpid(self.pid, 0)
        self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def press_ctrl_c(self) -> None:
        """As a terminal does it: everybody in its group of processes gets the signal."""
        os.write(self._output, b"\x03")

    @property
    def lines(self) -> list[str]:
        return [line for line in re.split(r"[\r\n]+", self.text) if line.strip()]

    def _listen(self, enough: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not enough():
            assert time.monotonic() < deadline, f"no {what} within {PATIENCE_S} s:\n{self.text[-6000:]}"
            if not select.select([self._output], [], [], 0.2)[0]:
                continue
            try:
                new = os.read(self._output, 65536)
            except OSError:  # how a terminal says that nobody is there any more
                new = b""
            if not new:
                assert what == "its end", f"it ended without {what}:\n{self.text[-6000:]}"
                return
            self.text += new.decode(errors="replace")

    def close(self) -> None:
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._output)


@contextmanager
def script(base: Path, mode: str = "", terminal: bool = False, **settings: str) -> Iterator[Script]:
    started = Script(base, mode, terminal, **settings)
    try:
        yield started
    finally:
        started.close()


def test_it_runs_stops_and_starts_again_in_few_lines(tmp_path: Path) -> None:
    """Without a terminal, logging not configured: SIGTERM, as systemd and Kubernetes send it."""
    with script(tmp_path) as first:
        first.wait_for("(checkpoint) complete")  # the script waits by then
        first.send(signal.SIGTERM)
        assert first.wait_for_end() == 0, first.text
    ours = [line for line in first.lines if " spark_abs." in line]
    for said in (
        ": a new root",
        "stage match begins with batch 0 in 2 shuffle partitions",
        "SIGTERM, stopping",
    ):
        assert any(said in line for line in ours), first.text
    assert "job attribution: run 1 has ended: stopped" in ours[-1]
    assert all(
        re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+[+-]\d\d:\d\d [A-Z]+ spark_abs\.", line)
        for line in ours
    )
    assert len(first.lines) <= MOST_LINES, first.text
    loud = [line for line in first.lines if re.search(r" (WARN|WARNING|ERROR) |Traceback|Exception", line)]
    assert not [line for line in loud if not SLOW_MACHINE.search(line)], first.text
    planned = (tmp_path / "attribution/native/1/match/offsets/0").read_text().split("\n")[1]
    assert json.loads(planned)["conf"]["spark.sql.shuffle.partitions"] == "2"  # local[2]

    with script(tmp_path, "logging", terminal=True) as second:
        second.wait_for("(checkpoint) complete")
        second.press_ctrl_c()
        assert second.wait_for_end() == 0, second.text
    assert "it resumes attempt 1" in second.text
    assert "SIGINT, stopping gracefully" in second.text
    assert "theirs job attribution: run 2 has ended: stopped" in second.text
    assert " INFO spark_abs." not in second.text  # nothing is said twice
    assert "Traceback" not in second.text
    assert "Exception" not in second.text


def test_a_second_signal_ends_all_processes_at_once(tmp_path: Path) -> None:
    """The alerts hang, and so does the stop that the first signal asks for."""
    with script(tmp_path, SPARK_ABS_RUN_STOP_TIMEOUT="1h") as held:
        held.wait_for("(checkpoint) complete")
        (tmp_path / "hold").touch()
        write_input(tmp_path, "b")
        held.wait_for_file(tmp_path / "held")
        held.send(signal.SIGTERM)
        held.wait_for("stopping gracefully within 3600 s")
        held.wait(lambda: re.search(r"it waits for .*totals \(batch", held.text) is not None)
        told = time.monotonic()
        held.wait(lambda: time.monotonic() > told + 1.1)  # signals that come closer together are one
        held.send(signal.SIGINT)
        assert held.wait_for_end() == 128 + signal.SIGINT, held.text  # nobody has its output open any more
    assert "SIGINT again: the process ends at once" in held.text
    assert "Traceback" not in held.text
