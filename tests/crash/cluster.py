"""A standalone cluster of processes on this machine, and a Python that has everything but spark_abs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import pyspark

from tests.crash.process import HERE, PATIENCE_S, processes_of
from tests.jvm import java_options

_LOOK_S = 0.2
_MASTER = re.compile(r"Starting Spark master at (spark://[\d.]+:\d+)")

_DEFAULTS = {
    "spark.abs.checkpoint.skipUnchanged": "false",  # a test waits for checkpoints when all files are in
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": java_options(),
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": java_options(),
}


def bare_python(directory: Path) -> Path:
    """Make a Python that imports what this one has installed, without this project's editable install.

    The packages come by their directory: the hooks of editable installs in it are not run.
    """
    venv.create(directory, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = directory / "lib" / version / "site-packages" / "installed.pth"
    installed.write_text(sysconfig.get_path("purelib"))
    return directory / "bin" / "python"


class Process:
    """A process in a session of its own, with a log; `SIGKILL` goes to all that it has started."""

    def __init__(self, command: list[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=log.parent, stdout=output, stderr=output, env=env, start_new_session=True
            )

    def wait_for(self, reached: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds, while the process lives."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            code = self.ended_within(_LOOK_S)
            assert code is None, f"ended with {code}, waiting for {what}\n{self.tail()}"
            assert time.monotonic() < deadline, f"waited for {what}\n{self.tail()}"

    def ended_within(self, seconds: float) -> int | None:
        """Return the exit code, None if the process still lives."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> int:
        """Wait for the end and return the exit code."""
        code = self.ended_within(PATIENCE_S)
        assert code is not None, f"waited {PATIENCE_S} s for the end\n{self.tail()}"
        return code

    def kill(self) -> None:
        """Send SIGKILL to the process and its children, and see them gone."""
        deadline = time.monotonic() + PATIENCE_S
        while living := list(processes_of(self._process.pid)):
            for pid in living:
                _kill(pid)
            assert time.monotonic() < deadline, f"something of process {self._process.pid} lives on"
            self.ended_within(_LOOK_S)
        self._process.wait(PATIENCE_S)

    def says(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return "\n".join(self.says().splitlines()[-40:])


class Cluster:
    """A master and its workers, all below one directory; `close` leaves nothing behind."""

    def __init__(self, directory: Path, workers: int) -> None:
        self._directory = directory
        conf = directory / "conf"
        conf.mkdir()
        settings = {**_DEFAULTS, "spark.local.dir": str(directory / "scratch")}
        (conf / "spark-defaults.conf").write_text("".join(f"{k} {v}\n" for k, v in settings.items()))
        self._env = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_CONF_DIR": str(conf),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": java_options(),
            "PYSPARK_PYTHON": str(bare_python(directory / "bare")),
        }
        self._env["PYSPARK_DRIVER_PYTHON"] = self._env["PYSPARK_PYTHON"]
        self._processes: list[Process] = []
        self.workers: list[Process] = []
        self._count = workers

    def __enter__(self) -> Cluster:
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the Python of drivers and executors."""
        command = [self._env["PYSPARK_PYTHON"], *arguments]
        return subprocess.run(
            command, cwd=self._directory, env=self._env, capture_output=True, text=True, check=False
        )

    def submit(self, base: Path, *options: str) -> Process:
        """Submit the attribution job as a user does."""
        return self._run("driver", [str(HERE / "jobs" / "submit.sh"), self.url, str(base), *options])

    def _begin(self) -> None:
        local = ["--host", "127.0.0.1", "--webui-port", "0"]
        master = self._daemon("master.Master", *local, "--port", "0")
        master.wait_for(lambda: _MASTER.search(master.says()) is not None, "a master with a port")
        found = _MASTER.search(master.says())
        assert found is not None
        self.url = found[1]
        for number in range(self._count):
            size = ["--cores", "1", "--memory", "1g", "--work-dir", str(self._directory / f"work-{number}")]
            self.workers.append(self._daemon("worker.Worker", *local, *size, self.url))
        master.wait_for(lambda: master.says().count("Registering worker") == self._count, "all workers")

    def _daemon(self, name: str, *arguments: str) -> Process:
        spark_class = Path(self._env["SPARK_HOME"], "bin", "spark-class")
        return self._run(name, [str(spark_class), f"org.apache.spark.deploy.{name}", *arguments])

    def _run(self, name: str, command: list[str]) -> Process:
        log = self._directory / f"{len(self._processes)}-{name}.log"
        self._processes.append(Process(command, log, self._env))
        return self._processes[-1]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
