"""`spark-abs watch` as its user calls it, and the commands that read its root."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from spark_abs.cli.main import main
from spark_abs.cli.root_command import Context
from spark_abs.store.control import Control
from spark_abs.store.history import History, HistoryEvent, HistoryRow
from spark_abs.store.table import Table
from spark_abs.watch import watcher
from spark_abs.watch.watcher import Watcher
from tests.watched_queries import WatchedWorld


@pytest.fixture
def world(tmp_path: Path) -> WatchedWorld:
    world = WatchedWorld(tmp_path / "live", "chain", seed=3, files=80)
    world.run(15)
    world.settle()
    return world


def call(*arguments: str, exits: int = 0, pause: Any = None) -> Result:
    result = CliRunner().invoke(main, arguments, obj=Context(pause=pause or (lambda _: None)))
    assert result.exit_code == exits, (result.output, result.exception)
    return result


def watch(world: WatchedWorld, *arguments: str, exits: int = 0, pause: Any = None) -> Result:
    given = ["--checkpoints", f"{world.base}/c/*", "--tables", f"{world.base}/t/*"]
    return call("watch", world.root.uri, *given, *arguments, exits=exits, pause=pause)


def test_cuts_are_kept_listed_and_gone_back_to(world: WatchedWorld) -> None:
    root = world.root.uri
    done = json.loads(watch(world, "--once", "--output", "json").stdout)
    cut = str(done["kept"])
    assert "There is no newer cut to keep." in watch(world, "--once").stdout
    world.run(30)
    world.settle()
    world.purge()
    said = watch(world, "--once").stdout
    assert "Kept cut" in said
    assert "bronze" in said
    rows = json.loads(call("list", root, "--output", "json").stdout)
    assert [row["kind"] for row in rows] == ["checkpoint"] * len(rows)
    assert "silver" in call("show", root, "latest").stdout
    status = json.loads(call("status", root, "--output", "json").stdout)
    assert status["job"] == "watched-queries"
    assert status["alive"] is None
    assert status["kept"] == len(rows)
    assert f" {len(rows)}, the oldest from" in call("status", root).stdout
    assert "nothing is damaged" in call("verify", root).stdout
    assert "nothing is damaged" in call("verify", root, cut).stdout
    given = ["--checkpoints", f"{world.base}/c/*", "--tables", f"{world.base}/t/*", "--root", root]
    moments = json.loads(call("rewind", *given, "--list", "--output", "json").stdout)
    (first,) = (m for m in moments if m["kept"] and m["batches"] == dict(done["batches"]))
    early = call("rewind", *given, "--before", "2020-01-01T00:00", exits=1).stderr
    assert f"The oldest moment there is: {moments[-1]['at'].replace('T', ' ')}; --list shows all" in early
    assert "--root ROOT" not in early
    asked = [f"--at={query}={batch}" for query, batch in first["batches"].items()]
    assert (
        f"The files come from cut {cut}, kept at {root}."
        in call("rewind", *given, *asked, "--dry-run").stdout
    )
    assert json.loads(call("rewind", *given, *asked, "--yes", "--output", "json").stdout)["applied"]
    world.is_whole(3)


def test_it_works_until_it_is_stopped_and_a_look_that_fails_does_not_end_it(world: WatchedWorld) -> None:
    looks: list[int] = []

    def pause(_: float) -> None:
        looks.append(len(looks))
        if len(looks) == 1:
            (world.base / "c" / "gold" / "metadata").rename(world.base / "c" / "gold" / "away")
            (world.base / "c" / "gold" / "metadata").write_text("torn")
        if len(looks) == 2:
            (world.base / "c" / "gold" / "away").rename(world.base / "c" / "gold" / "metadata")
            world.run(25)
            world.settle()
        if len(looks) == 3:
            raise KeyboardInterrupt

    result = watch(world, "--every", "1s", pause=pause)
    assert result.stdout.count("Kept cut") == 2
    assert "nothing was kept at this look" in result.stderr
    run = Control.open(world.root).state.run
    assert run is not None
    assert run.ended == "stopped"


def test_tables_that_are_cleaned_up_sooner_are_named(world: WatchedWorld) -> None:
    table = DeltaTable(str(world.base / "t" / "gold"))
    table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 2 days"})
    said = watch(world, "--once", "--keep", "24h:all", "60d:1d").stderr
    assert said.count("Warning:") == 6
    assert "VACUUM may delete files of versions that are older than 2d" in said
    assert "Delta may delete the log of versions that are older than 30d, and cuts are kept up to 60d" in said
    assert watch(world, "--once", "--keep", "24h:all").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said", "exits"),
    [
        (["--once", "--keep", "7d"], "--keep 7d: '7d': expected a number", 2),
        (["--every", "soon"], "--every soon: expected a duration", 2),
        (["--every", "0s"], "a look needs time", 2),
        (["--keep", ""], "says nothing", 2),
    ],
)
def test_wrong_calls_are_named(world: WatchedWorld, arguments: list[str], said: str, exits: int) -> None:
    assert said in watch(world, *arguments, exits=exits).stderr


def test_commands_that_are_for_jobs_say_so(world: WatchedWorld) -> None:
    watch(world, "--once")
    root = world.root.uri
    assert f"`spark-abs rewind --root {root}`" in call("restore", root, "--to", "1", exits=1).stderr
    assert "root of a watcher" in call("stop", root, exits=1).stderr


def test_a_root_is_a_directory_of_its_own(world: WatchedWorld) -> None:
    given = ["--checkpoints", f"{world.base}/c/*", "--tables", f"{world.base}/t/*", "--once"]
    for root in (world.base, world.base / "c", world.base / "c/gold", world.base / "t/gold/kept"):
        assert (
            "give a root that is a directory of its own" in call("watch", str(root), *given, exits=2).stderr
        )
        assert not (root / "control").exists()


def test_a_signal_that_ends_a_single_look_is_no_kill(
    world: WatchedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def round_(_: Watcher, __: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Watcher, "round", round_)
    watch(world, "--once", exits=1)
    run = Control.open(world.root).state.run
    assert run is not None
    assert run.ended == "stopped"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("error", [OSError("503"), DeltaError("503")], ids=repr)
def test_a_kept_cut_is_shown_also_if_the_clean_up_after_it_fails(
    world: WatchedWorld, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(watcher, "sweep", fails)
    done = json.loads(watch(world, "--once", "--output", "json").stdout)
    assert (done["kept"], done["unfinished"]) == (1, "503")
    world.run(10)
    world.settle()

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    result = watch(world, pause=stop)
    assert "Kept cut 2" in result.stdout
    assert "What comes after a kept cut has failed, a later look makes up for it: 503" in result.stdout
    assert "nothing was kept" not in result.stderr


def test_cuts_are_retired_also_if_the_store_does_not_take_the_history_of_it(
    world: WatchedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(world, "--once", "--keep", "1")
    world.run(10)
    world.settle()
    append, refused = History.append, list[HistoryRow]()

    def refuse(history: History, rows: Sequence[HistoryRow]) -> None:
        refused.extend(gone := [row for row in rows if row.event is HistoryEvent.RETIRED])
        if gone:
            raise DeltaError("503")
        append(history, rows)

    monkeypatch.setattr(History, "append", refuse)
    done = json.loads(watch(world, "--once", "--keep", "1", "--output", "json").stdout)
    assert [row.checkpoint for row in refused] == [1]
    assert (done["kept"], done["unfinished"]) == (2, None)
    assert [row["id"] for row in json.loads(call("list", world.root.uri, "--output", "json").stdout)] == [2]


def test_an_error_of_a_log_ends_neither_a_watcher_nor_its_look(
    world: WatchedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of a log may fail with an error of deltalake's own, at the end of the run too."""
    looks, refresh = list[int](), Table.refresh

    def fails(_: Table) -> None:
        raise DeltaError("503")

    def pause(_: float) -> None:
        looks.append(len(looks))
        monkeypatch.setattr(Table, "refresh", fails if len(looks) == 1 else refresh)
        if len(looks) == 3:
            monkeypatch.setattr(Table, "refresh", fails)
            raise KeyboardInterrupt

    result = watch(world, "--every", "1s", pause=pause)
    assert len(looks) == 3
    assert "Kept cut 1" in result.stdout
    assert result.stderr.count("nothing was kept at this look, the next is in 1s: 503") == 1
