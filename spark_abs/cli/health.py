"""The commands `health` and `metrics`, and the part of `doctor` that looks at a job."""

from __future__ import annotations

import click

from spark_abs.cli.output import Output, one_line
from spark_abs.cli.root_command import Context, milliseconds, root_command
from spark_abs.diagnosis.diagnoses import Diagnosis, diagnoses
from spark_abs.diagnosis.gather import gather
from spark_abs.diagnosis.health import health as judged
from spark_abs.observe.metrics import read_metrics
from spark_abs.observe.status import job_status, lease_timeout_ms
from spark_abs.store.root import Root


@click.command
@root_command
@click.option(
    "--max-age", metavar="DURATION", help="How old the newest completed checkpoint may be, e.g. 5m."
)
@click.option("--max-lag", metavar="DURATION", help="How old an unread row of a channel may be, e.g. 1h.")
def health(ctx: Context, root: Root, max_age: str | None, max_lag: str | None) -> None:
    """Say in one line whether a job is healthy: exit code 0 if it is, 1 if not. For cron and for probes.

    Healthy is a live run in which no stage is restarted without progress, and in which fewer than three
    checkpoints were aborted one after another; or a bounded run that has finished.
    """
    now = ctx.now_ms()
    age, lag = _milliseconds("--max-age", max_age), _milliseconds("--max-lag", max_lag)
    found = judged(job_status(root, now, lease_timeout_ms()), now, age, lag)
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


def _milliseconds(option: str, text: str | None) -> int | None:
    return None if text is None else milliseconds(text, f"{option} {text!r}")


def examine_job(ctx: Context, root: Root) -> None:
    """Print what is wrong with a job; exit code 1 if anything is."""
    found = diagnoses(gather(root, ctx.now_ms(), lease_timeout_ms()))
    ctx.out.result(found, lambda out: _diagnosed(out, found))
    if found:
        click.get_current_context().exit(1)


def _diagnosed(out: Output, found: tuple[Diagnosis, ...]) -> None:
    if not found:
        out.line("nothing is wrong with the job")
    for one in found:
        out.line(f"{one.kind}: {one_line(one.said)}.")
        out.line(f"    {one.then}.")
        if one.command:
            out.line(f"    {one.command}")
