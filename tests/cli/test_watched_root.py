"""`status`, `health` and `doctor` of a watched root, over the files of its queries and tables."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from spark_abs.errors import UsageError
from spark_abs.keep import keep_words
from spark_abs.observe.tables import table_at
from spark_abs.quantities import time_said
from spark_abs.rewind.prepare import kept_moments
from spark_abs.watch.watcher import watching
from tests.cli.conftest import Cli
from tests.watched_queries import WatchedWorld

HOUR = 3_600_000


@pytest.fixture
def world(tmp_path: Path) -> WatchedWorld:
    world = WatchedWorld(tmp_path / "live", "chain", seed=3, files=120)
    world.run(15)
    world.settle()
    world.watch()
    return world


def after(world: WatchedWorld, hours: int = 0) -> Cli:
    """Call commands so much later."""
    return Cli(world.root.uri, now_ms=lambda: world._tick() + hours * HOUR)


def step(world: WatchedWorld, name: str, batches: int) -> None:
    """Run batches of one query."""
    (query,) = (query for query in world.queries() if query.name == name)
    query.start()
    for _ in range(batches):
        assert query.step(3)


def next_cut(world: WatchedWorld) -> list[str]:
    found: list[str] = after(world).json("status")["next_cut"]
    lines = [" ".join(line.split()) for line in after(world)("status").stdout.splitlines()]
    assert len([line for line in lines if line.startswith("next cut ")]) == len(found)
    return found


def doctor(world: WatchedWorld, hours: int = 0) -> dict[str, Any]:
    found = after(world, hours).json("doctor", exits=1)
    return {one["kind"]: one for one in found}


def test_the_list_has_the_moments_that_a_rewind_takes(world: WatchedWorld) -> None:
    """A job's checkpoints have none."""
    (row,) = after(world).json("list")
    ((at_ms, _),) = kept_moments(world.root, world.places()[0])
    assert row["moment_ms"] == at_ms <= row["completed_ms"]
    head, line = after(world)("list").stdout.splitlines()
    assert head.split()[3:6] == ["attempt", "moment", "completed"]
    assert line.index(time_said(at_ms)) == head.index("moment")


def test_status_says_what_the_next_cut_waits_for(world: WatchedWorld) -> None:
    assert next_cut(world) == ["nothing was done since the newest"]
    step(world, "bronze", 2)
    bronze = world.top.below("t/bronze").uri
    (said,) = next_cut(world)
    assert re.fullmatch(
        rf"waits: table {bronze}: query 'silver' had read it up to version (\d+) with batch \d+, and query "
        rf"'bronze' had written it up to version (\d+) with batch \d+",
        said,
    ), said
    read, written = map(int, re.findall(r"up to version (\d+)", said))
    assert written - read == 2
    world.settle()
    (said,) = next_cut(world)
    assert re.fullmatch(r"of \S+ \S+ ago, for the next look", said), said
    world.watch()
    assert next_cut(world) == ["nothing was done since the newest"]
    (world.base / "c" / "gold").rename(world.base / "away")
    (said,) = next_cut(world)
    assert said.startswith("cannot be seen from here: ")
    assert "c/gold is not the checkpoint of a streaming query" in said


