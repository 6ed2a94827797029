"""Which state is meant is found without a JVM, and what there is to choose from is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from spark_abs.cli.main import main
from spark_abs.errors import CheckpointNotFound, DamageError, UsageError
from spark_abs.manifest import (
    Manifest,
    OperatorState,
    Origin,
    StageShape,
    StageSnapshot,
    StateFunction,
    StoredFile,
)
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import NO_BATCH, BatchId, CheckpointId, RunId, StageId
from spark_abs.observe.state_at import StateAt, find_state, same_at
from spark_abs.protocol import control as ledger
from spark_abs.snapshots.operators import Operator
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from tests.snapshot_support import LOCAL, captured, manifest_of

FORM = StateFunction("sums", 4, ("k: string",), ("total: int64",), "event-time")
OURS = {"heads": "ValueState", "$eventTimers_keyToTimestamp": "TimerState", "segments": "MapState"}
THEIRS = {"last": "ValueState", "seen": "ListState", "by_name": "MapState", "$procTimers_x": "TimerState"}


def plain(number: int, name: str, stores: tuple[str, ...] = ("default",)) -> tuple[str, str]:
    infos = [{"storeName": s, "numColsPrefixKey": 0, "numPartitions": 2} for s in stores]
    body = {"operatorInfo": {"operatorId": number, "operatorName": name}, "stateStoreInfo": infos}
    return f"state/{number}/_metadata/metadata", "v1\n" + json.dumps(body)


def transform(number: int, variables: dict[str, str]) -> tuple[str, str]:
    named = [{"stateName": n, "stateVariableType": k, "ttlEnabled": False} for n, k in variables.items()]
    properties = {"timeMode": "EventTime", "outputMode": "Append", "stateVariables": named}
    body = json.loads(plain(number, "transformWithStateInPandasExec")[1].partition("\n")[2])
    body["operatorPropertiesJson"] = json.dumps(properties)
    return f"state/{number}/_metadata/v2/0", "v2\n" + json.dumps(body)


AGGREGATION = plain(0, "stateStoreSave")
JOIN = plain(1, "symmetricHashJoin", ("left-keyToNumValues", "right-keyToNumValues"))


class Jobs:
    """A root with checkpoints of one stage, whose operators are said by their metadata alone."""

    def __init__(self, path: Path) -> None:
        self.root, self.path = Root(str(path / "root")), path
        control = Control.create(self.root, "job", 0)
        control.update(lambda s: ledger.begin_run(s, "host", 1, 0))
        self.kept = StateStorage.open(self.root, "job", RunId(1))
        self.checkpoints = Checkpoints.open(self.root, "job")
        self.stored = 0

    def checkpoint(
        self,
        *operators: tuple[str, str],
        functions: tuple[StateFunction, ...] = (),
        places: tuple[str, ...] = (),
        edited: bool = False,
    ) -> Manifest:
        number = len(self.checkpoints.summaries()) + 1
        files = self.files(*operators)
        uids = places or ("",) * len(operators)
        found = tuple(
            OperatorState(int(path.split("/")[1]), "", 2, (), "", uid)
            for (path, _), uid in zip(operators, uids, strict=True)
        )
        manifest = manifest_of(number, files)
        stages = (
            replace(manifest.stages[0], operators=found),
            StageSnapshot(StageId("pass"), BatchId(3)),
            StageSnapshot(StageId("new"), NO_BATCH),
        )
        graph = (StageShape(StageId("match"), (), {}, {}, {}, functions),)
        origin = Origin(manifest.attempt, manifest.id) if edited else None
        manifest = replace(manifest, stages=stages, graph=graph, edited=origin)
        assert self.checkpoints.complete(manifest)
        return manifest

    def files(self, *named: tuple[str, str]) -> tuple[StoredFile, ...]:
        """Store texts under the paths that they have in a native checkpoint."""
        found = []
        for path, text in named:
            self.stored += 1
            (file,) = captured(self.path / "native", **{f"file-{self.stored}": text.encode()})
            kept = self.kept.store(CheckpointId(1), LOCAL, str(self.path / "native"), [file])
            found.append(replace(kept.files[0], path=path))
        return tuple(found)

    def find(self, stage: str = "match", **asked: str | int) -> StateAt:
        return find_state(self.root, stage, **asked)  # type: ignore[arg-type]


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


def refused(find: Callable[[], object], *words: str) -> None:
    with pytest.raises(UsageError) as raised:
        find()
    for word in words:
        assert word in str(raised.value)


def test_one_operator_with_one_store_need_not_be_named(jobs: Jobs) -> None:
    jobs.checkpoint(AGGREGATION)
    found = jobs.find()
    assert found.operator == Operator(0, "stateStoreSave", found.operator.parts)
    assert found.part is not None
    assert (found.part.name, found.part.options, found.identity) == ("default", {}, ("key",))


def test_several_operators_and_stores_are_listed(jobs: Jobs) -> None:
    jobs.checkpoint(AGGREGATION, JOIN)
    refused(jobs.find, "2 stateful operators", "0 (stateStoreSave), 1 (symmetricHashJoin)")
    refused(lambda: jobs.find(operator=7), "no operator 7", "0 (stateStoreSave)")
    refused(lambda: jobs.find(operator=1), "2 stores: choose one of left, right")
    refused(lambda: jobs.find(operator=1, store="middle"), "no store 'middle': choose one of left, right")
    part = jobs.find(operator="1", store="right").part
    assert part is not None
    assert (part.options, part.identity) == ({"joinSide": "right"}, ())


def test_the_parts_of_a_transform_are_its_variables_and_timers(jobs: Jobs) -> None:
    jobs.checkpoint(transform(0, THEIRS))
    refused(jobs.find, "4 stores: choose one of last, seen, by_name, timers")
    identities = {name: jobs.find(store=name).identity for name in ("last", "seen", "by_name", "timers")}
    assert identities == {"last": ("key",), "seen": (), "by_name": ("key", "user_map_key"), "timers": ()}


def test_a_function_is_found_by_its_uid(jobs: Jobs) -> None:
    jobs.checkpoint(AGGREGATION, transform(1, OURS), functions=(FORM,))
    found = jobs.find(operator="sums")
    assert (found.operator.id, found.part, found.identity) == (1, None, ("key",))
    refused(lambda: jobs.find(operator="sums", store="heads"), "its state has no stores")
    jobs.checkpoint(transform(0, OURS), transform(1, OURS), functions=(FORM, replace(FORM, uid="others")))
    refused(lambda: jobs.find(operator="sums"), "2 functions, sums, others", "0 (transform")
    assert jobs.find(operator=1).function is None  # an earlier version has not said: the state does


def test_one_of_two_functions_is_found_by_its_uid_also_when_the_other_was_removed(jobs: Jobs) -> None:
    others = replace(FORM, uid="others")
    two = (transform(0, OURS), transform(1, OURS))
    jobs.checkpoint(*two, functions=(FORM, others), places=("others", "sums"))
    found = {uid: jobs.find(operator=uid) for uid in ("sums", "others")}
    assert {uid: (f.operator.id, f.function) for uid, f in found.items()} == {
        "sums": (1, FORM),
        "others": (0, others),
    }
    refused(jobs.find, "choose one of 0 (others), 1 (sums)")
    jobs.checkpoint(*two, functions=(FORM,), places=("", "sums"), edited=True)
    assert jobs.find(operator="sums").operator.id == 1
    assert jobs.find(operator="sums").function == FORM
    refused(lambda: jobs.find(operator=0), "operator 0, was removed by the edit")
    refused(
        lambda: jobs.find(operator="others"), "no operator 'others': choose one of 0 (transform", "1 (sums)"
    )


def test_a_function_is_compared_with_itself_wherever_it_stands(jobs: Jobs) -> None:
    two = (transform(0, OURS), transform(1, OURS))
    forms = (FORM, replace(FORM, uid="others"))
    before = jobs.checkpoint(*two, functions=forms, places=("others", "sums"))
    after = jobs.checkpoint(*two, functions=forms, places=("sums", "others"))
    now = jobs.find(checkpoint=after.id, operator="sums")
    assert (now.operator.id, same_at(jobs.root, now, before.id).operator.id) == (0, 1)


def test_what_is_not_there_is_said(jobs: Jobs) -> None:
    jobs.checkpoint(AGGREGATION)
    refused(lambda: jobs.find("other"), "no stage 'other': it has match, pass, new")
    refused(lambda: jobs.find("pass"), "has no stateful operator", "stages with state: match")
    refused(lambda: jobs.find("new"), "had run no batch", "stages with state: match")
    with pytest.raises(CheckpointNotFound, match="no checkpoint '7'"):
        jobs.find(checkpoint=7)


def test_only_the_same_operator_is_compared(jobs: Jobs) -> None:
    jobs.checkpoint(AGGREGATION)
    jobs.checkpoint(plain(0, "dedupe"))
    found = jobs.find(checkpoint=2)
    assert same_at(jobs.root, found, 2).manifest.id == 2
    refused(
        lambda: same_at(jobs.root, found, 1), "is dedupe at checkpoint 2 and stateStoreSave at checkpoint 1"
    )


def test_metadata_that_is_not_spark_s_is_damage(jobs: Jobs) -> None:
    path, text = transform(0, THEIRS)
    jobs.checkpoint((path, text.replace("stateVariables", "others")))
    with pytest.raises(DamageError, match="operator metadata"):
        jobs.find()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["other"], 2, "no stage 'other'"),
        (["pass"], 2, "it has no state"),
        (["match", "--checkpoint", "9"], 1, "no checkpoint '9'"),
        (["match", "--operator", "4"], 2, "no operator '4'"),
        (["match", "--diff", "9"], 1, "no checkpoint '9'"),
        (["match", "--export", "."], 1, "something at"),
        (["match", "--limit", "0"], 2, "--limit"),
        (["match", "--limit", "20", "--export", "new"], 2, "--export shows none: give one of the two"),
    ],
)
def test_a_wrong_call_ends_before_spark_is_started(
    jobs: Jobs, arguments: list[str], code: int, said: str
) -> None:
    jobs.checkpoint(AGGREGATION)
    result = CliRunner().invoke(main, ["state", jobs.root.uri, *arguments])
    assert (result.exit_code, said in result.output) == (code, True), result.output


def test_bytes_that_are_gone_are_damage(jobs: Jobs) -> None:
    jobs.checkpoint(AGGREGATION)
    for pack in Path(jobs.root.uri, "state").glob("pack-*"):
        pack.write_bytes(b"torn")
    result = CliRunner().invoke(main, ["state", jobs.root.uri, "match"])
    assert result.exit_code == 3, result.output
