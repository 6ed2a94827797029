"""The start of Python processes that Spark runs for this package.

Spark gives some of them ten seconds to start, however busy the machine is, and fails the query otherwise.
This directory is on their module path, so that Python runs its `sitecustomize`, which shortens the start. The
planning process of a gate is forked from a server process of the driver, which has done the imports.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark import SparkContext

_PATH = str(Path(__file__).parent)
"""An executor without this directory works as before."""
_FORK_SERVER = "SPARK_ABS_FORK_SERVER"
"""The variable with the address of the fork server."""
_OF_SERVER = {
    # numpy and pyarrow start no threads: what is forked while one holds a lock may wait without end.
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # As in every process that Spark starts.
    "PYTHONUNBUFFERED": "YES",
    "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
}
_END_S = 5.0
_changing = threading.Lock()
_listens_at: dict[str, str] = {}
"""The address of each interpreter's fork server; empty if it could not be started."""


@contextmanager
def quick_start(context: SparkContext, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """In this block, Python code that is passed to Spark gets processes that start quickly.

    `more` are further variables, set unless the user has set them. Spark copies the environment from the
    context when it gets the code, in any thread.
    """
    environment = context.environment
    with _changing:
        before = dict(environment)
        path = [entry for entry in (environment.get("PYTHONPATH"), _PATH) if entry]
        environment.update({**more, **before, "PYTHONPATH": os.pathsep.join(path)})
        try:
            yield
        finally:
            environment.clear()
            environment.update(before)


def forked_start(context: SparkContext) -> Mapping[str, str]:
    """Return the variable with which planning processes find the fork server; start it once per driver.

    No variable outside of Linux, where a fork after the import of numpy is not safe, and none if this package
    is in an archive.
    """
    executable = context.pythonExec
    with _changing:
        if executable not in _listens_at:
            _listens_at[executable] = ""
            if sys.platform == "linux" and os.path.isdir(_PATH):
                with suppress(OSError):
                    _listens_at[executable] = _start_server(executable, context.environment)
        address = _listens_at[executable]
    return {_FORK_SERVER: address} if address else {}


def _start_server(executable: str, environment: Mapping[str, str]) -> str:
    """Start a fork server that ends with this process; return its address.

    Raises:
        OSError: the interpreter cannot be started, or the path of temporary files is too long for a socket.
    """
    place = Path(tempfile.mkdtemp(prefix="spark_abs_"))  # nobody else's processes may reach it
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(place / "fork"))
            listening.listen(socket.SOMAXCONN)
            server = subprocess.Popen(  # noqa: S603 - the interpreter that Spark runs
                [executable, f"{_PATH}/fork_server.py", str(listening.fileno())],
                stdin=subprocess.PIPE,  # closed when this process ends, however that is
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **environment, **_OF_SERVER},
                pass_fds=[listening.fileno()],
            )
    except OSError:
        shutil.rmtree(place, ignore_errors=True)
        raise
    atexit.register(_end, server, place, os.getpid())
    return str(place / "fork")


def _end(server: subprocess.Popen[bytes], place: Path, driver: int) -> None:
    if os.getpid() != driver:  # forked by the driver, and not by way of `multiprocessing`
        return
    server.kill()
    with suppress(subprocess.TimeoutExpired):
        server.communicate(timeout=_END_S)
    shutil.rmtree(place, ignore_errors=True)
