"""What the processes below this one use: the JVM, its Python workers, the planning halves of gates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PLANNING, _SERVER = b"python_streaming_source_runner", b"worker_start/fork_server.py"
_TICKS = os.sysconf("SC_CLK_TCK")


def tree() -> Iterator[Path]:
    """Iterate the directories in `/proc` of this process and of all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int(_fields(entry)[1])
    for pid in parents:
        above = pid
        while above and above != os.getpid():
            above = parents.get(above, 0)
        if above:
            yield Path(f"/proc/{pid}")


def cpu_seconds() -> float:
    """Return the CPU time of the machine so far, which does nothing else.

    Not a sum over processes: that goes down when one ends for which nobody waits, as workers of Spark do.
    """
    user, nice, system, _, _, interrupts, soft, *_ = (
        Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return sum(map(int, (user, nice, system, interrupts, soft))) / _TICKS


def gate_megabytes() -> float:
    """Return what the planning half of a gate adds to the proportional set size of all processes, on average.

    Each is a process that Spark has started and one that was forked for it; the server that forks is shared.
    """
    total, gates = 0.0, 0
    for place in tree():
        with suppress(OSError):
            started = _PLANNING in (place / "cmdline").read_bytes()
            forked = (place / "comm").read_bytes().strip() == _PLANNING[:15]
            server = not started and not forked and _SERVER in (place / "cmdline").read_bytes()
            if started or forked or (server and int(_fields(place)[1]) == os.getpid()):
                lines = (place / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))
                gates += started
    return total / gates


def _fields(place: Path) -> list[str]:
    """Return the fields of a `stat` file after the name of the command, which may hold anything."""
    return (place / "stat").read_text().rpartition(")")[2].split()
