"""Let a stage go past input files: through the run if one is alive, else in `control/` for the next run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from spark_abs.channels.channel_log import ChannelLog
from spark_abs.errors import Refused, UsageError
from spark_abs.manifest import StageShape
from spark_abs.model import BatchId, RunId, StageId
from spark_abs.observe.client import ask_run, carried_out, commanded, is_alive, new_command
from spark_abs.observe.held import open_logs
from spark_abs.protocol.control import Command, CommandKind, ControlState, SkippedFile, skip
from spark_abs.protocol.skipped_files import UnfinishedBatch, choose_files, find_files
from spark_abs.sinks.delta.sink_log import SinkLog
from spark_abs.snapshots.file_sources import FileSources
from spark_abs.store.root import Root


@dataclass(frozen=True, slots=True)
class Skips:
    """The files that a request names."""

    new: tuple[SkippedFile, ...]
    """Those that are not skipped already."""
    said: str
    """What is done, for the person who asked."""


def skip_files(
    root: Root,
    stage: str,
    files: Sequence[str],
    now_ms: Callable[[], int],
    pause: Callable[[float], None],
    *,
    timeout_s: float | None = None,
) -> Command:
    """Let a stage go past files of its unfinished batch, and return the answer.

    Args:
        root: the job's root.
        stage: the name of the stage.
        files: the files, as the error of the batch names them, or as whole paths.
        now_ms: the wall clock.
        pause: called with seconds between two looks at the run.
        timeout_s: how long to wait for the answer of a live run; None: as long as it is alive.

    Raises:
        UsageError: no run is alive, and there is no such stage, a file is none of the batch, or an output
            already has the rows of the batch.
        Refused: as `ask_run`, if a run is alive; or a run began meanwhile.
    """
    control = commanded(root)
    before = control.state
    command = new_command(CommandKind.SKIP_FILE, now_ms(), stages=[stage], files=files)
    if is_alive(root, before, now_ms()):
        return ask_run(root, command, now_ms, pause, timeout_s)
    found = find_skips(root, before, command, RunId((before.newest_run or 0) + 1), now_ms())

    def change(state: ControlState) -> ControlState:
        if state.newest_run != before.newest_run:
            raise Refused(f"a run began meanwhile at {root.uri}: run the command again")
        return skip(state, found.new)

    control.update(change)
    return carried_out(root, command, f"{found.said}; no run is alive", before.attempt.id, now_ms())


def find_skips(root: Root, state: ControlState, command: Command, since: RunId, now_ms: int) -> Skips:
    """Find the files that a request names. The stage must not run a batch meanwhile.

    Args:
        root: the job's root.
        state: the content of `control/`.
        command: the request.
        since: the first run whose batches would lack the files.
        now_ms: the wall clock.

    Raises:
        UsageError: as `skip_files`.
    """
    stage = command.stages[0] if command.stages else StageId("")
    shape = _declared(state, stage)
    known = {one.file: one for one in state.skipped if one.stage == stage}
    before = find_files(command.files, known)
    names = [name for name in command.files if name not in before]
    chosen = _choose(root, state, shape, names) if names else ()
    each = [*chosen, *(f"{f}, which {known[f].by} had skipped before" for fs in before.values() for f in fs)]
    return Skips(
        tuple(SkippedFile(stage, file, command.by, now_ms, since) for file in chosen),
        f"stage {stage!r} skips {'; '.join(each)}",
    )


def _declared(state: ControlState, stage: StageId) -> StageShape:
    shapes = {shape.stage: shape for shape in state.attempt.shapes}
    if not shapes:
        raise UsageError(
            f"attempt {state.attempt.id} of job {state.job!r} has declared no stage yet: a file can be "
            "skipped once the batch that reads it has failed"
        )
    if stage not in shapes:
        raise UsageError(f"no stage {stage!r}: the job has {', '.join(shapes)}")
    return shapes[stage]


def _choose(root: Root, state: ControlState, shape: StageShape, names: Sequence[str]) -> tuple[str, ...]:
    stage, sources = shape.stage, _sources(root, state, shape.stage)
    files = sources.planned()
    held_by = tuple(_holding(root, state, shape, sources.unfinished))
    batch = UnfinishedBatch(stage, sources.unfinished, files, held_by)
    elsewhere = len(find_files(names, files)) < len(set(names))
    return choose_files(names, batch, sources.read() if elsewhere else ())


def _sources(root: Root, state: ControlState, stage: StageId) -> FileSources:
    attempt = state.attempt
    return FileSources(root.native(attempt.natives, attempt.id, attempt.directory(stage)))


def _holding(root: Root, state: ControlState, shape: StageShape, batch: BatchId) -> Iterator[str]:
    """Iterate the outputs that have committed a batch, for a person."""
    said = (
        *(f"channel '{shape.stage}.{output}'" for output in shape.channels),
        *(f"the table of sink {sink!r}" for sink in shape.tables),
    )
    for name, log in zip(said, _logs(root, state, shape), strict=True):
        if log is not None and log.last_batch() >= batch:
            yield name


def _logs(root: Root, state: ControlState, shape: StageShape) -> tuple[ChannelLog | SinkLog | None, ...]:
    return open_logs(
        root,
        state.job,
        shape.stage,
        attempt=state.attempt.id,
        writer=partial(state.writer, state.attempt),
        channels=shape.channels,
        sinks=shape.tables,
    )


def refuse_read(root: Root, state: ControlState) -> None:
    """Refuse a start if an unfinished batch was committed with a file that was skipped meanwhile.

    That takes a driver that was silent for so long that it counted as dead, and woke up. Its outputs must
    be fenced by now. Its rows are fixed, but the state of the stage would be made without the file.

    Raises:
        Refused: it names the batch, the run and the file.
    """
    for shape in state.attempt.shapes:
        skipped = {one.file: one.since for one in state.skipped if one.stage == shape.stage}
        sources = _sources(root, state, shape.stage) if skipped else None
        late = {} if sources is None else {f: skipped[f] for f in sources.planned() if f in skipped}
        if sources is None or not late:
            continue
        batch = sources.unfinished
        for log in _logs(root, state, shape):
            commit = None if log is None else log.commit_of(batch)
            for file, since in late.items():
                if commit is not None and commit[1].run < since:
                    raise Refused(
                        f"run {commit[1].run} counted as dead and committed batch {batch} of stage "
                        f"{shape.stage!r} with {file}, which was skipped meanwhile: start with "
                        "restart='checkpoint', which goes back to before the batch"
                    )
