"""`spark-abs rewind` as its user calls it, over queries and tables that know nothing of spark_abs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable

from spark_abs.cli.main import main
from spark_abs.cli.root_command import Context
from spark_abs.rewind import claim
from spark_abs.rewind.apply import apply
from spark_abs.store.storage import DEFAULTS
from tests.plain_queries import PlainQuery, World, append, rows_of


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path, "chain", seed=3, files=12)
    world.run(20)
    return world


def rewind(world: World, *arguments: str, exits: int = 0, pause: Any = lambda _: None) -> Result:
    base = world.base
    checkpoints = map(str, sorted((base / "c").iterdir()))
    given = ["rewind", "--checkpoints", *checkpoints, "--tables", f"{base}/t/*"]
    result = CliRunner().invoke(main, [*given, *arguments], obj=Context(pause=pause))
    assert result.exit_code == exits, (result.output, result.exception)
    return result


def test_the_moments_are_listed_and_one_is_gone_back_to(world: World) -> None:
    """The plan says batches and versions, and a second call finds nothing to change."""
    moments = json.loads(rewind(world, "--list", "--output", "json").stdout)
    assert len(moments) > 2
    assert rewind(world, "--list").stdout.split()[0] == "time"
    oldest = moments[-1]["batches"]
    before = {table: rows_of(world.base / "t" / table) for table in ("bronze", "silver", "gold")}
    asked = [f"--at={query}={batch}" for query, batch in oldest.items()]
    dry = rewind(world, *asked, "--dry-run").stdout
    assert f"back to batch {oldest['silver']}" in dry
    assert "back to the rows of version" in dry
    rewind(world, *asked, exits=2)
    assert before == {table: rows_of(world.base / "t" / table) for table in before}
    done = json.loads(rewind(world, *asked, "--yes", "--output", "json").stdout)
    assert done["applied"]
    assert {q["name"]: q["to"] for q in done["plan"]["queries"]} == oldest
    assert "nothing to change" in rewind(world, *asked, "--yes").stdout
    world.is_whole(3)


def test_a_query_that_runs_is_noticed(world: World) -> None:
    def runs(_: float) -> None:
        query = next(q for q in world.queries() if q.name == "bronze")
        query.start()
        assert query.step(1)

    said = rewind(world, "--at=bronze=1", "--yes", pause=runs, exits=1).stderr
    assert "query 'bronze' has begun or ended a batch" in said
    world.is_whole(3)


def test_a_query_that_runs_while_fences_are_set_is_noticed(world: World) -> None:
    """The fences go, and nothing else was changed."""
    prepared = world.prepare({"bronze": 1})
    query = next(q for q in world.queries() if q.name == "bronze")

    def at(point: str) -> None:
        if point == "fenced":
            append(world.base / "t" / "gold", [], {"someone": 1})

    query.start()
    with pytest.raises(Exception, match="gold has a new version"):
        apply(prepared.plan, DEFAULTS, require_still=prepared.require_still, at=at)
    world.is_whole(3)


def test_rows_of_others_go_only_if_that_is_said(world: World) -> None:
    append(world.base / "t" / "silver", [500], {})
    said = rewind(world, "--at=bronze=1", "--yes", exits=1).stderr
    assert "others have changed it since: version" in said
    assert "Say --force rows" in said
    rewind(world, "--at=bronze=1", "--yes", "--force", "rows")
    world.is_whole(3)


@pytest.mark.parametrize("timed", [True, False], ids=["", "no times"])
def test_rows_that_perhaps_a_query_has_written_stop_a_rewind(world: World, timed: bool) -> None:
    """A function without `txnAppId` leaves no trace of its batch: its rows would come twice."""
    table = world.base / "t" / "gold"
    for file in sorted((table / "_delta_log").glob("*.json"))[1:]:
        lines = [line for line in file.read_text().splitlines() if '"txn"' not in line]
        file.write_text("\n".join(lines))
    for _ in range(2):  # and more of others: times do not tell
        append(table, [500], {})
    if not timed:
        for file in (table / "_delta_log").glob("*.json"):
            file.write_text(re.sub(r'"timestamp":\d+,?', "", file.read_text()))
    oldest = json.loads(rewind(world, "--list", "--output", "json").stdout)[-1]["batches"]
    said = rewind(world, f"--at=bronze={oldest['bronze']}", "--yes", exits=1).stderr
    assert f"table {table} was changed after the moment by commits that name no batch of a query" in said
    rewind(world, f"--at=bronze={oldest['bronze']}", "--dry-run", "--force", "tables")


def read_again(world: World, batch: int) -> tuple[list[int], list[int]]:
    """Return the inputs that bronze has read up to a batch, and those that it has read since."""
    bronze = next(query for query in world.queries() if query.name == "bronze")
    bronze.start()
    return [n for at, n in bronze.entries if at <= batch], [n for at, n in bronze.entries if at > batch]


def input_file(world: World, number: int) -> Path:
    return world.base / "in1" / str(number)


def test_input_files_that_are_gone_are_not_lost_silently(world: World) -> None:
    """Those read before the moment are not read again, and may be gone."""
    before, again = read_again(world, 1)
    gone = [again[0], again[-1]]
    input_file(world, before[0]).unlink()
    rewind(world, "--at=bronze=1", "--dry-run")
    for number in gone:
        input_file(world, number).unlink()
    there = {table: rows_of(world.base / "t" / table) for table in ("bronze", "silver", "gold")}
    said = rewind(world, "--at=bronze=1", "--yes", exits=1).stderr
    assert f"2 of {len(again)} input files that query 'bronze' reads again are gone: " in said
    assert all(input_file(world, number).as_uri() in said for number in gone)
    assert "put the files back, go back to a later moment, or pass --force inputs" in said
    assert there == {table: rows_of(world.base / "t" / table) for table in there}
    done = rewind(world, "--at=bronze=1", "--yes", "--force", "inputs").stdout
    assert f"Note: 2 of {len(again)} input files that query 'bronze' reads again are gone: " in done
    assert "their rows will be missing" in done
    world.expected = [n for n in world.expected if n not in gone]
    world.is_whole(3)


def test_input_files_are_looked_for_where_only_a_later_compact_file_names_them(tmp_path: Path) -> None:
    world = World(tmp_path / "a b", "chain", seed=3, files=40)
    bronze = world.queries()[0]
    bronze.start()
    while not (log := world.base / "c/bronze/sources/0/9.compact").exists():
        assert bronze.step(1)
    for number in range(9):
        (log.parent / str(number)).unlink(missing_ok=True)
    for query in world.queries()[1:]:
        query.drain(1)
    input_file(world, 7).unlink()
    dry = ("--at=bronze=3", "--dry-run")
    assert (
        "1 of 6 input files that query 'bronze' reads again are gone" in rewind(world, *dry, exits=1).stderr
    )
    input_file(world, 7).touch()
    rewind(world, *dry)


def test_files_of_a_table_that_are_read_again_and_are_gone_stop_a_rewind(world: World) -> None:
    """`OPTIMIZE` and `VACUUM` leave the table whole, and take away what its stream reads."""
    base = world.base
    checkpoints = ("--checkpoints", f"{base}/c/silver", f"{base}/c/gold")

    def called(tables: str, *options: str, exits: int = 0) -> str:
        words = ("rewind", *checkpoints, "--tables", f"{base}/t/{tables}", "--force", "tables", *options)
        result = CliRunner().invoke(main, words, obj=Context(pause=lambda _: None))
        assert result.exit_code == exits, (result.output, result.exception)
        return result.output

    oldest = json.loads(called("*", "--list", "--output", "json"))[-1]["batches"]
    back = (f"--at=gold={oldest['gold']}", "--dry-run")
    called("*", *back)
    table = DeltaTable(str(base / "t" / "bronze"))
    table.optimize.compact()
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    said = called("*", *back, exits=1)
    assert re.search(
        rf"rows that queries read again: query 'silver' resumes at version \d+ of {base}/t/bronze, and \d+ "
        r"of \d+ files that it reads are gone, those of version",
        said,
    )
    assert "go back to a later moment, bring files and log back, or pass --force inputs" in said
    assert "Note: Delta tables no longer have rows that" in called("*", *back, "--force", "inputs")
    said = called("[sg]*", *back)
    assert "stays as it is, and its files are not looked at" in said


def test_a_store_that_cannot_be_asked_for_input_files_is_no_store_without_them(world: World) -> None:
    for log in (world.base / "c/bronze/sources/0").iterdir():
        log.write_text(log.read_text().replace(world.base.as_uri(), "s3n://elsewhere"))
    said = rewind(world, "--at=bronze=1", "--dry-run", exits=1).stderr
    assert "it is not known whether the input files that query 'bronze' reads again are there: s3n://" in said
    assert "--force inputs" in said
    done = rewind(world, "--at=bronze=1", "--dry-run", "--force", "inputs").stdout
    assert "Note: it is not known whether the input files" in done


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--at", "bronze"], "give QUERY=BATCH"),
        (["--at", "nobody=3"], "--at nobody=3: the queries are bronze, gold, silver"),
        (["--at", "bronze=99"], "query 'bronze' has no batch 99: its newest is "),
        (["--root", "/nope", "--list"], "there is no root of `spark-abs watch` at /nope"),
        (["--before", "yesterday"], "'yesterday' is no time such as 2026-01-31T20:15"),
        (["--wait", "long", "--yes", "--at=bronze=1"], "expected a duration"),
        (["--wait", "long", "--dry-run"], "--wait 'long': expected a duration"),
        (["--wait", "-5s", "--undo"], "--wait '-5s': expected a duration"),
        (["--undo", "--purge", "--yes"], "give either --undo or --purge"),
        (["--list", "--undo"], "give either --list or --undo"),
        (["--list", "--purge"], "give either --list or --purge"),
        (["--list", "--at", "gold=3"], "give either --list or --at"),
        (["--list", "--yes"], "give either --list or --yes"),
        (["--list", "--dry-run"], "give either --list or --dry-run"),
        (["--undo", "--before", "2026-01-31T20:15"], "give either --undo or --before"),
        (["--purge", "--at", "gold=3"], "give either --purge or --at"),
        (["--tables", "/nowhere/*"], "/nowhere/* leads to no Delta table"),
        (["--tables", "main.shop.silver"], "give the location that DESCRIBE DETAIL main.shop.silver shows"),
    ],
)
def test_a_wrong_call(world: World, arguments: list[str], said: str) -> None:
    assert said in rewind(world, *arguments, exits=2).stderr


def test_directories_are_what_they_should_be(world: World) -> None:
    """A copy of a checkpoint is none; names with the letters of patterns are names where they are found."""
    shutil.copytree(world.base / "c" / "gold", world.base / "c" / "gold.bak")
    assert "are checkpoints of the same query: give one of them" in rewind(world, exits=2).stderr
    (world.base / "c" / "gold.bak").rename(world.base / "gold.bak")
    (world.base / "c" / "gold").rename(world.base / "c" / "g[1]?")
    moments = json.loads(rewind(world, "--list", "--output", "json").stdout)
    assert sorted(moments[0]["batches"]) == ["bronze", "g[1]?", "silver"]
    (world.base / "ice" / "metadata").mkdir(parents=True)
    called = ["rewind", "--checkpoints", f"{world.base}/*", "--tables", f"{world.base}/t/*"]
    result = CliRunner().invoke(main, called, obj=Context(pause=lambda _: None))
    assert (result.exit_code, "commits of gold.bak" in result.output) == (0, False), result.output


@pytest.mark.parametrize("text", ["", "v1", "v1\n{", "v9\n{}"], ids=["empty", "torn", "cut off", "newer"])
def test_a_damaged_offset_file_is_named(world: World, text: str) -> None:
    newest = max((world.base / "c" / "gold" / "offsets").iterdir(), key=lambda file: int(file.name))
    newest.write_text(text)
    said = rewind(world, "--list", exits=1 if text.startswith("v9") else 3).stderr
    assert f"{newest}: offset log" in said


def test_a_changed_table_is_others_work(world: World) -> None:
    DeltaTable(str(world.base / "t" / "silver")).alter.set_table_properties(
        {"delta.logRetentionDuration": "interval 1 day"}
    )
    assert "others have changed it since" in rewind(world, "--at=bronze=1", "--yes", exits=1).stderr


def test_an_undo_whose_files_are_gone_leaves_the_rewind(world: World) -> None:
    rewind(world, "--at=bronze=1", "--yes")
    table = DeltaTable(str(world.base / "t" / "bronze"))
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    versions = rows_of(world.base / "t" / "bronze")
    said = rewind(world, "--undo", "--yes", exits=1).stderr
    assert "cannot be undone, and stands" in said or "was changed since" in said
    assert rows_of(world.base / "t" / "bronze") == versions
    world.is_whole(3)


def test_before_the_first_batch_there_is_no_cut(world: World) -> None:
    said = rewind(world, "--before", "2020-01-01T00:00", exits=1).stderr
    assert "has no batch that can be resumed so far back" in said
    oldest = json.loads(rewind(world, "--list", "--output", "json").stdout)[-1]
    assert f"The oldest moment there is: {oldest['at'].replace('T', ' ')}; --list shows all" in said
    assert "--root ROOT also those that `spark-abs watch` has kept" in said
    asked = rewind(world, "--before", oldest["at"], "--dry-run", "--output", "json")
    assert json.loads(asked.stdout)["plan"]["moment_ms"] == oldest["at_ms"]


def test_without_any_cut_no_moment_is_named(world: World) -> None:
    for file in (world.base / "c" / "gold" / "commits").iterdir():
        file.unlink()
    said = rewind(world, "--dry-run", exits=1).stderr
    assert "query 'gold' has no batch that can be resumed so far back" in said
    assert "oldest" not in said


def test_what_a_function_writes_elsewhere_is_said_to_come_again(world: World) -> None:
    """Of a query that writes with Delta's own sink, which has one table, nothing is said."""
    plan = json.loads(rewind(world, "--at=bronze=1", "--dry-run", "--output", "json").stdout)["plan"]
    (said,) = (note for note in plan["notes"] if "writes through a function" in note)
    assert said.startswith("query 'gold' writes through a function: what it writes elsewhere")
    assert said.endswith("is written again")


