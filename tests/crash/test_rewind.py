"""Plain queries under load, killed, rewound to any moment, killed while they are, and run to their end."""

from __future__ import annotations

import copy
import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

from spark_abs.cuts.cut import NoAlignedCut, newest_cut
from spark_abs.errors import Refused
from spark_abs.rewind.apply import apply
from spark_abs.rewind.prepare import Prepared, listed, prepare
from spark_abs.rewind.purge import purge
from spark_abs.rewind.undo import Finished, finish
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.storage import DEFAULTS, Place
from tests.plain_queries import SHAPES, Crash, PlainQuery, World, added, append, names_in, rows_of, text_of

W = TypeVar("W", bound=World)


class Killed(BaseException):
    """The rewind is killed."""


def killed_at(number: int) -> Callable[[str], None]:
    """Return a failpoint that kills at the n-th point."""
    left = iter(range(number, -1, -1))

    def failpoint(point: str) -> None:
        if next(left) == 0:
            raise Killed(point)

    return failpoint


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 10))])
def test_every_row_is_there_once_after_rewinds_to_any_batch(tmp_path: Path, shape: str, seed: int) -> None:
    world = World(tmp_path, shape, seed)
    for _ in range(3):
        world.run(25)
        try:
            world.rewind(world.any_batch())
        except NoAlignedCut:
            continue
    world.is_whole(seed)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 10))])
def test_batches_of_a_function_without_an_id_are_told_by_their_times(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, "untold", seed)
    world.run(40)
    for _ in range(3):
        assert "concluded from their times" in "".join(world.prepare().plan.notes)
        with suppress(NoAlignedCut):
            world.rewind(world.any_batch())
        world.run(20)
    world.is_whole(seed)


def worlds(first: W, every: int = 1) -> Iterator[tuple[int, W]]:
    """Yield a number and a world again and again, with the files that it has now and of its directory.

    All are at one place, so that records of a rewind that name it hold in each.
    """
    directory = first.base.parent
    saved = shutil.copytree(directory, directory.with_name("saved"))
    for number in itertools.count(0, every):
        shutil.rmtree(directory)
        shutil.copytree(saved, directory)
        world = copy.copy(first)
        world.chance = random.Random(number)
        yield number, world


@pytest.mark.parametrize("shape", ["fan-in", pytest.param("chain", marks=pytest.mark.long)])
@pytest.mark.parametrize("taken_back", [False, True], ids=["rewind", "undo"])
def test_a_rewind_and_its_undo_are_finished_when_killed_at_any_point(
    tmp_path: Path, shape: str, taken_back: bool
) -> None:
    first = World(tmp_path / "first" / "live", shape, seed=7, files=8)
    first.run(20)
    *_, (_, at) = listed(*first.places())  # the oldest cut
    if taken_back:
        first.rewind(at)
    for number, world in worlds(first):
        try:
            world.undo(killed_at(number)) if taken_back else world.rewind(at, killed_at(number))
        except Killed:
            reached = number
        else:
            break
        if any(text_of(q.checkpoint, "metadata").startswith("A rewind") for q in world.queries()):
            with pytest.raises(Refused, match="begun and is not finished"):
                world.prepare()
            with suppress(Killed):
                world.finish(killed_at(number % 5))
        world.finish()
        world.is_whole(number)
    assert reached > 10


class Tracking(PlainQuery):
    """A reader of a table that tracks its schema: every other batch ends at a change of columns."""

    @property
    def _log_of_schemas(self) -> dict[int, dict[str, int]]:
        log = "schemas/_schema_log_t"
        texts = {int(n): text_of(self.checkpoint, f"{log}/{n}") for n in names_in(self.checkpoint, log)}
        return {number: json.loads(text.partition("\n")[2]) for number, text in texts.items()}

    def start(self) -> None:
        """See that no schema is of later rows than the table has: Delta would read with the newest."""
        there = len(rows_of(self.table(self.sink)))
        assert all(entry["rows"] <= there for entry in self._log_of_schemas.values())
        super().start()

    def _write(self, ids: list[int], crash: str = "") -> None:
        super()._write(ids, crash)
        if not self.from_files and self.batch % 2:
            entry = {
                "deltaCommitVersion": self.until - 1,
                "sourceMetadataPath": "file:/c/sources/0",
                "rows": len(rows_of(self.table(self.sink))),
            }
            number = len(self._log_of_schemas)
            added(self.checkpoint, f"schemas/_schema_log_t/{number}", f"v1\n{json.dumps(entry)}")


class TrackingWorld(World):
    def queries(self) -> list[PlainQuery]:
        return [
            Tracking(self.top, name, source, sink, chance=self.chance)
            for name, source, sink in SHAPES["chain"]
        ]


