"""What is wrong with a job: pure functions from facts to sentences. Each needs the numbers that it says."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from spark_abs.diagnosis.facts import Facts, Partitions, StateSize
from spark_abs.observe.headline import paused_said, without_progress
from spark_abs.protocol.control import WATCHED_JOB, WRAPPED_JOB
from spark_abs.quantities import duration_said as length
from spark_abs.quantities import size_said as bytes_of
from spark_abs.store.activity import Backlog, Disk, Phase, StageActivity

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000
MB = 1024**2


@dataclass(frozen=True, slots=True)
class Limits:
    """From when on something is wrong. Times in milliseconds, sizes in bytes."""

    in_row: int = 2
    """Checkpoints that were aborted, or restarts of a stage, one after another."""
    growth: float = 2.0
    """How often a state is as large as it was."""
    growing_checkpoints: int = 8
    merged_checkpoints: int = 40
    """So many are needed of a state whose files shrink now and then."""
    growing_size: int = 10 * MB
    skew: float = 8.0
    """How often the largest state partition is as large as the median of the others."""
    skewed_size: int = 8 * MB
    skewed_late_size: int = 1 * MB
    """For a stage that holds a checkpoint up: a function that walks all of it for each row is slow then."""
    write_ms: int = 1 * SECOND
    """For a file of some kilobytes."""
    clock_ms: int = 5 * SECOND
    lag_ms: int = 1 * MINUTE
    lag_over_ms: int = 5 * MINUTE
    """The time over which a lag must have grown."""
    lag_growth: float = 0.1
    """For so much of this time it must have grown."""
    held_ms: int = 2 * MINUTE
    """For so long a watermark stands still while another input has rows, from the first to the last."""
    orphaned_ms: int = 1 * HOUR
    """So old is a file that no copy under way writes."""
    orphaned_size: int = 64 * MB
    """Of all of these files."""
    disk_share: float = 0.03
    disk_full_ms: int = 24 * HOUR
    disk_over_ms: int = 10 * MINUTE
    """The time over which a disk must have been observed."""


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Something that is wrong."""

    kind: str
    said: str
    """What is wrong, with the numbers that led to it."""
    then: str
    """What to do."""
    command: str = ""
    """The command to type; empty if there is none."""
    stage: str | None = None


def diagnoses(facts: Facts, limits: Limits = LIMITS) -> tuple[Diagnosis, ...]:
    """Return what is wrong with a job: what stops it first. A healthy job has nothing."""
    found: list[Diagnosis] = []
    for look in (
        _not_running,
        _damaged,
        _paused,
        _no_progress,
        _dormant,
        _aborted,
        _full_disks,
        _slow_sinks,
        _interval,
        _hot_keys,
        _growing_state,
        _growing_lag,
        _held_watermarks,
        _slow_store,
        _clock_skew,
        _versions,
        _retention,
        _orphaned,
    ):
        found += look(facts, limits)
    return tuple(found)


def typed(root: str, verb: str, *arguments: str) -> str:
    """Return a command for a root as it is typed. The root is quoted, `arguments` are as they are given."""
    return " ".join(["spark-abs", verb, shlex.quote(root), *arguments])


def _not_running(facts: Facts, _: Limits) -> Iterator[Diagnosis]:
    if facts.unfinished_restore:
        yield Diagnosis(
            "restore-unfinished",
            "A restore was begun and is not finished: until then the job does not start",
            "Run the same restore again",
            facts.unfinished_restore,
        )
    elif facts.ended and facts.job != WATCHED_JOB:
        yield Diagnosis(
            "not-running",
            f"No run is alive: {facts.ended}",
            f"Start {_starts(facts)} again; it goes on where it was",
            typed(facts.root, "history", "--limit", "20"),
        )


def _damaged(facts: Facts, _: Limits) -> Iterator[Diagnosis]:
    for damage in facts.damaged:
        yield Diagnosis(
            "damaged-checkpoint",
            f"A checkpoint cannot be read: {damage}",
            "See what else is damaged; restore others only",
            typed(facts.root, "verify"),
        )


