"""Sinks outside in a restore: what each has committed, what of it the restore undoes, and doing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from spark_abs.advice import way
from spark_abs.errors import DamageError, Refused, SinkFailed, SinkUnreachable, TakenOver, UsageError
from spark_abs.manifest import Manifest
from spark_abs.model import NO_EPOCH, Branch, CheckpointId, RunId, channel_id
from spark_abs.protocol import outside
from spark_abs.protocol.control import ControlState, OutsideSink
from spark_abs.protocol.outside import Mark, Owner
from spark_abs.protocol.path import NOTHING, channel_path
from spark_abs.restore.refusals import Force, forced_by
from spark_abs.restore.steps import FenceOutside, KeepSink, ReturnOutside, Step
from spark_abs.sinks.registry import NAMES, made_again, no_session, spark_table
from spark_abs.sinks.sending.bounds import cuts_of, path_to
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.store.root import Root

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Own = Mapping[str, TwoPhaseSink]
"""Sinks of the user's own, by name: nothing that is stored can make them again."""
NO_SINKS: Own = MappingProxyType({})
"""None of them."""


@dataclass(frozen=True, slots=True)
class OutsideFacts:
    """What was found of one sink outside."""

    sink: str
    where: str
    """For a person."""
    mark: Mark | None
    """What it has committed, None for nothing."""
    back: Mark | None = None
    """Its mark after the restore, if that is another."""
    behind: tuple[CheckpointId, ...] = ()
    """Checkpoints whose epochs it has committed and the restore undoes."""
    between: bool = False
    """Whether it has committed batches of a checkpoint that is not complete."""
    why_not: str = ""
    """What keeps it from taking them back; empty if nothing does."""
    gone: str = ""
    """Why it could not be asked; empty if it was."""
    taken_over: bool = False
    """It is a table that another root has taken over: nothing of this one gets there any more."""
    spark_table: str = ""
    """Its table if only Spark can write it, else nothing."""


def sink_of(
    record: OutsideSink, own: Own, root: Root, session: Callable[[], SparkSession] = no_session
) -> TwoPhaseSink | None:
    """Return a sink that is recorded, None for an own one that is not given."""
    return own.get(record.sink) or made_again(record.kind, record.settings, root, session)


def outside_facts(
    root: Root, state: ControlState, manifest: Manifest, known: Sequence[Manifest], attempt: Branch, own: Own
) -> tuple[OutsideFacts, ...]:
    """Ask every sink that the job has come to; changes nothing, and fences nobody.

    Args:
        root: the job's root.
        state: what `control/` says.
        manifest: the checkpoint to go back to.
        known: every manifest that can be read.
        attempt: the one that the restore begins, as the last branch of the path.
        own: the user's own sinks.
    """
    return tuple(_facts(root, state, manifest, known, attempt, record, own) for record in state.outside)


def _facts(
    root: Root,
    state: ControlState,
    manifest: Manifest,
    known: Sequence[Manifest],
    attempt: Branch,
    record: OutsideSink,
    own: Own,
) -> OutsideFacts:
    where = f" ({NAMES[record.kind]})" if record.kind in NAMES else ""
    try:
        sink = sink_of(record, own, root)
    except UsageError as error:  # the extra for its kind is not installed here
        return OutsideFacts(record.sink, where, None, gone=f"it cannot be asked: {error}")
    if sink is None:
        given = f"sinks={{{record.sink!r}: …}}"
        how = way(
            f"give it with {given}",
            f"restore from Python, with spark_abs.open(root).restore(checkpoint, {given})",
        )
        gone = f"it is one of your own, and only you can make it: {how}"
        return OutsideFacts(record.sink, where, None, gone=gone)
    try:
        found = _asked(state, manifest, known, attempt, record, sink)
        return replace(found, where=where, spark_table=spark_table(sink))
    except TakenOver as error:
        return OutsideFacts(record.sink, where, None, gone=str(error), taken_over=True)
    except (SinkUnreachable, SinkFailed, DamageError, UsageError, OSError) as error:
        return OutsideFacts(record.sink, where, None, gone=f"it cannot be asked: {error}")
    finally:
        sink.close()