def test_status_that_is_watched_looks_again_when_something_was_done(world: WatchedWorld) -> None:
    looks = 0

    def pause(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            step(world, "bronze", 1)
        if looks == 3:
            raise KeyboardInterrupt

    cli = Cli(world.root.uri, pause=pause, now_ms=world._tick)
    shown = re.findall(r"next cut +(nothing|waits)", cli("status", "--watch", exits=1).stdout)
    assert shown == ["nothing", "nothing", "waits"]


def test_health_is_the_age_of_the_newest_cut_if_anything_was_done_since(world: WatchedWorld) -> None:
    later = after(world, 2)
    assert later("health", "--max-age", "1h").stdout == "healthy: checkpoint 1, 0 ms old, lag -\n"
    step(world, "bronze", 1)
    assert after(world)("health", "--max-age", "1h").stdout.startswith("healthy: checkpoint 1, ")
    late = later("health", "--max-age", "1h", exits=1).stdout
    assert late == "unhealthy: the newest cut is 2.0 h old, more than 1.0 h are too many\n"
    assert "leave --max-lag out" in later("health", "--max-lag", "1h", exits=2).stderr


def test_queries_that_are_kept_have_nothing_wrong(world: WatchedWorld) -> None:
    assert after(world, 2)("doctor").stdout == "nothing is wrong with the queries\n"
    world.run(10)
    assert after(world)("doctor").stdout == "nothing is wrong with the queries\n"


def test_a_watcher_that_is_away_is_missed_when_there_is_a_newer_cut(world: WatchedWorld) -> None:
    world.run(20)
    world.settle()
    assert after(world)("doctor").stdout == "nothing is wrong with the queries\n", "a moment ago"
    (away,) = doctor(world, 2).values()
    assert re.fullmatch(
        r"No watcher is at work: run 1 ended: stopped; the newest cut is 1, 2\.0 h old, and there has been a "
        r"newer one for more than 1\.0 h",
        away["said"],
    )
    assert away["command"].startswith(f"spark-abs watch {world.root.uri} --checkpoints {world.base}/c/")
    with watching(world.root, *world.places(), keep_words("24h:all"), every="10m"):
        assert doctor(world, 2).keys() == {"cuts-passed-over"}


def test_batches_that_spark_deletes_before_a_look_are_named(world: WatchedWorld) -> None:
    world.run(60)
    world.settle()
    world.purge(retained=3)
    with watching(world.root, *world.places(), keep_words("24h:all"), every="10m"):
        found = after(world).json("doctor", exits=1)
    assert {one["kind"] for one in found} == {"deleted-before-kept"}
    stages = {stage["stage"]: stage for stage in after(world).json("status")["stages"]}
    (bronze,) = (one["said"] for one in found if " of query bronze:" in one["said"])
    first, last = map(int, re.findall(r"batches (\d+) to (\d+) ", bronze)[0])
    left = sorted(int(p.name) for p in (world.base / "c/bronze/offsets").iterdir())
    assert (first, last) == (stages["bronze"]["cut"] + 1, left[0]), "the oldest has no batch before it"


def test_what_cannot_be_read_is_named(world: WatchedWorld) -> None:
    (world.base / "c/silver/metadata").write_text("torn")
    (found,) = doctor(world).values()
    assert (found["kind"], "c/silver/metadata" in found["said"]) == ("unreadable", True)


def test_batches_that_have_not_fitted_together_for_long_are_named(world: WatchedWorld) -> None:
    step(world, "bronze", 3)
    assert after(world)("doctor").stdout == "nothing is wrong with the queries\n", "since a moment ago"
    (found,) = doctor(world, 2).values()
    assert found["kind"] == "no-aligned-cut"
    assert "query 'silver' had read it up to version" in found["said"]


def test_tables_whose_logs_are_cleaned_before_their_cuts_are_named(world: WatchedWorld) -> None:
    table = DeltaTable(str(world.base / "t/bronze"))
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 1 hours"})
    assert after(world)("doctor").stdout == "nothing is wrong with the queries\n"
    found = doctor(world, 2)["tables-cleaned"]
    assert (
        "Delta may delete the log of versions that are older than 1.0 h, and cut 1 is 2.0 h" in found["said"]
    )
    world.run(20)
    world.settle()
    kept = world.watch()
    table.update_incremental()
    table.create_checkpoint()
    newest = table.version()
    for commit in (world.base / "t/bronze/_delta_log").glob("*.json"):
        if int(commit.stem) < newest:
            commit.unlink()
    (found,) = doctor(world).values()
    assert f"t/bronze begins at version {newest}, and " in found["said"]
    assert kept.kept is not None


def test_a_table_that_was_made_anew_is_named(world: WatchedWorld) -> None:
    gold = Path(world.base / "t/gold")
    rows = DeltaTable(str(gold)).to_pyarrow_table()
    shutil.rmtree(gold)
    write_deltalake(str(gold), rows)
    found = doctor(world)["table-made-anew"]
    assert f"Table {gold} was dropped and made anew: kept cut 1 is of the table before" in found["said"]


def test_the_root_records_what_the_watcher_was_given(world: WatchedWorld) -> None:
    extra = world.base / "t/of-nobody"
    write_deltalake(str(extra), pa.table({"n": [1]}))
    world.run(10)
    world.settle()
    with watching(world.root, *world.places(), keep_words("24h:all 7d:1h"), every="5m") as watcher:
        found = after(world).json("status")["watch"]
        assert found["tables"] == sorted(map(str, (world.base / "t").iterdir()))
        assert "keeps 3 1d:all 7d:1h, looks every 5m" in after(world)("status").stdout
        fewer = [place for place in world.places()[1] if place.uri != str(extra)]
        watcher.given(world.places()[0], fewer)
        assert str(extra) not in after(world).json("status")["watch"]["tables"]
        watcher.given(*world.places())
    (world.base / "c/silver/metadata").write_text("torn")
    world.base.joinpath("c/silver/commits/\N{SUPERSCRIPT TWO}").touch()
    assert doctor(world).keys() == {"unreadable"}


def test_a_root_that_has_kept_nothing_says_what_it_waits_for(tmp_path: Path) -> None:
    world = WatchedWorld(tmp_path / "live", "chain", seed=3, files=120)
    step(world, "bronze", 2)
    for query in world.queries():
        query.start()
    with watching(world.root, *world.places(), keep_words("24h:all"), every="10m"):
        waits = after(world).json("status")["next_cut"]
        assert [said.split()[2] for said in waits] == ["'gold'", "'silver'"]
        (found,) = doctor(world, 2).values()
        assert (found["kind"], "no cut is kept" in found["said"]) == ("no-aligned-cut", True)


def test_a_query_whose_log_is_gone_is_waited_for(world: WatchedWorld) -> None:
    shutil.rmtree(world.base / "c/gold/commits")
    assert next_cut(world) == ["waits: query 'gold' has no batch that can be resumed"]
    assert doctor(world, 2).keys() == {"no-aligned-cut"}


def test_damaged_cuts_are_told_beside_those_that_are_whole(world: WatchedWorld) -> None:
    world.run(10)
    world.settle()
    kept = world.watch().kept
    assert kept is not None
    (row,) = Path(world.root.path("checkpoints")).glob(f"{kept:08d}-*.parquet")
    row.write_bytes(row.read_bytes()[:-20])
    said = after(world)("health", exits=1).stdout
    assert said.startswith(f"unhealthy: a checkpoint cannot be read: checkpoints/{row.name}: ")
    shown = after(world).json("status")
    assert (shown["last"]["id"], len(shown["damaged"])) == (1, 1)
    assert "damaged" in after(world)("status").stdout
    (first,) = Path(world.root.path("checkpoints")).glob("00000001-*.parquet")
    first.write_bytes(b"")
    said = after(world)("health", exits=1).stdout
    assert "and 1 more; see `spark-abs verify " in said
    assert "no cut is kept" not in said


def test_commands_of_jobs_are_refused(world: WatchedWorld) -> None:
    for command in (["resume"], ["skip-file", "gold", "a"], ["pause"], ["stop"], ["forget", "gold"]):
        assert "takes no commands" in after(world)(*command, exits=1).stderr


def test_a_bisection_takes_directories_and_tables_in_place_of_the_root(world: WatchedWorld) -> None:
    said = after(world)("bisect", "SELECT id FROM main", exits=1).stderr
    assert 'spark-abs bisect "CONDITION" --checkpoints ... --tables ...' in said
    with pytest.raises(UsageError, match=r"has several tables of the name 'main': .*t/gold"):
        table_at(world.root, "main")


def test_a_look_settles_what_a_killed_watcher_has_left_also_if_there_is_no_newer_cut(
    world: WatchedWorld,
) -> None:
    """It was killed after its cut was complete, before it had recorded that."""
    world.run(10)
    world.settle()
    given = ["--checkpoints", f"{world.base}/c/*", "--tables", f"{world.base}/t/*", "--once"]
    killed = (
        "import os, sys\n"
        "from spark_abs.keep import keep_words\n"
        "from spark_abs.watch.watcher import look, newest_kept, watching\n"
        "from spark_abs.rewind.prepare import checkpoints_at, tables_at\n"
        "from spark_abs.store.root import Root\n"
        "root, base = Root(sys.argv[1]), sys.argv[2]\n"
        "places = checkpoints_at([f'{base}/c/*'], root.storage), tables_at([f'{base}/t/*'], root.storage)\n"
        "end = lambda point: os._exit(9) if point == 'watch.manifest.after' else None\n"
        "with watching(root, *places, keep_words('24h:all'), failpoint=end) as watcher:\n"
        "    watcher.round(look(*places, newest_kept(root)))\n"
    )
    done = subprocess.run([sys.executable, "-c", killed, world.root.uri, str(world.base)], timeout=300)
    assert done.returncode == 9
    assert "was killed" in after(world)("health", exits=1).stdout
    assert doctor(world).keys() == {"watcher-away"}
    assert [one["id"] for one in after(world).json("status")["open"]] == [2]
    assert "There is no newer cut to keep." in after(world)("watch", *given).stdout
    assert after(world)("health").stdout.startswith("healthy: checkpoint 2, ")
    assert after(world)("doctor").stdout == "nothing is wrong with the queries\n"
    assert after(world).json("status")["open"] == []


def test_a_query_that_no_cut_has_yet_counts(world: WatchedWorld) -> None:
    extra = world.base / "c/extra"
    shutil.copytree(world.base / "c/bronze", extra)
    (extra / "metadata").write_text('{"id":"another"}')
    for log in ("offsets", "commits"):
        newest = max((extra / log).iterdir(), key=lambda path: int(path.name) if path.name.isdigit() else -1)
        shutil.copy(newest, newest.with_name(str(int(newest.name) + 1)))
    with watching(world.root, *world.places(), keep_words("24h:all"), every="10m"):
        shown = {one["stage"]: one for one in after(world).json("status")["stages"]}
        assert shown.keys() == {"bronze", "silver", "gold", "extra"}
        assert (shown["extra"]["cut"], shown["extra"]["finished"] > 0) == (None, True)
        late = after(world, 5)("health", "--max-age", "30m", exits=1).stdout
        assert late == "unhealthy: the newest cut is 5.0 h old, more than 30.0 min are too many\n"
        assert doctor(world, 5).keys() == {"cuts-passed-over"}


def test_doctor_tells_a_damaged_cut_beside_the_rest(world: WatchedWorld) -> None:
    world.run(10)
    world.settle()
    world.watch()
    (first,) = Path(world.root.path("checkpoints")).glob("00000001-*.parquet")
    first.write_bytes(b"")
    (world.base / "c/silver/metadata").write_text("torn")
    found = doctor(world)
    assert found.keys() == {"damaged-checkpoint", "unreadable"}
    assert found["damaged-checkpoint"]["command"] == f"spark-abs verify {world.root.uri}"
