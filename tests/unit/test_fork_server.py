"""Planning halves of gates that are forked: real processes, with the test in the place of Spark's JVM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.spark import worker_start

MODULE = "pyspark.sql.streaming.python_streaming_source_runner"
START = str(Path(worker_start.__file__).parent)
PATH = os.pathsep.join((str(Path(__file__).parents[2]), START))


@pytest.fixture(scope="module")
def variables() -> Mapping[str, str]:
    """What the driver tells Spark; the server stays until the tests end, as it does for a driver."""
    context: Any = SimpleNamespace(pythonExec=sys.executable, environment={"PYTHONHASHSEED": "0"})
    found = worker_start.forked_start(context)
    assert found == worker_start.forked_start(context), "one for a driver process"
    with started(found) as (process, pid):
        assert process.pid == pid, "the first one would have to wait for imports"
    until(lambda: is_forked(found))
    return found


def is_forked(variables: Mapping[str, str], **more: str) -> bool:
    with started(variables, **more) as (process, pid):
        return process.pid != pid


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def server_of(variables: Mapping[str, str]) -> int:
    with started(variables) as (_, pid):
        return parent(pid)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def started(
    variables: Mapping[str, str], path: str = PATH, **more: str
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a planning half as Spark does; gives the process and the id that connects. Then Spark goes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)
        environment = {
            **os.environ,
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": path,
            "PYTHON_WORKER_FACTORY_PORT": str(listening.getsockname()[1]),
            "PYTHON_WORKER_FACTORY_SECRET": "secret",
            **variables,
            **more,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE], env=environment, stdout=subprocess.PIPE, text=True, stderr=2
        )
        with process, listening.accept()[0] as connection, connection.makefile("rwb") as stream:
            assert stream.read(4 + 6)[4:] == b"secret"
            stream.write((2).to_bytes(4, "big") + b"ok")
            stream.flush()
            yield process, int.from_bytes(stream.read(4), "big")


def test_it_is_forked_by_the_server_and_each_ends_with_the_other(variables: Mapping[str, str]) -> None:
    with started(variables) as (first, pid), started(variables) as (second, other):
        assert first.pid != pid != other != second.pid
        assert parent(pid) == parent(other) != os.getpid()
        assert len(list(Path(f"/proc/{parent(pid)}/task").iterdir())) == 1, "safe to fork"
        first.terminate()  # what Spark does when a query is stopped
        until(lambda: not Path(f"/proc/{pid}").exists())
        os.kill(other, signal.SIGKILL)
        assert second.wait(20) == 0


def test_it_ends_when_spark_closes_its_connection(variables: Mapping[str, str]) -> None:
    with started(variables) as (process, pid):
        pass
    assert process.returncode == 0
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_its_directory_and_streams_are_those_that_spark_gave(
    variables: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is its environment: that says where to connect, and with which secret."""
    monkeypatch.chdir(tmp_path)
    with started(variables, GIVEN=os.fsdecode(b"\xff")) as (process, pid):
        assert os.readlink(f"/proc/{pid}/cwd") == str(tmp_path)
        for stream in (0, 1, 2):
            assert os.readlink(f"/proc/{pid}/fd/{stream}") == os.readlink(f"/proc/{process.pid}/fd/{stream}")


@pytest.mark.parametrize("other", ["path", "flags", "server", "sitecustomize"])
def test_it_imports_by_itself_where_it_would_not_be_the_same(
    variables: Mapping[str, str], tmp_path: Path, other: str
) -> None:
    server = server_of(variables)
    before = os.listdir(f"/proc/{server}/fd")
    if other == "sitecustomize":
        (tmp_path / "sitecustomize.py").touch()
    path = os.pathsep.join((PATH, str(tmp_path)))
    more = {
        "path": {"path": path},
        "flags": {"PYTHONOPTIMIZE": "1"},
        "server": {"SPARK_ABS_FORK_SERVER": str(tmp_path / "none")},
        "sitecustomize": {"path": path},
    }
    assert not is_forked(variables, **more[other])
    assert os.listdir(f"/proc/{server}/fd") == before
    assert is_forked(variables)


def test_it_says_nothing_to_another_user_who_listens_in_the_place_of_the_server(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can listen as another user")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "fork"))
        os.seteuid(65534)
        try:
            listening.listen()
        finally:
            os.seteuid(0)
        assert not is_forked({"SPARK_ABS_FORK_SERVER": str(tmp_path / "fork")})
        with listening.accept()[0] as client:
            assert client.recv(1) == b""


def test_a_request_that_is_none_is_closed_and_the_server_goes_on(variables: Mapping[str, str]) -> None:
    (address,) = variables.values()
    for said in (b"", b"GET / HTTP/1.1", (3).to_bytes(8, "big") + b"{}]", (2).to_bytes(8, "big") + b"{}"):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(address)
            client.sendall(said)
            client.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):  # it was closed before all was read
                assert client.recv(1) == b""
    assert is_forked(variables)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit()", "os.kill(server, 19); sys.exit()"])
def test_the_server_ends_with_the_driver_however_that_ends(end: str) -> None:
    """Not with a process that the driver forks."""
    code = (
        "import os, pathlib, sys, types; from spark_abs.spark import worker_start\n"
        "context = types.SimpleNamespace(pythonExec=sys.executable, environment={})\n"
        "address = worker_start.forked_start(context)['SPARK_ABS_FORK_SERVER']\n"
        "server = int(pathlib.Path('/proc/thread-self/children').read_text())\n"
        "forked = os.fork()\n"
        "if forked == 0: sys.exit()\n"
        "os.waitpid(forked, 0)\n"
        "print(os.path.exists(address), server, address, flush=True)\n"
    )
    said = subprocess.run([sys.executable, "-c", code + end], stdout=subprocess.PIPE, text=True, check=False)
    there, server, address = said.stdout.split()
    assert there == "True"
    until(lambda: not Path(address).parent.exists() and not Path(f"/proc/{server}").exists())