def _paused(facts: Facts, _: Limits) -> Iterator[Diagnosis]:
    if facts.paused:
        names = ", ".join(one.stage for one in facts.paused)
        yield Diagnosis(
            "paused",
            f"{paused_said(facts.paused, facts.now_ms)}; {names} read nothing until somebody resumes them, "
            "also after a restart",
            "If the reason for the pause is gone, let them read again",
            typed(facts.root, "resume"),
        )


def _no_progress(facts: Facts, limits: Limits) -> Iterator[Diagnosis]:
    for stage in facts.stages:
        if stage.failing is not None and stage.failing.restarts >= limits.in_row:
            yield Diagnosis(
                "restarts-without-progress",
                without_progress(stage),
                "Repair the cause; if the rows of the batch are at fault, see 'A batch that always fails' in "
                "`spark-abs guide failures`",
                typed(facts.root, "history", "--limit", "20"),
                stage.stage,
            )


def _dormant(facts: Facts, _: Limits) -> Iterator[Diagnosis]:
    for stage in facts.stages:
        if not stage.is_dormant:
            continue
        part = f"of checkpoint {stage.checkpoint}, after batch {stage.cut}"
        yield Diagnosis(
            "query-does-not-run",
            f"Query {stage.stage} does not run, and others at this root do: new checkpoints repeat its part "
            f"{part if stage.checkpoint is not None else 'unchanged'}",
            "Start it again; if it is gone for good, forget it",
            typed(facts.root, "forget", stage.stage),
            stage.stage,
        )


def _smaller_batches(facts: Facts) -> str:
    """Say how batches become smaller: the frame of a wrapped query is its owner's."""
    return (
        "an option of its source, as maxFilesPerTrigger"
        if facts.job == WRAPPED_JOB
        else "max_entries_per_batch"
    )


def _aborted(facts: Facts, limits: Limits) -> Iterator[Diagnosis]:
    aborted = facts.aborted
    if aborted is None or aborted.number < limits.in_row:
        return
    last = "none was ever completed"
    if facts.last_completed_ms is not None:
        last = f"the last one was completed {length(facts.now_ms - facts.last_completed_ms)} ago"
    first = next((stage for stage in facts.stages if stage.first), None)
    why = f": now {first.stage} is late: {first.waiting}" if first is not None else f": {aborted.detail}"
    then, command = "Remove the cause that is named", typed(facts.root, "status", "--watch")
    timeout = facts.setting_ms("timeout_ms")
    if aborted.reason == "expired" and timeout is not None:
        then = f"Remove the cause that is named, or give checkpoints more time than {length(timeout)}"
        slowest = max((batch_ms(stage, facts.now_ms) for stage in facts.activities), default=0)
        wanted = 3 * max(timeout, slowest)
        command = typed(facts.root, "set", f"timeout={wanted // SECOND}s")
    yield Diagnosis(
        "checkpoints-aborted",
        f"The last {aborted.number} checkpoints were aborted ({aborted.reason}), {last}{why}",
        then,
        command,
        None if first is None else first.stage,
    )


def batch_ms(stage: StageActivity, now_ms: int) -> int:
    """Return how long the batches of a stage work: the last, or the one under way if that is longer.

    The time for which a batch waits is that of another stage, or of a person who pauses it.
    """
    return max((stage.last_ms or 0) - stage.last_waited_ms, _works_ms(stage, now_ms))


def _works_ms(stage: StageActivity, now_ms: int) -> int:
    """Return how long the batch under way has worked, 0 if there is none or if it waits."""
    return 0 if stage.phase is Phase.WAITING else max(0, stage.running_ms(now_ms) - stage.waited_ms)


