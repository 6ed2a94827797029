"""Sinks outside in a restore: the epochs that each has committed, those that are undone, and the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import MappingProxyType

from spark_abs.advice import way
from spark_abs.errors import DamageError, Refused, SinkFailed, SinkUnreachable, TakenOver, UsageError
from spark_abs.manifest import Manifest
from spark_abs.model import NO_EPOCH, Branch, CheckpointId, RunId, Version, channel_id
from spark_abs.protocol import outside
from spark_abs.protocol.control import ControlState, OutsideSink
from spark_abs.protocol.outside import Mark, Owner
from spark_abs.protocol.path import NOTHING, channel_path
from spark_abs.restore.refusals import Force, forced_by
from spark_abs.restore.restoring import Restoring, Step
from spark_abs.restore.steps import KeepSink, listed, through_spark
from spark_abs.sinks.kind import Session, no_session
from spark_abs.sinks.registry import made_again, title_of
from spark_abs.sinks.sending.bounds import cuts_of, path_to
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.store.root import Root

Own = Mapping[str, TwoPhaseSink]
"""The user's own sinks, by name: the root cannot create them."""
NO_SINKS: Own = MappingProxyType({})
"""No sink of the user's own."""


@dataclass(frozen=True, slots=True)
class OutsideFacts:
    """The facts about one sink outside."""

    sink: str
    where: str
    """The place of the sink in parentheses, for messages."""
    mark: Mark | None
    """Its mark: up to where it has committed, None if it has committed nothing."""
    back: Mark | None = None
    """Its mark after the restore, if that differs."""
    behind: tuple[CheckpointId, ...] = ()
    """Checkpoints whose epochs are committed and will be undone."""
    between: bool = False
    """Whether it has committed batches after its newest completed checkpoint."""
    why_not: str = ""
    """Why it cannot take them back; empty if it can."""
    gone: str = ""
    """Why it could not be asked; empty if it has answered."""
    taken_over: bool = False
    """Whether another root has taken its table over: this root no longer writes there."""
    spark_table: str = ""
    """Its table if only Spark can write it, else nothing."""


def sink_of(record: OutsideSink, own: Own, root: Root, session: Session = no_session) -> TwoPhaseSink | None:
    """Return the sink of a record; None for a sink of the user's own that was not given."""
    return own.get(record.sink) or made_again(record.kind, record.settings, root, session)


def outside_facts(
    root: Root,
    state: ControlState,
    *,
    manifest: Manifest,
    known: Sequence[Manifest],
    attempt: Branch,
    own: Own,
) -> tuple[OutsideFacts, ...]:
    """Ask every sink outside of the job; changes nothing, and fences no run.

    Args:
        root: the job's root.
        state: the content of `control/`.
        manifest: the checkpoint to go back to.
        known: every manifest that can be read.
        attempt: the attempt that the restore begins, as the last branch of the path.
        own: the user's own sinks.
    """
    return tuple(
        _facts(root, state, manifest=manifest, known=known, attempt=attempt, record=record, own=own)
        for record in state.outside
    )


def _facts(
    root: Root,
    state: ControlState,
    *,
    manifest: Manifest,
    known: Sequence[Manifest],
    attempt: Branch,
    record: OutsideSink,
    own: Own,
) -> OutsideFacts:
    title = title_of(record.kind)
    where = f" ({title})" if title else ""
    try:
        sink = sink_of(record, own, root)
    except UsageError as error:  # the extra for its kind is not installed
        return OutsideFacts(record.sink, where, None, gone=f"it cannot be asked: {error}")
    if sink is None:
        given = f"sinks={{{record.sink!r}: …}}"
        how = way(
            f"give it with {given}",
            f"restore from Python, with spark_abs.open(root).restore(checkpoint, {given})",
        )
        gone = f"only its author can create this sink: {how}"
        return OutsideFacts(record.sink, where, None, gone=gone)
    try:
        found = _asked(state, manifest, known=known, attempt=attempt, record=record, sink=sink)
        return replace(found, where=where, spark_table=sink.spark_table())
    except TakenOver as error:
        return OutsideFacts(record.sink, where, None, gone=str(error), taken_over=True)
    except (SinkUnreachable, SinkFailed, DamageError, UsageError, OSError) as error:
        return OutsideFacts(record.sink, where, None, gone=f"it cannot be asked: {error}")
    finally:
        sink.close()


