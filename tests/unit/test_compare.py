"""A declared job against a recorded one: the verdict on every kind of change, and where readers begin."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from spark_abs.manifest import CHANNEL, OperatorShape, SourceShape, StageShape
from spark_abs.model import (
    NO_BATCH,
    AttemptId,
    BatchId,
    ChannelId,
    CheckpointId,
    Entry,
    Position,
    StageId,
    Version,
)
from spark_abs.protocol.changes import (
    Comparison,
    Recorded,
    StageChange,
    StageProgress,
    UnderWay,
    Verdict,
    first_position,
    less_read,
    newly_read,
)
from spark_abs.protocol.compare import compare
from spark_abs.protocol.stage_progress import current_cut, whole_after

FILES = SourceShape("json", "/in")
COUNT = OperatorShape("Aggregate", ("by k bigint", "count(1)"))


def at(channel: str, version: int) -> Position:
    return Position(ChannelId(channel), AttemptId(1), Version(version), CheckpointId(3))


def reading(channel: str) -> SourceShape:
    return SourceShape(CHANNEL, channel)


def shape(name: str, *sources: SourceShape, **more: Any) -> StageShape:
    inputs = tuple(s.name for s in sources if s.kind == CHANNEL)
    found = StageShape(StageId(name), inputs, {}, {}, {}, sources=sources, output_mode="append")
    return replace(found, **more)


def progress(*sources: Position | None, finished: int = 4, **more: Any) -> StageProgress:
    return replace(StageProgress(sources, BatchId(finished)), **more)


A, B = shape("a", FILES), shape("b", reading("a.main"))
STANDS = {StageId("a"): progress(None), StageId("b"): progress(at("a.main", 7))}
SEEN = Recorded(
    "the last run",
    (A, B),
    STANDS,
    ends={ChannelId("a.main"): Version(9), ChannelId("b.main"): Version(5)},
    earliest={ChannelId("a.main"): Version(2)},
    epoch=CheckpointId(6),
)


def verdicts(found: Comparison) -> dict[str, str]:
    return {str(s.stage): s.verdict.value for s in found.stages}


def of(found: Comparison, stage: str) -> StageChange:
    (one,) = [s for s in found.stages if s.stage == stage]
    return one


def starts(found: Comparison, stage: str) -> dict[str, int]:
    return {str(s.position.channel): int(s.position.version) for s in of(found, stage).starts}


def test_a_new_root_begins_everything_at_the_first_entry() -> None:
    found = compare(Recorded("the last run"), (A, B))
    assert verdicts(found) == {"a": "new", "b": "new"}
    assert of(found, "b").starts[0].position == first_position(ChannelId("a.main"))


def test_an_unchanged_job_goes_on_and_nothing_is_written() -> None:
    found = compare(SEEN, (A, B))
    assert [s for s in found.stages if s.layout or s.starts or s.notes or s.ends_batch] == []
    assert verdicts(found) == {"a": "kept", "b": "kept"}


def test_inputs_in_another_order_keep_their_positions() -> None:
    x, y = at("x.main", 3), at("y.main", 8)
    before = shape("u", reading("x.main"), reading("y.main"))
    seen = Recorded("the last run", (before,), {StageId("u"): progress(x, y)})
    found = compare(seen, (shape("u", reading("y.main"), reading("x.main")),))
    change = of(found, "u")
    assert (change.verdict, change.layout and change.layout.sources) == (Verdict.KEPT, (1, 0))


def test_a_channel_read_twice_keeps_both_positions() -> None:
    before = shape("u", reading("x.main"), reading("x.main"))
    seen = Recorded("the last run", (before,), {StageId("u"): progress(at("x.main", 3), at("x.main", 8))})
    assert of(compare(seen, (before,)), "u").layout is None


def test_a_native_source_read_twice_stays_as_it_is_or_is_refused() -> None:
    """Spark keeps its files once, and its position twice."""
    before = shape("u", FILES, FILES, reading("x.main"))
    stands = {StageId("u"): progress(None, None, at("x.main", 3))}
    seen = Recorded("the last run", (before,), stands)
    assert of(compare(seen, (before,)), "u").layout is None
    moved = of(compare(seen, (shape("u", reading("x.main"), FILES, FILES),)), "u")
    assert moved.verdict is Verdict.REFUSED
    assert "it reads json source /in more than once, and its inputs have changed" in moved.notes[0]


def test_a_new_reader_begins_at_the_cut_or_with_the_earliest() -> None:
    other = shape("c", reading("a.main"))
    assert starts(compare(SEEN, (A, B, other)), "c") == {"a.main": 9}
    found = compare(SEEN, (A, B, other), begin={StageId("c"): "earliest"})
    assert starts(found, "c") == {"a.main": 2}
    assert of(found, "c").starts[0].position.epoch == 6


def test_a_stage_put_between_two_begins_where_the_one_behind_it_stood() -> None:
    between, behind = shape("m", reading("a.main")), shape("b", reading("m.main"))
    found = compare(replace(SEEN, unread=lambda _: 2), (A, between, behind))
    assert verdicts(found) == {"a": "kept", "m": "new", "b": "kept"}
    assert starts(found, "m") == {"a.main": 7}
    layout = of(found, "b").layout
    assert layout is not None
    assert layout.sources == (first_position(ChannelId("m.main")),)


def test_readers_that_stood_at_different_places_hand_nothing_over() -> None:
    other = shape("c", reading("a.main"))
    stands = {**STANDS, StageId("c"): progress(at("a.main", 8))}
    seen = replace(SEEN, shapes=(A, B, other), progress=stands)
    both = shape("d", reading("a.main"))
    found = compare(seen, (A, both))
    assert "'b' after entry 7, 'c' after entry 8" in of(found, "d").notes[0]
    same = replace(seen, progress={**stands, StageId("c"): progress(at("a.main", 7))})
    assert starts(compare(same, (A, both)), "d") == {"a.main": 7}


def test_an_input_with_unread_rows_is_not_given_up_unasked() -> None:
    seen = replace(SEEN, unread=lambda _: 2)
    rewired = (A, shape("b", reading("a.valid")))
    found = compare(seen, rewired)
    assert "2 of its entries are unread" in of(found, "b").notes[0]
    assert compare(seen, rewired, leave=True).ok
    assert compare(SEEN, rewired).ok, "nothing is unread"


def test_a_channel_that_is_read_once_more_is_read_from_where_the_stage_stands() -> None:
    twice = shape("b", reading("a.main"), reading("a.main"))
    layout = of(compare(SEEN, (A, twice)), "b").layout
    assert layout is not None
    assert layout.sources == (0, at("a.main", 7))
    fresh = {**STANDS, StageId("b"): progress(at("a.main", 3), finished=NO_BATCH)}
    assert starts(compare(replace(SEEN, progress=fresh), (A, twice)), "b") == {"a.main": 3}


def test_a_channel_that_is_read_once_less_is_read_to_its_end_before() -> None:
    slow, fast = at("a.main", 3), at("a.main", 7)
    assert less_read(progress(slow, fast), B) == (slow,)
    assert less_read(progress(fast, at("c.main", 1)), shape("b", reading("a.main"))) == (at("c.main", 1),)
    assert less_read(progress(fast), None) == (fast,)
    assert newly_read(shape("b", reading("a.main"), reading("c.main")), progress(fast)) == {"c.main"}


def entries(*batches: int) -> list[Entry | None]:
    found = [Entry(Version(n), AttemptId(1), batch=BatchId(b)) for n, b in enumerate(batches, 1)]
    return [*reversed(found), None]


def test_the_current_cut_is_behind_every_batch_that_all_outputs_hold() -> None:
    ends = [current_cut(entries(0, 1, -1, 2), Version(4), BatchId(b), AttemptId(1)) for b in (0, 1, 2)]
    assert ends == [1, 3, 4]
    assert current_cut(entries(0, 1), Version(2), NO_BATCH, AttemptId(2)) == 2, "of an attempt that was left"
    way = {UnderWay.WRITTEN: 5, UnderWay.TORN: 4, UnderWay.PLANNED: 4, UnderWay.NOTHING: 4}
    assert {w: progress(None, under_way=w).ended for w in way} == way, "written: only its end is not recorded"


def test_the_earliest_is_behind_the_batches_that_nobody_read() -> None:
    found = [whole_after(only(entries(*batches)), Version(len(batches)), BatchId(3)) for batches in GAPS]
    assert found == [0, 0, 2, 4, 3]


GAPS = ((0, 1, 2, 3), (2, -1, 3), (0, 1, 3), (0, 1, 2, -1), (0, 1, -1, 3, 4))
"""Batches of a channel whose producer has ended batch 3."""


def only(found: list[Entry | None]) -> list[Entry]:
    return [entry for entry in found if entry is not None]


def test_a_first_batch_that_is_repeated_begins_where_it_began() -> None:
    """Its outputs hold it and its state does not: begun after itself, its rows would be in no state."""
    first = progress(
        at("a.main", 9),
        finished=NO_BATCH,
        under_way=UnderWay.WRITTEN,
        stateful=True,
        first=(at("a.main", 3),),
    )
    seen = replace(SEEN, progress={**STANDS, StageId("b"): first})
    assert starts(compare(seen, (A, B)), "b") == {"a.main": 3}


def test_a_native_source_is_found_by_what_it_reads() -> None:
    other = SourceShape("json", "/other")
    seen = Recorded("the last run", (shape("s", FILES, other),), {StageId("s"): progress(None, None)})
    swapped = of(compare(seen, (shape("s", other, FILES),)), "s").layout
    assert swapped is not None
    assert swapped.sources == (1, 0)
    moved = compare(seen, (shape("s", FILES, SourceShape("json", "/moved")),))
    assert "json source /other was removed" in of(moved, "s").notes[0]


def test_native_sources_of_earlier_versions_are_taken_in_order() -> None:
    other = SourceShape("json", "/other")
    old = Recorded("checkpoint 3", (shape("s"),), {StageId("s"): progress(None, at("a.main", 1), None)})
    found = compare(old, (shape("s", FILES, other, reading("a.main")),))
    layout = of(found, "s").layout
    assert layout is not None
    assert layout.sources == (0, 2, 1)
    assert not compare(old, (shape("s", FILES, reading("a.main")),)).ok


def test_a_stage_that_is_gone_is_named_with_what_it_has() -> None:
    stands = {StageId("a"): progress(None), StageId("b"): progress(at("a.main", 7), stateful=True)}
    seen = replace(SEEN, progress=stands, unread=lambda _: 2)
    found = compare(seen, ())
    assert "positions in its sources" in of(found, "a").notes[0]
    assert "state and 2 unread entries of channel a.main" in of(found, "b").notes[0]
    assert verdicts(compare(seen, (), leave=True)) == {"a": "left", "b": "left"}
    never = {StageId("b"): progress(at("a.main", 0), finished=NO_BATCH)}
    assert verdicts(compare(replace(SEEN, shapes=(B,), progress=never), ())) == {"b": "left"}


def test_a_stage_that_was_left_out_does_not_come_back() -> None:
    found = compare(replace(SEEN, left=(StageId("c"),)), (A, B, shape("c", reading("a.main"))))
    assert "under a new name" in of(found, "c").notes[0]


@pytest.mark.parametrize(
    ("operators", "mode", "word"),
    [
        ((COUNT,), "append", None),
        ((), "append", "stateful operators"),
        ((replace(COUNT, parts=("by j bigint", "count(1)")),), "append", "by j bigint"),
        ((COUNT, COUNT), "append", "stateful operators"),
        ((COUNT,), "update", "output mode"),
    ],
)
def test_state_fits_its_operators(operators: tuple[OperatorShape, ...], mode: str, word: str | None) -> None:
    before = shape("b", reading("a.main"), operators=(COUNT,))
    seen = Recorded("the last run", (before,), {StageId("b"): progress(at("a.main", 7), stateful=True)})
    found = compare(seen, (replace(before, operators=operators, output_mode=mode),))
    assert found.ok == (word is None)
    assert word is None or word in of(found, "b").notes[0]


def test_the_sides_of_a_join_stay() -> None:
    join = OperatorShape("InnerJoin", ("on (id = id)",), (("channel x.main",), ("channel y.main",)))
    before = shape("j", reading("x.main"), reading("y.main"), operators=(join,))
    stands = {StageId("j"): progress(at("x.main", 3), at("y.main", 3), stateful=True)}
    seen = Recorded("the last run", (before,), stands)
    crossed = replace(join, sides=join.sides[::-1])
    assert not compare(seen, (replace(before, operators=(crossed,)),)).ok
    through = replace(join, sides=(("channel m.main",), ("channel y.main",)))
    behind = shape("j", reading("m.main"), reading("y.main"), operators=(through,))
    assert compare(seen, (shape("m", reading("x.main")), behind)).ok


CLICKS, ORDERS = "(kind = 'click')", "(kind = 'order')"
X = "channel x.main"


def joining(left: tuple[str, ...], right: tuple[str, ...]) -> StageShape:
    """Return a stage that joins two parts of a channel; the channel is on both sides."""
    apart = ((X, *left), (X, *right)) if left or right else ()
    join = OperatorShape("InnerJoin", ("on (id = id)",), ((X,), (X,)), apart=apart)
    return shape("j", reading("x.main"), reading("x.main"), operators=(join,))


@pytest.mark.parametrize(
    ("before", "now", "fits"),
    [
        (((CLICKS,), (ORDERS,)), ((CLICKS,), (ORDERS,)), True),
        (((CLICKS,), (ORDERS,)), ((ORDERS,), (CLICKS,)), False),
        (((CLICKS, "(v > 0)"), (ORDERS,)), ((ORDERS, "(v > 0)"), (CLICKS,)), False),
        (((CLICKS,), ()), ((), (CLICKS,)), False),
        (((CLICKS,), (ORDERS,)), (("(kind = 'view')",), (ORDERS,)), True),
        (((CLICKS,), (ORDERS,)), ((CLICKS, "(v > 0)"), (ORDERS, "(v > 0)")), True),
        (((CLICKS, "(v > 0)"), (ORDERS,)), ((CLICKS, "(v > 0)"), (ORDERS, "(v > 0)")), True),
        ((("(rand(1L) < v)",), ("(rand(2L) < w)",)), (("(rand(3L) < w)",), ("(rand(4L) < v)",)), False),
        ((("in@west:1",), ("in@east:1",)), (("in@east:1",), ("in@west:1",)), False),
        ((("in@west:1",), ("in@east:1",)), (("in@south:1",), ("in@east:1",)), True),
        (((), ()), ((ORDERS,), (CLICKS,)), True),  # an earlier version recorded nothing
    ],
)
def test_what_the_sides_of_a_join_are_known_by_does_not_change_sides(
    before: tuple[tuple[str, ...], ...], now: tuple[tuple[str, ...], ...], fits: bool
) -> None:
    stands = {StageId("j"): progress(at("x.main", 3), at("x.main", 3), stateful=True)}
    seen = Recorded("the last run", (joining(*before),), stands)
    assert compare(seen, (joining(*now),)).ok == fits


def test_a_refusal_shows_what_the_sides_of_a_join_are_known_by() -> None:
    stands = {StageId("j"): progress(at("x.main", 3), at("x.main", 3), stateful=True)}
    seen = Recorded("the last run", (joining((CLICKS,), (ORDERS,)),), stands)
    said = of(compare(seen, (joining((ORDERS,), (CLICKS,)),)), "j").notes[0]
    assert f"was: InnerJoin(on (id = id); left: {X}, {CLICKS}; right: {X}, {ORDERS})" in said
    assert f"now: InnerJoin(on (id = id); left: {X}, {ORDERS}; right: {X}, {CLICKS})" in said


def test_the_key_of_a_function_with_state_stays() -> None:
    def keyed(*parts: str) -> StageShape:
        operators = (OperatorShape("FlatMapGroupsInPandasWithState", parts, computed=()),)
        return shape("b", reading("a.main"), operators=operators)

    seen = replace(SEEN, shapes=(A, keyed("by user bigint")))
    assert compare(seen, (A, keyed("by user bigint"))).ok
    assert not compare(seen, (A, keyed("by item bigint"))).ok
    earlier = replace(SEEN, shapes=(A, keyed()))
    assert compare(earlier, (A, keyed("by item bigint"))).ok, "an earlier version recorded no key"


def test_a_start_as_it_was_is_not_the_only_way_where_it_repeats_a_batch() -> None:
    """A batch that fails each time is repeated by every start; a checkpoint before it is a way out."""
    seen = replace(SEEN, unread=lambda _: 2)
    changed = (A, shape("b", FILES))
    refused = of(compare(seen, changed), "b")
    assert "stop it with a savepoint" in refused.notes[0]
    assert "restart='checkpoint'" not in refused.notes[0]
    stuck = STANDS | {StageId("b"): progress(at("a.main", 7), under_way=UnderWay.PLANNED)}
    refused = of(compare(replace(seen, progress=stuck), changed), "b")
    assert "fails each time in its repeated batch (batch 5 of stage 'b')" in refused.notes[0]
    assert "restart='checkpoint'" in refused.notes[0]


def test_what_spark_keeps_by_place_stays_in_its_order() -> None:
    def summing(*functions: str) -> StageShape:
        return shape("b", reading("a.main"), operators=(COUNT,), by_place=(functions,))

    seen = replace(SEEN, shapes=(A, summing("sum(a)", "sum(b)")))
    assert compare(seen, (A, summing("sum(a)", "sum(b)"))).ok
    refused = of(compare(seen, (A, summing("sum(b)", "sum(a)"))), "b")
    assert refused.verdict is Verdict.REFUSED
    assert "was: sum(a), sum(b)\n  now: sum(b), sum(a)" in refused.notes[0]
    assert not compare(seen, (A, summing("sum(a)"))).ok
    unknown = replace(summing(), by_place=None)
    assert compare(seen, (A, unknown)).ok
    assert compare(replace(SEEN, shapes=(A, unknown)), (A, summing("sum(b)"))).ok, "of an earlier version"
    salted = [replace(SEEN, shapes=(A, summing(f"sum(rand({seed}L))"))) for seed in (1, 2)]
    assert compare(salted[0], salted[1].shapes).ok
    said = (r"'\'(v#11L > cast(1 as bigint))\' is not true!'", r"'\'(v > 1)\' is not true!'")
    asserted = [replace(SEEN, shapes=(A, summing(f"first(assert_true((v > 1), {text}))"))) for text in said]
    assert compare(asserted[0], asserted[1].shapes).ok, "a message is no part of the state"
    assert not compare(asserted[0], (A, summing(f"first(assert_true((v > 2), {said[1]}))"))).ok
    before = {**STANDS, StageId("b"): progress(at("a.main", 0), finished=NO_BATCH)}
    assert compare(replace(seen, progress=before), (A, summing("sum(b)", "sum(a)"))).ok, "it has no state"


def test_a_key_is_computed_as_it_was() -> None:
    def keyed(*computed: str, known: bool = True) -> StageShape:
        operator = replace(COUNT, computed=computed if known else None)
        return shape("b", reading("a.main"), operators=(operator,))

    seen = replace(SEEN, shapes=(A, keyed()))
    assert compare(seen, (A, keyed())).ok
    refused = of(compare(seen, (A, keyed("lower(k)"))), "b")
    assert "was: Aggregate(by k bigint; count(1))" in refused.notes[0]
    assert "now: Aggregate(by k bigint; count(1), from lower(k))" in refused.notes[0]
    assert compare(replace(SEEN, shapes=(A, keyed(known=False))), (A, keyed("lower(k)"))).ok


WEST, EAST, SOUTH = (SourceShape("kafka", "clicks", at=at) for at in ("west:9092", "east:9092", "south:9092"))


@pytest.mark.parametrize(
    ("before", "now", "layout"),
    [
        ((WEST, EAST), (WEST, EAST), None),
        ((WEST, EAST), (EAST, WEST), (1, 0)),
        ((WEST,), (EAST, WEST), (None, 0)),
        ((WEST,), (EAST,), None),
        ((WEST, EAST), (SOUTH, EAST), None),
        ((WEST, EAST), (EAST, SOUTH), (1, 0)),
        ((replace(WEST, at=""), replace(EAST, at="")), (WEST, EAST), None),
    ],
)
def test_sources_of_one_name_are_told_apart_by_their_place(
    before: tuple[SourceShape, ...], now: tuple[SourceShape, ...], layout: tuple[int | None, ...] | None
) -> None:
    stands = {StageId("s"): progress(*(None for _ in before))}
    found = of(compare(Recorded("the last run", (shape("s", *before),), stands), (shape("s", *now),)), "s")
    assert found.verdict is Verdict.KEPT, found
    assert (found.layout and found.layout.sources) == layout


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((WEST, EAST), (SOUTH, SOUTH)),
        ((WEST,), (EAST, SOUTH)),
        ((WEST, EAST), (SOUTH,)),
        ((replace(WEST, at=""),), (WEST, EAST)),
    ],
)
def test_sources_of_one_name_that_cannot_be_told_apart_are_refused(
    before: tuple[SourceShape, ...], now: tuple[SourceShape, ...]
) -> None:
    stands = {StageId("s"): progress(*(None for _ in before))}
    seen = Recorded("the last run", (shape("s", *before),), stands)
    found = of(compare(seen, (shape("s", *now),), leave=True), "s")
    assert found.verdict is Verdict.REFUSED
    assert any("it is unknown which position belongs to which source" in note for note in found.notes)


def test_a_second_source_of_the_same_files_is_refused() -> None:
    seen = Recorded("the last run", (shape("s", FILES),), {StageId("s"): progress(None)})
    (note,) = of(compare(seen, (shape("s", FILES, FILES),)), "s").notes
    assert "it reads json source /in more than once, and its inputs have changed" in note


@pytest.mark.parametrize("closes", [True, False])
def test_a_channel_that_comes_to_close_a_loop_or_ceases_to_keeps_its_place(closes: bool) -> None:
    x, y = at("x.main", 3), replace(at("y.main", 8), feedback=not closes)
    before = shape("m", reading("x.main"), replace(reading("y.main"), feedback=not closes))
    now = shape("m", reading("x.main"), replace(reading("y.main"), feedback=closes))
    seen = Recorded("the last run", (before,), {StageId("m"): progress(x, y)})
    found = of(compare(seen, (now,)), "m")
    assert found.verdict is Verdict.KEPT
    assert found.notes == (f"channel y.main closes {'a' if closes else 'no'} loop now",)
    assert found.layout is not None
    assert found.layout.sources == (0, replace(y, feedback=closes))
    begun = {StageId("m"): progress(x, y, finished=NO_BATCH)}
    first = of(compare(replace(seen, progress=begun), (now,)), "m").starts
    assert [start.position for start in first] == [x, replace(y, feedback=closes)]


@pytest.mark.parametrize(
    ("under_way", "more", "ok"),
    [
        (UnderWay.PLANNED, {}, True),
        (UnderWay.PLANNED, {"calls_functions": True}, False),
        (UnderWay.WRITTEN, {}, True),
        (UnderWay.WRITTEN, {"stateful": True}, False),
        (UnderWay.WRITTEN, {"calls_functions": True}, False),
        (UnderWay.TORN, {}, False),
        (UnderWay.NAMED, {}, True),
        (UnderWay.NAMED, {"stateful": True}, False),
    ],
)
def test_a_batch_under_way_is_settled_before_inputs_or_outputs_change(
    under_way: UnderWay, more: dict[str, Any], ok: bool
) -> None:
    outputs = shape("b", reading("a.main"), channels={"main": ""}, outputs={"main": "{}"})
    stands = {**STANDS, StageId("b"): progress(at("a.main", 7), under_way=under_way, **more)}
    seen = replace(SEEN, shapes=(A, outputs), progress=stands)
    for changed in (
        replace(outputs, channels={"main": "", "late": ""}),
        replace(outputs, sources=(reading("a.main"), reading("c.main"))),
    ):
        found = compare(seen, (A, changed))
        assert found.ok == ok, found
        assert of(found, "b").ends_batch == (ok and under_way.decided)
    assert compare(seen, (A, outputs)).ok, "an unchanged stage repeats it"


def _half_committed(**more: Any) -> Recorded:
    """Batch 5 of `a` is in `a.main`, and its first commit names what `a.late` is to get; `b` reads that."""
    a = shape("a", FILES, channels={"main": "", "late": ""}, outputs={"main": "{}", "late": "{}"})
    half = progress(None, under_way=UnderWay.NAMED, lacks=[ChannelId("a.late")], **more)
    stands = {StageId("a"): half, StageId("b"): progress(at("a.late", 7))}
    return Recorded(
        "the last run",
        (a, shape("b", reading("a.late"))),
        stands,
        ends={ChannelId("a.main"): Version(9), ChannelId("a.late"): Version(7)},
    )


def test_a_channel_is_not_given_up_before_a_batch_that_it_gets_yet() -> None:
    seen = _half_committed()
    a = seen.shapes[0]
    for now in ((a, shape("b", reading("a.main"))), (a,)):
        found = compare(seen, now)
        assert of(found, "b").verdict is Verdict.REFUSED, found
        assert "1 " in of(found, "b").notes[0]
        assert compare(seen, now, leave=True).ok
    assert compare(seen, seen.shapes).ok
    taken = compare(seen, (a, shape("b", reading("c.main")), shape("c", reading("a.late"))))
    assert starts(taken, "c") == {"a.late": 7}


def test_a_batch_is_brought_to_a_channel_before_another_stage_begins_behind_it() -> None:
    seen = _half_committed()
    now = (*seen.shapes, shape("c", reading("a.late")))
    assert of(compare(seen, now), "a").ends_batch
    assert not of(compare(seen, (*seen.shapes, shape("c", reading("a.main")))), "a").ends_batch
    refused = of(compare(_half_committed(stateful=True), now), "a")
    assert refused.verdict is Verdict.REFUSED
    assert refused.notes[0].startswith("a.late gets a new reader while batch 5 is unfinished")


def test_a_salt_that_spark_seeds_anew_is_the_same_key() -> None:
    def salted(seed: int, by: int = 4) -> StageShape:
        keys = f"by salt int = CAST((rand({seed}L) * CAST({by} AS DOUBLE)) AS INT)"
        return shape("b", reading("a.main"), operators=(OperatorShape("Aggregate", (keys, "count(1)")),))

    seen = replace(SEEN, shapes=(A, salted(-5049857701359653630)))
    assert compare(seen, (A, salted(7))).ok
    assert not compare(seen, (A, salted(7, by=5))).ok


def test_a_sink_under_another_name_is_the_same_sink() -> None:
    before = replace(B, sinks={"out": "main"}, tables={"out": "/t"})
    renamed = replace(B, sinks={"rows": "main"}, tables={"rows": "/t"})
    torn = {**STANDS, StageId("b"): progress(at("a.main", 7), under_way=UnderWay.TORN)}
    found = compare(replace(SEEN, shapes=(A, before), progress=torn), (A, renamed))
    assert found.ok
    assert of(found, "b").notes == ("sink rows was out",)


def test_a_stage_that_is_changed_and_lost_is_refused() -> None:
    stands = {**STANDS, StageId("b"): progress(at("a.main", 7), lost=True)}
    seen = replace(SEEN, progress=stands)
    assert compare(seen, (A, B)).ok, "it is rebuilt"
    assert not compare(seen, (A, shape("b", reading("a.main"), reading("c.main")))).ok


def _only(channel: str, position: Position) -> int:
    return 3 if position.channel == channel else 0


@pytest.mark.parametrize(
    ("old", "new", "where"), [("a", "c", "in the table twice"), ("c", "a", "missing from the table")]
)
def test_a_sink_moves_to_another_stage_if_nothing_between_the_two_is_unread(
    old: str, new: str, where: str
) -> None:
    """Its table has what the one stage has written; the rows on the way were written by one, or by none."""
    chain = (A, B, shape("c", reading("b.main")))
    stands = {**STANDS, StageId("c"): progress(at("b.main", 5))}

    def with_sink_at(stage: str) -> tuple[StageShape, ...]:
        sink: Any = {"sinks": {"rows": "main"}, "tables": {"rows": "/t"}}
        return tuple(replace(s, **sink) if s.stage == stage else s for s in chain)

    seen = replace(SEEN, shapes=with_sink_at(old), progress=stands)
    assert compare(seen, with_sink_at(new)).ok
    for channel in ("a.main", "b.main"):
        under_way = replace(seen, unread=partial(_only, channel))
        found = compare(under_way, with_sink_at(new), leave=True)
        assert verdicts(found)[new] == "refused"
        assert f"3 entries of channel {channel}" in of(found, new).notes[0]
        assert f"the rows of these entries would be {where}" in of(found, new).notes[0]
        assert compare(under_way, with_sink_at(old)).ok


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("old", "new", "where"), [(10, 7, "in the table twice"), (7, 10, "missing from the table"), (9, 9, None)]
)
def test_a_sink_moves_to_a_stage_beside_its_own_if_both_stand_at_the_same_entry(
    old: int, new: int, where: str | None, left: bool
) -> None:
    sink: Any = {"sinks": {"rows": "main"}, "tables": {"rows": "/t"}}
    b, c = shape("b", reading("a.main")), shape("c", reading("a.main"))
    stands = {
        StageId("a"): progress(None),
        StageId("b"): progress(at("a.main", old)),
        StageId("c"): progress(at("a.main", new)),
    }
    seen = Recorded("the last run", (A, replace(b, **sink), c), stands, unread=lambda p: 12 - p.version)
    now = (A, replace(c, **sink)) if left else (A, b, replace(c, **sink))
    found = of(compare(seen, now, leave=True), "c")
    assert (found.verdict is Verdict.KEPT) == (where is None)
    if where is not None:
        assert "only one of the two stages has read 3 entries of channel a.main" in found.notes[0]
        assert where in found.notes[0]


def test_a_sink_does_not_move_beside_its_stage_while_rows_are_on_the_way() -> None:
    """Both have read the same of the channel that they share, and one of them through a stage between."""
    sink: Any = {"sinks": {"rows": "main"}, "tables": {"rows": "/t"}}
    m, c = shape("m", reading("a.main")), shape("c", reading("m.main"))
    b = shape("b", reading("a.main"))
    stands = {**STANDS, StageId("m"): progress(at("a.main", 7)), StageId("c"): progress(at("m.main", 2))}
    seen = replace(SEEN, shapes=(A, replace(b, **sink), m, c), progress=stands)
    now = (A, b, m, replace(c, **sink))
    assert compare(seen, now).ok
    found = of(compare(replace(seen, unread=partial(_only, "m.main")), now), "c")
    assert "3 entries of channel m.main" in found.notes[0]
    assert "in the table twice" in found.notes[0]


def test_a_sink_does_not_move_behind_a_new_stage_that_begins_with_rows_it_has() -> None:
    sink: Any = {"sinks": {"rows": "main"}, "tables": {"rows": "/t"}}
    seen = replace(SEEN, shapes=(replace(A, **sink), B), unread=lambda p: max(0, 9 - p.version))
    between, behind = shape("m", reading("a.main"), **sink), shape("b", reading("m.main"))
    found = compare(seen, (A, between, behind))
    assert "2 entries of channel a.main" in of(found, "m").notes[0]
    assert compare(seen, (A, B, between)).ok, "it begins at the cut"
