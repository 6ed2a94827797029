"""Compare a declared job with the recorded job: stages continue, begin, or are refused.

Inputs, outputs and operators are matched by name, never by position. Pure: `compatibility` collects the
records and carries out the result; `check` only shows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from spark_abs.manifest import CHANNEL, SourceShape, StageShape
from spark_abs.model import NO_BATCH, ChannelId, Position, StageId
from spark_abs.protocol.attempt import Start
from spark_abs.protocol.changes import (
    LEAVE,
    Begin,
    Comparison,
    Layout,
    Recorded,
    StageChange,
    StageProgress,
    UnderWay,
    Verdict,
    first_position,
    less_read,
    newly_read,
)
from spark_abs.protocol.moved_sinks import moved_sinks
from spark_abs.protocol.sources import match, more_than_once, recorded_sources, turned, unclear
from spark_abs.protocol.state_compatibility import state_reasons

_UNCHANGED = "the unchanged job"
"""Every reason that asks to run the job before its change contains these words."""
REBUILD_FIRST = "start the unchanged job, which rebuilds the stage, then change it; or restore a checkpoint"
_ONCE = "start the unchanged job once, so that it finishes this batch, stop the job, then change it"


def compare(
    recorded: Recorded,
    declared: Sequence[StageShape],
    *,
    begin: Mapping[StageId, Begin] | None = None,
    leave: bool = False,
) -> Comparison:
    """Compare the declared job with the recorded one, stage by stage.

    Args:
        recorded: the records of the root; empty for a new root.
        declared: the stages as they are declared, sources in the order of their plans.
        begin: where stages begin in channels that they did not read before; the default is the cut. If
            another stage stops reading the channel in the same change, the new reader begins at that stage's
            position.
        leave: whether state, positions and unread rows may be left behind.
    """
    return _Comparing(recorded, declared, begin or {}, leave).run()


class _Comparing:
    """One comparison. `_given_up` has the positions of stages in channels that they no longer read."""

    def __init__(
        self,
        recorded: Recorded,
        declared: Sequence[StageShape],
        begin: Mapping[StageId, Begin],
        leave: bool,
    ) -> None:
        lacking = {c for reached in recorded.progress.values() for c in reached.lacks}
        self._recorded = replace(
            recorded, unread=lambda position: recorded.unread(position) + (position.channel in lacking)
        )
        self._declared, self._begin, self._leave = declared, begin, leave
        self._reads = {s.stage: [x.name for x in s.sources if x.kind == CHANNEL] for s in declared}
        self._given_up: dict[ChannelId, dict[StageId, Position]] = {}
        for stage, reached in recorded.progress.items():
            for position in reached.positions:
                if position.channel not in self._reads.get(stage, ()):
                    known = self._given_up.setdefault(position.channel, {}).get(stage, position)
                    self._given_up[position.channel][stage] = min(known, position, key=lambda p: p.version)

    def run(self) -> Comparison:
        """Compare stage by stage, then over all stages."""
        changes = [self._stage(shape) for shape in self._declared]
        names = {shape.stage for shape in self._declared}
        if all(change.verdict is not Verdict.REFUSED for change in changes):
            changes = self._with_moved_sinks(changes)
        changes += [self._left(s.stage) for s in self._recorded.shapes if s.stage not in names]
        return Comparison(
            self._recorded.where,
            tuple(map(self._with_way_back, changes)),
            drops_sinks=bool(_sinks(self._recorded.shapes) - _sinks(self._declared)),
        )

    def _with_way_back(self, change: StageChange) -> StageChange:
        """Add a remedy for a failing batch to reasons that ask for a start of the unchanged job."""
        open_ = [
            f"batch {reached.finished + 1} of stage {stage!r}"
            for stage, reached in sorted(self._recorded.progress.items())
            if reached.under_way is not UnderWay.NOTHING
        ]
        if not open_ or change.verdict is not Verdict.REFUSED:
            return change
        way = (
            f"; if the unchanged job fails each time in its repeated batch ({', '.join(open_)}), start the "
            "changed job with restart='checkpoint', which goes back to before this batch"
        )
        reasons = (reason + way if _UNCHANGED in reason else reason for reason in change.notes)
        return replace(change, notes=tuple(reasons))

    def _with_moved_sinks(self, changes: Sequence[StageChange]) -> list[StageChange]:
        reasons: dict[StageId, tuple[str, ...]] = {}
        for stage, reason in moved_sinks(self._recorded, self._declared, changes):
            reasons[stage] = (*reasons.get(stage, ()), reason)
        return [
            StageChange(c.stage, Verdict.REFUSED, reasons[c.stage]) if c.stage in reasons else c
            for c in changes
        ]

    def _stage(self, shape: StageShape) -> StageChange:
        reached = self._recorded.progress.get(shape.stage)
        if reached is None:
            return self._new(shape)
        before = self._recorded.shape(shape.stage)
        names = recorded_sources(before, reached)
        places = match(names, shape.sources)
        sources, notes, reasons = self._sources(shape, reached, names, places)
        reasons = [*state_reasons(before, shape, reached), *unclear(names, shape.sources, places), *reasons]
        in_order = places == list(range(len(reached.sources)))
        same = in_order and not turned(shape, reached, places)
        batch_reasons, ends = _batch(before, shape, reached, same, self._begun() & set(reached.lacks))
        reasons += batch_reasons
        if reached.lost and not same:
            reasons.append(f"its inputs have changed, and its native checkpoint is lost: {REBUILD_FIRST}")
        if not same and (again := more_than_once(names) or more_than_once(shape.sources)):
            reasons.append(
                f"it reads {again} more than once, and its inputs have changed: Spark's files do not tell "
                f"the positions of equal sources apart; declare the inputs as before, or read {again} in a "
                "separate source"
            )
        if reasons:
            return StageChange(shape.stage, Verdict.REFUSED, tuple(reasons))
        if not in_order and sorted(p for p in places if p is not None) == list(range(len(places))):
            notes.append(f"the order of inputs has changed: {_listed(shape.sources)}")
        notes += _said(before, shape)
        begun = reached.finished != NO_BATCH or ends  # its offset file says where it stands
        starts = () if begun else _starts(shape, reached, places, sources)
        layout = Layout(tuple(sources)) if not same else None
        return StageChange(
            shape.stage, Verdict.KEPT, notes=tuple(notes), starts=starts, layout=layout, ends_batch=ends
        )

    def _sources(
        self,
        shape: StageShape,
        reached: StageProgress,
        names: Sequence[SourceShape],
        places: Sequence[int | None],
    ) -> tuple[list[int | Position | None], list[str], list[str]]:
        """Return the layout of a stage's sources, the notes, and the reasons against a start."""
        sources: list[int | Position | None] = list(places)
        notes: list[str] = []
        reasons: list[str] = []
        for place in (i for i in range(len(reached.sources)) if i not in places):
            reason, note = self._gone(reached.sources[place], names[place])
            reasons += reason
            notes += note
        other_way = turned(shape, reached, places)
        for i, source in enumerate(shape.sources):
            if i in other_way:
                sources[i] = other_way[i]
                notes.append(f"{source} closes {'a' if source.feedback else 'no'} loop now")
            elif places[i] is None and source.kind != CHANNEL:
                notes.append(f"{source} is new and starts where its options say")
            elif places[i] is None:
                sources[i], said = self._begins(shape.stage, source)
                (reasons if sources[i] is None else notes).extend(said)
        return sources, notes, reasons

    def _new(self, shape: StageShape) -> StageChange:
        if shape.stage in self._recorded.left:
            return StageChange(
                shape.stage,
                Verdict.REFUSED,
                (
                    "an earlier start removed this stage with its positions and state: declare the stage "
                    "under a new name, so that it begins anew, or restore a checkpoint that has it",
                ),
            )
        starts, notes, reasons = [], [], []
        for source in shape.sources:
            if source.kind != CHANNEL:
                notes.append(f"{source} starts where its options say")
                continue
            position, said = self._begins(shape.stage, source)
            if position is None:
                reasons += said
            else:
                starts.append(Start(shape.stage, position))
                notes += said
        if reasons:
            return StageChange(shape.stage, Verdict.REFUSED, tuple(reasons))
        return StageChange(shape.stage, Verdict.NEW, tuple(notes), tuple(starts))

    def _left(self, stage: StageId) -> StageChange:
        reached = self._recorded.progress.get(stage, StageProgress())
        if reached.under_way is UnderWay.TORN:
            said = (
                f"batch {reached.finished + 1} is unfinished, and only some of the stage's outputs hold it: "
                f"{_ONCE}"
            )
            return StageChange(stage, Verdict.REFUSED, (said,))
        begun = reached.ended != NO_BATCH
        held = ["state"] if reached.stateful and begun else []
        held += ["positions in its sources"] if begun and None in reached.sources else []
        held += [
            f"{n} unread entries of channel {p.channel}"
            for p in less_read(reached, None)
            if p.channel not in self._taken_over() and (n := self._recorded.unread(p))
        ]
        if held and not self._leave:
            said = (
                f"the job no longer declares this stage, and {self._recorded.where} has its "
                f"{' and '.join(held)}: declare the stage under its old name, or leave these behind: {LEAVE}"
            )
            return StageChange(stage, Verdict.REFUSED, (said,))
        what = f"leaves behind {' and '.join(held)}" if held else "no needed data is lost"
        return StageChange(stage, Verdict.LEFT, (what,), ends_batch=reached.under_way is UnderWay.NAMED)

    def _gone(self, position: Position | None, source: SourceShape) -> tuple[list[str], list[str]]:
        """Return why a source cannot be removed, or a note if it can."""
        if position is None:
            if self._leave:
                return [], [f"{source} was removed, its position is left behind"]
            return [
                (
                    f"{source} was removed; adding it back later would read it from its start again: declare "
                    f"the source as before, or leave its position behind: {LEAVE}"
                )
            ], []
        if position.channel in self._taken_over():
            return [], [f"another stage reads channel {position.channel} from this position on"]
        unread = self._recorded.unread(position)
        if unread and not self._leave:
            return [
                (
                    f"no stage reads channel {position.channel} any more, and {unread} of its entries are "
                    "unread: start the unchanged job and stop it with a savepoint, so that no entry stays "
                    "unread; or let another stage read the channel, which begins at this position; or leave "
                    f"the entries behind: {LEAVE}"
                )
            ], []
        said = f"no stage reads channel {position.channel} any more"
        return [], [f"{said}; {unread} entries stay unread" if unread else said]

    def _taken_over(self) -> set[ChannelId]:
        """Return the channels that a stage begins to read while another stage stops reading them."""
        return self._begun() & self._given_up.keys()

    def _begun(self) -> set[ChannelId]:
        """Return the channels that a stage begins to read."""
        begun: set[ChannelId] = set()
        for shape in self._declared:
            begun |= newly_read(shape, self._recorded.progress.get(shape.stage, StageProgress()))
        return begun

    def _begins(self, stage: StageId, source: SourceShape) -> tuple[Position | None, list[str]]:
        """Return where a stage begins in a channel, with a note; None if it cannot begin."""
        channel = ChannelId(source.name)
        reached = self._recorded.progress.get(stage, StageProgress())
        own = [p for p in reached.positions if p.channel == channel]
        if own:  # a second reading of the channel: the two have one first position
            position = min(own, key=lambda p: p.version)
            return position, [f"reads channel {channel} a further time, from after entry {position.version}"]
        asked = self._begin.get(stage, "cut")
        given = self._given_up.get(channel, {})
        if given and asked == "cut":
            versions = {p.version for p in given.values()}
            if len(versions) > 1:
                stood = ", ".join(f"{s!r} after entry {p.version}" for s, p in sorted(given.items()))
                return None, [
                    (
                        f"several stages stop reading channel {channel} at different entries ({stood}), and "
                        "a new reader can start at only one entry: stop the unchanged job with a savepoint "
                        "first, then all readers are at the same entry"
                    )
                ]
            position = replace(next(iter(given.values())), feedback=source.feedback)
            (who, *_) = given
            return position, [
                f"begins channel {channel} after entry {position.version}, the position of {who!r}"
            ]
        if channel not in self._recorded.ends:
            return first_position(channel, source.feedback), []
        at = self._recorded.earliest if asked == "earliest" else self._recorded.ends
        first = first_position(channel, source.feedback)
        position = replace(first, version=at[channel], epoch=self._recorded.epoch)
        said = "the earliest that is kept" if asked == "earliest" else "the current cut"
        return position, [f"begins channel {channel} after entry {position.version}, {said}"]


