"""Whether a run is alive, by its lease: its process is asked where it can be seen, else the beat counts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.codec import from_json, to_json
from spark_abs.errors import RunAlive
from spark_abs.model import RunId
from spark_abs.protocol.control import begin_run
from spark_abs.run.registration import begin, refuse_second
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control
from spark_abs.store.lease import Lease, own_lease, write_lease
from spark_abs.store.root import Root

TIMEOUT_MS = 30_000
OF_THE_OTHER = (
    "import sys; from spark_abs.codec import from_json, to_json; from spark_abs.model import RunId\n"
    "from spark_abs.store.lease import Lease, own_lease\n"
    "print(to_json(own_lease(RunId(2), 0)), from_json(Lease, sys.argv[1]).alive(1, 30_000))"
)
"""Says the lease of its own process, and whether the run of a given one is alive."""


def later(lease: Lease) -> tuple[bool, bool]:
    """Say whether a run is alive a moment after its beat, and when it has been silent for too long."""
    beat = lease.beat_ms
    return lease.alive(beat + 1, TIMEOUT_MS), lease.alive(beat + TIMEOUT_MS, TIMEOUT_MS)


def other_process(lease: Lease, *around: str) -> tuple[Lease, bool]:
    """Return the lease of another process, which has ended, and whether it took the run for alive."""
    command = [*around, sys.executable, "-c", OF_THE_OTHER, to_json(lease)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    written, verdict = done.stdout.rsplit(maxsplit=1)
    return from_json(Lease, written), verdict == "True"


def test_a_process_that_can_be_seen_is_asked_itself() -> None:
    """However long it has been silent, and at once when it is dead: a restart after a crash does not wait."""
    own = own_lease(RunId(1), 0)
    dead, alive_there = other_process(own)
    assert (later(own), alive_there) == ((True, True), True)
    assert later(dead) == (False, False)
    assert later(replace(own, process_started="1")) == (False, False)  # another one has its pid now
    assert later(replace(own, ended=True)) == (False, False)


@pytest.mark.parametrize(
    "around",
    [("unshare", "-Urpf", "--mount-proc"), ("unshare", "-Urpf")],
    ids=["with a /proc of its own", "with that of others"],
)
def test_a_container_of_the_same_name_has_other_processes(around: tuple[str, ...]) -> None:
    """Neither sees the other's process, and each is alive as long as it is heard of."""
    if subprocess.run([*around, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    own = own_lease(RunId(1), 0)
    contained, alive_there = other_process(own, *around)
    assert contained.host == own.host
    assert alive_there
    assert later(contained) == (True, False)


def test_another_boot_or_host_is_another_machine() -> None:
    """An image of a machine that was started twice has one boot, and names of its own."""
    own = own_lease(RunId(1), 0)
    boot, namespace = own.process_table.split()
    assert later(replace(own, process_table=f"{boot[::-1]} {namespace}")) == (True, False)
    assert later(replace(own, host="elsewhere")) == (True, False)


def test_a_lease_that_does_not_say_whose_pid_it_has_counts_by_its_beat() -> None:
    """One of an earlier version, or of a machine without /proc."""
    plain = json.loads(to_json(own_lease(RunId(1), 0)))
    del plain["process_table"]
    old = from_json(Lease, json.dumps({**plain, "pid": 2**22 + 1}))
    assert old == Lease(RunId(1), socket.gethostname(), 2**22 + 1, plain["process_started"], 0)
    assert later(old) == (True, False)
    assert later(Lease(RunId(1), socket.gethostname(), os.getpid(), "", 0)) == (True, False)


def test_a_run_that_takes_its_lease_while_another_one_starts_is_not_replaced(tmp_path: Path) -> None:
    """The other one had seen its number, and the lease of the run before it."""
    root = Root(str(tmp_path))
    control = Control.create(root, "job", 0)
    state = control.update(lambda s: begin_run(s, "here", 1, now_ms()))

    def taken(at: str) -> None:
        if at == "start.run.before":
            write_lease(root, own_lease(state.runs[-1].id, now_ms()))

    settings = SimpleNamespace(lease_timeout_ms=30_000)
    job: Any = SimpleNamespace(root=root, name="job", settings=settings, failpoint=taken)
    newest = refuse_second(job, control, takeover=False)
    assert newest == state.runs[-1].id
    with pytest.raises(RunAlive, match="already running: run 1"):
        begin(job, control, newest, takeover=False, bounded=False)
    assert control.state.newest_run == newest
