"""`status` of roots whose queries are not a job's: wrapped ones, and those that a watcher keeps cuts of."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from spark_abs.keep import keep_words
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import AttemptId, BatchId, CheckpointId, CheckpointKind, RunId, StageId
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import WRAPPED_JOB, ControlState
from spark_abs.store.activity import Late, Phase, RunActivity, StageActivity, write_activity
from spark_abs.store.control import Control
from spark_abs.store.lease import own_lease, write_lease
from spark_abs.store.root import Root
from spark_abs.watch.watcher import watching
from tests.cli.conftest import Cli
from tests.native_support import Native
from tests.watched_queries import StatefulQuery, WatchedWorld

NOW, RUN = 1_000_000, RunId(1)


def rows(cli: Cli) -> list[list[str]]:
    """Return the words of each row of the table of stages."""
    return [line.split() for line in cli("status").stdout.partition("\n\n")[2].splitlines()[1:]]


class Wrapped:
    """The root of wrapped queries, made by hand: a run that is alive, and native checkpoints."""

    def __init__(self, top: Path) -> None:
        self.root = Root(str(top / "root"))
        Control.create(self.root, WRAPPED_JOB, 1_000)
        self._update(lambda state: ledger.begin_run(state, "here", os.getpid(), NOW - 60_000))

    def _update(self, change: Any) -> ControlState:
        return Control.open(self.root).update(change)

    def come_alive(self) -> None:
        write_lease(self.root, own_lease(RUN, NOW))

    def query(self, name: str, batches: int, ended_ms: int = NOW - 20_000) -> Native:
        """Write the native checkpoint of a query that has finished so many batches."""
        native = Native(Path(self.root.path(f"native/1/{name}")))
        for batch in range(batches):
            native.batch(batch, ["{}"])
            os.utime(native.directory / f"commits/{batch}", ns=(ended_ms * 1_000_000,) * 2)
        return native

    def checkpoint(self, *stages: str) -> None:
        """Complete a checkpoint of queries at their second batch."""
        claimed: list[Any] = []

        def claim(state: ControlState) -> ControlState:
            kind = CheckpointKind.CHECKPOINT
            state, barrier = ledger.claim(state, RUN, kind=kind, name=None, now_ms=NOW - 9_000)
            claimed[:] = [barrier]
            return state

        self._update(claim)
        (barrier,) = claimed
        at, parts = NOW - 8_000, tuple(StageSnapshot(StageId(name), BatchId(1)) for name in stages)
        manifest = Manifest(
            barrier.id,
            AttemptId(1),
            RUN,
            WRAPPED_JOB,
            barrier.kind,
            name=None,
            triggered_ms=barrier.timestamp_ms,
            acked_ms=at,
            completed_ms=at,
            graph=(),
            stages=parts,
        )
        checkpoints = Checkpoints.open(self.root, WRAPPED_JOB)
        checkpoints.fence(RUN)
        assert checkpoints.complete(manifest)
        self._update(lambda state: ledger.settle(state, completed=(barrier.id,)))

    def claim(self) -> None:
        kind = CheckpointKind.CHECKPOINT
        self._update(lambda s: ledger.claim(s, RUN, kind=kind, name=None, now_ms=NOW - 4_000)[0])


@pytest.fixture
def wrapped(tmp_path: Path) -> Wrapped:
    return Wrapped(tmp_path)


def test_wrapped_queries_are_shown_before_their_first_checkpoint(wrapped: Wrapped) -> None:
    """From their native checkpoints, and those whose first batch is not planned from what the run tells."""
    wrapped.query("orders", 3)
    wrapped.query("gone", 1)
    wrapped._update(lambda state: ledger.forget(state, StageId("gone"), NOW))
    Path(wrapped.root.path("native/1/_temporary")).mkdir()
    wrapped.come_alive()
    cli = Cli(wrapped.root.uri)
    assert [(s["stage"], s["finished"]) for s in cli.json("status")["stages"]] == [("orders", 2)]
    new = StageActivity(StageId("new"), Phase.CALLING, "new", NOW - 5_000, began_ms=NOW - 5_000)
    write_activity(wrapped.root, RunActivity(RUN, NOW - 1_000, (new,)))
    assert [s["stage"] for s in cli.json("status")["stages"]] == ["orders", "new"]


def test_a_wrapped_query_is_shown_with_what_its_live_run_tells(wrapped: Wrapped) -> None:
    wrapped.query("orders", 3)
    wrapped.query("resting", 2)
    wrapped.checkpoint("orders", "resting")
    wrapped.claim()
    wrapped.come_alive()
    orders = StageActivity(
        StageId("orders"),
        Phase.CALLING,
        "orders",
        since_ms=NOW - 11_000,
        batch=BatchId(3),
        began_ms=NOW - 11_000,
        ended_ms=NOW - 15_000,
        last_ms=2_000,
        rows_per_s=40.0,
        watermark_ms=NOW - 90_000,
    )
    resting = StageActivity(StageId("resting"), what="the query does not run")
    late = Late(CheckpointId(2), StageId("orders"), "batch 3 has been under way for 11.0 s", True)
    write_activity(wrapped.root, RunActivity(RUN, NOW - 1_000, (orders, resting), (late,)))
    cli = Cli(wrapped.root.uri)
    assert cli("status").stdout.splitlines()[0] == (
        "job queries runs; checkpoint 2 waits for orders: batch 3 has been under way for 11.0 s"
    )
    first, second = rows(cli)
    assert first[:12] == ["orders", "3", "11.0", "s", "2.0", "s", "15.0", "s", "40", "-", "-", "-"]
    assert second[:7] == ["resting", "1", "-", "-", "20.0", "s", "-"], "what its native checkpoint says"
    assert " ".join(second).endswith("the query does not run")


def test_wrapped_queries_that_do_not_run_are_shown_as_stored(wrapped: Wrapped) -> None:
    native = wrapped.query("orders", 3)
    wrapped.checkpoint("orders")
    native.batch(3, ["{}"])
    (native.directory / "commits/3").unlink()
    cli = Cli(wrapped.root.uri)
    assert "channels" not in cli("status").stdout, "wrapped queries have none"
    (stage,) = cli.json("status")["stages"]
    assert (stage["finished"], stage["finished_ms"]) == (2, NOW - 20_000)
    assert stage["finished_at"].startswith("1970-01-01T")
    assert (stage["planned"], stage["planned_ms"], stage["watermark_ms"]) == (3, 5, 3_000)
    assert rows(cli) == [["orders", "2", "20.0", "s", "3", "16.7", "min", "16.6", "min", "1", "1", "-"]]
    (native.directory / "offsets/3").write_text("of a later version")
    (stage,) = cli.json("status")["stages"]
    assert (stage["planned"], stage["planned_ms"], stage["watermark_ms"]) == (3, None, None)


@pytest.fixture
def world(tmp_path: Path) -> WatchedWorld:
    world = WatchedWorld(tmp_path / "live", "chain", seed=3, files=80)
    world.run(15)
    world.settle()
    world.watch()
    return world


@pytest.fixture
def watched(world: WatchedWorld) -> Cli:
    return Cli(world.root.uri, now_ms=world._tick)


def newest(world: WatchedWorld) -> dict[str, tuple[int, int]]:
    """Return the newest finished and planned batch of each query, as its own logs say."""
    found = {}
    for query in world.queries():
        assert isinstance(query, StatefulQuery)
        found[query.name] = (query._newest("commits"), query._newest("offsets"))
    return found


def stages_of(cli: Cli) -> dict[str, Any]:
    return {stage["stage"]: stage for stage in cli.json("status")["stages"]}


def test_watched_queries_are_shown_where_they_are_now_beside_the_newest_cut(
    world: WatchedWorld, watched: Cli
) -> None:
    cut = {name: stage["cut"] for name, stage in stages_of(watched).items()}
    world.run(20)
    found = stages_of(watched)
    assert {n: (s["finished"], s["planned"]) for n, s in found.items()} == newest(world)
    assert {n: s["cut"] for n, s in found.items()} == cut
    assert any(s["finished"] > s["cut"] for s in found.values())
    assert all(s["finished_ms"] and s["planned_ms"] for s in found.values())
    assert {row[0]: row[1] for row in rows(watched)} == {n: str(s["finished"]) for n, s in found.items()}


def test_the_first_line_of_a_watched_root_is_the_age_of_the_newest_cut(
    world: WatchedWorld, watched: Cli
) -> None:
    """A watcher need not be at work: cron may start one for each look."""
    status = watched.json("status")
    assert status["moment_ms"] == max(s["finished_ms"] for s in status["stages"])
    first, *lines = (" ".join(line.split()) for line in watched("status").stdout.splitlines())
    assert re.fullmatch(
        r"watched-queries: no watcher is at work, the newest cut is 1, \S+ \S+ old; run 1 ended: stopped",
        first,
    )
    assert any(re.fullmatch(r"newest cut 1, of .* ago, kept .* ago", line) for line in lines)
    with watching(world.root, *world.places(), keep_words("24h:all"), every="10m"):
        first = watched("status").stdout.splitlines()[0]
        assert first.startswith("watched-queries: a watcher is at work, the newest cut is 1, ")
    (row,) = Path(world.root.path("checkpoints")).glob("00000001-*.parquet")
    row.write_bytes(row.read_bytes()[:-20])
    assert "no kept cut can be read" in watched("status").stdout.splitlines()[0]


def test_of_a_watched_query_that_is_not_there_any_more_only_the_cut_is_told(
    world: WatchedWorld, watched: Cli
) -> None:
    """Its directory is gone, or is that of a query that was begun anew, or has other bytes."""
    gold, silver, bronze = (Path(world.top.below(f"c/{name}").uri) for name in ("gold", "silver", "bronze"))
    gold.rename(gold.with_name("away"))
    (silver / "metadata").write_text('{"id":"another"}')
    (bronze / "metadata").write_bytes(b"\xff")
    found = stages_of(watched)
    assert {s["finished"] for s in found.values()} == {None}
    assert {s["checkpoint"] for s in found.values()} == {1}


def test_watch_shows_queries_again_as_it_does_jobs(world: WatchedWorld) -> None:
    looks = 0

    def pause(_: float) -> None:
        nonlocal looks
        looks += 1
        world.run(10)
        if looks == 2:
            raise KeyboardInterrupt

    cli = Cli(world.root.uri, pause=pause, now_ms=world._tick)
    shown = cli("status", "--watch", "--output", "json", exits=1).stdout.splitlines()
    first, second = (json.loads(line)["stages"] for line in shown if line.startswith('{"root"'))
    assert sum(s["finished"] for s in first) < sum(s["finished"] for s in second)
