"""The state of a job as metrics in Prometheus' text format.

Names are Flink's where Flink has the metric, in Prometheus' form: words apart, with the unit. The series are
bounded: one for each job, stage, channel and disk; no label has an id, a time or a text of an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spark_abs.observe.status import JobStatus, StageStatus, lease_timeout_ms, status_and_activity
from spark_abs.observe.tally import Tally
from spark_abs.snapshots.layout import END_OF_TIME_MS
from spark_abs.store.activity import RunActivity
from spark_abs.store.history import HistoryEvent
from spark_abs.store.root import Root

JOB = "job_name"
"""The label of each sample: Flink's, since `job` is Prometheus' own."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric, or of a counter whose name ends in `_total`."""

    name: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


def read_metrics(root: Root, now_ms: int, tally: Tally | None = None) -> str:
    """Return the metrics of a job in Prometheus' text format; without Spark.

    Args:
        root: the root of the job.
        now_ms: the wall clock.
        tally: what follows `history/`, for who looks again and again; without it, all of it is read.

    Raises:
        RootNotFound: there is no job at this root.
        DamageError: a log cannot be read.
    """
    tally = tally or Tally(root)
    status, activity = status_and_activity(root, now_ms, lease_timeout_ms(), tally)
    counts = tally.counts()
    return written(
        [*of_job(status, counts, now_ms), *of_stages(status, now_ms), *of_run(status, activity, now_ms)]
    )


def of_job(status: JobStatus, counts: Mapping[str, int], now_ms: int) -> Iterator[Sample]:
    """Yield what the root says of the job; `counts` has the number of events of each kind."""
    job = ((JOB, status.job),)
    up = status.alive is not None
    yield Sample("up", "Whether a run is alive", up, job)
    yield Sample(
        "finished", "Whether the newest run was bounded and has read its input", status.finished, job
    )
    if up and status.run is not None:
        yield Sample("uptime_seconds", "Since the run began", (now_ms - status.run.started_ms) / 1000, job)
    completed = counts.get(HistoryEvent.COMPLETED.value, 0)
    failed = counts.get(HistoryEvent.ABORTED.value, 0)
    restored = counts.get(HistoryEvent.RESTORED.value, 0)
    yield Sample("number_of_completed_checkpoints_total", "Completed checkpoints", completed, job)
    yield Sample("number_of_failed_checkpoints_total", "Aborted checkpoints", failed, job)
    yield Sample("number_of_restores_total", "Restores", restored, job)
    yield Sample("number_of_in_progress_checkpoints", "Open checkpoints", len(status.open) if up else 0, job)
    yield Sample(
        "paused_sources", "Sources that begin no batch until they are resumed", len(status.paused), job
    )
    in_row = 0 if status.aborted is None else status.aborted.number
    yield Sample(
        "failed_checkpoints_in_row", "Checkpoints that failed since the last complete one", in_row, job
    )
    last = status.last
    if last is None:
        return
    if status.age_ms is not None:
        said = "Since it was completed, or since one was skipped that would have equalled it"
        yield Sample("last_checkpoint_age_seconds", said, status.age_ms / 1000, job)
    if last.duration_ms is not None:
        yield Sample(
            "last_checkpoint_duration_seconds", "From trigger to completion", last.duration_ms / 1000, job
        )
    if last.size_new is not None:
        yield Sample("last_checkpoint_size_bytes", "Bytes that it wrote", last.size_new, job)
    if last.size_full is not None:
        yield Sample("last_checkpoint_full_size_bytes", "Bytes that a restore reads", last.size_full, job)


def of_stages(status: JobStatus, now_ms: int) -> Iterator[Sample]:
    """Yield what a live run tells of each stage."""
    for stage in status.stages:
        labels = ((JOB, status.job), ("stage", str(stage.stage)))
        yield Sample("num_restarts", "Restarts of the stage in this run", stage.restarts, labels)
        in_row = 0 if stage.failing is None else stage.failing.restarts
        yield Sample(
            "restarts_without_progress", "Restarts at a batch that is not finished yet", in_row, labels
        )
        late = stage.first and status.alive is not None
        yield Sample("stage_holds_checkpoint_up", "Whether an open checkpoint waits for it", late, labels)
        yield from _live(stage, labels, now_ms)


def _live(stage: StageStatus, labels: tuple[tuple[str, str], ...], now_ms: int) -> Iterator[Sample]:
    doing = stage.activity
    if doing is None:
        return
    running = doing.running_ms(now_ms) / 1000
    yield Sample("batch_under_way_seconds", "Age of the batch under way, else 0", running, labels)
    if doing.last_ms is not None:
        yield Sample(
            "last_batch_duration_seconds", "Of the last finished batch", doing.last_ms / 1000, labels
        )
    if doing.rows_per_s is not None:
        yield Sample("num_records_in_per_second", "Rows per second of a batch", doing.rows_per_s, labels)
    if 0 < doing.watermark_ms < END_OF_TIME_MS:
        lag = max(0, now_ms - doing.watermark_ms) / 1000
        yield Sample("watermark_lag_seconds", "How far the watermark is behind the clock", lag, labels)
    if doing.state_rows is not None:
        yield Sample("state_rows", "Rows in the state stores", doing.state_rows, labels)
    if doing.state_memory is not None:
        yield Sample("state_memory_bytes", "Memory of the state stores", doing.state_memory, labels)
    yield Sample("lag_seconds", "Age of the oldest unread row", doing.lag_ms(now_ms) / 1000, labels)
    for one in doing.inputs:
        channel = (*labels, ("channel", str(one.channel)))
        yield Sample("unread_rows", "Rows of the channel that the stage has not read", one.rows, channel)
        yield Sample("unread_bytes", "Bytes of these rows before compression", one.size, channel)


def of_run(status: JobStatus, activity: RunActivity | None, now_ms: int) -> Iterator[Sample]:
    """Yield what a live run tells of its checkpoints, its store and its disks."""
    if activity is None:
        return
    job = ((JOB, status.job),)
    skipped = "Checkpoints of this run that were skipped since they would have equalled the last one"
    yield Sample("number_of_skipped_checkpoints_total", skipped, activity.skips.in_run, job)
    yield Sample(
        "told_age_seconds", "Since the run told of itself", max(0, now_ms - activity.at_ms) / 1000, job
    )
    if activity.write_ms is not None:
        yield Sample("store_write_seconds", "Slowest of twenty small writes", activity.write_ms / 1000, job)
    for disk in activity.disks:
        labels = (*job, ("path", disk.path))
        yield Sample("disk_free_bytes", "Free bytes of a disk of the driver", disk.free, labels)
        yield Sample("disk_bytes", "Size of a disk of the driver", disk.total, labels)


def written(samples: list[Sample]) -> str:
    """Write samples in the text format, those of one metric together."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.name, []).append(sample)
    lines = []
    for name, found in families.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP spark_abs_{name} {found[0].help}.", f"# TYPE spark_abs_{name} {kind}"]
        for sample in found:
            labels = ",".join(f'{label}="{_escaped(value)}"' for label, value in sample.labels)
            lines.append(f"spark_abs_{name}{{{labels}}} {float(sample.value):.15g}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
