"""What a seed says: which victims are killed, and where the job stands then.

A place is a fault point and how often it has been passed since the kill before, so that a seed kills at the
same places again however fast the machine is; the delay after it puts the moment between two points.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from random import Random
from typing import Any


class Victim(StrEnum):
    """Who is killed; SIGKILL each time."""

    DRIVER = "driver"
    """The driver's Python and JVM and all that they have started, at once."""
    JVM = "jvm"
    """The driver's JVM alone: its Python must end by itself."""
    PYTHON = "python"
    """The driver's Python alone: its JVM must end by itself."""
    GATE = "gate"
    """The planning half of a gate: the stage fails, the job is started again in the same driver."""
    WORKER = "worker"
    """A Python worker of Spark's, or the daemon that forks them: Spark repeats the task."""
    EXECUTOR = "executor"
    """An executor with its state stores: Spark starts another and repeats the tasks."""

    @property
    def ends_life(self) -> bool:
        """Whether the driver is gone with it."""
        return self in (Victim.DRIVER, Victim.JVM, Victim.PYTHON)


KILLS_PER_LIFE = 7
"""At most; a run has at least two lives."""
LOCAL = "local[2,4]"
CLUSTER = "local-cluster[2,1,768]"

STAGES = {"attribution": ("clicks", "orders", "match", "totals"), "small": ("events", "pair", "tail")}
"""The stages of the job of the demo, and of that of the crash tests."""

_OF_STAGE = (
    "batch.{}.wait.before",
    "batch.{}.find.before",
    "batch.{}.files.before",
    "batch.{}.files.after",
    "batch.{}.handover.before",
    "batch.{}.handover.after",
    "capture.{}.copy.before",
    "capture.{}.copy.after",
    "ack.{}.before",
)
_OF_JOB = ("claim.before", "claim.after", "manifest.before", "manifest.after", "tidy.retire.after")


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill."""

    number: int
    victim: Victim
    point: str
    times: int
    """How often the point is passed before."""
    delay_ms: int
    pick: int
    """Which of several victims; taken modulo their number."""

    def __str__(self) -> str:
        return f"{self.victim} {self.pick} at {self.point}, time {self.times}, +{self.delay_ms} ms"

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Life:
    """A driver process, from its start to the kill that ends it."""

    master: str
    restart: str
    """`native`, or `checkpoint`: the job goes back to its newest one before it starts."""
    kills: tuple[Kill, ...]


def job_of(seed: int) -> str:
    """Say which job runs under a seed: mostly that of the demo; of the other one every row is checked."""
    return "attribution" if seed % 3 else "small"


def lives(seed: int, kills: int) -> tuple[Life, ...]:
    """Deal so many kills to lives: the last of each life is the driver's."""
    random = Random(f"soak/{seed}")
    count = min(kills, max(2, -(-kills // KILLS_PER_LIFE)))
    found: list[Life] = []
    for life in range(count):
        numbers = range(life * kills // count, (life + 1) * kills // count)
        cluster = life % 2 == 1
        minor = [Victim.GATE, *[Victim.WORKER] * 3, *([Victim.EXECUTOR] * 3 if cluster else [])]
        victims = [random.choice(minor) for _ in numbers[1:]]
        victims.append(random.choice((Victim.DRIVER, Victim.DRIVER, Victim.JVM, Victim.PYTHON)))
        dealt = zip(numbers, victims, strict=True)
        found.append(
            Life(
                CLUSTER if cluster else LOCAL,
                "checkpoint" if life and random.random() < 0.25 else "native",
                tuple(_kill(random, STAGES[job_of(seed)], number + 1, victim) for number, victim in dealt),
            )
        )
    return tuple(found)


def _kill(random: Random, stages: tuple[str, ...], number: int, victim: Victim) -> Kill:
    if random.random() < 0.2:
        point, times = random.choice(_OF_JOB), 1
    else:
        template, stage = random.choice(_OF_STAGE), random.choice(stages)
        point, times = template.format(stage), random.randint(1, 3) if "batch" in template else 1
    delay_ms = random.choice((0, 0, random.randrange(200)))
    return Kill(number, victim, point, times, delay_ms, random.randrange(12))
