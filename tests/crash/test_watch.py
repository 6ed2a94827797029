"""A watcher beside queries that work: raced by Spark's clean-up, killed, doubled; rewinds to what it kept."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from spark_abs.cuts.cut import NoAlignedCut
from spark_abs.errors import CommitStateUnknown, DamageError, Fenced, Refused, RunAlive
from spark_abs.keep import keep_words
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.observe.progress import SILENT
from spark_abs.observe.verification import verify_root
from spark_abs.protocol import control as ledger
from spark_abs.rewind.apply import apply
from spark_abs.rewind.prepare import listed
from spark_abs.store.control import Control
from spark_abs.store.storage import DEFAULTS
from spark_abs.watch.watcher import look, newest_kept, watching
from tests.crash import watcher
from tests.crash.test_rewind import Killed, killed_at, worlds
from tests.plain_queries import SHAPES, rows_of
from tests.watched_queries import StatefulQuery, WatchedWorld


def worked(base: Path, shape: str, seed: int, rounds: int = 4, files: int = 40) -> WatchedWorld:
    """Return queries that have worked for some rounds, each kept, of which Spark has the newest batches."""
    world = WatchedWorld(base / "first" / "live", shape, seed, files)
    for number in range(rounds):
        world.run(20)
        if number == rounds - 1:
            world.settle()
        with suppress(NoAlignedCut):
            world.watch()
        world.purge()
    return world


AFTER_COMMIT = ("watch.manifest.after", "watch.retire.after", "watch.sweep.after")


def of_spark(world: WatchedWorld) -> list[dict[str, int]]:
    return [batches for _, batches in listed(*world.places())]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 10))])
def test_every_row_is_there_once_after_rewinds_to_kept_cuts(tmp_path: Path, shape: str, seed: int) -> None:
    """Also to cuts that were kept between two rewinds, never to one that a rewind has abandoned."""
    world, chance = worked(tmp_path, shape, seed), random.Random(seed)
    reached = 0
    for _ in range(3):
        older = [cut for cut in world.kept() if cut not in of_spark(world)]
        if not older:
            break
        cut = chance.choice(older)
        world.rewind(cut)
        reached += 1
        assert all(batches[q] <= cut[q] for batches in world.kept() for q in cut)
        world.run(20)
        with suppress(NoAlignedCut):
            world.watch()
        world.purge()
    assert reached
    world.is_whole(seed)
    assert verify_root(world.root, SILENT) == ()


@pytest.mark.parametrize("taken_back", [False, True], ids=["rewind", "undo"])
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.long)])
def test_a_rewind_to_a_kept_cut_is_finished_when_killed_at_any_point(
    tmp_path: Path, every: int, taken_back: bool
) -> None:
    """It needs the root no more once it has begun."""
    first = worked(tmp_path, "chain", seed=1)
    *_, at = (cut for cut in first.kept() if cut not in of_spark(first))
    if taken_back:
        first.rewind(at)
    for number, world in worlds(first, every):
        try:
            world.undo(killed_at(number)) if taken_back else world.rewind(at, killed_at(number))
        except Killed:
            shutil.rmtree(world.root.uri)
            world.finish()
        else:
            break
        world.is_whole(number)
    assert number > 20
    assert not list(world.base.glob("c/*/_rewind/*/kept/**/*.delta")), "all files are at their places"


def test_an_undo_leaves_none_of_the_files_that_came_from_the_root(tmp_path: Path) -> None:
    world = worked(tmp_path, "chain", seed=1)

    def there() -> dict[str, bytes]:
        files = (p for p in (world.base / "c").rglob("*") if p.is_file() and "_rewind" not in p.parts)
        return {str(p): p.read_bytes() for p in files}

    before = there()
    *_, at = (cut for cut in world.kept() if cut not in of_spark(world))
    world.rewind(at)
    records = (world.base / "c").glob("*/_rewind/*/brought.json")
    came = {str(r.parents[2] / path) for r in records for path in json.loads(r.read_bytes())["new"]}
    assert came
    assert came <= there().keys() - before.keys()
    world.undo()
    assert came.isdisjoint(there())
    world.is_whole(1)


@pytest.mark.parametrize("every", [17, pytest.param(3, marks=pytest.mark.long)])
def test_an_undo_that_is_not_possible_leaves_a_rewind_to_a_kept_cut(tmp_path: Path, every: int) -> None:
    """The rows of before are gone; killed at any point, it ends with the rewind as it was, and no fence."""
    first = worked(tmp_path, "chain", seed=1)
    *_, at = (cut for cut in first.kept() if cut not in of_spark(first))
    first.rewind(at)
    assert list(first.base.glob("c/*/_rewind/*/brought.json"))
    for table in (first.base / "t").iterdir():
        for gone in DeltaTable(str(table)).vacuum(retention_hours=0, enforce_retention_duration=False):
            (table / gone).unlink()
    for number, world in worlds(first, every):
        rows = {table: rows_of(table) for table in (world.base / "t").iterdir()}
        killed = False
        try:
            with pytest.raises(Refused, match="cannot be undone, and stands"):
                world.undo(killed_at(number))
        except Killed:
            killed = True
            with suppress(Refused):
                world.finish()
        assert world.finish() is None
        assert {table: rows_of(table) for table in rows} == rows
        world.is_whole(number)
        if not killed:
            break
    assert number > 20


def test_a_rewind_that_finds_the_root_damaged_changes_nothing(tmp_path: Path) -> None:
    world = worked(tmp_path, "chain", seed=2)
    *_, at = (cut for cut in world.kept() if cut not in of_spark(world))
    prepared = world.prepare(at)
    for pack in Path(world.root.uri, "state").glob("*.parquet"):
        data = pack.read_bytes()
        pack.write_bytes(data[:8] + bytes(len(data) // 2 - 8) + data[len(data) // 2 :])
    with pytest.raises(DamageError, match=r"do not have sha256|cannot be read"):
        apply(prepared.plan, DEFAULTS, require_still=prepared.require_still, at=lambda _: None)
    assert not list(world.base.glob("c/*/_rewind/*/brought.json"))
    world.is_whole(2)


def test_a_watcher_that_is_killed_anywhere_leaves_a_root_that_goes_on(tmp_path: Path) -> None:
    """Killed at every point in turn: the next one keeps the cut, and nothing that no manifest names stays."""
    first = worked(tmp_path, "two writers", seed=3, rounds=1, files=80)
    first.run(10)
    first.settle()
    points = []
    for number, world in worlds(first):
        point = watcher.killed_at(world, number, tmp_path / "point")
        if point is None:
            break
        points.append(point)
        again = world.watch()
        assert (again.kept is None) == (point in AFTER_COMMIT)
        world.run(10)
        world.settle()
        assert world.watch().kept is not None
        assert len(world.kept()) == 3
        assert verify_root(world.root, SILENT) == ()
        state = Control.open(world.root).state
        assert state.claims == (), point
    assert {"watch.begin.after", "watch.claim.after", "capture.pack.commit.before"} <= set(points)
    assert {"watch.manifest.before", "watch.manifest.after", "watch.sweep.after"} <= set(points)


def test_a_cut_whose_files_vanish_is_passed_over_and_an_older_one_is_kept(tmp_path: Path) -> None:
    world = worked(tmp_path, "chain", seed=4, rounds=1)
    world.run(20)
    world.settle()
    newest, second, *_ = of_spark(world)
    before = len(Control.open(world.root).state.aborted)
    query = next(q for q in world.queries() if newest[q.name] != second[q.name])
    gone = Path(query.checkpoint.uri) / "commits" / str(newest[query.name])

    def purged(point: str) -> None:
        if point == f"watch.{query.name}.copy.before":
            gone.unlink(missing_ok=True)

    found = world.watch(failpoint=purged)
    assert found.kept is not None
    assert dict(found.batches)[query.name] < newest[query.name]
    assert f"the commit of batch {newest[query.name]} is missing" in found.passed[0]
    assert len(Control.open(world.root).state.aborted) == before + len(found.passed)


def test_a_cut_is_kept_whose_input_is_only_in_a_later_compact_file(tmp_path: Path) -> None:
    """The reader stands still at the newest cut while the log of the source is compacted."""
    world = WatchedWorld(tmp_path / "first" / "live", "chain", seed=12, files=60)
    world.run(10)
    world.settle()
    cut = of_spark(world)[0]
    bronze = next(q for q in world.queries() if q.name == "bronze")
    log = Path(bronze.checkpoint.uri) / "sources" / "0"
    assert not (log / "9.compact").exists()
    bronze.start()
    while not (log / "9.compact").exists():
        assert bronze.step(1)
    for number in range(9):
        (log / str(number)).unlink(missing_ok=True)
    found = world.watch()
    assert (dict(found.batches), found.passed) == (cut, ())
    world.run(20)
    world.purge()
    assert cut not in of_spark(world)
    world.rewind(cut)
    world.is_whole(12)
    assert verify_root(world.root, SILENT) == ()


def test_a_snapshot_without_the_changes_after_it_is_passed_over(tmp_path: Path) -> None:
    """Half of the state of the newest batch is there: an older batch is whole."""
    world = worked(tmp_path, "chain", seed=6, rounds=1)
    world.run(20)
    world.settle()
    newest, *others = of_spark(world)
    query = next(q for q in world.queries() if any(o[q.name] != newest[q.name] for o in others))
    assert isinstance(query, StatefulQuery)
    version = newest[query.name] + 1
    (query.store / f"{version}.delta").unlink()
    (query.store / f"{version}.snapshot").unlink(missing_ok=True)
    found = world.watch()
    assert found.kept is not None
    assert found.passed
    assert dict(found.batches)[query.name] < newest[query.name]


def test_a_query_that_is_begun_anew_is_another_query(tmp_path: Path) -> None:
    """Cuts of the old one are not offered, and the next cut is of the new one."""
    world = worked(tmp_path, "two writers", seed=8)
    assert world.kept()
    left = next(q for q in world.queries() if q.name == "left")
    Path(left.checkpoint.uri, "metadata").write_text('{"id":"00000000-0000-0000-0000-000000000000"}')
    assert world.kept() == []

    def anew(point: str) -> None:
        if point == "watch.left.copy.before":
            Path(left.checkpoint.uri, "metadata").write_text('{"id":"00000000-0000-0000-0000-000000000001"}')

    assert world.watch(failpoint=anew).kept is None
    kept = world.watch().kept
    assert kept is not None
    assert len(world.kept()) == 1


def test_of_two_watchers_one_works(tmp_path: Path) -> None:
    world = worked(tmp_path, "chain", seed=9, rounds=1)
    world.run(10)
    world.settle()
    found = look(*world.places(), newest_kept(world.root))
    assert found is not None
    with watching(world.root, *world.places(), keep_words("24h:all")) as one:
        with pytest.raises(RunAlive, match="is watched already"):
            world.watch()
        # One that was frozen, and replaced by another: it can commit no more.
        control = Control.open(world.root)
        run = control.update(lambda s: ledger.begin_run(s, "elsewhere", 1, 1)).runs[-1].id
        with pytest.raises(Fenced, match=f"replaced by run {run}"):
            one.round(found)
    assert newest_kept(world.root) is not None


def test_words_thin_out_what_is_kept_and_its_bytes_go(tmp_path: Path) -> None:
    world = worked(tmp_path, "chain", seed=10, rounds=3, files=90)
    before = sum(p.stat().st_size for p in Path(world.root.uri, "state").glob("*.parquet"))
    world.run(10)
    world.settle()
    world.watch(keep="1")
    assert len(world.kept()) == 1
    assert verify_root(world.root, SILENT) == ()
    assert sum(p.stat().st_size for p in Path(world.root.uri, "state").glob("*.parquet")) < before


def test_a_root_of_a_job_is_neither_watched_nor_rewound_to(tmp_path: Path) -> None:
    world = worked(tmp_path, "chain", seed=11, rounds=0)
    world.run(20)
    world.settle()
    Control.create(world.root, "shop", 1)
    with pytest.raises(Refused, match="belongs to job 'shop'"):
        world.watch()
    with pytest.raises(Refused, match="is the root of job 'shop'"):
        world.kept()


def test_a_cut_of_a_table_that_was_made_anew_since_is_not_gone_back_to(tmp_path: Path) -> None:
    """The new table has no rows of before: they would be lost."""
    world = WatchedWorld(tmp_path / "live", "chain", 3, 120)
    world.run(15)
    world.settle()
    world.watch()
    (then,) = world.kept()
    gold = tmp_path / "live/t/gold"
    schema = DeltaTable(str(gold)).schema()
    shutil.rmtree(gold)
    DeltaTable.create(str(gold), schema)
    world.run(60)
    world.settle()
    world.watch()
    world.purge(retained=3)
    with pytest.raises(NoAlignedCut, match="the logs of the tables fit none of them"):
        world.prepare(at=then)


def test_a_watcher_that_ends_with_an_error_of_the_store_has_failed(tmp_path: Path) -> None:
    world = WatchedWorld(tmp_path / "live", "chain", 3, 40)
    world.run(15)
    world.settle()

    def full(point: str) -> None:
        if point == "watch.manifest.before":
            raise OSError("no space left on the device")

    with pytest.raises(OSError, match="no space"):
        world.watch(failpoint=full)
    assert Control.open(world.root).state.runs[-1].ended == "failed: no space left on the device"


def test_an_offset_file_that_is_not_text_is_damage(tmp_path: Path) -> None:
    world = WatchedWorld(tmp_path / "live", "chain", 3, 40)
    world.run(15)
    newest = max((tmp_path / "live/c/silver/offsets").iterdir(), key=lambda file: int(file.name))
    newest.write_bytes(newest.read_bytes() + b"\xc3")
    with pytest.raises(DamageError, match=f"offsets/{newest.name} is not text"):
        world.prepare()


@pytest.mark.parametrize("stands", [False, True], ids=["not committed", "committed"])
def test_a_cut_whose_commit_is_not_confirmed_is_kept_or_aborted_as_the_store_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stands: bool
) -> None:
    world = WatchedWorld(tmp_path / "live", "chain", 3, 40)
    world.run(15)
    world.settle()
    complete, tried = Checkpoints.complete, list[int]()

    def unconfirmed(checkpoints: Checkpoints, manifest: Manifest) -> bool:
        tried.append(manifest.id)
        if len(tried) > 1:
            return complete(checkpoints, manifest)
        if stands:
            complete(checkpoints, manifest)
        raise CommitStateUnknown("the store did not confirm it")

    monkeypatch.setattr(Checkpoints, "complete", unconfirmed)
    found = world.watch()
    state = Control.open(world.root).state
    assert state.claims == ()
    if stands:
        assert (tried, found.kept, found.passed, state.aborted) == ([1], 1, (), ())
    else:
        assert (tried, found.kept) == ([1, 2], 2)
        assert [gone.id for gone in state.aborted] == [1]
        assert found.passed == (state.aborted[0].detail,)
        assert found.passed == ("cut 1: its manifest could not be committed",)


@pytest.mark.parametrize("point", AFTER_COMMIT)
@pytest.mark.parametrize("error", [OSError("503"), DeltaError("503"), DamageError("torn")], ids=repr)
def test_a_cut_is_kept_whatever_fails_after_its_commit(tmp_path: Path, point: str, error: Exception) -> None:
    """No older cut is kept in its place, and the next look makes up for what was not done."""
    world = WatchedWorld(tmp_path / "live", "chain", 3, 40)
    world.run(15)
    world.settle()

    def fails(at: str) -> None:
        if at == point:
            raise error

    found = world.watch(keep="1", failpoint=fails)
    assert (found.kept, found.passed, found.unfinished) == (1, (), str(error))
    world.run(10)
    world.settle()
    again = world.watch(keep="1")
    assert (again.kept, again.unfinished) == (2, None)
    state = Control.open(world.root).state
    assert (state.claims, state.aborted) == ((), ())
    assert len(world.kept()) == 1
    assert verify_root(world.root, SILENT) == ()


def test_a_watcher_that_is_replaced_after_a_commit_ends(tmp_path: Path) -> None:
    world = WatchedWorld(tmp_path / "live", "chain", 3, 40)
    world.run(15)
    world.settle()

    def replaced(at: str) -> None:
        if at == "watch.retire.after":
            raise Fenced("replaced by run 2")

    with pytest.raises(Fenced, match="replaced by run 2"):
        world.watch(failpoint=replaced)