def _starts(
    shape: StageShape,
    reached: StageProgress,
    places: Sequence[int | None],
    sources: Sequence[int | Position | None],
) -> tuple[Start, ...]:
    """Return where a stage without a finished batch begins in its channels."""
    begins = replace(reached, sources=reached.first or reached.sources)
    other_way = turned(shape, begins, places)
    first = [begins.sources[s] if isinstance(s, int) else s for s in sources]
    first = [other_way.get(i, position) for i, position in enumerate(first)]
    return tuple(Start(shape.stage, position) for position in first if position is not None)


def _batch(
    before: StageShape | None,
    shape: StageShape,
    reached: StageProgress,
    same: bool,
    begun: Collection[ChannelId],
) -> tuple[list[str], bool]:
    """Say whether the unfinished batch must be recorded as finished, or why it prevents the start.

    `begun` are channels that lack the batch and that another stage begins to read: the new reader begins
    after this batch.
    """
    changed = not same or (before is not None and not _same_outputs(before, shape))
    differ = "its inputs or outputs differ" if changed else f"{_listed(sorted(begun))} gets a new reader"
    changed = changed or bool(begun)
    if not changed or reached.under_way is UnderWay.NOTHING:
        return [], False
    if reached.under_way is UnderWay.PLANNED and not reached.calls_functions:
        return [], False
    if reached.under_way.decided and not (reached.stateful or reached.calls_functions):
        return [], True
    number = reached.finished + 1
    what = {
        UnderWay.PLANNED: "its sink functions may have seen",
        UnderWay.WRITTEN: "its outputs hold",
        UnderWay.TORN: "some of its outputs hold",
        UnderWay.NAMED: "some of its outputs hold",
    }[reached.under_way]
    return [f"{differ} while batch {number} is unfinished, which {what}: {_ONCE}"], False