@pytest.mark.parametrize("taken_back", [False, True], ids=["rewind", "undo"])
def test_schemas_tracked_since_are_gone_wherever_a_rewind_is_killed(tmp_path: Path, taken_back: bool) -> None:
    first = TrackingWorld(tmp_path / "first" / "live", "chain", seed=7, files=12)
    first.run(25)
    *_, (_, at) = listed(*first.places())
    if taken_back:
        first.rewind(at)
    points = Counter[str]()

    def note(point: str) -> None:
        points[point] += 1

    for number, world in worlds(first, every=7):
        try:
            world.undo(killed_at(number)) if taken_back else world.rewind(at, killed_at(number))
        except Killed:
            world.finish(note)
        else:
            break
        world.is_whole(number)
    assert taken_back or points["schema"] > 0
    world.is_whole(number)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_undone_is_there_again_and_can_be_done_again(tmp_path: Path, shape: str) -> None:
    """An undo leads to the newest batches of the time before that fit together."""
    world = World(tmp_path, shape, seed=11)
    world.run(30)
    found = world.prepare().found
    cut = newest_cut(found.pipeline, found.pipeline.newest())
    then = {
        table.place.path: max(w.last[cut[w.query]] for w in found.pipeline.written if w.table == table.uri)
        for table in found.tables
    }
    world.rewind(world.any_batch())
    world.undo()
    for path, version in then.items():
        assert rows_of(Path(path)) == rows_of(Path(path), version)
    with pytest.raises(Refused, match="go back anew in place of undoing it"):
        world.undo()
    world.run(10)
    world.rewind(world.any_batch())
    world.run(3)
    with pytest.raises(Refused, match="can no longer be undone"):
        world.undo()
    world.is_whole(11)


def test_offsets_of_an_earlier_rewind_are_those_of_its_own_batches_only(tmp_path: Path) -> None:
    """Rewound twice and run on: batch numbers come again, with other offsets."""
    world = World(tmp_path, "chain", seed=5, files=40)
    world.run(40)
    query = next(q for q in world.queries() if q.name == "silver")
    newest = max(query.batches("commits"))
    assert newest > 6
    world.rewind({"silver": newest - 1})
    world.rewind({"silver": newest - 4})
    world.run(40)
    world.rewind({"silver": newest - 2})
    world.is_whole(5)


def test_a_writer_that_stays_cannot_run_while_its_table_goes_back(tmp_path: Path) -> None:
    world = World(tmp_path, "two writers", seed=3, files=12)
    left, right = world.queries()
    right.start()
    while right.step(3):
        pass
    left.start()
    assert all(left.step(1) for _ in range(6))
    with pytest.raises(Killed):
        world.rewind({"left": 2}, lambda point: killed_at(0)(point) if point == "table" else None)
    for query in (left, right):
        with pytest.raises(json.JSONDecodeError):
            query.start()
    world.finish()
    world.is_whole(3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 12))])
def test_a_driver_that_was_frozen_and_wakes_after_a_rewind_does_no_harm(
    tmp_path: Path, shape: str, seed: int
) -> None:
    """It was idle, or held the rows of a batch, or had written them; its successor has run or not."""
    world = World(tmp_path, shape, seed)
    world.run(20)
    frozen, went = world.frozen(), set[str]()
    with suppress(NoAlignedCut):
        went = world.rewind(world.any_batch())
    world.run(world.chance.choice([0, 15]))
    for query in frozen:
        if query.name in went:
            query.wake()
    world.run(10)
    with suppress(NoAlignedCut):
        world.rewind(world.any_batch())
    world.is_whole(seed)


def test_of_two_rewinds_at_the_same_instant_one_gives_way(tmp_path: Path) -> None:
    """The second one works while the first one is at any of its points."""
    first = World(tmp_path / "first" / "live", "fan-in", seed=7, files=8)
    first.run(20)
    *_, (_, oldest) = listed(*first.places())
    for number, world in worlds(first):
        one, two = world.prepare(oldest), world.prepare({"left": oldest["left"] + 1})
        left = iter(range(number, -1, -1))
        outcomes: list[bool] = []

        def go(prepared: Prepared, at: Callable[[str], None], outcomes: list[bool] = outcomes) -> None:
            try:
                apply(prepared.plan, DEFAULTS, require_still=prepared.require_still, at=at)
            except Refused:
                outcomes.append(False)
            else:
                outcomes.append(True)

        def other(
            _: str,
            left: Iterator[int] = left,
            two: Prepared = two,
            go: Callable[[Prepared, Callable[[str], None]], None] = go,
        ) -> None:
            if next(left, -1) == 0:
                go(two, no_failpoint)

        go(one, other)
        assert world.finish() is None
        assert sum(outcomes) == 1, (number, outcomes)
        world.is_whole(number)
        if len(outcomes) == 1:
            break
    assert number > 10


