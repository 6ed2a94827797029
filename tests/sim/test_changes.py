"""Seeded runs of a job that is declared otherwise at its starts; `simulate_changes(seed)` shows one again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from spark_abs.manifest import CHANNEL
from spark_abs.model import (
    NO_BATCH,
    AttemptId,
    ChannelId,
    Position,
    StageId,
    Version,
    app_id,
)
from spark_abs.protocol.attempt import Start
from spark_abs.protocol.changes import (
    Comparison,
    Layout,
    Recorded,
    StageChange,
    StageProgress,
    UnderWay,
    Verdict,
)
from spark_abs.protocol.compare import compare
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.stage_progress import under_way
from tests.invariants import InvariantViolated
from tests.simulator.changing import main, simulate_changes, simulate_two_roots
from tests.simulator.cluster import Checkpoint
from tests.simulator.parts import Parts, Sinks

SEEDS = range(150)
TWO_ROOTS = range(40)
OF_DEFECTS = (*SEEDS, *range(500, 570))


@pytest.mark.parametrize("block", range(3))
def test_a_job_that_changes_goes_on_exactly_once(block: int) -> None:
    """Any change, any end of the run before, restores to checkpoints from before changes and from behind."""
    seen = sum((simulate_changes(seed) for seed in SEEDS[block * 50 : (block + 1) * 50]), Counter[str]())
    changes = {"swapped", "input added", "input dropped", "rewired", "put after", "put between", "taken out"}
    changes |= {"split", "merged", "renamed", "left out", "sink renamed", "sink moved", "sink added", "again"}
    wanted = {f"started: {name}" for name in changes}
    wanted |= {
        "ended by kill",
        "ended by stop",
        "ended by a savepoint",
        "ended by freeze",
        "killed before it ran",
    }
    wanted |= {"refused: input dropped", "refused: state added or lost", "restores", "channels trimmed"}
    wanted |= {"batches ended", "drivers fenced"}
    assert wanted - seen.keys() == set()


def test_two_roots_that_write_the_same_tables_go_on_exactly_once() -> None:
    seen = sum((simulate_two_roots(seed) for seed in TWO_ROOTS), Counter[str]())
    assert {"restores", "started: sink moved"} - seen.keys() == set()


def test_a_seed_is_the_whole_run() -> None:
    assert simulate_changes(7) == simulate_changes(7)


def test_the_command_tells_what_it_saw() -> None:
    result = CliRunner().invoke(main, ["--runs", "1", "--roots", "2"])
    assert "no violation" in result.output


# -- what is broken on purpose has to be found


def positions_by_place(recorded: Recorded, declared: Any, **more: Any) -> Comparison:
    """Hand the offset at each place to the gate that is there now, whatever it reads."""
    found = compare(recorded, declared, **more)
    shapes = {shape.stage: shape for shape in declared}

    def by_place(change: StageChange) -> StageChange:
        if change.layout is None:
            return change
        stands = recorded.progress[change.stage].sources
        sources: list[int | Position | None] = []
        for place, (source, right) in enumerate(
            zip(shapes[change.stage].sources, change.layout.sources, strict=True)
        ):
            here = stands[place] if place < len(stands) else None
            if source.kind == CHANNEL and here is not None:
                sources.append(replace(here, channel=ChannelId(source.name)))
            else:
                sources.append(right)
        return replace(change, layout=Layout(tuple(sources)))

    return replace(found, stages=tuple(map(by_place, found.stages)))


def begins_new_readers(
    recorded: Recorded, declared: Any, where: Callable[[Position], Version], **more: Any
) -> Comparison:
    """Let channels that a stage did not read before begin elsewhere."""
    found = compare(recorded, declared, **more)

    def moved(stage: StageId, position: Position) -> Position:
        had = recorded.progress.get(stage, StageProgress()).positions
        if position.channel in {p.channel for p in had} or position.channel not in recorded.ends:
            return position
        return replace(position, version=where(position))

    def changed(change: StageChange) -> StageChange:
        starts = tuple(Start(change.stage, moved(change.stage, s.position)) for s in change.starts)
        layout = change.layout
        if layout is not None:
            sources = (moved(change.stage, s) if isinstance(s, Position) else s for s in layout.sources)
            layout = Layout(tuple(sources))
        return replace(change, starts=starts, layout=layout)

    return replace(found, stages=tuple(map(changed, found.stages)))


def at_entry_0(recorded: Recorded, declared: Any, **more: Any) -> Comparison:
    return begins_new_readers(recorded, declared, lambda _: Version(0), **more)


def at_the_producers_end(recorded: Recorded, declared: Any, **more: Any) -> Comparison:
    """Hand nothing over: a stage that is put between two begins like any new reader."""
    return begins_new_readers(recorded, declared, lambda position: recorded.ends[position.channel], **more)


def torn_is_unwritten(*facts: Any) -> UnderWay:
    found = under_way(*facts)
    return UnderWay.PLANNED if found is UnderWay.TORN else found


def torn_is_written(*facts: Any) -> UnderWay:
    found = under_way(*facts)
    return UnderWay.WRITTEN if found is UnderWay.TORN else found


def written_is_unwritten(*facts: Any) -> UnderWay:
    found = under_way(*facts)
    return UnderWay.PLANNED if found is UnderWay.WRITTEN else found


def recomputed(recorded: Recorded, declared: Any, **more: Any) -> Comparison:
    """Find out anew at each start where readers begin that have finished no batch."""
    found = compare(recorded, declared, **more)
    before = {shape.stage for shape in recorded.shapes}

    def anew(change: StageChange) -> StageChange:
        if change.verdict is not Verdict.KEPT or change.stage not in before:
            return change
        starts = (
            Start(
                s.stage,
                replace(s.position, version=recorded.ends.get(s.position.channel, s.position.version)),
            )
            for s in change.starts
        )
        return replace(change, starts=tuple(starts))

    return replace(found, stages=tuple(map(anew, found.stages)))


def begins_behind_its_first_batch(recorded: Recorded, declared: Any, **more: Any) -> Comparison:
    """Take where the offset file of a first batch has a stage for where it begins."""
    progress = {stage: replace(reached, first=()) for stage, reached in recorded.progress.items()}
    return compare(replace(recorded, progress=progress), declared, **more)


def without_root(state: ControlState, attempt: AttemptId, stage: StageId, sink: str) -> str:
    return app_id(state.job, stage, sink, attempt)


def by_sink(checkpoint: Checkpoint, table: str, sinks: Sinks) -> Version | None:
    """Bring a table back for the sink that writes it now, to where the checkpoint has that sink."""
    *_, newest = sinks
    found = [
        output.version
        for snapshot in checkpoint.snapshots
        for output in snapshot.outputs
        if (snapshot.stage, output.output) == newest and output.table == table
    ]
    return found[0] if found else None


def at_entry_0_once_more(recorded: Recorded, declared: Any, **more: Any) -> Comparison:
    """Let a second reading of a channel begin at its first entry."""
    found = compare(recorded, declared, **more)

    def changed(change: StageChange) -> StageChange:
        had = {p.channel for p in recorded.progress.get(change.stage, StageProgress()).positions}
        if change.layout is None:
            return change
        sources = (
            replace(s, version=Version(0)) if isinstance(s, Position) and s.channel in had else s
            for s in change.layout.sources
        )
        return replace(change, layout=Layout(tuple(sources)))

    return replace(found, stages=tuple(map(changed, found.stages)))


def unbegun_stays(recorded: Recorded, declared: Any, **more: Any) -> Comparison:
    """Let a stage that has run no batch go on in its directory, whatever it reads now."""
    found = compare(recorded, declared, **more)
    unbegun = {
        stage
        for stage, reached in recorded.progress.items()
        if reached.finished == NO_BATCH and reached.under_way is UnderWay.NOTHING
    }
    stages = (replace(c, layout=None) if c.stage in unbegun else c for c in found.stages)
    return replace(found, stages=tuple(stages))


class Unfenced(Comparison):
    """A comparison on which nothing is fenced before it is carried out."""

    rests_on_outputs = False


def unfenced(recorded: Recorded, declared: Any, **more: Any) -> Comparison:
    found = compare(recorded, declared, **more)
    return Unfenced(found.where, found.stages)


def dropped_sinks_are_not_fenced(recorded: Recorded, declared: Any, **more: Any) -> Comparison:
    return replace(compare(recorded, declared, **more), drops_sinks=False)


def unread_is_nothing(recorded: Recorded, declared: Any, **more: Any) -> Comparison:
    return compare(replace(recorded, unread=lambda _: 0), declared, **more)


def violated(parts: Parts, simulate: Callable[[int, Parts], object], seeds: Sequence[int]) -> bool:
    for seed in seeds:
        try:
            simulate(seed, parts)
        except InvariantViolated:
            return True
    return False


DEFECTS = {
    "positions by place": Parts(compare=positions_by_place),
    "a new reader begins at the first entry": Parts(compare=at_entry_0),
    "a stage put between two begins at the end of the producer": Parts(compare=at_the_producers_end),
    "a batch that some outputs hold counts as unwritten": Parts(under_way=torn_is_unwritten),
    "a batch that some outputs hold counts as written": Parts(under_way=torn_is_written),
    "a batch that all outputs hold counts as unwritten": Parts(under_way=written_is_unwritten),
    "first positions are not recorded": Parts(compare=recomputed),
    "a first batch is repeated from its end": Parts(compare=begins_behind_its_first_batch),
    "a second reading of a channel begins at its first entry": Parts(compare=at_entry_0_once_more),
    "a stage without a batch keeps its directory": Parts(compare=unbegun_stays),
    "older runs are not fenced before the comparison": Parts(compare=unfenced),
    "the table of a sink that leaves is not fenced": Parts(compare=dropped_sinks_are_not_fenced),
    "unread rows are given up": Parts(compare=unread_is_nothing),
    "tables are brought back by sink": Parts(table_version=by_sink),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(defect: str) -> None:
    assert violated(DEFECTS[defect], simulate_changes, OF_DEFECTS)


def test_a_sink_that_moves_over_unread_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_abs.protocol.compare.moved_sinks", lambda *_: ())
    assert violated(Parts(), simulate_changes, SEEDS)


def test_ids_that_do_not_name_the_root_are_found() -> None:
    """Two roots that run jobs of one name: what one has committed the other takes for its own."""
    assert violated(Parts(sink_app=without_root), simulate_two_roots, TWO_ROOTS)
