"""`spark-abs status`: how a job stands."""

from __future__ import annotations

from collections.abc import Iterator

import click

from spark_abs.cli.output import duration
from spark_abs.cli.root_command import Context, root_command
from spark_abs.model import NO_BATCH, RunKind
from spark_abs.observe.live_run import lease_timeout_ms
from spark_abs.observe.status import JobStatus, job_status
from spark_abs.store.root import Root


@click.command
@root_command
def status(ctx: Context, root: Root) -> None:
    """Show the attempt and run of a job, whether it is alive, and its open and last checkpoints."""
    found = job_status(root, ctx.now_ms(), lease_timeout_ms())
    ctx.out.result(found, lambda out: out.pairs(_pairs(found, ctx.now_ms())))


def _pairs(found: JobStatus, now_ms: int) -> Iterator[tuple[str, str]]:
    yield "job", f"{found.job} at {found.root}"
    origin = f", restored from checkpoint {found.restored_from}" if found.restored_from is not None else ""
    yield "attempt", f"{found.attempt}{origin}{'' if found.ready else ', restore not finished: run it again'}"
    if found.run is not None:
        run, began = found.run, duration(now_ms - found.run.started_ms)
        kind = "" if run.kind is RunKind.JOB else f", a{'n' if run.kind is RunKind.EDIT else ''} {run.kind}"
        how = f"ended: {run.ended}" if run.ended is not None else "at work"
        if found.killed:
            how = "killed, or its machine was lost: it recorded no end"
        yield "run", f"{run.id}{kind}, begun {began} ago by process {run.pid} on {run.host}, {how}"
    if found.alive is not None:
        yield "alive", f"yes, heard of {duration(found.alive.heard_ms)} ago"
    else:
        yield "alive", "no"
    for stuck in found.stuck:
        times = "once" if stuck.restarts == 1 else f"{stuck.restarts} times"
        where = "its first batch" if stuck.batch == NO_BATCH else f"batch {stuck.batch}"
        said = f"stage {stuck.stage!r} has been restarted {times} without finishing {where}: {stuck.cause}"
        yield "no progress", said
    for claim in found.open:
        name = f" {claim.name!r}" if claim.name else ""
        yield "open checkpoint", f"{claim.id}, {claim.kind}{name}, for {duration(claim.age_ms)}"
    if found.last is not None:
        yield "last completed", f"{found.last.id}, {duration(found.last.age_ms)} ago"
    else:
        yield "last completed", "none"
    if found.last_aborted is not None:
        aborted = found.last_aborted
        yield (
            "last aborted",
            f"{aborted.id}, {aborted.reason}{': ' if aborted.detail else ''}{aborted.detail}",
        )
    for command in found.pending:
        name = f" {command.name!r}" if command.name else ""
        yield "waiting command", f"{command.kind}{name}, for {duration(now_ms - command.asked_ms)}"
