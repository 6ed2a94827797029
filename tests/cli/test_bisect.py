"""`spark-abs bisect` over small real roots, and over plain queries."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable, write_deltalake

import spark_abs
from spark_abs.cli.main import main
from spark_abs.cli.root_command import Context
from spark_abs.errors import UsageError
from spark_abs.manifest import Manifest, OutputVersion
from spark_abs.model import Barrier, BatchId, CheckpointMode, Version
from spark_abs.observe.tables import table_at
from spark_abs.store.storage import Place
from spark_abs.store.table import Table
from tests.cli.conftest import Cli
from tests.plain_queries import World, rows_of
from tests.root_support import SmallJob, offsets_of

BAD = "EXISTS (SELECT n FROM totals WHERE n >= 100)"


def start_again(job: SmallJob) -> None:
    """Begin a run that goes on with the batches of the one before."""
    batch = job.batch
    job.start()
    job.batch = batch


def vacuum(table: str) -> None:
    DeltaTable(table).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)


def test_the_first_bad_checkpoint_is_named_and_the_way_back_is_a_command_that_works(
    job: SmallJob, cli: Cli
) -> None:
    for n in (1, 2, 3):
        job.checkpoint(n)
    start_again(job)
    job.checkpoint(4, name="good")
    job.step(5)
    job.checkpoint(100)
    for n in (6, 7, 8, 9):
        job.checkpoint(n)
    found = cli.json("bisect", BAD)
    assert (found["good"]["id"], found["good"]["name"], found["bad"]["id"]) == (4, "good", 5)
    assert (found["reads"], found["moments"], found["skipped"]) == (5, 9, [])
    ran = {r["name"]: (r["since"], r["until"]) for r in found["between"]["ran"]}
    assert ran == {"a": (3, 5), "b": (3, 5)}
    assert found["between"]["began"] == []
    text = cli("bisect", BAD).stdout
    assert "Bad since checkpoint 5, 1970-01-01 00:00:10" in text
    assert "Good until checkpoint 4 (good)" in text
    assert "'a' ran batches 4 to 5" in text
    command = found["back"]
    assert command in text
    again = CliRunner().invoke(main, [*shlex.split(command)[1:], "--yes"], obj=Context())
    assert again.exit_code == 0, again.output
    assert job.rows() == [1, 2, 3, 4]


def test_a_query_says_it_too_and_starts_in_between_are_named(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    start_again(job)
    job.checkpoint(200)
    found = cli.json("bisect", "SELECT sum(n) > 100 FROM totals")
    assert (found["good"]["id"], found["bad"]["id"]) == (1, 2)
    assert [run["run"] for run in found["between"]["began"]] == [2]
    assert "run 2 of attempt 1 began at" in cli("bisect", "SELECT n FROM totals WHERE n = 200").stdout


def test_checkpoints_that_a_restore_abandoned_are_not_looked_at(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    job.checkpoint(300)
    spark_abs.open(job.root.uri).restore(1)
    job.start()
    job.checkpoint(2)
    job.checkpoint(100)
    found = cli.json("bisect", BAD)
    assert (found["good"]["id"], found["bad"]["id"], found["moments"]) == (3, 4, 3)


def test_what_is_bad_from_the_beginning_or_never_is_said(job: SmallJob, cli: Cli) -> None:
    assert "there is no checkpoint to look at yet" in cli("bisect", BAD, exits=1).stderr
    job.checkpoint(1)
    job.checkpoint(2)
    said = cli("bisect", BAD, exits=1).stderr
    assert "the condition is not true at checkpoint 2, the newest that can be read" in said
    said = cli("bisect", "SELECT count(*) FROM totals WHERE n > 100", exits=1).stderr
    assert "is true already at checkpoint 1, the oldest that can be read" in said
    assert "as a SELECT count(*) is" in said


def test_versions_that_vacuum_took_away_are_passed_over(job: SmallJob, cli: Cli) -> None:
    for n in (1, 2, 3):
        job.checkpoint(n)
    DeltaTable(job.table).optimize.compact()
    job.checkpoint(4)
    job.checkpoint(100)
    vacuum(job.table)
    found = cli.json("bisect", BAD)
    assert (found["good"]["id"], found["bad"]["id"], found["skipped"]) == (4, 5, [])
    said = cli("bisect", "SELECT n FROM totals WHERE n = 3", exits=1).stderr
    assert "true already at checkpoint 4, the oldest that can be read" in said
    assert re.search(r"checkpoint 3 cannot be read: table totals: \d files of version", said)


def test_between_two_that_can_be_read_those_that_cannot_are_named(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    kept = set(DeltaTable(job.table).file_uris())
    job.checkpoint(2)
    (gone,) = set(DeltaTable(job.table).file_uris()) - kept
    DeltaTable(job.table).optimize.compact()
    job.checkpoint(100)
    Path(gone).unlink()
    found = cli.json("bisect", BAD)
    assert (found["good"]["id"], found["bad"]["id"]) == (1, 3)
    assert [skipped["moment"]["id"] for skipped in found["skipped"]] == [2]
    assert "Not known: checkpoint 2 cannot be read: table totals: 1 files" in cli("bisect", BAD).stdout


@pytest.mark.parametrize(
    ("arguments", "said", "exits"),
    [
        (["1 > 0"], "the condition names none of the tables, which are totals", 2),
        (["SELECT m FROM totals"], "No field named m", 2),
        (["SELECT n FROM totals; DROP TABLE totals"], "cannot be asked", 2),
        (["SELECT", "n FROM totals"], "as one argument in quotes", 2),
        ([BAD, "--tables", "x"], "--tables needs --checkpoints", 2),
        ([BAD, "--checkpoints", "x"], "as one argument in quotes", 2),
        (["SELECT n / 0 FROM totals"], "cannot be computed", 1),
    ],
)
def test_a_wrong_call(job: SmallJob, cli: Cli, arguments: list[str], said: str, exits: int) -> None:
    job.checkpoint(1)
    assert said in cli("bisect", *arguments, exits=exits).stderr


def test_no_root_and_a_table_that_was_replaced(job: SmallJob, cli: Cli, tmp_path: Path) -> None:
    job.checkpoint(1)
    assert Cli(str(tmp_path / "none"))("bisect", BAD, exits=2).stderr
    replaced = tmp_path / "other"
    Path(job.table).rename(replaced)
    assert "no moment can be read; checkpoint 1: sink 'totals' has lost" in cli("bisect", BAD, exits=1).stderr


@pytest.mark.parametrize("newest", [0, 1, 2])
def test_tables_of_different_places_are_told_apart_whatever_their_versions(
    job: SmallJob, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, newest: int
) -> None:
    """From checkpoint 3 on the sink has another table, whose versions count from 0 again."""
    place = Place(str(tmp_path / "lake/other"))
    for n in range(newest + 1):
        write_deltalake(place.uri, pa.table({"n": [100 + n]}), mode="append")
    other = Table.open(place)
    job.checkpoint(1)
    job.checkpoint(2)
    made = job.manifest

    def elsewhere(barrier: Barrier, version: Version) -> Manifest:
        manifest = made(barrier, version)
        a, b = manifest.stages
        table, mail = b.outputs
        moved = replace(table, table=place.uri, table_id=other.id, version=other.version)
        return replace(manifest, stages=(a, replace(b, outputs=(moved, mail))))

    monkeypatch.setattr(job, "manifest", elsewhere)
    job.checkpoint(3)
    found = cli.json("bisect", BAD)
    assert (found["good"]["id"], found["bad"]["id"], found["skipped"]) == (2, 3, [])


def test_a_name_of_several_tables_is_refused_and_each_is_named(
    job: SmallJob, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As of a wrapped query: its function, and each table that this writes, have the name of the query."""
    kept = [Place(str(tmp_path / "lake" / name)) for name in ("first", "second")]
    for place in kept:
        write_deltalake(place.uri, pa.table({"n": [1]}))
    made, tables = job.manifest, kept[:1]

    def wrapped(barrier: Barrier, version: Version) -> Manifest:
        manifest = made(barrier, version)
        a, b = manifest.stages
        function = OutputVersion("daily", "function", "daily", "", None)
        written = [OutputVersion("daily", "table", t.uri, t.id, t.version) for t in map(Table.open, tables)]
        return replace(manifest, stages=(a, replace(b, outputs=(*b.outputs, function, *written))))

    monkeypatch.setattr(job, "manifest", wrapped)
    job.checkpoint(1)
    assert table_at(job.root, "daily").table == kept[0].uri
    assert "is not true at checkpoint 1" in cli("bisect", "SELECT n FROM daily WHERE n > 1", exits=1).stderr
    tables = kept
    job.checkpoint(2)
    said = (
        f"checkpoint 2 has several tables of the name 'daily': {kept[0].uri}, {kept[1].uri}; "
        f"spark_abs.open({job.root.uri!r}).tables(2) has the version of each, for any reader of Delta"
    )
    with pytest.raises(UsageError, match=re.escape(said)):
        table_at(job.root, "daily")
    refused = cli("bisect", "SELECT n FROM daily", "--output", "json", exits=2).stderr
    assert said in json.loads(refused)["message"]
    assert set(spark_abs.open(job.root.uri).tables(2)["table"].to_pylist()) >= {place.uri for place in kept}
    tables = kept[1:]
    write_deltalake(kept[1].uri, pa.table({"n": [100]}), mode="append")
    job.checkpoint(100)
    found = cli.json("bisect", "SELECT n FROM daily WHERE n >= 100")
    assert (found["good"]["id"], found["bad"]["id"]) == (1, 3)
    (skipped,) = found["skipped"]
    assert said in skipped["reason"]


