"""Where the history of a job is cut off: rounds of points, each round one life of the job.

A round is walked in order: a thread parks at the first point, then one at the next, and at the last the
process is killed. So one death tells on several threads at once; with `CRASH_ONE_BY_ONE=1` every point has
a death of its own. The order in a round is such that a parked thread never keeps the next point from coming.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

ONE_BY_ONE = os.environ.get("CRASH_ONE_BY_ONE") == "1"
JOBS = 1 if ONE_BY_ONE else 8
"""Jobs that share a process, each on its own root and with its own points."""


@dataclass(frozen=True, slots=True)
class Round:
    points: tuple[str, ...]
    options: dict[str, object] = field(default_factory=dict)
    """Of `Job.start`, and `checkpoint`: settings."""

    @property
    def quiet(self) -> bool:
        """Whether no input may come until the first point is reached: the agent works for idle stages."""
        return self.points[0].startswith("agent.")


BOUNDED: dict[str, object] = {"available_now": True}
IMPATIENT: dict[str, object] = {"checkpoint": {"timeout": "2s"}}

ROUNDS: Sequence[Round] = (
    # A start, on a root that is new.
    Round(("start.run.before",)),
    Round(("start.run.after",)),
    Round(("start.channels.after",)),
    # The batch function of a source and of a stage at its cut; capture and acknowledgement of the source.
    Round(("capture.events.await.before", "batch.pair.wait.before@cut", "batch.events.wait.before")),
    Round(("capture.events.copy.before", "batch.pair.read.before@cut", "batch.events.read.before")),
    Round(("batch.pair.find.before@cut", "batch.events.find.before")),
    Round(("capture.events.copy.after", "batch.pair.files.before@cut", "batch.events.files.before")),
    # A start again, of the last job in its process: while it is held there no query of another one starts.
    Round(("start.pair.query.after",)),
    Round(("ack.events.before", "batch.pair.files.after@cut", "batch.events.files.after")),
    Round(("batch.pair.commit-main.after@cut", "batch.events.commit-main.after")),
    Round(("batch.pair.commit-pairs.after@cut", "batch.events.commit-orders.after")),
    Round(("batch.pair.handover.after@cut", "batch.events.commit-arrivals.after")),
    # A source whose batch carries the barrier; the last stage at its cut.
    Round(("batch.events.commit-main.after@barrier",)),
    Round(("batch.events.commit-orders.after@barrier", "batch.tail.files.after@cut")),
    Round(("batch.events.commit-arrivals.after@barrier", "batch.tail.commit-totals.after@cut")),
    Round(("batch.events.handover.after@barrier", "batch.tail.handover.after@cut")),
    # The agent of an idle source.
    Round(("agent.events.commit.before", "batch.events.wait.before")),
    Round(("agent.events.commit-main.after", "batch.events.wait.before")),
    Round(("agent.events.commit-orders.after", "batch.pair.commit-main.after@cut")),
    Round(("agent.events.commit.after", "batch.tail.commit-totals.after@cut")),
    # Capture and acknowledgement, of the source as soon as it has the barrier and of those after it.
    Round(("capture.pair.copy.before", "capture.tail.copy.before", "batch.tail.wait.before")),
    Round(("capture.pack.commit.before", "batch.pair.files.after", "batch.events.files.after")),
    Round(("capture.pair.copy.after", "capture.tail.copy.after", "batch.tail.read.before")),
    Round(("ack.pair.before", "ack.tail.before", "batch.tail.find.before")),
    Round(("ack.events.after", "batch.tail.files.before")),
    Round(("ack.tail.after", "batch.pair.commit-main.after")),
    # The outcome, and what comes of it.
    Round(("claim.before", "batch.pair.read.before")),
    Round(("claim.after", "batch.pair.commit-main.after")),
    Round(("manifest.before", "batch.tail.files.after", "batch.events.commit-main.after")),
    Round(("manifest.after", "batch.tail.commit-totals.after")),
    Round(("manifest.settle.after", "batch.pair.files.after")),
    Round(("capture.events.copy.before", "abort.before"), IMPATIENT),
    Round(("capture.events.copy.before", "abort.after"), IMPATIENT),
    Round(("capture.events.copy.before", "abort.settle.after"), IMPATIENT),
    Round(("tidy.retire.after", "claim.after")),
    Round(("tidy.sweep.after", "batch.pair.commit-pairs.after")),
    Round(("tidy.events.main.trim.after", "batch.events.commit-orders.after")),
    # A start, on a root with a past.
    Round(("start.fence.after",)),
    Round(("start.abort.before",)),
    Round(("start.abort.after",)),
    Round(("start.natives.after",)),
    Round(("start.sinks.after",)),
    Round(("start.state.after",)),
    Round(("start.events.fence-main.after",)),
    # The agents of stages that take a barrier where they stand.
    Round(("agent.pair.commit.before", "batch.events.wait.before")),
    Round(("agent.pair.commit-main.after", "batch.pair.wait.before")),
    Round(("agent.pair.commit.after", "batch.tail.read.before")),
    Round(("agent.tail.commit.before", "batch.pair.commit-main.after")),
    Round(("agent.tail.commit.after", "batch.pair.read.before")),
    # The end of a bounded run.
    Round(("end.events.before",), BOUNDED),
    Round(("end.events.after",), BOUNDED),
    Round(("end.tail.after",), BOUNDED),
)


def histories() -> list[list[Round]]:
    """Deal the rounds to the jobs."""
    rounds = list(ROUNDS)
    if ONE_BY_ONE:
        singles = {point: Round((point,), r.options) for r in ROUNDS for point in r.points}
        # What only happens after another point is reached with it.
        rounds = [r if "abort" in p else singles[p] for r in ROUNDS for p in r.points]
    return [rounds[number::JOBS] for number in range(JOBS)]
