"""Wrapped queries of one root, killed where one of them runs and the other has not started yet."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import spark_abs
from spark_abs.protocol import control as ledger
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.crash.process import DriverProcess
from tests.crash.restorer import BEFORE_READERS, kill_restore, points
from tests.wrapped_support import covers, holds, ids

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def feed(base: Path, name: str, number: int) -> None:
    """Give a query one row, in a file that is seen whole or not at all."""
    directory, unseen = base / f"in-{name}", base / f".{name}-{number}"
    directory.mkdir(exist_ok=True)
    unseen.write_text(json.dumps({"id": number}))
    unseen.rename(directory / f"{number:05}.json")


def wait_for_rows(process: DriverProcess, base: Path, name: str, until: int) -> None:
    wanted = list(range(1, until + 1))
    process.wait_for(partial(holds, str(base / f"out-{name}"), wanted), f"rows up to {until} of {name}")


def ask(control: Control, name: str) -> None:
    control.update(lambda s: ledger.ask(s, ledger.Command(name, ledger.CommandKind.SAVEPOINT, name, 0)))


def test_killed_before_a_query_has_started_again_and_within_a_savepoint(tmp_path: Path) -> None:
    """The savepoint that was complete has both; the way back and on leaves every row once."""
    root = str(tmp_path / "root")
    for name in ("a", "b"):
        feed(tmp_path, name, 1)
        feed(tmp_path, name, 2)
    with DriverProcess(tmp_path, "tests.crash.wrapped", "a", "b") as both:
        wait_for_rows(both, tmp_path, "a", 2)
        wait_for_rows(both, tmp_path, "b", 2)
        claimed = Control.open(Root(root)).state.last_claimed  # any up to it may be of before these rows
        both.wait_for(partial(covers, root, "a", "b", after=claimed), "a checkpoint of both")
        feed(tmp_path, "b", 3)
        wait_for_rows(both, tmp_path, "b", 3)

    with DriverProcess(tmp_path, "tests.crash.wrapped", "a") as alone:
        feed(tmp_path, "a", 3)
        wait_for_rows(alone, tmp_path, "a", 3)
        control = Control.open(Root(root))
        ask(control, "one")
        alone.wait_for(lambda: any(c.id == "one" and c.ok for c in control.state.commands), "a savepoint")
        assert covers(root, "a", "b")
        (tmp_path / "hold").touch()
        feed(tmp_path, "a", 4)
        alone.wait_for((tmp_path / "held").exists, "a batch under way")
        ask(control, "two")
        alone.wait_for(lambda: any(c.barrier.name == "two" for c in control.state.claims), "its claim")
    (tmp_path / "hold").unlink()

    spark_abs.open(root).restore("one")
    assert ids(str(tmp_path / "out-a")) == [1, 2, 3]
    assert ids(str(tmp_path / "out-b")) in ([1, 2], [1, 2, 3])
    feed(tmp_path, "b", 4)
    with DriverProcess(tmp_path, "tests.crash.wrapped", "a", "b") as both:
        wait_for_rows(both, tmp_path, "a", 4)
        wait_for_rows(both, tmp_path, "b", 4)


def test_killed_after_a_function_has_written_a_table_by_its_name(tmp_path: Path) -> None:
    """The repeat writes nothing twice; the way back needs neither Spark nor the catalog."""
    root, table = str(tmp_path / "root"), str(tmp_path / "scratch" / "warehouse" / "out_a")
    feed(tmp_path, "a", 1)
    with DriverProcess(tmp_path, "tests.crash.wrapped", "--catalog", "a") as process:
        process.wait_for(partial(holds, table, [1]), "the first row")
        control = Control.open(Root(root))
        ask(control, "one")
        process.wait_for(lambda: any(c.id == "one" and c.ok for c in control.state.commands), "a savepoint")
        (tmp_path / "hold-after").touch()
        feed(tmp_path, "a", 2)
        process.wait_for((tmp_path / "held").exists, "a batch that has written and not ended")
        assert ids(table) == [1, 2]
    (tmp_path / "hold-after").unlink()
    feed(tmp_path, "a", 3)
    with DriverProcess(tmp_path, "tests.crash.wrapped", "--catalog", "a") as process:
        process.wait_for(partial(holds, table, [1, 2, 3]), "every row once")
    spark_abs.open(root).restore("one")
    assert ids(table) == [1]
    with DriverProcess(tmp_path, "tests.crash.wrapped", "--catalog", "a") as process:
        process.wait_for(partial(holds, table, [1, 2, 3]), "every row once again")


def test_killed_while_the_writer_of_a_table_waits_for_its_reader(tmp_path: Path) -> None:
    """The savepoint that was complete takes both back; after it every row is in both tables once.

    The restore is killed at each of its steps, too, and between a table and the position of its reader.
    """
    root = str(tmp_path / "root")
    with DriverProcess(tmp_path, "tests.crash.wrapped", "a", "b:a") as both:
        for number in (1, 2, 3):
            feed(tmp_path, "a", number)
            wait_for_rows(both, tmp_path, "b", number)
        control = Control.open(Root(root))
        ask(control, "one")
        both.wait_for(lambda: any(c.id == "one" and c.ok for c in control.state.commands), "a savepoint")
        (tmp_path / "hold-b").touch()
        feed(tmp_path, "a", 4)
        both.wait_for((tmp_path / "held").exists, "a batch of the reader under way")
        ask(control, "two")
        both.wait_for(lambda: any(c.barrier.name == "two" for c in control.state.claims), "its claim")
        feed(tmp_path, "a", 5)
    (tmp_path / "hold-b").unlink()

    before, *after = points(root, "one")
    for point in (before, BEFORE_READERS, *after):
        kill_restore(root, "one", point)
    assert ids(str(tmp_path / "out-a")) == ids(str(tmp_path / "out-b")) == [1, 2, 3]
    feed(tmp_path, "a", 6)
    with DriverProcess(tmp_path, "tests.crash.wrapped", "a", "b:a") as both:
        wait_for_rows(both, tmp_path, "a", 6)
        wait_for_rows(both, tmp_path, "b", 6)
    with DriverProcess(tmp_path, "tests.crash.wrapped", "a", "b:a") as both:
        feed(tmp_path, "a", 7)  # both continue after a kill as they are
        wait_for_rows(both, tmp_path, "b", 7)
