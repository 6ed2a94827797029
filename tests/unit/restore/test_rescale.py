"""Which stages get another number of partitions, what is refused, and what is done again after a kill."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import spark_abs
from spark_abs.errors import AttemptNotReady, DamageError, Refused, UsageError
from spark_abs.manifest import Location, Manifest, OperatorState, StageSnapshot, StoredFile
from spark_abs.model import (
    NO_BATCH,
    AttemptId,
    BatchId,
    CheckpointId,
    CheckpointKind,
    Provider,
    RunId,
    StageId,
)
from spark_abs.protocol.attempt_changes import attempt_for, begin_attempt
from spark_abs.protocol.control import begin_job, begin_run
from spark_abs.restore import steps as module
from spark_abs.restore.rescale import changes, is_rescaled, rescale
from spark_abs.restore.restoring import RestorePlan, Restoring
from spark_abs.restore.steps import Materialise, Rescale
from spark_abs.snapshots.layout import PARTITIONS_KEY
from spark_abs.store.storage import Place
from tests.root_support import SmallJob, offsets_of, with_failpoint

SUMS = StageId("sum")


def operator(name: str = "stateStoreSave", partitions: int = 2, key: str = '[{"name":"k"}]') -> OperatorState:
    schema = b'\x00\x02v2{"type":"struct","fields":' + key.encode() + b"}"
    stored = json.dumps({"default": base64.b64encode(schema).decode()})
    return OperatorState(0, name, partitions, ("default",), stored)


SUM = StageSnapshot(
    SUMS, BatchId(3), operators=(operator(),), shuffle_partitions=2, provider=Provider.ROCKSDB
)


def manifest(*stages: StageSnapshot) -> Manifest:
    kind = CheckpointKind.CHECKPOINT
    whole = (StageSnapshot(StageId("clicks"), BatchId(3)), *stages)
    return Manifest(CheckpointId(5), AttemptId(1), RunId(1), "shop", kind, None, 0, 1, 2, (), whole)


def test_one_number_is_for_all_stages_that_keep_state_and_names_are_for_some() -> None:
    more = replace(SUM, stage=StageId("more"), shuffle_partitions=7, operators=(operator(partitions=7),))
    assert changes(manifest(SUM, more), None) == {}
    assert changes(manifest(SUM, more), 7) == {"sum": 7}
    assert changes(manifest(SUM, more), 5) == {"sum": 5, "more": 5}
    assert changes(manifest(SUM, more), {"more": 3}) == {"more": 3}


def test_a_number_below_one_and_a_stage_that_is_not_there_are_wrong_calls() -> None:
    with pytest.raises(UsageError, match="stage 'sum': 0 is below 1"):
        changes(manifest(SUM), 0)
    with pytest.raises(UsageError, match="'sums': checkpoint 5 has no such stage, it has clicks, sum"):
        changes(manifest(SUM), {"sums": 3})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"provider": Provider.HDFS}, "in HDFSBackedStateStoreProvider, and Spark repartitions .* RocksDB"),
        ({"operators": (operator("globalLimit", 1),)}, "its operator globalLimit"),
        ({"operators": (operator(), operator("stateStoreSave", 1))}, "stateStoreSave has no key"),
        ({"operators": (operator(key="[]"),)}, "stateStoreSave has no key"),
        ({"cut_batch": NO_BATCH}, "it had run no batch"),
        (
            {"files": (StoredFile("state/0/0/4_6d1c.changelog", 1, "", Location("p", 0, 1)),)},
            "an id for each file",
        ),
    ],
)
def test_state_that_spark_cannot_divide_is_refused_with_the_reason(change: dict[str, Any], why: str) -> None:
    with pytest.raises(
        Refused, match=rf"stage 'sum' cannot go from 2 to 5 .* checkpoint 5: .*{why}.*nothing"
    ):
        changes(manifest(replace(SUM, **change)), 5)


def test_a_stage_without_state_is_refused_by_name_and_otherwise_left_alone() -> None:
    assert changes(manifest(), 5) == {}
    with pytest.raises(Refused, match=r"stage 'clicks' .* it keeps no state"):
        changes(manifest(), {"clicks": 5})


def test_other_partitions_are_another_attempt() -> None:
    state = begin_run(begin_job("shop", 0), "here", 1, 0)
    begun = begin_attempt(
        state,
        AttemptId(1),
        checkpoint=CheckpointId(5),
        plan="{}",
        host="here",
        pid=1,
        now_ms=0,
        natives=None,
        partitions={"sum": 5},
    )
    assert (begun.attempt.id, begun.attempt.partitions) == (2, {"sum": 5})
    assert attempt_for(begun, AttemptId(1), CheckpointId(5), "native", {"sum": 5}) == 2
    assert attempt_for(begun, AttemptId(1), CheckpointId(5), "native", {"sum": 3}) == 3
    assert attempt_for(begun, AttemptId(1), CheckpointId(5), "native") == 3
    with pytest.raises(AttemptNotReady, match=r"restore\(5, shuffle_partitions={'sum': 5}\)` again"):
        begin_run(begun, "here", 2, 0)


class Killed(BaseException):
    """The process was killed at a named point."""


class Spread(SmallJob):
    """The small job with state in stage `b`, and a stand-in for Spark that divides it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, lambda: None)  # type: ignore[arg-type,return-value]
        self.spread = 0
        self.dies = ""

    def manifest(self, *given: Any) -> Manifest:
        whole = super().manifest(*given)
        last = replace(
            whole.stages[1], operators=(operator(),), shuffle_partitions=2, provider=Provider.ROCKSDB
        )
        return replace(whole, stages=(whole.stages[0], last))

    def repartition(
        self, spark: object, place: Place, batch: BatchId, partitions: int, meanwhile: Callable[[], None]
    ) -> None:
        native = Path(place.path)
        assert not (native / f"offsets/{batch}").exists()
        self.spread += 1
        meanwhile()
        head = {"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {PARTITIONS_KEY: str(partitions)}}
        (native / f"offsets/{batch}").write_text(f"v1\n{json.dumps(head)}\n")
        if self.dies == "within":
            raise Killed
        (native / f"commits/{batch}").write_text('v1\n{"nextBatchWatermarkMs":0}')

    def restore(self, dies: str = "", partitions: int | None = 5) -> RestorePlan:
        def failpoint(point: str) -> None:
            if dies and point.endswith(dies):
                raise Killed

        self.dies = dies
        given = {"b": partitions} if partitions is not None else None
        if not dies:
            return spark_abs.open(self.root.uri).restore(1, shuffle_partitions=given).plan
        with pytest.raises(Killed):
            with_failpoint(self.root.uri, failpoint).restore(1, shuffle_partitions=given)
        return spark_abs.open(self.root.uri).restore(1, shuffle_partitions=given, dry_run=True).plan


@pytest.fixture
def spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spread:
    job = Spread(tmp_path)
    monkeypatch.setattr(module, "rescale", job.repartition)
    monkeypatch.setattr(Restoring, "session", lambda _: object())
    job.checkpoint(1)
    job.step(2)
    return job


def test_the_plan_says_who_divides_what(spread: Spread) -> None:
    plan = spark_abs.open(spread.root.uri).restore(1, shuffle_partitions=5, dry_run=True).plan
    at = [i for i, step in enumerate(plan.steps) if isinstance(step, Rescale)]
    assert plan.steps[at[0]] == Rescale(StageId("b"), "native/2/b", BatchId(1), 2, 5)
    assert isinstance(plan.steps[at[0] - 1], Materialise)
    said = "repartition the state of stage b from 2 to 5 partitions, as batch 1 of native/2/b through Spark"
    assert plan.steps[at[0]].sentence() == said
    assert (plan.needs_spark, plan.partitions) == (True, {"b": 5})
    assert any("a Spark session is needed" in note for note in plan.notes)
    assert spread.state.attempt.id == 1


@pytest.mark.parametrize(
    ("dies", "spreads"),
    [("Rescale.before", 1), ("within", 2), ("Rescale.after", 1), ("Finish.before", 1)],
)
def test_killed_anywhere_the_same_restore_divides_the_state_once_and_whole(
    spread: Spread, dies: str, spreads: int
) -> None:
    plan = spread.restore(dies)
    assert plan.continues
    with pytest.raises(AttemptNotReady):
        spread.start()
    spread.restore()
    native = spread.native(2, "b")
    assert native["offsets/0"] == offsets_of("b", 0)
    assert is_rescaled(spread.root.place("native/2/b"), BatchId(1), 5)
    assert (spread.spread, spread.rows(), spread.state.attempt.partitions) == (spreads, [1], {"b": 5})
    spread.start()


def test_with_other_partitions_an_unfinished_restore_is_given_up(spread: Spread) -> None:
    spread.restore("Rescale.after")
    spread.restore(partitions=None)
    assert (spread.state.attempt.id, spread.state.attempt.partitions, spread.spread) == (3, {}, 1)
    assert "offsets/1" not in spread.native(3, "b")


def test_the_command_reads_numbers_for_all_or_for_stages(spread: Spread) -> None:
    from click.testing import CliRunner

    from spark_abs.cli.main import main

    def run(*given: str) -> Any:
        arguments = [text for one in given for text in ("--shuffle-partitions", one)]
        command = ["restore", spread.root.uri, "--to", "1", "--dry-run", "--output", "json", *arguments]
        return CliRunner().invoke(main, command)

    assert json.loads(run("5").stdout)["plan"]["partitions"] == {"b": 5}
    assert json.loads(run("b=3").stdout)["plan"]["partitions"] == {"b": 3}
    for wrong in (("x",), ("b=",), ("5", "b=3"), ("b=3", "b=4")):
        result = run(*wrong)
        assert (result.exit_code, "give one number for all" in result.stderr) == (2, True)


def test_what_spark_cannot_do_is_said_and_what_it_leaves_is_looked_at(tmp_path: Path) -> None:
    class Manager:
        def repartition(self, place: str, partitions: int) -> None:
            raise RuntimeError("no such luck\n at somewhere")

    class Session:
        streams = None
        _streamingCheckpointManager = Manager()  # noqa: N815 (Spark's name)

    session: Any = Session()
    spark: SparkSession = session
    with pytest.raises(DamageError, match=r"could not repartition it: no such luck$"):
        rescale(spark, Place(str(tmp_path)), BatchId(1), 5, lambda: None)
