"""What a root holds, as Arrow tables: of a small real root."""

from __future__ import annotations

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import spark_abs
from spark_abs.errors import RootNotFound
from spark_abs.model import BatchId, StageId
from spark_abs.observe.inspect import Inspection
from spark_abs.store.history import History, HistoryEvent, HistoryRow
from tests.cli.test_status import NOW, tell
from tests.root_support import SmallJob, with_failpoint

TABLES = ("checkpoints", "stages", "channels", "state", "failures", "restores", "retention", "sinks")


def inspected(job: SmallJob) -> Inspection:
    return spark_abs.open(job.root.uri).inspect


def test_stages_and_channels_are_those_of_the_live_run(job: SmallJob) -> None:
    job.checkpoint(1)
    idle = inspected(job).stages().to_pylist()
    assert [(row["stage"], row["finished"], row["checkpoint"], row["phase"]) for row in idle] == [
        ("a", 0, 1, None),
        ("b", 0, 1, None),
    ]
    assert inspected(job).channels().num_rows == 0
    job.come_alive()
    tell(job)
    b = inspected(job).stages().to_pylist()[1]
    assert (b["phase"], b["what"], b["batch"], b["state_rows"]) == ("calling", "mail", 7, 17)
    (channel,) = inspected(job).channels().to_pylist()
    assert channel == {
        "channel": "a.main", "stage": "b", "entries": 2, "rows": 5, "size": 2048,
        "oldest_ms": NOW - 30_000, "more": False, "moved_ms": None,
    }  # fmt: skip


def test_failures_and_restores_are_events_of_the_history(job: SmallJob) -> None:
    job.checkpoint(1)
    job.checkpoint(2)
    row = HistoryRow(
        5,
        HistoryEvent.STAGE_RESTARTED,
        job.attempt,
        job.run,
        stage=StageId("b"),
        batch=BatchId(3),
        detail="no",
    )
    History(job.root).append([row])
    spark_abs.open(job.root.uri).restore(1)
    (failed,) = inspected(job).failures().to_pylist()
    assert (failed["event"], failed["stage"], failed["batch"], failed["detail"]) == (
        "stage-restarted", "b", 3, "no",
    )  # fmt: skip
    (restored,) = inspected(job).restores().to_pylist()
    assert (restored["attempt"], restored["checkpoint"]) == (2, 1)
    assert restored["duration_ms"] >= 0
    stored = DeltaTable(job.root.path("history")).to_pyarrow_table()
    assert pa.compute.sum(pa.compute.equal(stored["event"], "restored")).as_py() == 1


def test_retention_says_what_keeps_a_checkpoint(job: SmallJob) -> None:
    job.checkpoint(1)
    job.checkpoint(2, name="mine")
    job.checkpoint(3)
    spark_abs.open(job.root.uri).restore(1)
    kept = {row["id"]: row["kept_by"] for row in inspected(job).retention().to_pylist()}
    assert kept == {1: "retention", 2: "user", 3: "abandoned"}


def test_sinks_have_their_version_at_the_newest_checkpoint(job: SmallJob) -> None:
    job.checkpoint(1)
    job.checkpoint(2)
    newest = spark_abs.open(job.root.uri).tables()
    rows = inspected(job).sinks().to_pylist()
    assert [row["version"] for row in rows if row["kind"] == "delta"] in ([], newest["version"].to_pylist())


def test_a_new_root_has_empty_tables_with_their_columns(job: SmallJob) -> None:
    found = inspected(job)
    for name in TABLES:
        if name != "state":
            assert getattr(found, name)().num_columns > 0


@pytest.mark.parametrize("name", TABLES)
def test_a_directory_without_a_job_is_no_root(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = with_failpoint(str(tmp_path_factory.mktemp("empty")), lambda _: None)
    with pytest.raises(RootNotFound):
        getattr(empty.inspect, name)()


def test_every_column_is_in_its_docstring(job: SmallJob) -> None:
    job.checkpoint(1)
    found = inspected(job)
    missing = [
        (name, column)
        for name in TABLES
        if name != "checkpoints"
        for column in getattr(found, name)().column_names
        if f"`{column}`" not in str(getattr(Inspection, name).__doc__)
    ]
    assert missing == []