def test_a_table_between_two_queries_is_missed(world: World) -> None:
    base = world.base
    given = ["--checkpoints", f"{base}/c/*", "--tables", f"{base}/t/bronze", f"{base}/t/gold", "--yes"]
    result = CliRunner().invoke(main, ["rewind", *given], obj=Context(pause=lambda _: None))
    assert result.exit_code == 1
    assert "query 'gold' reads the Delta table with id" in result.stderr
    assert "the log of no given table names 'gold' or 'silver' as its writer" in result.stderr


def test_a_rewind_that_was_killed_is_finished_by_the_next_call(world: World) -> None:
    """Meanwhile no query starts: the file with its id is none."""
    prepared = world.prepare({"bronze": 1})

    def at(point: str) -> None:
        if point == "rewound":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply(prepared.plan, DEFAULTS, require_still=prepared.require_still, at=at)
    with pytest.raises(json.JSONDecodeError):
        PlainQuery(world.base, "silver", "bronze", "silver").start()
    assert "is not finished: give --yes" in rewind(world, exits=2).stderr
    assert "was begun and is not finished" in rewind(world, "--list", exits=1).stderr
    assert "is finished" in rewind(world, "--yes").stdout
    world.is_whole(3)


def test_a_rewind_is_taken_back(world: World) -> None:
    assert "have not been rewound" in rewind(world, "--undo", "--yes", exits=2).stderr
    there = rows_of(world.base / "t" / "bronze")
    rewind(world, "--at=bronze=1", "--yes")
    assert rows_of(world.base / "t" / "bronze") != there
    assert "come back" in rewind(world, "--undo", exits=2).stdout
    assert json.loads(rewind(world, "--undo", "--yes", "--output", "json").stdout)["applied"]
    assert set(rows_of(world.base / "t" / "bronze")) <= set(there)
    world.is_whole(3)


