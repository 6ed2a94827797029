"""A new kind of sinks is one folder and one line in the registry: nothing else knows the kinds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import spark_abs
from spark_abs import sinks
from spark_abs.errors import UsageError
from spark_abs.job import Job
from spark_abs.sinks.registry import SinkKinds, described, kinds, made_again
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.store.root import Root
from spark_abs.testing import two_phase
from tests.job_support import Feed, eventually
from tests.spark.conftest import Start

PACKAGE = Path(spark_abs.__file__).parent
FOLDER = Path(__file__).parents[1] / "kinds"
KNOW_NO_KINDS = (
    *(PACKAGE / room for room in ("plan", "run", "stages", "checkpointing", "manifests", "cli", "testing")),
    *(PACKAGE / name for name in ("job.py", "job_root.py", "restore/outside.py", "observe/tables.py")),
    *(PACKAGE / "sinks" / name for name in ("sending", "two_phase.py", "marked.py", "kind.py")),
)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the folder beside those of the package, and the line into the registry."""
    monkeypatch.setattr(sinks, "__path__", [*sinks.__path__, str(FOLDER)])
    monkeypatch.setitem(SinkKinds.__annotations__, "toy", "Toy | str | None")
    yield
    for name in [name for name in sys.modules if name.startswith("spark_abs.sinks.toy")]:
        del sys.modules[name]
    vars(sinks).pop("toy", None)


def made(path: Path, columns: pa.Schema) -> str:
    DeltaTable.create(str(path), columns)
    return str(path)


def ids(path: Path, version: int | None = None) -> list[int]:
    return sorted(DeltaTable(str(path), version=version).to_pyarrow_table()["id"].to_pylist())


def test_a_job_declares_it_sends_to_it_goes_back_and_reads_it(
    spark: SparkSession, tmp_path: Path, start: Start
) -> None:
    table, root, feed = tmp_path / "toys", tmp_path / "root", Feed(spark, tmp_path / "in", "id long")
    outside: Any = {"toy": made(table, pa.schema([("id", pa.int64())]))}

    def declared() -> Job:
        job = Job("job", root=str(root), spark=spark, interval="1h")
        job.sink("toys", job.source("numbers", feed.stream()), **outside)
        return job

    feed.write({"id": 1}, {"id": 2})
    run = start(declared())
    eventually(run, lambda: run.checkpoint() and ids(table) == [1, 2], "the rows of the first file")
    early = run.savepoint("early")
    feed.write({"id": 3})
    eventually(run, lambda: run.checkpoint() and ids(table) == [1, 2, 3], "the rows of the second file")
    later = run.checkpoint()
    run.stop()

    handle = spark_abs.open(str(root), spark=spark)
    tables = {at: handle.tables(at).to_pylist()[0] for at in (early, later)}
    assert {(at["sink"], at["table"]) for at in tables.values()} == {("toys", str(table))}
    assert [ids(table, tables[at]["version"]) for at in (early, later)] == [[1, 2], [1, 2, 3]]
    assert sorted(row.id for row in handle.read("toys", checkpoint="early").collect()) == [1, 2]

    plan = handle.restore("early")
    assert "undo" in str(plan)
    assert ids(table) == [1, 2]
    run = start(declared())
    feed.write({"id": 4})
    eventually(run, lambda: run.checkpoint() and ids(table) == [1, 2, 3, 4], "each row once")
    run.stop()


def test_it_keeps_the_contract_of_two_phase_sinks(tmp_path: Path) -> None:
    name, settings = described({"toy": made(tmp_path / "toys", two_phase.SCHEMA)})
    assert name == "toy"

    def sink() -> TwoPhaseSink:
        found = made_again(name, settings, Root(str(tmp_path / "root")))
        assert found is not None
        return found

    def read() -> list[two_phase.Row]:
        rows = DeltaTable(str(tmp_path / "toys")).to_pyarrow_table()
        return list(zip(rows["id"].to_pylist(), rows["text"].to_pylist(), strict=True))

    two_phase.check(sink, read, every=37)


def test_what_is_given_for_a_kind_is_checked(spark: SparkSession, tmp_path: Path) -> None:
    job = Job("job", root=str(tmp_path), spark=spark)
    source = job.source("numbers", spark.readStream.format("rate").load())
    wrong: Any = {"toy": 7}
    with pytest.raises(UsageError, match=r"toy= takes a name as text or a spark_abs\.Toy, not 7"):
        job.sink("toys", source, **wrong)
    wrong = {"tyo": "t"}
    with pytest.raises(TypeError, match=r"Job\.sink\(\) got an unexpected keyword argument 'tyo'"):
        job.sink("toys", source, **wrong)
    with pytest.raises(UsageError, match=r"needs one of table=, .*iceberg=, toy= and two_phase="):
        job.sink("toys", source)


def test_nothing_but_the_registry_names_a_kind() -> None:
    """Delta is also what tables are that get their rows with each batch."""
    named = [f"spark_abs.sinks.{kind}" for kind in kinds() if kind != "delta"]
    named += ["sinks.delta.epoch_sink", "sinks.delta.kind", "EpochTable", "DeltaEpochSink"]
    modules = [m for place in KNOW_NO_KINDS for m in (place.rglob("*.py") if place.is_dir() else [place])]
    assert len(modules) > 50
    assert [(m.name, name) for m in modules for name in named if name in m.read_text()] == []