def _slow_sinks(facts: Facts, _: Limits) -> Iterator[Diagnosis]:
    """Yield the slowest first."""
    interval = facts.setting_ms("interval_ms")
    found: list[tuple[int, Diagnosis]] = []
    for stage in facts.activities:
        now = facts.now_ms - stage.since_ms if stage.since_ms is not None else 0
        phase, what, took = stage.phase, stage.what, now
        if phase not in _OF_SINKS and stage.longest is not None:
            phase, what, took = stage.longest.phase, stage.longest.what, stage.longest.ms
        whole = max(stage.slowest_ms or 0, batch_ms(stage, facts.now_ms))
        if phase not in _OF_SINKS or interval is None or took < interval or 2 * took < whole:
            continue
        does = f"function {what!r}" if phase is Phase.CALLING else f"the commit to {what!r}"
        slow = Diagnosis(
            "slow-sink",
            f"{does} of stage {stage.stage} takes {length(took)} of a batch of {length(whole)}; a checkpoint "
            f"begins every {length(interval)} and waits for it",
            f"Make {_WORK_OF[phase]} faster, give it smaller batches ({_smaller_batches(facts)}), or "
            "checkpoint less often",
            typed(facts.root, "set", f"interval={_seconds(2 * whole)}"),
            stage.stage,
        )
        found.append((took, slow))
    for _took, slow in sorted(found, key=lambda one: -one[0]):
        yield slow


_OF_SINKS = (Phase.CALLING, Phase.COMMITTING)
_WORK_OF = {
    Phase.CALLING: "the function, or the stage, whose rows Spark may compute inside the call,",
    Phase.COMMITTING: "the sink",
}


def _interval(facts: Facts, _: Limits) -> Iterator[Diagnosis]:
    interval = facts.setting_ms("interval_ms")
    slow = [stage for stage in facts.activities if interval is not None and _outlasts(stage, facts, interval)]
    if interval is None or not slow:
        return
    slowest = max(slow, key=lambda stage: batch_ms(stage, facts.now_ms))
    took = batch_ms(slowest, facts.now_ms)
    yield Diagnosis(
        "interval-too-short",
        f"A batch of stage {slowest.stage} takes {length(took)}, longer than the interval of "
        f"{length(interval)}: each checkpoint waits for that batch, and the next one is due before it is "
        "complete",
        f"Checkpoint less often, or make the batches smaller ({_smaller_batches(facts)})",
        typed(facts.root, "set", f"interval={_seconds(2 * took)}"),
        slowest.stage,
    )


def _outlasts(stage: StageActivity, facts: Facts, interval: int) -> bool:
    """Say whether a batch works for longer than the interval: now, or a moment ago. A job may be at rest."""
    if _works_ms(stage, facts.now_ms) > interval:
        return True
    took, ended = (stage.last_ms or 0) - stage.last_waited_ms, stage.ended_ms
    return took > interval and ended is not None and facts.now_ms - ended <= took + interval


def _hot_keys(facts: Facts, limits: Limits) -> Iterator[Diagnosis]:
    late = {stage.stage for stage in facts.stages if stage.first}
    for found in facts.partitions:
        if len(found.sizes) < 2:
            continue
        largest, middle = max(found.sizes), median(sorted(found.sizes)[:-1])
        least = limits.skewed_late_size if found.stage in late else limits.skewed_size
        if largest < least or largest < limits.skew * max(middle, 1):
            continue
        yield _hot_key(facts, found, largest, int(middle))


def _hot_key(facts: Facts, found: Partitions, largest: int, middle: int) -> Diagnosis:
    number = found.sizes.index(largest)
    return Diagnosis(
        "hot-key",
        f"Partition {number} of the state of stage {found.stage} (operator {found.operator}) has "
        f"{bytes_of(largest)}, the others about {bytes_of(middle)}: one key, or a few, hold nearly all of "
        "it, and one task does their work",
        "Look for the largest keys (--export TABLE writes all of them), bound what a key keeps, or divide "
        "the key",
        typed(facts.root, "state", found.stage, "--operator", str(found.operator)),
        found.stage,
    )


def _growing_state(facts: Facts, limits: Limits) -> Iterator[Diagnosis]:
    for stage, sizes in facts.sizes.items():
        if len(sizes) < limits.growing_checkpoints or not _grows(sizes, limits):
            continue
        first, last = sizes[0], sizes[-1]
        hours = (last.at_ms - first.at_ms) / HOUR
        rate = f", {bytes_of(int((last.size - first.size) / hours))} an hour" if hours > 0 else ""
        yield Diagnosis(
            "growing-state",
            f"The state of stage {stage} grew from {bytes_of(first.size)} in checkpoint {first.checkpoint} "
            f"to {bytes_of(last.size)} in checkpoint {last.checkpoint}, in "
            f"{length(last.at_ms - first.at_ms)}{rate}, and kept growing",
            "Give the state an end: a watermark, a timeout or a time to live",
            typed(facts.root, "state", stage),
            stage,
        )


