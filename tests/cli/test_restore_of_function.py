"""A table that a function writes under its own id goes back with the id, so that batches come again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

import spark_abs
from spark_abs.errors import Refused
from spark_abs.manifest import Manifest
from spark_abs.model import FENCED, Barrier, Version
from spark_abs.sinks.delta.rollback import ahead
from spark_abs.store.storage import Place
from spark_abs.store.table import Commit, Table
from tests.root_support import SmallJob

APP = "my-app"


class OfFunction(SmallJob):
    """Its sink is the table of a function, which writes it as Spark's documentation has it."""

    def manifest(self, barrier: Barrier, version: Version) -> Manifest:
        made = super().manifest(barrier, version)
        a, b = made.stages
        newest = Version(DeltaTable(self.table).version())
        outputs = tuple(
            replace(o, kind="table", version=newest) if o.kind == "delta" else o for o in b.outputs
        )
        return replace(made, stages=(a, replace(b, outputs=outputs)))

    def write(self, batch: int, *values: int, app: str = APP) -> bool:
        """Write a batch as Delta's writer does, which skips numbers that the log has seen."""
        seen = DeltaTable(self.table).transaction_version(app)
        if seen is not None and seen >= batch:
            return False
        rows = pa.table({"n": pa.array(values, pa.int64())})
        properties = CommitProperties(app_transactions=[Transaction(app, batch)])
        write_deltalake(self.table, rows, mode="append", commit_properties=properties)
        return True


@pytest.fixture
def job(tmp_path: Path) -> OfFunction:
    return OfFunction(tmp_path)


def test_batches_come_again_under_a_constant_id_after_a_restore(job: OfFunction) -> None:
    """Also under an id that is younger than the checkpoint, and after a second restore."""
    job.write(0, 1)
    job.checkpoint()
    job.write(1, 2)
    job.write(0, 3, app="younger")
    assert not job.write(1, 2)
    for _ in range(2):
        spark_abs.open(job.root.uri).restore(1)
        assert job.rows() == [1]
        assert (ids := DeltaTable(job.table)).transaction_version(APP) == 0
        assert ids.transaction_version("younger") == -1
        assert not job.write(0, 1), "the batch of the cut is in the table"
        assert job.write(1, 5)
        assert job.write(0, 6, app="younger")
        assert job.rows() == [1, 5, 6]


def test_what_a_restore_sets_back_is_in_the_commit_with_the_rows(job: OfFunction) -> None:
    job.write(0, 1)
    job.checkpoint()
    job.write(1, 2)
    before = DeltaTable(job.table).version()
    spark_abs.open(job.root.uri).restore(1)
    table = Table.open(Place(job.table))
    commits = [c for v in range(before + 1, table.version + 1) if (c := table.read_commit(v)) is not None]
    (restoring,) = [c for c in commits if c.removed]
    assert restoring.transactions[APP] == 0


def test_ids_of_the_root_and_fences_stay(tmp_path: Path) -> None:
    table = Table.ensure(Place(str(tmp_path)), pa.schema([("n", pa.int64())]))
    table.commit_next(Commit(transactions={"one": 3, "same": 1}))
    version = table.version
    given = {"one": 5, "same": 1, "new": 0, "fenced": FENCED, "queries/s/s@1": 4, "queries#r/s/s@1": 4}
    table.commit_next(Commit(transactions=given))
    assert ahead(table, version, "queries", "queries#r") == {"new": -1, "one": 3}
    assert ahead(table, Version(-1), "queries", "queries#r") == {"new": -1, "one": -1, "same": -1}
    assert ahead(table, table.version, "queries", "queries#r") == {}


def test_a_table_whose_ids_cannot_be_set_back_is_refused(tmp_path: Path) -> None:
    """Nothing is changed."""
    job = OfFunction(tmp_path)
    job.checkpoint()
    job.write(0, 1)
    DeltaTable(job.table).alter.set_table_properties({"delta.dataSkippingNumIndexedCols": "1"})
    with pytest.raises(Refused, match="it cannot set back application id 'my-app': Delta would skip"):
        spark_abs.open(job.root.uri).restore(1)
    assert job.rows() == [1]