def _asked(
    state: ControlState,
    manifest: Manifest,
    known: Sequence[Manifest],
    attempt: Branch,
    record: OutsideSink,
    sink: TwoPhaseSink,
) -> OutsideFacts:
    """Ask a sink; `where` and `spark_table` are left to the caller."""
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
    """Say whether a sink had left the job before one left its attempt: what it has sent still counts.

    The channel was not there any more at that cut, so no entry says so. A mark of that very checkpoint is of
    a sink that has come to the job after it, and has sent batches since.
    """
    steps = state.lineage(manifest.cut.attempt)
    ends = [*(step.base or step.checkpoint for step in steps[1:]), manifest.cut.checkpoint]
    return any(
        step.id == mark.attempt and branch.until == NOTHING and NO_EPOCH < mark.checkpoint < (end or NO_EPOCH)
        for step, branch, end in zip(steps, path, ends, strict=False)
    )


def outside_steps(facts: Sequence[OutsideFacts], force: bool) -> Iterator[Step]:
    """Plan what becomes of the sinks outside.

    Raises:
        Refused: one has committed what the restore would undo and cannot, or cannot be asked, unless forced.
    """
    for found in facts:
        ids = ", ".join(map(str, found.behind))
        behind = f"the epochs of checkpoints {ids}, after that one," if ids else "rows after that one"
        name = f"{found.sink}{found.where}"
        if found.taken_over:
            yield KeepSink((found.sink,), f"{found.gone}: what it has sent stays")
            continue
        if found.gone:
            if not force:
                raise Refused(
                    f"sink {name}: {found.gone}; what it has sent is not known, and an older run could go on "
                    f"sending. If it is gone for good say {forced_by(Force.OUTSIDE)}"
                )
            yield KeepSink((found.sink,), f"{found.gone}: what it has sent stays, and it is not fenced")
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
                f"{_ways_out(found)}say {forced_by(Force.OUTSIDE)}: then they stay there, what is computed "
                "again is sent again, to be appended a second time or to replace rows of the same key"
            )
        kept = bool(found.why_not)
        yield ReturnOutside(found.sink, found.back, found.behind, kept, spark_table=found.spark_table)


def _ways_out(found: OutsideFacts) -> str:
    """Name a checkpoint after which nothing was sent, if one is known to be."""
    if found.mark is None or found.between:
        return "Start the job without going back, or go back to a later checkpoint, which keeps them; or "
    return f"Go back to checkpoint {found.mark.checkpoint} or a later one, or "


def carry_out_outside(
    step: FenceOutside | ReturnOutside,
    root: Root,
    state: ControlState,
    run: RunId,
    own: Own,
    session: Callable[[], SparkSession],
) -> None:
    """Fence a sink, or bring it back. Both may be repeated.

    Raises:
        Refused: it has committed more since it was planned, which cannot be taken back.
        SinkUnreachable: it cannot be reached now.
    """
    record = next(r for r in state.outside if r.sink == step.sink)
    sink = sink_of(record, own, root, session)
    if sink is None:
        raise Refused(f"sink {step.sink!r} was given when the restore was planned, and is not any more")
    owner = Owner(state.root, state.job, step.sink, run)
    try:
        sink.recover(owner)
        found = sink.mark(owner)
        if isinstance(step, ReturnOutside):
            if found is not None and found != step.back:
                sink.abort(owner, step.back, keep=step.keep)
            return
        path = channel_path(state, channel_id(record.stage, record.output))
        if found is None or step.returns or outside.is_on(path, found):
            return
        if (found.checkpoint, found.version) != (step.sent, step.version or found.version):
            again = way("call restore again", "give the command again")
            raise Refused(
                f"sink {step.sink!r} has committed rows up to checkpoint {found.checkpoint} and entry "
                f"{found.version} since the restore was planned: {again}"
            )
    finally:
        sink.close()
