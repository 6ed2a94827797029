"""The lease of a run: a small file with the owner of the job's run and the time of its renewal.

It is not a lock: it only prevents a second start by mistake. A replaced run is stopped by the fences on each
table.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from spark_abs.codec import from_json, to_json
from spark_abs.errors import DamageError
from spark_abs.model import RunId
from spark_abs.protocol.control import require_current
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control
from spark_abs.store.root import Root

PATH = "control/_lease.json"
"""VACUUM and readers ignore files that begin with an underscore."""
BEAT_EVERY_MS = 2000


@dataclass(frozen=True, slots=True)
class Lease:
    """Who runs the job."""

    run: RunId
    host: str
    pid: int
    process_started: str
    """Tells this process from a later process with the same pid; empty if unknown."""
    beat_ms: int
    ended: bool = False
    process_table: str = ""
    """Where `pid` is valid, see `process_table`; empty in leases of earlier versions."""

    def alive(self, now_ms: int, timeout_ms: int) -> bool:
        """Say whether the run may still be at work. Its process is checked if it is visible here."""
        if self.ended:
            return False
        if self.process_started and self.process_table and self._is_here():
            return process_started(self.pid) == self.process_started
        return now_ms - self.beat_ms < timeout_ms

    def is_ours(self) -> bool:
        """Say whether this process took the lease."""
        return self._is_here() and self.pid == os.getpid()

    def _is_here(self) -> bool:
        return (self.host, self.process_table) == (socket.gethostname(), process_table())


def process_table() -> str:
    """Identify the process table in /proc by boot and PID namespace; empty if there is none.

    A container may share its host name with another container or its machine and not see their processes.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # that of another namespace
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_started(pid: int) -> str:
    """Return the start time of a process as the kernel counts it, empty if there is none or unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def own_lease(run: RunId, now: int) -> Lease:
    """Return the lease of this process."""
    pid = os.getpid()
    return Lease(run, socket.gethostname(), pid, process_started(pid), now, process_table=process_table())


def write_lease(root: Root, lease: Lease) -> None:
    """Write the lease; a reader sees the old one or the new one."""
    root.write_whole(PATH, to_json(lease).encode())


def read_lease(root: Root) -> Lease | None:
    """Read the lease, None if no run ever wrote one or it cannot be read."""
    data = root.read_whole(PATH)
    if data is None:
        return None
    try:
        return from_json(Lease, data)
    except DamageError:
        return None


def renew(root: Root, lease: Lease, now: int, ended: bool = False) -> None:
    """Renew the lease, unless a newer run has taken it."""
    found = read_lease(root)
    if found is None or found.run <= lease.run:
        write_lease(root, replace(lease, beat_ms=now, ended=ended))


class Heartbeat:
    """Renews the lease during long work before the coordinator runs."""

    def __init__(self, root: Root, control: Control) -> None:
        self._root, self._control = root, control
        self._beat_ms = now_ms()

    def __call__(self, run: RunId) -> None:
        """Renew the lease if the last renewal was some seconds ago.

        Raises:
            Fenced: another run has taken over.
        """
        now = now_ms()
        if now - self._beat_ms >= BEAT_EVERY_MS:
            self._beat_ms = now
            require_current(self._control.state, run)
            renew(self._root, own_lease(run, now), now)


@contextmanager
def holding_lease(root: Root, run: RunId) -> Iterator[None]:
    """Hold the lease inside the block: a thread renews it until a newer run takes it."""
    lease, done = own_lease(run, now_ms()), threading.Event()
    renew(root, lease, now_ms())

    def renew_often() -> None:
        while not done.wait(BEAT_EVERY_MS / 1000):
            with suppress(OSError):
                renew(root, lease, now_ms())

    thread = threading.Thread(target=renew_often, name=f"spark-abs-lease-{run}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
