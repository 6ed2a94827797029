"""Queries that share a root and are forgotten: what checkpoints carry on, and what a restore leaves alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable, write_deltalake

import spark_abs
from spark_abs.cli.main import main
from spark_abs.errors import Refused, UsageError
from spark_abs.manifest import Manifest, OutputVersion, StageSnapshot
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import AttemptId, BatchId, CheckpointId, CheckpointKind, RunId, StageId, Version
from spark_abs.observe.client import asker
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import WRAPPED_JOB, remember
from spark_abs.restore.facts import gather
from spark_abs.restore.forget import forget_query
from spark_abs.store.control import Control
from spark_abs.store.lease import own_lease, write_lease
from spark_abs.store.root import Root
from spark_abs.wrapped.foreach_batch import recorded_parts


class Shared:
    """A root of two queries, `a` and `b`, each with a table; its run has died."""

    def __init__(self, base: Path) -> None:
        self.root = Root(str(base / "root"))
        self.control = Control.create(self.root, WRAPPED_JOB, 1_000)
        self.control.update(lambda s: ledger.begin_run(s, "here", 1, 2_000))
        self.checkpoints = Checkpoints.open(self.root, WRAPPED_JOB)
        self.tables = {name: str(base / name) for name in ("a", "b")}
        for table in self.tables.values():
            write_deltalake(table, pa.table({"id": pa.array([1], pa.int64())}))

    def complete(self, number: int, *stages: str) -> Manifest:
        """Complete a checkpoint with a part of each of these."""
        parts = tuple(StageSnapshot(StageId(s), BatchId(number), outputs=(self._output(s),)) for s in stages)
        ids = CheckpointId(number), AttemptId(1), RunId(1), WRAPPED_JOB
        manifest = Manifest(*ids, CheckpointKind.CHECKPOINT, None, 0, 0, 0, (), parts)
        assert self.checkpoints.complete(manifest)
        return manifest

    def _output(self, stage: str) -> OutputVersion:
        table = DeltaTable(self.tables[stage])
        version = Version(table.version())
        return OutputVersion(stage, "table", self.tables[stage], str(table.metadata().id), version)

    def parts(self) -> dict[str, int | None]:
        """Return the checkpoint from which the part of each query is carried on."""
        return {p.stage: p.carried for p in recorded_parts(self.checkpoints, self.control.state)}


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


def test_parts_are_carried_on_until_their_query_is_forgotten_and_again_when_it_comes(shared: Shared) -> None:
    assert shared.parts() == {}
    shared.complete(1, "a", "b")
    assert shared.parts() == {"a": 1, "b": 1}
    spark_abs.open(shared.root.uri).forget("b")
    assert shared.parts() == {"a": 1}
    shared.control.update(lambda s: remember(s, StageId("b")))
    assert shared.parts() == {"a": 1, "b": 1}


def test_a_restore_leaves_the_table_of_a_forgotten_query_alone_unless_the_checkpoint_has_it(
    shared: Shared,
) -> None:
    first = shared.complete(1, "a", "b")
    spark_abs.open(shared.root.uri).forget("b")
    second, state = shared.complete(2, "a"), shared.control.state

    def tables(manifest: Manifest) -> set[str]:
        facts = gather(
            shared.root, manifest, known=(first, second), completed=(), attempt=AttemptId(2), state=state
        )
        return {Path(sink.table).name for sink in facts.sinks}

    assert tables(second) == {"a"}
    assert tables(first) == {"a", "b"}


def test_what_cannot_be_forgotten(shared: Shared) -> None:
    shared.complete(1, "a", "b")
    with pytest.raises(UsageError, match=r"no query 'c' .* known are a, b"):
        spark_abs.open(shared.root.uri).forget("c")
    done = CliRunner().invoke(main, ["forget", shared.root.uri, "b"])
    assert done.stdout == "query 'b' is forgotten: later checkpoints leave it out\n"
    (row,) = spark_abs.open(shared.root.uri).history().to_pylist()
    assert (row["event"], row["kind"], row["name"], row["by"]) == ("command", "forget", "b", asker())
    with pytest.raises(UsageError, match=r"known are a$"):
        spark_abs.open(shared.root.uri).forget("b")


def test_a_run_that_is_alive_is_asked(shared: Shared) -> None:
    """It knows whether the query runs."""
    shared.complete(1, "a", "b")
    write_lease(shared.root, own_lease(RunId(1), 3_000))

    def answer(_: float) -> None:
        (asked,) = shared.control.state.commands
        assert (asked.kind, asked.name) == (ledger.CommandKind.FORGET, "b")
        shared.control.update(lambda s: ledger.answer(s, asked.id, False, None, "query 'b' runs"))

    with pytest.raises(Refused, match="query 'b' runs"):
        forget_query(shared.root, "b", lambda: 3_001, answer)
    assert shared.parts() == {"a": 1, "b": 1}