def _grows(sizes: tuple[StateSize, ...], limits: Limits) -> bool:
    """Say whether sizes rise over all of the time: they are steady where a watermark has an effect.

    RocksDB rewrites values that change, and merges its files now and then: the files of a growing state
    shrink then. In this case the smallest size of each quarter of the time counts, and more checkpoints.
    """
    grown = [size.size for size in sizes]
    if any(now < 0.95 * before for before, now in pairwise(grown)):
        if len(grown) < limits.merged_checkpoints:
            return False
        quarter = len(grown) // 4
        grown = [min(grown[n * quarter : (n + 1) * quarter]) for n in range(4)]
        if any(now < 1.05 * before for before, now in pairwise(grown)):
            return False
    first, half, last = grown[0], grown[len(grown) // 2], grown[-1]
    still = last - half > 0.25 * (last - first)
    return last >= limits.growing_size and last >= limits.growth * max(first, 1) and still


def _growing_lag(facts: Facts, limits: Limits) -> Iterator[Diagnosis]:
    doing = {stage.stage: stage for stage in facts.activities}
    for before in facts.earlier:
        stage, over = doing.get(before.stage), facts.now_ms - before.at_ms
        if stage is None or over < limits.lag_over_ms:
            continue
        lag, rows = stage.lag_ms(facts.now_ms), sum(one.rows for one in stage.inputs)
        if lag < max(limits.lag_ms, before.lag_ms + limits.lag_growth * over) or rows <= before.rows:
            continue
        yield Diagnosis(
            "growing-lag",
            f"Stage {stage.stage} is {length(lag)} behind, with {rows} unread rows; "
            f"{length(over)} ago it was {length(before.lag_ms)} behind, with "
            f"{before.rows}: it is slower than the stages before it",
            "Make its batches faster: more shuffle partitions or cores, or less state",
            typed(facts.root, "status", "--watch"),
            stage.stage,
        )


def _held_watermarks(facts: Facts, limits: Limits) -> Iterator[Diagnosis]:
    for stage in facts.activities:
        since = stage.watermark_since_ms
        if not (stage.has_watermark or stage.watermark_ms > 0) or since is None:
            continue
        moved = [one for one in stage.inputs if _moved_after(one, since + limits.held_ms)]
        idle = [one for one in stage.inputs if not _moved_after(one, since) and not one.rows]
        stands = "has stood still" if stage.watermark_ms > 0 else "has not begun"
        for channel in idle if moved else ():
            yield Diagnosis(
                "held-watermark",
                f"The watermark of stage {stage.stage} {stands} for {length(facts.now_ms - since)}: "
                f"no rows came from {channel.channel} in this time, while {moved[0].channel} had some; "
                "windows stay open, and state stays",
                "Let the idle input send rows with a time, or join it without a watermark",
                typed(facts.root, "status", "--watch"),
                stage.stage,
            )


def _moved_after(channel: Backlog, since: int) -> bool:
    return channel.moved_ms is not None and channel.moved_ms > since


def _slow_store(facts: Facts, limits: Limits) -> Iterator[Diagnosis]:
    usual = facts.usual_write_ms
    if usual is not None and usual >= limits.write_ms:
        yield Diagnosis(
            "slow-store",
            f"Writing a file of some kilobytes into the root usually takes {length(usual)}: every commit of "
            "a batch takes about as long at least",
            "Look for throttling and for the distance to the store; Spark's own checkpoints can be on a "
            "local disk (native_root), and checkpoints can be less often",
            "spark-abs guide clusters-and-object-stores",
        )


def _clock_skew(facts: Facts, limits: Limits) -> Iterator[Diagnosis]:
    if facts.heard_ahead_ms >= limits.clock_ms:
        yield Diagnosis(
            "clock-skew",
            f"The clock of the driver is {length(facts.heard_ahead_ms)} ahead of this machine's: ages are "
            "wrong here, and a killed driver counts as alive for longer",
            "Let both machines follow one time server",
        )
    ahead = facts.ahead_of_store_ms or 0
    if abs(ahead) >= limits.clock_ms:
        yield Diagnosis(
            "clock-skew",
            f"The clock of the driver is {length(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the "
            "clock of the store: times of files and of commits do not fit together",
            "Let the driver's machine follow a time server",
        )


def _versions(facts: Facts, _: Limits) -> Iterator[Diagnosis]:
    differ = [
        f"{name} {version} there and {facts.own_versions[name]} here"
        for name, version in sorted(facts.versions.items())
        if facts.own_versions.get(name, version) != version
    ]
    if differ:
        yield Diagnosis(
            "versions-differ",
            f"The driver has other packages than this command: {', '.join(differ)}",
            "Run commands, above all a restore, with the packages of the driver",
        )


def _retention(facts: Facts, _: Limits) -> Iterator[Diagnosis]:
    keep, restore_ms, retained_ms = facts.keep, facts.restore_ms, facts.retained_ms
    if keep is None or restore_ms is None or retained_ms is None or retained_ms >= restore_ms:
        return
    if keep.up_to_ms >= restore_ms or facts.retained < keep.newest:
        return  # the job is young: it will keep enough
    yield Diagnosis(
        "retention-too-short",
        f"The checkpoints that are kept reach back {length(retained_ms)} (keep={keep}), "
        f"and the last restore took {length(restore_ms)}: an error that is noticed now is in all of "
        "them before a restore could be done",
        "Keep more checkpoints (keep), or take a savepoint before each risky change",
        typed(facts.root, "savepoint", "before-change"),
    )


def _orphaned(facts: Facts, limits: Limits) -> Iterator[Diagnosis]:
    old = [one for one in facts.orphans if facts.now_ms - one.at_ms >= limits.orphaned_ms]
    size = sum(one.size for one in old)
    if not old or size < limits.orphaned_size:
        return
    oldest = length(facts.now_ms - min(one.at_ms for one in old))
    yield Diagnosis(
        "orphaned-files",
        f"{len(old)} {'file' if len(old) == 1 else 'files'} in state/, {bytes_of(size)} together, the oldest "
        f"written {oldest} ago, are in no checkpoint: a run was killed while it copied state",
        "The clean-up after the next completed checkpoint deletes them"
        + (
            "; if it does not, the log of the driver says why" if facts.alive else f": start {_starts(facts)}"
        ),
        typed(facts.root, "checkpoint") if facts.alive and facts.job != WATCHED_JOB else "",
    )


def _starts(facts: Facts) -> str:
    return {WRAPPED_JOB: "a query", WATCHED_JOB: "a watcher"}.get(facts.job, "the job")


def _full_disks(facts: Facts, limits: Limits) -> Iterator[Diagnosis]:
    for disk in facts.disks:
        over = facts.now_ms - disk.before_ms
        left = _full_in_ms(disk, over) if over >= limits.disk_over_ms else None
        soon = left is not None and left < limits.disk_full_ms
        if not soon and disk.free >= limits.disk_share * disk.total:
            continue
        when = ""
        if soon and left is not None:
            lost = int((disk.free_before - disk.free) / over * HOUR)
            when = f" and loses {bytes_of(lost)} an hour: it is full in {length(left)}"
        yield Diagnosis(
            "disk-full",
            f"The disk of {disk.path} has {bytes_of(disk.free)} free of {bytes_of(disk.total)}{when}",
            "Make room before batches fail: keep fewer checkpoints (keep), or dispose of savepoints",
            typed(facts.root, "list"),
        )


def _full_in_ms(disk: Disk, over_ms: int) -> int | None:
    lost = disk.free_before - disk.free
    return None if lost <= 0 else int(disk.free * over_ms / lost)


def _seconds(ms: int) -> str:
    return f"{-(-ms // SECOND)}s"
