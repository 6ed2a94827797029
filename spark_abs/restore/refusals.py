"""The obstacles of a restore that force overrides: a run that is alive, input that is gone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from spark_abs.advice import way
from spark_abs.errors import Refused, RunAlive, UsageError
from spark_abs.model import CheckpointId
from spark_abs.observe.status import LiveRun
from spark_abs.protocol.control import ControlState


class Force(StrEnum):
    """An obstacle that a restore overrides if it is asked to."""

    RUN = "run"
    """A run that is alive: it is fenced."""
    ROWS = "rows"
    """Rows of sinks that others have changed since: they are undone, too; a table that was replaced stays."""
    INPUTS = "inputs"
    """Input files, records or versions of tables that are gone: their rows are lost."""
    OUTSIDE = "outside"
    """Rows that a sink outside has committed and cannot take back: they stay, and are sent again."""


ForceName = Literal["run", "rows", "inputs", "outside"]
"""The same as arguments."""


def forces(given: bool | Collection[ForceName]) -> frozenset[Force]:
    """Parse the argument `force`.

    Raises:
        UsageError: it names no obstacle.
    """
    if isinstance(given, bool):
        return frozenset(Force) if given else frozenset()
    unknown = sorted(set(given) - set(Force))
    if isinstance(given, str) or unknown:
        raise UsageError(f"force={given!r}: give a list of {', '.join(Force)}, or True for all")
    return frozenset(map(Force, given))


def forced_by(force: Force) -> str:
    """Return the argument that overrides an obstacle, for messages."""
    return way(f"force=[{force.value!r}]", f"--force {force}")


@dataclass(frozen=True, slots=True)
class Back:
    """The words for a way back, in messages."""

    call: str
    """What it is called."""
    goal: str
    """To what it goes back."""
    started: str
    """What is started afterwards."""


RESTORE = Back("restore", "checkpoint", "job")


def alive(state: ControlState, found: LiveRun | None, *, forced: bool, dry_run: bool) -> tuple[str, ...]:
    """Refuse if a run is alive; forced, or in a dry run, return a note on it for the plan.

    Raises:
        RunAlive: neither forced nor a dry run, or the run is a restore.
    """
    if found is None:
        return ()
    who = f"process {found.pid} on {found.host}"
    if not state.attempt.ready and state.run is not None and found.run == state.run.id:
        raise RunAlive(
            f"job {state.job!r} is being restored by {who}: wait for the end, or stop that process: two "
            "restores would write the same native checkpoint directories"
        )
    if forced:
        return (f"run {found.run} is alive ({who}) and will be fenced",)
    stop = way("run.stop() where it was started, or `spark-abs stop ROOT`", "`spark-abs stop ROOT`")
    ways = f"stop it with {stop}, or fence it with {forced_by(Force.RUN)}"
    if dry_run:
        return (f"run {found.run} is alive ({who}), and goes on; to carry the plan out, {ways}",)
    heard = f"its lease was renewed {found.heard_ms / 1000:.0f} s ago"
    raise RunAlive(f"run {found.run} of job {state.job!r} is alive: {who}, {heard}; {ways}")


def lost_inputs(which: str, lost: Sequence[str], *, forced: bool, back: Back = RESTORE) -> tuple[str, ...]:
    """Refuse to lose the rows of input files that are gone; forced, return a note for the plan.

    Args:
        which: says which files are read again.
        lost: those that are gone.
        forced: whether their rows may be lost.
        back: the words for the way back.

    Raises:
        Refused: names the files, and the way to drop bad files.
    """
    if not lost:
        return ()
    named = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
    what = f"{which} are gone: {named}"
    if not forced:
        raise Refused(
            f"{what}; their rows would be missing after the {back.call}: put the files back, go back to a "
            f"later {back.goal}, or pass {forced_by(Force.INPUTS)} to accept their loss. If the files were "
            f"bad and were removed on purpose: put them back, {back.call}, remove them again, then start the "
            f"{back.started}; then only their rows are missing"
        )
    return (f"{what}; their rows will be missing",)


def lost_records(checkpoint: CheckpointId, lost: tuple[str, ...], *, forced: bool) -> tuple[str, ...]:
    """Refuse to lose records that Kafka has dropped; forced, return a note for the plan.

    Raises:
        Refused: names partitions, the offsets to read and the offsets that are there.
    """
    if not lost:
        return ()
    what = f"stages read records after checkpoint {checkpoint} that Kafka has dropped: {'; '.join(lost)}"
    if not forced:
        raise Refused(
            f"{what}; their rows would be missing after the restore: go back to a later checkpoint, or pass "
            f"{forced_by(Force.INPUTS)} to accept their loss; the job then needs "
            '.option("failOnDataLoss", "false")'
        )
    return (f"{what}; their rows will be missing",)


def lost_tables(which: str, lost: Sequence[str], *, forced: bool, back: Back = RESTORE) -> tuple[str, ...]:
    """Refuse to lose rows that Delta tables no longer have; forced, return a note for the plan.

    Args:
        which: says which rows are read again.
        lost: the tables that lack some, each with the reason.
        forced: whether the rows may be lost.
        back: the words for the way back.

    Raises:
        Refused: names the tables, and the rows that each lacks.
    """
    if not lost:
        return ()
    what = f"Delta tables no longer have {which}: {'; '.join(lost)}"
    if not forced:
        raise Refused(
            f"{what}; the {back.started} could not start, or rows would be missing: go back to a later "
            f"{back.goal}, bring files and log back, or pass {forced_by(Force.INPUTS)} to accept the loss. A "
            "start then succeeds only if Delta may skip lost rows: by spark.sql.files.ignoreMissingFiles for "
            'files, by .option("failOnDataLoss", "false") for versions of the log'
        )
    return (f"{what}; their rows will be missing",)
