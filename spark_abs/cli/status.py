"""The command `status`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from spark_abs.cli.output import Output, batch_number, duration, one_line, plain_result, size, text_of
from spark_abs.cli.root_command import Context, root_command
from spark_abs.model import RunKind
from spark_abs.observe.headline import headline
from spark_abs.observe.status import JobStatus, StageStatus, job_status, lease_timeout_ms
from spark_abs.observe.tally import Tally
from spark_abs.protocol.control import WATCHED_JOB, WRAPPED_JOB
from spark_abs.snapshots.layout import END_OF_TIME_MS
from spark_abs.store.activity import Backlog, Phase, StageActivity, phase_said
from spark_abs.store.root import Root

if TYPE_CHECKING:
    from spark_abs.watch.ahead import NextCut

WATCH_S = 2.0
MOST_LATE = 8
"""Of so many late stages it is said why."""
STAGES = (
    ("stage", False),
    ("finished batch", True),
    ("ended", True),
    ("unfinished", True),
    ("planned", True),
    ("watermark lag", True),
    ("checkpoint", True),
    ("up to batch", True),
    ("restarts", True),
    ("", False),
)
LIVE = (
    ("stage", False),
    ("batch", True),
    ("under way", True),
    ("last took", True),
    ("ended", True),
    ("rows/s", True),
    ("unread rows", True),
    ("bytes", True),
    ("lag", True),
    ("watermark lag", True),
    ("state rows", True),
    ("restarts", True),
    ("checkpoint", True),
    ("", False),
)


@click.command
@root_command
@click.option("--watch", is_flag=True, help="Show it again every two seconds, until Ctrl-C.")
def status(ctx: Context, root: Root, watch: bool) -> None:
    """Show what is wrong with a job first, then its run, its open and last checkpoints, and each stage.

    The stages that hold an open checkpoint up are first. Of a live run, each stage is shown with what it
    does now: its batch and for how long that is under way, the last batch, rows per second, what it has not
    read of its channels and how old that is, how far its watermark is behind, its state, and its restarts.
    """
    reader = _Reader(root, Tally(root) if watch else None)
    if not watch:
        now = ctx.now_ms()
        found = reader.read(now)
        ctx.out.result(found, lambda out: _text(out, found, now))
        return
    while True:
        _look(ctx, reader)
        ctx.pause(WATCH_S)


class _Reader:
    """Reads the status of a root; of watched queries with what the next cut waits for."""

    def __init__(self, root: Root, tally: Tally | None) -> None:
        self._root, self._tally = root, tally
        self._next: NextCut | None = None

    def read(self, now_ms: int) -> JobStatus:
        found = job_status(self._root, now_ms, lease_timeout_ms(), self._tally)
        if found.job != WATCHED_JOB:
            return found
        if self._next is None:
            # Reading of Delta tables loads libraries that the status of a job does without.
            from spark_abs.watch.ahead import NextCut

            self._next = NextCut(self._root)
        return replace(found, next_cut=self._next.said(found, now_ms))


def _look(ctx: Context, reader: _Reader) -> None:
    now = ctx.now_ms()
    found = reader.read(now)
    if ctx.out.json:
        click.echo(json.dumps(plain_result(found)))
    else:
        click.clear()
        _text(ctx.out, found, now)


def _text(out: Output, found: JobStatus, now_ms: int) -> None:
    out.line(headline(found, now_ms), "bold")
    out.pairs(_pairs(found, now_ms))
    if not found.stages:
        return
    out.line("")
    if any(stage.activity is not None for stage in found.stages):
        out.table(LIVE, (_live(stage, now_ms) for stage in found.stages))
    else:
        out.table(STAGES, (_recorded(stage, now_ms) for stage in found.stages))


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
    if found.settings:
        yield "settings", found.settings
    if found.alive is not None:
        told = "" if found.told_ms is None else f"; it told of its stages {duration(found.told_ms)} ago"
        yield "alive", f"yes, its lease was renewed {duration(found.alive.heard_ms)} ago{told}"
    else:
        yield "alive", "no"
    for claim in found.open:
        name = f" {claim.name!r}" if claim.name else ""
        yield "open checkpoint", f"{claim.id}, {claim.kind}{name}, for {duration(claim.age_ms)}"
    if found.told_ms is not None:
        for stage in [stage for stage in found.stages if stage.waiting][:MOST_LATE]:
            yield "held up by" if stage.first else "waits", f"{stage.stage}: {one_line(stage.waiting)}"
    yield from _completed(found, now_ms)
    yield from _kept(found)
    yield from _skipped_files(found, now_ms)
    if found.last_aborted is not None:
        aborted = found.last_aborted
        yield (
            "last aborted",
            f"{aborted.id}, {aborted.reason}{': ' if aborted.detail else ''}{aborted.detail}",
        )
    for command in found.pending:
        name = f" {command.name!r}" if command.name else ""
        yield "waiting command", f"{command.kind}{name}, for {duration(now_ms - command.asked_ms)}"


def _completed(found: JobStatus, now_ms: int) -> Iterator[tuple[str, str]]:
    if found.last is None:
        yield "last completed", "none"
        return
    if found.moment_ms is not None:
        kept = f"kept {duration(found.last.age_ms)} ago"
        yield "newest cut", f"{found.last.id}, of {duration(now_ms - found.moment_ms)} ago, {kept}"
        return
    yield "last completed", f"{found.last.id}, {duration(found.last.age_ms)} ago"
    if found.skipped:
        until = f"{duration(found.unchanged_ms)} ago nothing had been done"
        yield "skipped", f"{found.skipped} checkpoints since then: {until}"


def _kept(found: JobStatus) -> Iterator[tuple[str, str]]:
    for said in found.next_cut[:MOST_LATE]:
        yield "next cut", one_line(said)
    if found.oldest_age_ms is not None:
        logs = "" if found.job in (WATCHED_JOB, WRAPPED_JOB) else ": channels keep their logs since then"
        yield "kept", f"{found.kept}, the oldest from {duration(found.oldest_age_ms)} ago{logs}"
    for damage in found.damaged[:MOST_LATE]:
        yield "damaged", one_line(damage)
    if found.watch is not None:
        every = f"looks every {found.watch.every}" if found.watch.every else "has looked once"
        yield "watcher", f"keeps {found.watch.keep}, {every}"


def _skipped_files(found: JobStatus, now_ms: int) -> Iterator[tuple[str, str]]:
    by_stage = {one.stage: one for one in found.skipped_files}
    for stage, last in by_stage.items():
        number = sum(one.stage == stage for one in found.skipped_files)
        since = f"{duration(now_ms - last.at_ms)} ago by {last.by}"
        yield "skipped files", f"{number} of stage {stage}, the last {last.file}, {since}"


def _recorded(stage: StageStatus, now_ms: int) -> tuple[str, ...]:
    done = stage.planned == stage.finished
    late = f"late for the open checkpoint: {one_line(stage.waiting)}" if stage.waiting else ""
    return (
        stage.stage,
        batch_number(stage.finished),
        _since(stage.finished_ms, now_ms),
        "" if done else batch_number(stage.planned),
        "" if done else _since(stage.planned_ms, now_ms),
        _watermark_lag(stage.watermark_ms or 0, now_ms),
        text_of(stage.checkpoint),
        "-" if stage.cut is None else batch_number(stage.cut),
        str(stage.restarts or "-"),
        late,
    )


def _live(stage: StageStatus, now_ms: int) -> tuple[str, ...]:
    doing = stage.activity or StageActivity(stage.stage, what="it has not begun")
    inputs = doing.inputs
    lag = doing.lag_ms(now_ms)
    return (
        stage.stage,
        batch_number(doing.batch if doing.under_way else stage.finished),
        _since(doing.began_ms, now_ms) if doing.under_way else "-",
        duration(doing.last_ms),
        _since(stage.finished_ms if doing.ended_ms is None else doing.ended_ms, now_ms),
        "-" if doing.rows_per_s is None else f"{doing.rows_per_s:.0f}",
        _counted(inputs, sum(one.rows for one in inputs)),
        _sized(inputs, sum(one.size for one in inputs)),
        duration(lag) if lag else "-",
        _watermark_lag(doing.watermark_ms or stage.watermark_ms or 0, now_ms),
        text_of(doing.state_rows),
        str(stage.restarts or "-"),
        text_of(stage.checkpoint),
        _does(doing, now_ms),
    )


def _does(doing: StageActivity, now_ms: int) -> str:
    if doing.phase is Phase.IDLE:
        return doing.what
    said = phase_said(doing.phase, doing.what)
    return said if doing.since_ms is None else f"{said}, for {duration(now_ms - doing.since_ms)}"


def _since(ms: int | None, now_ms: int) -> str:
    return "-" if ms is None else duration(now_ms - ms)


def _counted(inputs: tuple[Backlog, ...], rows: int) -> str:
    return "-" if not inputs else f"{'≥' if any(one.more for one in inputs) else ''}{rows}"


def _sized(inputs: tuple[Backlog, ...], bytes_: int) -> str:
    return "-" if not inputs else size(bytes_)


def _watermark_lag(watermark_ms: int, now_ms: int) -> str:
    if watermark_ms <= 0 or watermark_ms == END_OF_TIME_MS:
        return "-"
    return duration(now_ms - watermark_ms)