def test_an_undo_that_would_read_lost_input_files_again_leaves_the_rewind(world: World) -> None:
    """The newest batches before the rewind were not read by all: their input is read again."""
    for query in world.queries():
        query.drain(5)
    for number in range(1000, 1004):
        (world.base / "in1" / str(number)).touch()
    bronze = world.queries()[0]
    bronze.drain(1)
    rewind(world, "--at=bronze=1", "--yes")
    (world.base / "in1" / "1003").unlink()
    rows = rows_of(world.base / "t" / "bronze")
    said = rewind(world, "--undo", "--yes", exits=1).stderr
    assert "cannot be undone, and stands" in said
    assert "1 of 4 input files that query 'bronze' reads again are gone" in said
    assert rows_of(world.base / "t" / "bronze") == rows
    rewind(world, "--undo", "--yes", "--force", "inputs")
    assert 1003 not in rows_of(world.base / "t" / "bronze")


def test_the_plan_counts_the_same_rows_and_batches_after_a_rewind_and_its_undo(world: World) -> None:
    """Meanwhile batches have new numbers, and the files of a table were taken away and added again."""

    def counted() -> list[str]:
        said = " ".join(rewind(world, *oldest, "--dry-run").stdout.split())
        return re.findall(r"what the (?:\d+ batches|batch)|\d+ commits|\d+ of the present rows", said)

    for query in world.queries():
        query.drain(5)
    batches = json.loads(rewind(world, "--list", "--output", "json").stdout)[-1]["batches"]
    oldest = [f"--at={query}={batch}" for query, batch in batches.items()]
    before = counted()
    assert len(before) > 4
    rewind(world, *oldest, "--yes")
    rewind(world, "--undo", "--yes")
    assert counted() == before


