"""Commands for a running job: its checkpoints, sources, stages and settings, and its end."""

from __future__ import annotations

import click

from spark_abs.cli.output import plain_result
from spark_abs.cli.root_command import Context, root_command, to_milliseconds
from spark_abs.errors import UsageError
from spark_abs.manifests.find import check_savepoint_name
from spark_abs.observe.client import PATIENCE_S, ask_run, new_command, resume_sources, set_live, stop_run
from spark_abs.observe.skipping import skip_files
from spark_abs.protocol.control import Command, CommandKind
from spark_abs.store.root import Root

timeout_option = click.option(
    "--timeout",
    metavar="DURATION",
    callback=to_milliseconds,
    help="How long to wait, e.g. 5m; by default until the job ends.",
)
stages_argument = click.argument("stages", metavar="[STAGE]...", nargs=-1)


@click.command
@root_command
@click.argument("name")
@timeout_option
def savepoint(ctx: Context, root: Root, name: str, timeout: int | None) -> None:
    """Take a savepoint of the running job, and wait until it is complete.

    Exit code 4: the timeout has passed, and the savepoint may still complete.
    """
    check_savepoint_name(name)
    with ctx.out.waiting(f"waiting for savepoint {name!r}"):
        answer = _asked(ctx, root, new_command(CommandKind.SAVEPOINT, ctx.now_ms(), name), timeout)
    said = f"savepoint {name!r} is checkpoint {answer.checkpoint}{answer.message.removeprefix('completed')}"
    ctx.out.result(answer, lambda out: out.line(said))


@click.command
@root_command
@timeout_option
def checkpoint(ctx: Context, root: Root, timeout: int | None) -> None:
    """Take a checkpoint of the running job now, and wait until it is complete.

    It waits while as many checkpoints are open as the job allows. Exit code 4: the timeout has passed, and
    the checkpoint may still complete.
    """
    with ctx.out.waiting("waiting for the checkpoint"):
        answer = _asked(ctx, root, new_command(CommandKind.CHECKPOINT, ctx.now_ms()), timeout)
    said = f"checkpoint {answer.checkpoint} is complete{answer.message.removeprefix('completed')}"
    ctx.out.result(answer, lambda out: out.line(said))


@click.command
@root_command
@click.argument("which", metavar="ID|NAME")
def cancel(ctx: Context, root: Root, which: str) -> None:
    """Abort an open checkpoint, or the open savepoint of a name, and say what became of it.

    If it completes at the same moment, it stays complete, and the command fails. A cancelled checkpoint does
    not count as failed. Outcomes come in the order of ids: cancel the oldest open checkpoint first.
    """
    with ctx.out.waiting(f"waiting for the end of checkpoint {which}"):
        answer = _asked(ctx, root, new_command(CommandKind.CANCEL, ctx.now_ms(), which), _AT_ONCE)
    ctx.out.result(answer, lambda out: out.line(answer.message))


@click.command
@root_command
@stages_argument
def pause(ctx: Context, root: Root, stages: tuple[str, ...]) -> None:
    """Let sources of the running job begin no further batch, all sources if none is named.

    A batch under way ends first. The other stages and the checkpoints go on. The pause holds until `resume`,
    over restarts and restores, too: `status`, `health` and `doctor` name it.
    """
    with ctx.out.waiting("waiting for the job to pause its sources"):
        answer = _asked(ctx, root, new_command(CommandKind.PAUSE, ctx.now_ms(), stages=stages), _AT_ONCE)
    ctx.out.result(answer, lambda out: out.line(answer.message))


@click.command
@root_command
@stages_argument
def resume(ctx: Context, root: Root, stages: tuple[str, ...]) -> None:
    """Let paused sources read again, all of them if none is named. The job need not run."""
    with ctx.out.waiting("waiting for the job to resume its sources"):
        answer = resume_sources(root, stages, ctx.now_ms, ctx.pause)
    ctx.out.result(answer, lambda out: out.line(answer.message))


@click.command
@root_command
@click.argument("stage")
@timeout_option
def restart(ctx: Context, root: Root, stage: str, timeout: int | None) -> None:
    """Start a stage of the running job again when its batch has ended; the others run on.

    A stage that has failed and waits for its restart is started at once. A source gets the columns that its
    table has now, where a restart can take them.
    """
    with ctx.out.waiting(f"waiting for the batch of stage {stage!r} to end"):
        answer = _asked(ctx, root, new_command(CommandKind.RESTART, ctx.now_ms(), stages=[stage]), timeout)
    ctx.out.result(answer, lambda out: out.line(answer.message))


@click.command("skip-file")
@root_command
@click.argument("stage")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@timeout_option
def skip_file(ctx: Context, root: Root, stage: str, files: tuple[str, ...], timeout: int | None) -> None:
    """Let a stage go past input files that fail its batch, from that batch on. The job need not run.

    FILE is as the error of the batch names it, or a whole path. A running stage is started again without the
    files. They stay skipped, over restarts and restores; `status` counts them and `history` names them.
    """
    patience_s = None if timeout is None else timeout / 1000
    with ctx.out.waiting(f"waiting for stage {stage!r} to start without the files"):
        answer = skip_files(root, stage, files, ctx.now_ms, ctx.pause, timeout_s=patience_s)
    ctx.out.result(answer, lambda out: out.line(answer.message))


def _asked(ctx: Context, root: Root, command: Command, timeout_ms: int | None) -> Command:
    """Ask the run, and return its answer; None: wait until the run ends."""
    patience_s = None if timeout_ms is None else timeout_ms / 1000
    return ask_run(root, command, ctx.now_ms, ctx.pause, patience_s)


_AT_ONCE = int(PATIENCE_S * 1000)
"""How long to wait for what a run answers at once."""


@click.command("set")
@root_command
@click.argument("changes", metavar="KEY=VALUE...", nargs=-1)
def set_settings(ctx: Context, root: Root, changes: tuple[str, ...]) -> None:
    """Change settings of the running job, e.g. interval=30s mode=unaligned.

    The change holds from now on until the run ends. The next start uses the job's own configuration.
    """
    given: dict[str, str] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise UsageError(f"{change!r} is not KEY=VALUE, such as interval=30s")
        given[key.strip()] = value
    with ctx.out.waiting("waiting for the job to change the settings"):
        answer = set_live(root, given, ctx.now_ms, ctx.pause)
    ctx.out.result(answer, lambda out: out.line(answer.message))


@click.command
@root_command
@click.option(
    "--savepoint",
    "name",
    metavar="NAME",
    help="Take a savepoint first; nothing after its barrier is processed.",
)
@click.option(
    "--drain",
    is_flag=True,
    help="Before the savepoint, stop the sources, advance the watermark to its end and emit every open "
    "window. Do not drain a job that is to resume in the same event time: later rows would count as late.",
)
def stop(ctx: Context, root: Root, name: str | None, drain: bool) -> None:
    """Stop the running job gracefully, and wait until it has ended."""
    with ctx.out.waiting("waiting for the job to stop" + (f" with savepoint {name!r}" if name else "")):
        answer, how = stop_run(root, name, drain, ctx.now_ms, ctx.pause)
    taken = f"; savepoint {name!r} is checkpoint {answer.checkpoint}" if name else ""
    stopped = how if how.startswith("stopped") else "stopped"
    ctx.out.result({**plain_result(answer), "ended": how}, lambda out: out.line(f"{stopped}{taken}"))