class OfFiles(SmallJob):
    """Its stage `a` reads a file with each batch."""

    def native_files(self, stage: str, cut: BatchId) -> dict[str, str]:
        found = super().native_files(stage, cut)
        if stage == "a":
            for batch in range(cut + 1):
                entry = {"path": f"file:///in/{batch}.json", "timestamp": 1, "batchId": batch}
                found[f"sources/0/{batch}"] = f"v1\n{json.dumps(entry)}"
        return found

    def manifest(self, barrier: Barrier, version: Version) -> Manifest:
        made = super().manifest(barrier, version)
        a, b = made.stages
        head = offsets_of("a", self.batch).rpartition("\n")[0]
        return replace(made, stages=(replace(a, offsets=f'{head}\n{{"logOffset":{self.batch}}}'), b))


def test_the_input_files_in_between_are_named(tmp_path: Path) -> None:
    job = OfFiles(tmp_path)
    job.checkpoint(1)
    job.step(2)
    job.checkpoint(100)
    ask = Cli(job.root.uri)
    (a, _) = ask.json("bisect", BAD)["between"]["ran"]
    (source,) = a["inputs"]
    assert (source["since"], source["until"]) == ("file batch 0", "file batch 2")
    assert source["files"] == ["file:///in/1.json", "file:///in/2.json"]
    text = ask("bisect", BAD).stdout
    assert "source 0: from file batch 0 to file batch 2" in text
    assert "      file:///in/2.json" in text