def test_a_purge_that_was_killed_is_not_called_a_rewind(world: World) -> None:
    rewind(world, "--at=bronze=1", "--yes")
    checkpoints, _ = world.places()
    killed = claim.Claim("p", tuple(sorted(place.uri for place in checkpoints)), purges=True)
    for place in checkpoints:
        claim.take(place, killed)
    assert "purge p is not finished" in rewind(world, "--undo", exits=2).stderr
    assert "Say --purge again" in rewind(world, "--undo", "--yes").stdout
    assert "can no longer be undone" in rewind(world, "--purge", "--yes").stdout


def test_kept_files_are_purged_and_then_there_is_no_undo(world: World) -> None:
    assert "No rewind has kept files" in rewind(world, "--purge", "--yes").stdout
    rewind(world, "--at=bronze=1", "--yes")
    kept = json.loads(rewind(world, "--purge", "--dry-run", "--output", "json").stdout)["kept"]
    assert sum(k["files"] for k in kept) > 3
    assert json.loads(rewind(world, "--purge", "--yes", "--output", "json").stdout)["applied"]
    assert not list(world.base.glob("c/*/_rewind/*/files"))
    assert "were purged: it can no longer be undone" in rewind(world, "--undo", "--yes", exits=1).stderr
    world.is_whole(3)


def test_an_id_from_a_file_that_leads_elsewhere_deletes_nothing(world: World) -> None:
    rewind(world, "--at=bronze=1", "--yes")
    (record,) = world.base.glob("c/bronze/_rewind/*/rewound.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "rewind": "../../../elsewhere"}))
    precious = world.base / "elsewhere/files/precious"
    precious.parent.mkdir(parents=True)
    precious.touch()
    assert "leaves its root" in rewind(world, "--purge", "--yes", exits=3).stderr
    assert precious.exists()
