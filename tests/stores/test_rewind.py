"""Plain queries whose checkpoints and tables are in an object store, taken back: no JVM."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import pytest
from click.testing import CliRunner

from spark_abs.cli.main import main
from spark_abs.cuts.cut import NoAlignedCut
from spark_abs.errors import Refused
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.storage import Place
from tests.plain_queries import World, rows_of, text_of
from tests.stores.server import Server

POINTS = ("fence", "fenced", "journal", "table", "file", "offsets", "rewound", "done", "lifted")
OF_AN_UNDO = (
    *("fence", "fenced", "journal", "back", "forget", "put back", "planned"),
    *("table", "offsets", "rewound", "done", "lifted"),
)

pytestmark = pytest.mark.timeout(1800)


class Killed(BaseException):
    """The rewind is killed."""


def killed_at(wanted: str, skip: int = 0) -> Callable[[str], None]:
    """Return a failpoint that kills at a point, when it is reached once more than `skip` times."""
    left = count(-skip)

    def failpoint(point: str) -> None:
        if point == wanted and next(left) == 0:
            raise Killed(point)

    return failpoint


_numbers = count()


@pytest.fixture
def fresh(server: Server) -> Callable[[], Place]:
    """Return places that nobody has used."""
    return lambda: server.storage.place(f"{server.top}/rewind/{next(_numbers)}")


def oldest(world: World) -> dict[str, int]:
    """Return the first batch of the last query to which a rewind can go.

    By its number: a store may date all files of one second alike.
    """
    *_, last = world.queries()
    for batch in last.batches("commits"):
        with suppress(NoAlignedCut):
            world.prepare({last.name: batch})
            return {last.name: batch}
    raise AssertionError(f"no batch of {last.name} can be gone back to")


@pytest.mark.parametrize("shape", ["fan-out", "fan-in"])
def test_every_row_is_there_once_after_rewinds_and_an_undo(fresh: Callable[[], Place], shape: str) -> None:
    world = World(fresh(), shape, seed=2, files=6)
    world.run(10)
    world.rewind(oldest(world))
    world.undo()
    world.run(4)
    world.rewind(oldest(world))
    world.is_whole(2)


@pytest.mark.parametrize("taken_back", [False, True], ids=["rewind", "undo"])
def test_killed_at_any_point_it_is_finished_or_withdrawn_by_the_next_call(
    fresh: Callable[[], Place], taken_back: bool
) -> None:
    """Again and again, from the end of the input; the call that finishes it is killed once, too."""
    world = World(fresh(), "chain", seed=7, files=8)
    world.most = 2
    world.is_whole(7)
    for point in OF_AN_UNDO if taken_back else POINTS:
        at = oldest(world)
        if taken_back:
            world.rewind(at)
        with pytest.raises(Killed):
            world.undo(killed_at(point)) if taken_back else world.rewind(at, killed_at(point))
        if any(text_of(query.checkpoint, "metadata").startswith("A rewind") for query in world.queries()):
            with pytest.raises(Refused, match="begun and is not finished"):
                world.prepare()
            with suppress(Killed):
                world.finish(killed_at("back" if point == "back" else "file", skip=1))
        world.finish()
        world.is_whole(7)


def test_the_command_takes_patterns_in_a_store(server: Server, fresh: Callable[[], Place]) -> None:
    world = World(fresh(), "chain", seed=3, files=8)
    world.most = 2
    world.is_whole(3)
    top = world.top.uri.replace("s3a:", "s3:")

    def called(*options: str, exits: int = 0) -> str:
        words = ["rewind", "--checkpoints", f"{top}/c/*", "--tables", f"{top}/t/[bs]*", f"{top}/t/gol?"]
        done = CliRunner().invoke(main, [*words, *options], env=server.environment)
        assert done.exit_code == exits, done.output
        assert server.secret not in done.output
        return done.stdout

    assert json.loads(called("--list", "--output", "json"))
    batch = oldest(world)["gold"]
    there = {table: rows_of(world.top.below(f"t/{table}")) for table in ("bronze", "silver", "gold")}
    assert "Rewind to" in called("--at", f"gold={batch}", "--dry-run")
    assert "Rewind to" in called("--at", f"gold={batch}", "--wait", "0s", exits=2)  # nobody has agreed
    assert {table: rows_of(world.top.below(f"t/{table}")) for table in there} == there
    done = json.loads(called("--at", f"gold={batch}", "--yes", "--wait", "0s", "--output", "json"))
    assert done["applied"]
    assert {q["name"]: q["to"] for q in done["plan"]["queries"]}["gold"] == batch
    assert rows_of(world.top.below("t/bronze")) != there["bronze"]
    assert json.loads(called("--undo", "--yes", "--wait", "0s", "--output", "json"))["applied"]
    assert {table: rows_of(world.top.below(f"t/{table}")) for table in there} == there
    world.is_whole(3)


def test_a_query_that_runs_is_noticed(fresh: Callable[[], Place]) -> None:
    world = World(fresh(), "chain", seed=4, files=8)
    world.most = 2
    world.is_whole(4)
    world.top.write("in1/8", b"")
    world.expected.append(8)
    prepared = world.prepare(oldest(world))
    bronze = world.queries()[0]
    bronze.start()
    assert bronze.step(1)
    with pytest.raises(Refused, match="has begun or ended a batch since the plan was made"):
        prepared.require_still()
    world.rewind(oldest(world), no_failpoint)
    world.is_whole(4)