def _asked(
    state: ControlState,
    manifest: Manifest,
    *,
    known: Sequence[Manifest],
    attempt: Branch,
    record: OutsideSink,
    sink: TwoPhaseSink,
) -> OutsideFacts:
    """Ask a sink; the caller fills `where` and `spark_table`."""
    owner = Owner(state.root, state.job, record.sink, RunId(0))
    mark = sink.mark(owner)
    found = OutsideFacts(record.sink, "", mark)
    if mark is None:
        return found
    if all(a.id != mark.attempt for a in state.attempts):
        gone = f"its mark names attempt {mark.attempt}, which this root does not have"
        return replace(found, mark=None, gone=gone)
    channel = channel_id(record.stage, record.output)
    path = (*path_to(state, manifest, channel), attempt)
    cuts = tuple(cuts_of({m.id: m for m in (*known, manifest)}.values(), channel))
    line = outside.line_to(channel_path(state, channel, mark.attempt), mark)
    back = outside.mark_after_rollback(mark, line, path, cuts)
    if back == mark or _left_before(state, manifest, path, mark):
        return found
    behind = outside.sent_behind(back, mark, line, cuts)
    between = sink.each_batch and all((c.attempt, c.version) != (mark.attempt, mark.version) for c in cuts)
    return replace(found, back=back, behind=behind, between=between, why_not=sink.why_not(owner, back))


def _left_before(state: ControlState, manifest: Manifest, path: Sequence[Branch], mark: Mark) -> bool:
    """Say whether a sink had left the job before the path left the sink's attempt: its rows stay.

    Its channel was gone at that cut, so that no entry of the channel tells. If the mark is of that very
    checkpoint, the sink came to the job after it, and has sent batches since.
    """
    steps = state.lineage(manifest.cut.attempt)
    ends = [*(step.base or step.checkpoint for step in steps[1:]), manifest.cut.checkpoint]
    return any(
        step.id == mark.attempt and branch.until == NOTHING and NO_EPOCH < mark.checkpoint < (end or NO_EPOCH)
        for step, branch, end in zip(steps, path, ends, strict=False)
    )


def outside_steps(facts: Sequence[OutsideFacts], force: bool) -> Iterator[Step]:
    """Plan the steps for sinks outside: fence each, and bring its mark back where it must.

    Raises:
        Refused: unless forced, if a sink cannot take committed rows back, or cannot be asked.
    """
    for found in facts:
        ids = ", ".join(map(str, found.behind))
        behind = (
            f"the epochs of checkpoints {ids}, after that checkpoint,"
            if ids
            else "rows after that checkpoint"
        )
        name = f"{found.sink}{found.where}"
        if found.taken_over:
            yield KeepSink((found.sink,), f"{found.gone}: its rows stay")
            continue
        if found.gone:
            if not force:
                raise Refused(
                    f"sink {name}: {found.gone}; so its rows are not known, and an older run could send "
                    f"more. If the sink is gone for good, pass {forced_by(Force.OUTSIDE)}"
                )
            yield KeepSink(
                (found.sink,), f"{found.gone}: its rows stay, and older runs are not refused there"
            )
            continue
        sent = found.mark.checkpoint if found.mark is not None else NO_EPOCH
        version = found.mark.version if found.mark is not None else None
        returns = found.back is not None
        yield FenceOutside(found.sink, sent, returns, version, spark_table=found.spark_table)
        if found.mark is None or found.back is None:
            continue
        if found.why_not and not force:
            raise Refused(
                f"sink {name} has committed {behind} and cannot take them back: {found.why_not}. "
                f"{_ways_out(found)}pass {forced_by(Force.OUTSIDE)}: then the rows stay, and rows that are "
                "computed again are appended a second time, or replace rows of the same key"
            )
        kept = bool(found.why_not)
        yield ReturnOutside(found.sink, found.back, found.behind, kept, spark_table=found.spark_table)


