"""Reads a root for the page, and follows it: each part is read again only if it has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from deltalake.exceptions import DeltaError

from spark_abs.channels.entries import entry_of
from spark_abs.channels.follow import LogTail
from spark_abs.errors import AbsError, CheckpointNotFound, DamageError
from spark_abs.manifest import Manifest, StageShape
from spark_abs.manifests.find import DamagedRow, list_manifests
from spark_abs.manifests.manifest_table import PATH, Checkpoints, RowFile, Summary, read_rows, row_files
from spark_abs.model import (
    NO_BATCH,
    BatchId,
    ChannelId,
    CheckpointId,
    Position,
    StageId,
    Version,
    positions_of,
)
from spark_abs.observe.status import LiveRun, lease_timeout_ms, live_run
from spark_abs.packages import installed
from spark_abs.protocol.control import ControlState
from spark_abs.report.cuts import read_manifest
from spark_abs.report.graph import (
    MOST_ENTRIES,
    PendingEntries,
    StageReading,
    channels_of,
    shapes_of,
    stages_of,
    with_passed,
)
from spark_abs.report.history_tail import HistoryTail
from spark_abs.report.model import (
    MOST_CUT_ROWS,
    MOST_CUTS,
    AttemptLine,
    Cut,
    Report,
    RunLine,
    Timeline,
)
from spark_abs.report.redaction import redacted
from spark_abs.snapshots.capture import newest_batch
from spark_abs.snapshots.layout import parse_offsets
from spark_abs.store.activity import Skips, read_activity
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.table import Table

T = TypeVar("T")


class RootReader:
    """The root of a job for the page. Not thread-safe.

    A part that cannot be read is named in the report; only `control/` must be readable.
    """

    def __init__(self, root: Root) -> None:
        """Open the root.

        Raises:
            UsageError: there is no job at this root.
            DamageError: `control/` cannot be read.
        """
        self._root = root
        self._control = Control.open(root)
        self._history = HistoryTail(root)
        self._stored = _Stored(root, self._control.state.job)
        self._channels = _Channels(root)

    def read(self, now_ms: int) -> Report:
        """Return the report as of now.

        Raises:
            DamageError: `control/` cannot be read.
            OSError: the store cannot be read now.
        """
        try:
            self._control.refresh()
        except DeltaError as error:
            raise DamageError(f"control/ cannot be read: {_first_line(error)}") from error
        state, problems = self._control.state, list[str]()
        alive = live_run(self._root, now_ms, lease_timeout_ms())
        events = _unless_damaged(problems, lambda: self._history.read(state.last_claimed))
        summaries, damaged = _unless_damaged(problems, self._stored.listed) or ((), ())
        problems += [redacted(f"{row.path}: {row.error}") for row in damaged]
        cuts, newest = self._stored.cuts(state, summaries, problems)
        shapes = shapes_of(state, newest)
        readings = {s.stage: _reading(self._root, state, s.stage, problems) for s in shapes}
        pending = self._channels.look(shapes, readings, problems)
        channels = channels_of(shapes, readings, pending)
        return Report(
            state.job,
            redacted(self._root.uri),
            now_ms,
            version=installed(["spark-abs"]).get("spark-abs", "unknown"),
            attempt=state.attempt.id,
            restored_from=state.attempt.checkpoint,
            ready=state.attempt.ready,
            alive="" if alive is None else f"process {alive.pid} on {alive.host}",
            heard_ms=None if alive is None else now_ms - alive.heard_ms,
            stages=with_passed(stages_of(shapes, state, readings), channels),
            channels=channels,
            timeline=Timeline() if events is None else events.timeline(state, summaries, damaged),
            attempts=_attempts(state),
            runs=_runs(state, alive),
            cuts=cuts,
            skips=_skips(self._root, state),
            problems=tuple(dict.fromkeys(problems)),
        )


def _unless_damaged(problems: list[str], read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (AbsError, OSError, DeltaError) as error:
        problems.append(redacted(_first_line(error)))
        return None


def _first_line(error: Exception) -> str:
    """Return what an error says without the stack that deltalake adds."""
    return str(error).partition("\n")[0]


def _attempts(state: ControlState) -> tuple[AttemptLine, ...]:
    path = {attempt.id for attempt in state.lineage()}
    return tuple(
        AttemptLine(
            a.id,
            a.parent,
            a.checkpoint,
            base=a.base,
            created_ms=a.created_ms,
            ready=a.ready,
            current=a.id in path,
        )
        for a in state.attempts
    )


def _runs(state: ControlState, alive: LiveRun | None) -> tuple[RunLine, ...]:
    killed = "killed, or its machine was lost"
    return tuple(
        RunLine(
            run.id,
            run.attempt,
            str(run.kind),
            place=f"{run.host}:{run.pid}",
            started_ms=run.started_ms,
            ended=redacted(run.ended)
            if run.ended is not None
            else None
            if alive is not None and alive.run == run.id
            else killed,
        )
        for run in state.runs
    )


def _skips(root: Root, state: ControlState) -> Skips | None:
    told = read_activity(root)
    return None if told is None or told.run != state.newest_run else told.skips


def _reading(root: Root, state: ControlState, stage: StageId, problems: list[str]) -> StageReading:
    """Return how far a stage is: the positions of its newest planned batch."""
    attempt = state.attempt
    try:
        native = root.native(attempt.natives, attempt.id, attempt.directory(stage))
        planned = newest_batch(native, "offsets")
        if planned == NO_BATCH:
            return StageReading()
        text = native.read_text(f"offsets/{planned}")
        lines = parse_offsets(text, f"{native}/offsets/{planned}").lines if text else ()
        return StageReading(positions_of(lines), _known(newest_batch(native, "commits")), planned)
    except (AbsError, OSError) as error:
        problems.append(redacted(f"stage {stage}: {error}"))
        return StageReading()


def _known(batch: BatchId) -> int | None:
    return None if batch == NO_BATCH else batch


class _Stored:
    """The stored checkpoints: each row is read once, the cuts of the newest and of savepoints, too."""

    def __init__(self, root: Root, job: str) -> None:
        self._root, self._job = root, job
        self._table: Table | None = None
        self._listed: tuple[Version, tuple[Summary, ...], tuple[DamagedRow, ...]] | None = None
        self._files: tuple[RowFile, ...] = ()
        self._cuts: dict[CheckpointId, tuple[Manifest, Cut] | None] = {}

    def listed(self) -> tuple[tuple[Summary, ...], tuple[DamagedRow, ...]]:
        """Return the stored checkpoints by id, and the rows that are damaged."""
        if self._table is None:
            self._table = Table.find(self._root.place(PATH))
            if self._table is None:
                return (), ()
        else:
            self._table.refresh()
        if self._listed is None or self._listed[0] != self._table.version:
            self._listed = (self._table.version, *self._read(self._table))
            self._files = row_files(self._table, PATH)
        return self._listed[1], self._listed[2]

    def _read(self, table: Table) -> tuple[tuple[Summary, ...], tuple[DamagedRow, ...]]:
        checkpoints = Checkpoints(self._root, self._job, table)
        known = () if self._listed is None else self._listed[1]
        try:
            return checkpoints.summaries_since(known), ()
        except DamageError:
            found = list_manifests(self._root, self._job)
            return found.completed, found.damaged

    def cuts(
        self, state: ControlState, summaries: Sequence[Summary], problems: list[str]
    ) -> tuple[tuple[Cut, ...], Manifest | None]:
        """Return the cuts of the newest checkpoints and savepoints, and the newest manifest of the path."""
        chosen, rows, newest = list[Cut](), 0, None
        by_id = sorted(summaries, key=lambda s: (s.kind.owned_by_user, s.id), reverse=True)
        path = [s.id for s in summaries if state.on_path(s.attempt, s.id)]
        latest = max(path, default=None)
        for summary in sorted(by_id, key=lambda s: s.id != latest)[:MOST_CUTS]:
            found = self._cut(summary.id, problems)
            if found is None:
                continue
            manifest, cut = found
            if summary.id == latest:
                newest = manifest
            rows += max(1, len(cut.stages))
            if rows > MOST_CUT_ROWS and chosen:
                break
            chosen.append(cut)
        known = {cut.checkpoint for cut in chosen}
        self._cuts = {number: found for number, found in self._cuts.items() if number in known}
        return tuple(sorted(chosen, key=lambda cut: cut.checkpoint)), newest

    def _cut(self, checkpoint: CheckpointId, problems: list[str]) -> tuple[Manifest, Cut] | None:
        if checkpoint not in self._cuts:
            try:
                self._cuts[checkpoint] = read_manifest(*self._body(checkpoint))
            except (AbsError, OSError) as error:
                problems.append(redacted(f"checkpoint {checkpoint}: {error}"))
                return None
        return self._cuts[checkpoint]

    def _body(self, checkpoint: CheckpointId) -> tuple[int, str]:
        for file in self._files:
            if file.may_have(checkpoint):
                for row in read_rows(self._root, file.path, ["id", "v", "body"]):
                    if row["id"] == checkpoint:
                        return row["v"], row["body"]
        raise CheckpointNotFound("it was removed meanwhile")


class _Channels:
    """The entries of channels that stages have not read. Each entry is opened once."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._known: dict[ChannelId, tuple[LogTail, PendingEntries]] = {}

    def look(
        self,
        shapes: Iterable[StageShape],
        readings: dict[StageId, StageReading],
        problems: list[str],
    ) -> dict[ChannelId, PendingEntries]:
        """Return the entries after the slowest reader of each channel whose readers can be seen."""
        slowest: dict[ChannelId, Position] = {}
        for shape in shapes:
            for position in readings[shape.stage].positions:
                known = slowest.get(position.channel)
                if known is None or position.version < known.version:
                    slowest[position.channel] = position
        self._known = {channel: known for channel, known in self._known.items() if channel in slowest}
        for channel, position in slowest.items():
            try:
                self._follow(channel, position.version)
            except (AbsError, OSError) as error:
                self._known.pop(channel, None)
                problems.append(redacted(f"channel {channel}: {error}"))
        return {channel: pending for channel, (_, pending) in self._known.items()}

    def _follow(self, channel: ChannelId, after: Version) -> None:
        known = self._known.get(channel)
        if known is None or known[0].version < after or self._went_back(known, after):
            path = self._root.path(self._root.channel(channel))
            known = self._known[channel] = (LogTail(self._root.fs, path, after), PendingEntries())
        tail, pending = known
        pending.forget(after)
        pending.more = False
        while len(pending.entries) < MOST_ENTRIES:
            commit = tail.next()
            if commit is None:
                return
            pending.add(entry_of(commit))
        pending.more = True

    @staticmethod
    def _went_back(known: tuple[LogTail, PendingEntries], after: Version) -> bool:
        """Say whether a reader is before the entries that are known, as after a restore."""
        tail, pending = known
        oldest = pending.entries[0].version - 1 if pending.entries else tail.version
        return after < oldest