class Reversed(World):
    """Its checkpoint directories are given in another order."""

    def places(self) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
        checkpoints, tables = super().places()
        return checkpoints[::-1], tables


@pytest.mark.parametrize("kind", [World, Reversed])
def test_a_rewind_that_another_call_finishes_or_withdraws_meanwhile(
    tmp_path: Path, kind: type[World]
) -> None:
    """It had not died, as the other call supposed; a rewind that was withdrawn does not begin."""
    first = kind(tmp_path / "first" / "live", "chain", seed=7, files=8)
    first.run(20)
    *_, (_, oldest) = listed(*first.places())
    withdrawn = 0
    for number, world in worlds(first):
        left, answers = iter(range(number, -1, -1)), list[Finished | None]()

        def other(
            _: str,
            left: Iterator[int] = left,
            world: World = world,
            answers: list[Finished | None] = answers,
        ) -> None:
            if next(left, -1) == 0:
                answers.append(world.finish())

        refused = False
        try:
            world.rewind(oldest, other)
        except Refused:
            refused = True
            withdrawn += 1
        assert refused == any(found is not None and not found.finished for found in answers), number
        assert world.finish() is None
        world.is_whole(number)
        if next(left, -1) >= 0:
            break
    assert 0 < withdrawn < number


def test_rows_of_others_stay_although_a_late_driver_makes_their_table_go_back(tmp_path: Path) -> None:
    """The table was to keep its rows until a driver that still ran had ended its batch."""
    world = World(tmp_path, "chain", seed=3, files=12)
    bronze, silver, gold = world.queries()
    for query in (bronze, silver, gold):
        query.start()
        assert query.step(3)
    assert all(query.step(3) for query in (bronze, silver))
    with suppress(Crash):
        gold.step(3, crash="planned")
    prepared = world.prepare()
    (goal,) = (one for one in prepared.plan.journal.tables if one.uri.endswith("/gold"))
    assert not goal.restored
    ((app, _),) = goal.transactions.items()
    table = tmp_path / "t" / "gold"

    def late(point: str) -> None:
        if point == "begun":
            append(table, [1000], {app: 1})
            append(table, [1001], {})

    with pytest.raises(Refused, match="others have changed rows in version"):
        apply(prepared.plan, DEFAULTS, require_still=prepared.require_still, at=late)
    assert 1001 in rows_of(table)
    finish(*world.places(), at=no_failpoint, undo_others=True)
    world.is_whole(3)


def test_an_undo_leaves_queries_that_the_rewind_did_not_have(tmp_path: Path) -> None:
    """They are given beside those of the rewind, and one of them is within a batch."""
    world = World(tmp_path, "chain", seed=3, files=12)
    bronze, silver, gold = world.queries()
    for query in (bronze, silver, gold):
        query.start()
        assert all(query.step(1) for _ in range(5 if query is bronze else 4))
    checkpoints, tables = world.places()
    silver_alone = [place for place in checkpoints if place.uri.endswith("/silver")]
    gone = prepare(silver_alone, tables, storage=DEFAULTS, now_ms=1, at={"silver": 2}, undo_others=True)
    (goal,) = gone.plan.journal.queries
    apply(gone.plan, DEFAULTS, require_still=gone.require_still, at=no_failpoint)
    others = [query for query in (bronze, gold) if query.checkpoint.uri != goal.uri]
    with pytest.raises(Crash):
        bronze.step(1, crash="planned")

    def there() -> dict[str, list[str]]:
        return {query.name: sorted(names_in(query.checkpoint, "offsets")) for query in others}

    before = there()
    world.undo()
    assert there() == before


def test_a_purge_that_was_killed_is_repeated_and_no_undo_comes_between(tmp_path: Path) -> None:
    first = World(tmp_path / "first" / "live", "chain", seed=7, files=8)
    first.run(20)
    *_, (_, oldest) = listed(*first.places())
    first.rewind(oldest)
    checkpoints, _ = first.places()
    for number, world in worlds(first):
        try:
            purge(checkpoints, call="p", at=killed_at(number))
        except Killed:
            if number:
                with pytest.raises(Refused, match="were purged: it can no longer be undone"):
                    world.undo()
            purge(checkpoints, call="q", at=no_failpoint)
            assert not list(world.base.glob("c/*/_rewind/*/files"))
        else:
            break
    assert number > 3
    world.is_whole(7)
