"""The commands `health` and `metrics`, and the part of `doctor` that looks at a job."""

from __future__ import annotations

from collections.abc import Callable

import click

from spark_abs.cli.output import Output, one_line
from spark_abs.cli.root_command import Context, root_command, to_milliseconds
from spark_abs.diagnosis.diagnoses import Diagnosis, diagnoses
from spark_abs.diagnosis.gather import gather
from spark_abs.diagnosis.health import read_health
from spark_abs.observe.metrics import read_metrics
from spark_abs.observe.status import job_status, lease_timeout_ms
from spark_abs.protocol.control import WATCHED_JOB, WRAPPED_JOB
from spark_abs.store.root import Root


def limits(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options `--max-age` and `--max-lag`, in milliseconds."""
    for name, said in (
        ("--max-lag", "How old an unread row of a channel may be, e.g. 1h."),
        ("--max-age", "How old the newest completed checkpoint may be, e.g. 5m."),
    ):
        command = click.option(name, metavar="DURATION", callback=to_milliseconds, help=said)(command)
    return command


@click.command
@root_command
@limits
def health(ctx: Context, root: Root, max_age: int | None, max_lag: int | None) -> None:
    """Say in one line whether a job is healthy: exit code 0 if it is, 1 if not. For cron and for probes.

    Healthy is a live run in which no stage is restarted without progress, and in which fewer than three
    checkpoints were aborted one after another; or a bounded run that has finished. A paused source is not,
    nor are wrapped queries of which one does not run. Of watched queries --max-age is the age of the newest
    cut; no watcher need be at work.
    """
    found = read_health(root, ctx.now_ms(), max_age, max_lag)
    ctx.out.result(found, lambda out: out.line(one_line(found.line)))
    if not found.healthy:
        click.get_current_context().exit(1)


@click.command
@root_command
def metrics(ctx: Context, root: Root) -> None:
    """Print metrics of a job in Prometheus' text format, for the textfile collector of node_exporter.

    Names are Flink's where Flink has the metric. There is a series for each job, stage, channel and disk.
    """
    text = read_metrics(root, ctx.now_ms())
    ctx.out.result(text, lambda _: click.echo(text, nl=False))


def examine_job(ctx: Context, root: Root) -> None:
    """Print what is wrong with a job, or with watched queries; exit code 1 if anything is."""
    now = ctx.now_ms()
    facts = gather(root, now, lease_timeout_ms())
    found = diagnoses(facts)
    if facts.job == WATCHED_JOB:
        # Reading of Delta tables loads libraries that the doctor of a job does without.
        from spark_abs.watch.diagnoses import gather_watched, watched_diagnoses

        status = job_status(root, now, lease_timeout_ms())
        found = (*watched_diagnoses(gather_watched(root, status, now)), *found)
    what = "the queries" if facts.job in (WATCHED_JOB, WRAPPED_JOB) else "the job"
    ctx.out.result(found, lambda out: _diagnosed(out, found, what))
    if found:
        click.get_current_context().exit(1)


def _diagnosed(out: Output, found: tuple[Diagnosis, ...], what: str) -> None:
    if not found:
        out.line(f"nothing is wrong with {what}")
    for one in found:
        out.line(f"{one.kind}: {one_line(one.said)}.")
        out.line(f"    {one.then}.")
        if one.command:
            out.line(f"    {one.command}")