def _same_outputs(before: StageShape, shape: StageShape) -> bool:
    def places(of: StageShape) -> tuple[set[str], set[tuple[str, str]]]:
        sinks = {(output, of.tables.get(sink, sink)) for sink, output in of.sinks.items()}
        return set(of.channels), sinks

    return not before.sources or places(before) == places(shape)


def _said(before: StageShape | None, shape: StageShape) -> Iterator[str]:
    """Iterate the notes on other differences, which do not affect recorded data."""
    if before is None:
        return
    yield from _lookups_said(before, shape)
    for sink in sorted(shape.sinks.keys() - before.sinks.keys()):
        table = shape.tables.get(sink)
        renamed = [s for s, t in before.tables.items() if t == table and s not in shape.sinks]
        yield f"sink {sink} was {renamed[0]}" if renamed else f"sink {sink} begins with the next batch"
    for sink in sorted(before.sinks.keys() - shape.sinks.keys()):
        if before.tables.get(sink) not in shape.tables.values() or sink not in before.tables:
            yield f"sink {sink} is no longer written"
    for sink in sorted(before.sinks.keys() & shape.sinks.keys()):
        if before.sinks[sink] != shape.sinks[sink]:
            yield f"sink {sink} now writes output {shape.sinks[sink]}, before {before.sinks[sink]}"


def _lookups_said(before: StageShape, shape: StageShape) -> Iterator[str]:
    for lookup in sorted(shape.lookups.keys() - before.lookups.keys()):
        was = [n for n, t in before.lookups.items() if t == shape.lookups[lookup] and n not in shape.lookups]
        said = f"was {was[0]}, and " if was else ""
        yield f"lookup {lookup} {said}is read at the newest version from the next batch on"
    for lookup in sorted(before.lookups.keys() - shape.lookups.keys()):
        yield f"lookup {lookup} is no longer read"
    for lookup in sorted(before.lookups.keys() & shape.lookups.keys()):
        if before.lookups[lookup] != shape.lookups[lookup]:
            yield f"lookup {lookup} is now {shape.lookups[lookup]}, before {before.lookups[lookup]}"


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


def _sinks(shapes: Iterable[StageShape]) -> set[tuple[StageId, str, str]]:
    """Return the sinks of stages, each with its table."""
    return {(shape.stage, sink, shape.tables.get(sink, "")) for shape in shapes for sink in shape.sinks}