def test_tables_of_an_unaligned_checkpoint_are_said_to_differ(
    job: SmallJob, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.checkpoint(1)
    made = job.manifest
    monkeypatch.setattr(job, "manifest", lambda *a: replace(made(*a), mode=CheckpointMode.UNALIGNED))
    job.checkpoint(100)
    assert "Note: checkpoint 2 was made in mode unaligned" in cli("bisect", BAD).stdout


def of_queries(world: World, condition: str, exits: int = 0) -> Result:
    base = world.base
    called = ["bisect", condition, "--checkpoints", f"{base}/c/*", "--tables", f"{base}/t/*"]
    result = CliRunner().invoke(main, [*called, "--output", "json"], obj=Context())
    assert result.exit_code == exits, (result.output, result.exception)
    return result


def test_plain_queries_are_searched_at_their_cuts(tmp_path: Path) -> None:
    """The command goes back to the last good moment, and the queries then lose no row."""
    world = World(tmp_path, "chain", seed=3, files=12)
    world.run(20)
    wanted = sorted(rows_of(world.base / "t" / "gold"))[-4]
    found: dict[str, Any] = json.loads(of_queries(world, f"SELECT id FROM gold WHERE id = {wanted}").stdout)
    assert found["bad"]["at_ms"] >= found["good"]["at_ms"]
    assert found["back"].startswith("spark-abs rewind --at ")
    ran = {r["name"]: r for r in found["between"]["ran"]}
    assert ran["gold"]["until"] > ran["gold"]["since"]
    back = CliRunner().invoke(
        main, [*shlex.split(found["back"])[1:], "--yes"], obj=Context(pause=lambda _: None)
    )
    assert back.exit_code == 0, back.output
    assert wanted not in rows_of(world.base / "t" / "gold")
    world.is_whole(3)


def test_plain_queries_name_their_input_files(tmp_path: Path) -> None:
    world = World(tmp_path, "chain", seed=3, files=12)
    world.run(20)
    wanted = sorted(rows_of(world.base / "t" / "bronze"))[-1]
    found = json.loads(of_queries(world, f"(SELECT count(*) FROM bronze WHERE id = {wanted}) > 0").stdout)
    (bronze,) = (r for r in found["between"]["ran"] if r["name"] == "bronze")
    (source,) = bronze["inputs"]
    assert source["files"]
    said = of_queries(world, "SELECT id FROM bronze WHERE id > 1000000", exits=1).stderr
    assert "is not true at the moment gold=" in said
