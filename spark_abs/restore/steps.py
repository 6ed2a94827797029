"""The steps of a restore: values that `control/` stores, each with its sentence and its act.

Every step may be repeated.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from deltalake import CommitProperties, PostCommitHookProperties
from pyarrow.fs import FileType

from spark_abs.advice import named
from spark_abs.errors import DamageError, Refused
from spark_abs.manifests.manifest_table import Checkpoints, abort_open
from spark_abs.model import (
    NO_TABLE,
    AttemptId,
    BatchId,
    ChannelId,
    CheckpointId,
    RunId,
    StageId,
    Version,
    app_id,
    checked_relative,
    run_app_id,
)
from spark_abs.observe.verification import damaged_rows
from spark_abs.protocol import attempt_changes
from spark_abs.protocol import control as ledger
from spark_abs.restore.rescale import is_rescaled, rescale
from spark_abs.restore.restoring import Restoring, Step
from spark_abs.sinks.delta.changes import Changes, Own
from spark_abs.snapshots.materialise import clear_ahead, continue_at, empty, is_whole, materialise
from spark_abs.store.clock import now_ms
from spark_abs.store.fence import fence_attempt, fence_run
from spark_abs.store.history import History, HistoryEvent, HistoryRow
from spark_abs.store.lease import own_lease, write_lease
from spark_abs.store.table import Table

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BeginAttempt(Step):
    """Record the new attempt and the run that restores it, in place of the old attempt and run."""

    attempt: AttemptId
    parent: AttemptId
    checkpoint: CheckpointId
    replaces: RunId | None

    def sentence(self) -> str:
        origin = f"checkpoint {self.checkpoint} of attempt {self.parent}"
        replaced = f", in place of run {self.replaces}" if self.replaces is not None else ""
        return f"record attempt {self.attempt}, from {origin}{replaced}"

    def act(self, restoring: Restoring) -> None:
        """Take the newest run and the new attempt in one commit, and the lease of that run.

        Raises:
            Refused: the job was started or restored since the plan was made.
            CheckpointNotFound: the checkpoint was retired.
        """
        restoring.require_retained("nothing was changed")
        plan, stored = restoring.plan, restoring.plan.stored()

        def begin(state: ledger.ControlState) -> ledger.ControlState:
            newest = state.newest_run
            if state.attempt.id != plan.newest or newest != plan.replaces:
                raise Refused(
                    f"nothing was changed: job {plan.job!r} was started or restored after this restore was "
                    f"planned (now run {newest}, attempt {state.attempt.id}): plan it again"
                )
            return attempt_changes.begin_attempt(
                state,
                plan.parent,
                checkpoint=plan.checkpoint,
                plan=stored,
                host=socket.gethostname(),
                pid=os.getpid(),
                now_ms=now_ms(),
                natives=plan.natives,
                partitions=plan.partitions,
                base=plan.base,
            )

        restoring.run = restoring.control.update(begin).runs[-1].id
        write_lease(restoring.root, own_lease(restoring.run, now_ms()))


@dataclass(frozen=True, slots=True)
class FenceRoot(Step):
    """Refuse commits of older runs to `checkpoints/` or `state/`."""

    table: str

    def sentence(self) -> str:
        return f"refuse older runs on {self.table}/"

    def act(self, restoring: Restoring) -> None:
        """Fence the table; then the checkpoint cannot be retired any more, so check that it is there.

        Raises:
            CheckpointNotFound: it was retired before.
        """
        job = restoring.plan.job
        fence_run(Table.open(restoring.root.place(self.table)), job, restoring.run, run_app_id(job))
        restoring.require_retained("the job does not start until you do")


@dataclass(frozen=True, slots=True)
class SetAside(Step):
    """Move a damaged manifest out of `checkpoints/`, where no run could start with it; its bytes stay."""

    path: str

    def sentence(self) -> str:
        return f"set {self.path} aside, it is damaged"

    def act(self, restoring: Restoring) -> None:
        """Move the file to a directory that no table reads, and remove it from the log.

        It is verified again first: a manifest that is moved is lost to every later restore.
        """
        root = restoring.root
        if all(finding.path != self.path for finding in damaged_rows(root)):
            log.warning("%s is no longer damaged: it stays where it is", self.path)
            return
        folder, _, name = checked_relative(self.path).rpartition("/")
        source, target = root.path(self.path), root.path(f"{folder}/_damaged")
        if root.fs.get_file_info(source).type is FileType.File:
            root.fs.create_dir(target)
            root.fs.copy_file(source, f"{target}/{name}")
            root.fs.delete_file(source)
        Table.open(root.place(folder)).delta.repair(
            commit_properties=CommitProperties(max_commit_retries=0),
            post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
        )


@dataclass(frozen=True, slots=True)
class FenceChannel(Step):
    """Refuse older runs on a channel, and burn the ids under which the replaced attempt commits."""

    channel: ChannelId
    attempt: AttemptId

    def sentence(self) -> str:
        return f"refuse older runs and attempt {self.attempt} on channel {self.channel}"

    def act(self, restoring: Restoring) -> None:
        """Fence the replaced attempt, then older runs of the new one."""
        root, plan = restoring.root, restoring.plan
        stage, _, output = self.channel.partition(".")
        table = Table.open(root.place(root.channel(self.channel)))
        fence_attempt(table, plan.job, StageId(stage), output, self.attempt)
        fence_run(table, plan.job, restoring.run, app_id(plan.job, stage, output, plan.attempt))


@dataclass(frozen=True, slots=True)
class FenceSink(Step):
    """Burn the ids under which a replaced attempt commits to the table of a sink, or of several in turn."""

    table: str
    sinks: tuple[str, ...]
    """`<stage>/<sink>` of all that have written it under this root."""
    attempt: AttemptId
    apps: tuple[str, ...]
    needs_spark: bool
    name: str = ""
    """The name of the table in a catalog, if it has one."""

    def sentence(self) -> str:
        return f"refuse older runs and attempt {self.attempt} on {_at_table(self)}"

    def act(self, restoring: Restoring) -> None:
        """Burn the ids by one commit, which Spark makes if the table needs it; none if they are burnt."""
        restoring.delta_sink(self.table, self.sinks).fence(self.apps)

    def table_for_spark(self) -> str:
        return self.table if self.needs_spark else ""


@dataclass(frozen=True, slots=True)
class AbortOpen(Step):
    """Abort every id that has no outcome, also ids that were claimed after the plan was made."""

    open: tuple[CheckpointId, ...]

    def sentence(self) -> str:
        return f"abort open checkpoints: {listed(self.open) or 'none'}"

    def act(self, restoring: Restoring) -> None:
        """Abort the ids that are open now, which may be more than the plan names."""
        abort_open(restoring.control, Checkpoints.open(restoring.root, restoring.plan.job), restoring.run)


@dataclass(frozen=True, slots=True)
class Materialise(Step):
    """Write a stage's native directory from `state/`."""

    stage: StageId
    directory: str
    batch: BatchId
    files: int
    size: int

    def sentence(self) -> str:
        return (
            f"write {self.directory} as it was after batch {self.batch}: {self.files} files, "
            f"{self.size:,} bytes"
        )

    def act(self, restoring: Restoring) -> None:
        """Write the directory, again if an earlier try left it incomplete; once rescaled, it stays.

        Raises:
            DamageError: the manifest lacks the stage, or bytes in `state/` are gone or differ.
            Refused: the directory belongs to another query.
        """
        snapshot = restoring.manifest.stage(self.stage)
        if snapshot is None:
            raise DamageError(f"checkpoint {restoring.manifest.id} has no stage {self.stage!r}")
        target, query = restoring.root.anywhere(self.directory), restoring.plan.queries[self.stage]
        partitions = restoring.plan.partitions.get(self.stage)
        if partitions is not None and is_whole(target, query):
            if is_rescaled(target, BatchId(self.batch + 1), partitions):
                restoring.written(self.size)
                return
            # Spark may have been killed anywhere while it repartitioned: begin again from the checkpoint.
            empty(target)
        if restoring.prestaged is not None and restoring.prestaged.move(self.stage, target, query):
            restoring.written(self.size)
        materialise(restoring.root, snapshot.files, target=target, query_id=query, progress=restoring.written)

    def bytes_to_write(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class Rescale(Step):
    """Repartition the state of a stage: Spark does it, in a batch of its own."""

    stage: StageId
    directory: str
    batch: BatchId
    """The batch after the cut: it reads nothing and writes the whole state again."""
    before: int
    partitions: int

    def sentence(self) -> str:
        return (
            f"repartition the state of stage {self.stage} from {self.before} to {self.partitions} "
            f"partitions, as batch {self.batch} of {self.directory}{through_spark(True)}"
        )

    def act(self, restoring: Restoring) -> None:
        """Run the batch in a session, unless it has run before."""
        place = restoring.root.anywhere(self.directory)
        if not is_rescaled(place, self.batch, self.partitions):
            rescale(restoring.session(), place, self.batch, self.partitions, restoring.beat)


@dataclass(frozen=True, slots=True)
class StartAfresh(Step):
    """Leave a stage without a native directory: it had run no batch at the cut."""

    stage: StageId

    def sentence(self) -> str:
        return f"stage {self.stage} starts afresh: it had run no batch"

    def act(self, restoring: Restoring) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class TableReader:
    """A stage of the checkpoint that reads a restored table, and at its cut had read all rows of then."""

    stage: StageId
    directory: str
    sources: tuple[str, ...]
    """The sources that read the table, as the stage's offset files name them."""


@dataclass(frozen=True, slots=True)
class RestoreSink(Step):
    """Bring a table back to the version it had at the cut: one step a table, for all sinks that wrote it.

    Stages that read the table as a stream continue behind the commit that does it.
    """

    table: str
    sinks: tuple[str, ...]
    """`<stage>/<sink>` of all that have written it under this root."""
    version: Version
    current: Version
    changes: Changes
    """The commits since that changed rows, and their authors."""
    by_function: bool
    needs_spark: bool
    name: str = ""
    """The name of the table in a catalog, if it has one."""
    readers: tuple[TableReader, ...] = ()

    def sentence(self) -> str:
        then = f"back to the rows of version {self.version}"
        if self.version == NO_TABLE:
            then = "to no rows: there was no such table"
        undone = _undone(self.changes, self.by_function)
        behind = "".join(f"; stage {r.stage} continues to read it behind that" for r in self.readers)
        return f"bring {_at_table(self)} from version {self.current} {then}{undone}{behind}"

    def act(self, restoring: Restoring) -> None:
        """Restore the table by one commit, unless it has been restored before; then move its readers.

        Raises:
            Refused: rows of others would go, and the caller did not agree to that.
        """
        state = restoring.control.state
        restored = restoring.delta_sink(self.table, self.sinks).restore_to(
            self.version,
            Own(state.job, state.root, state.unnamed),
            restoring.undo_others or self.by_function,
            self.by_function,
        )
        for reader in self.readers if restored > self.version else ():  # else nothing was undone
            continue_at(restoring.root.anywhere(reader.directory), reader.sources, restored + 1)

    def table_for_spark(self) -> str:
        return self.table if self.needs_spark else ""


@dataclass(frozen=True, slots=True)
class KeepSink(Step):
    """Leave a sink as it is."""

    sinks: tuple[str, ...]
    """`<stage>/<sink>`."""
    why: str

    def sentence(self) -> str:
        return f"leave {_sinks(self.sinks)}: {self.why}"

    def act(self, restoring: Restoring) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Finish(Step):
    """Write the restore to `history/`, and mark the attempt ready."""

    attempt: AttemptId

    def sentence(self) -> str:
        return f"mark attempt {self.attempt} ready"

    def act(self, restoring: Restoring) -> None:
        """Add the event before the attempt is ready: a restore that is not in `history/` is unfinished."""
        self._record(restoring)
        plan, run, anywhere = restoring.plan, restoring.run, restoring.root.anywhere
        clear_ahead(anywhere(plan.natives), run)
        for elsewhere in {a.natives for a in restoring.control.state.attempts} - {plan.natives}:
            with suppress(OSError):  # a disk that was lost
                clear_ahead(anywhere(elsewhere), run)

        def finish(state: ledger.ControlState) -> ledger.ControlState:
            ledger.require_current(state, run)
            said = f"the job was restored to checkpoint {plan.checkpoint} meanwhile"
            state = attempt_changes.finish_attempt(ledger.dismiss(state, said), self.attempt)
            return ledger.end_run(state, run, "restored")

        restoring.control.update(finish)

    def _record(self, restoring: Restoring) -> None:
        history, plan = History(restoring.root), restoring.plan
        recorded = history.read().select(["event", "attempt"]).to_pylist() if plan.continues else []
        if {"event": HistoryEvent.RESTORED.value, "attempt": self.attempt} in recorded:
            return
        left = ", ".join(map(str, plan.abandons)) or "nothing"
        history.append(
            [
                HistoryRow(
                    at_ms=now_ms(),
                    event=HistoryEvent.RESTORED,
                    attempt=self.attempt,
                    run=restoring.run,
                    checkpoint=plan.checkpoint,
                    kind=restoring.manifest.kind.value,
                    name=plan.name,
                    detail=f"from attempt {plan.parent}; leaves behind {left}",
                    duration_ms=now_ms() - restoring.began_ms,
                )
            ]
        )


def _at_table(step: FenceSink | RestoreSink) -> str:
    return f"{_sinks(step.sinks)} ({named(step.name, step.table)}){through_spark(step.needs_spark)}"


def _sinks(names: Sequence[str]) -> str:
    return f"{'sink' if len(names) == 1 else 'sinks'} {', '.join(names)}"


def _undone(changes: Changes, by_function: bool) -> str:
    """Say whose rows go and whose stay; commits of a function do not name their author."""
    parts = []
    if changes.own_rows or (changes.own and not by_function):
        parts.append(f"{_rows(changes.own_rows)} of this job {'goes' if changes.own_rows == 1 else 'go'}")
    if changes.of_others:
        who = f"{'the function and ' if by_function else ''}others"
        versions = _versions(changes.of_others)
        parts.append(f"changes of {who} in {versions} are undone ({_rows(changes.rows_of_others)} added)")
    if changes.of_roots:
        parts.append(f"rows of jobs on other roots in {_versions(changes.of_roots)} stay")
    return "".join(f"; {part}" for part in parts)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _versions(numbers: Sequence[int]) -> str:
    return f"{'version' if len(numbers) == 1 else 'versions'} {listed(numbers)}"


def listed(numbers: Sequence[int]) -> str:
    """Return the first five numbers for a sentence, and the count of the others."""
    shown = ", ".join(map(str, numbers[:5]))
    return f"{shown} and {len(numbers) - 5} more" if len(numbers) > 5 else shown


def through_spark(needed: bool) -> str:
    """Return the end of a phrase about a change that only Spark can make."""
    return " through Spark" if needed else ""