def _ways_out(found: OutsideFacts) -> str:
    """Return the ways on without force, with the checkpoint after which nothing was sent, if it is known."""
    if found.mark is None or found.between:
        return "Start the job without a restore, or restore a later checkpoint, which keeps them; or "
    return f"Restore checkpoint {found.mark.checkpoint} or a later one, or "


@dataclass(frozen=True, slots=True)
class FenceOutside(Step):
    """Refuse older runs at a sink outside; its committed rows stay unless a `ReturnOutside` follows."""

    sink: str
    sent: CheckpointId
    """The checkpoint of its newest committed epoch when the restore was planned; 0 if it had none."""
    returns: bool
    """Whether a `ReturnOutside` follows."""
    version: Version | None = None
    """The newest entry that it had committed, None if none: later entries may be of the same checkpoint."""
    spark_table: str = ""
    """Its table if only Spark can write it, else nothing."""

    def sentence(self) -> str:
        sent = self.sent or self.version is not None
        has = f"has sent up to checkpoint {self.sent}" if sent else "has sent nothing"
        rest = ", which stays; later rows are sent once" if sent and not self.returns else ""
        by = through_spark(bool(self.spark_table))
        return f"refuse older runs at sink {self.sink}{by}, which {has}{rest}"

    def act(self, restoring: Restoring) -> None:
        """Fence the sink.

        Raises:
            Refused: it has committed more since the plan was made, and cannot take it back.
            SinkUnreachable: it cannot be reached now.
        """
        state = restoring.control.state
        record, owner = _recorded(restoring, self.sink)
        with closing(_opened(restoring, record)) as sink:
            sink.recover(owner)
            mark = sink.mark(owner)
        path = channel_path(state, channel_id(record.stage, record.output))
        if mark is None or self.returns or outside.is_on(path, mark):
            return
        if (mark.checkpoint, mark.version) != (self.sent, self.version or mark.version):
            again = way("call restore again", "run the command again")
            raise Refused(
                f"sink {self.sink!r} has committed rows up to checkpoint {mark.checkpoint} and entry "
                f"{mark.version} since the restore was planned: {again}"
            )

    def table_for_spark(self) -> str:
        return self.spark_table


@dataclass(frozen=True, slots=True)
class ReturnOutside(Step):
    """Bring the mark of a sink outside back, and undo its later epochs unless `keep`."""

    sink: str
    back: Mark
    epochs: tuple[CheckpointId, ...]
    """The later checkpoints whose epochs it has committed, as far as they are known; empty if it has only
    committed batches after its newest completed checkpoint."""
    keep: bool
    spark_table: str = ""
    """Its table if only Spark can write it, else nothing."""

    def sentence(self) -> str:
        epochs = "the rows that were sent after it"
        if self.epochs:
            epochs = f"the epochs of checkpoints {listed(self.epochs)}"
        if self.keep:
            return f"leave {epochs} in sink {self.sink}: rows that are computed again are sent a second time"
        where = f"in sink {self.sink}{through_spark(bool(self.spark_table))}"
        return f"undo {epochs} {where}, from the history that it keeps"

    def act(self, restoring: Restoring) -> None:
        """Bring the mark back.

        Raises:
            SinkUnreachable: the sink cannot be reached now.
        """
        record, owner = _recorded(restoring, self.sink)
        with closing(_opened(restoring, record)) as sink:
            sink.recover(owner)
            mark = sink.mark(owner)
            if mark is not None and mark != self.back:
                sink.abort(owner, self.back, keep=self.keep)

    def table_for_spark(self) -> str:
        return self.spark_table


def _recorded(restoring: Restoring, name: str) -> tuple[OutsideSink, Owner]:
    state = restoring.control.state
    record = next(record for record in state.outside if record.sink == name)
    return record, Owner(state.root, state.job, name, restoring.run)


def _opened(restoring: Restoring, record: OutsideSink) -> TwoPhaseSink:
    sink = sink_of(record, restoring.own_sinks, restoring.root, restoring.session)
    if sink is None:
        raise Refused(
            f"sink {record.sink!r} was given when the restore was planned, and is missing now: give it again"
        )
    return sink
