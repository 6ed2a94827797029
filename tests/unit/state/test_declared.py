"""What stages declare of their functions: one uid each, kept in manifests, compared at the next start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from spark_abs.codec import from_json, to_json
from spark_abs.compatibility.restored import Past, check_functions, check_restored
from spark_abs.errors import GraphError, Refused
from spark_abs.manifest import Manifest, OperatorState, StateFunction
from spark_abs.model import AttemptId, BatchId, StageId
from spark_abs.plan.frames import Frames
from spark_abs.protocol.attempt_changes import start_functions
from spark_abs.protocol.control import begin_job, begin_run
from spark_abs.snapshots.materialise import make_directory, put
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.state.declared import Declared, declaring, gathering
from spark_abs.state.evolution import form_digest
from spark_abs.store.root import Root

MATCH = StageId("match")
SUMS = StateFunction("sums", 16, ("k: int64",), ("total: int64",), "none")
EXAMPLE = Path(__file__).parents[1] / "formats" / "manifest-1.json"


@dataclass
class Count:
    value: int


def declared(*functions: StateFunction) -> Frames:
    stage = Declared("match", functions=list(functions))
    return Frames({}, {}, {MATCH: stage})


def manifest(*functions: StateFunction) -> Manifest:
    found = from_json(Manifest, EXAMPLE.read_text())
    (shape,) = found.graph
    name = "transformWithStateInPySparkExec"
    operators = tuple(OperatorState(at, name, 2, (), "", f.uid) for at, f in enumerate(functions))
    stages = (replace(found.stages[0], operators=operators, cut_batch=BatchId(4)),)
    stored = replace(found, graph=(replace(shape, functions=functions),), stages=stages)
    again = from_json(Manifest, to_json(stored))
    assert again == stored
    return again


class Started:
    """Starts of stage `match` over a native checkpoint, as far as functions go."""

    def __init__(self, path: Path, *functions: StateFunction) -> None:
        self.root = Root(str(path))
        self.control = begin_run(begin_job("job", 0), "host", 1, 0)
        self.manifest: Manifest | None = manifest(*functions) if functions else None
        self.ended(4 if functions else -1)

    def ended(self, batch: int) -> None:
        """Let a batch be the last that has ended."""
        native = self.root.native("native", AttemptId(1), MATCH)
        make_directory(native, "commits")
        for number in range(batch + 1):
            put(native, f"commits/{number}", [b""])

    def start(self, *functions: StateFunction, places: tuple[str, ...] | None = None) -> Frames:
        """Start with functions, in the order of the plan unless another is said."""
        frames, run = declared(*functions), self.control.runs[-1].id
        plans = {MATCH: plan(places or tuple(f.uid for f in functions))}
        past = Past(self.root, self.control, self.manifest)
        self.control = start_functions(self.control, run, check_functions(past, frames, plans))
        return frames


def plan(functions: tuple[str, ...]) -> PlanFacts:
    return PlanFacts((), (), (), False, True, {}, functions=functions)


def test_a_stage_starts_on_functions_that_are_what_they_were(tmp_path: Path) -> None:
    started = Started(tmp_path, SUMS)
    started.start(replace(SUMS, ttl_ms=5))
    started.manifest = None
    started.ended(5)
    with pytest.raises(Refused, match="'sums' has state and is no longer declared"):
        started.start()


@pytest.mark.parametrize(
    "change",
    [
        {"key_groups": 32},
        {"key": ("k: string",)},
        {"state": ("total: string",)},
        {"timeout": "event-time"},
    ],
)
def test_a_function_of_another_form_is_refused_with_both(tmp_path: Path, change: dict[str, Any]) -> None:
    now, started = replace(SUMS, **change), Started(tmp_path, SUMS)
    with pytest.raises(Refused, match="stage 'match': function 'sums' does not fit its state") as refused:
        started.start(now)
    for form in (SUMS, now):
        for column in (*form.key, *form.state, str(form.key_groups), form.timeout):
            assert column in str(refused.value)
    assert "spark_abs.open(root).edit(7).rekey writes the state of a function" in str(refused.value)
    assert started.control.attempt.functions == ()


def test_a_function_that_goes_on_in_another_form_is_recorded_with_its_past(tmp_path: Path) -> None:
    now = replace(SUMS, state=("sum: int64", "n: int64"), renamed={"sum": ("total",)}, defaults={"n": "3"})
    (form,) = Started(tmp_path / "1", SUMS).start(now).declared[MATCH].functions
    assert form == replace(now, older=(form_digest(SUMS),))
    second = Started(tmp_path / "2", form)
    with pytest.raises(Refused, match=r"'n' is no longer.*(.*\n)+.* n: int64 +-(.*\n)+.*renamed=.*dropped="):
        second.start(replace(SUMS, state=("sum: int64",)))
    frames = second.start(replace(SUMS, state=("sum: int64",), dropped=("n",)))
    (last,) = frames.declared[MATCH].functions
    assert (last.renamed, last.dropped, len(last.older)) == ({"sum": ("total",)}, ("n",), 2)


def test_a_crash_before_the_first_checkpoint_does_not_make_a_start_forget(tmp_path: Path) -> None:
    """What ran is known from `control/`, and whether a batch of it ended from Spark's own checkpoint."""
    job, renamed = Started(tmp_path), replace(SUMS, state=("sum: int64",))
    job.start(SUMS)
    job.start(renamed)  # nothing has run: there is no state
    job.start(SUMS)
    job.ended(0)
    with pytest.raises(Refused, match="field 'total' is no longer declared"):
        job.start(renamed)
    with pytest.raises(Refused, match="'more' is new, and a stage that has run"):
        job.start(SUMS, replace(SUMS, uid="more"))
    named = replace(renamed, renamed={"sum": ("total",)})
    job.start(named)
    job.start(SUMS)  # back to the release before: no batch of the new one has ended
    job.start(named)
    job.ended(1)
    with pytest.raises(Refused, match="field 'sum' is no longer declared"):
        job.start(SUMS)
    assert [f.after for f in job.control.attempt.functions] == [-1, 0]
    job.start(named)
    assert [f.after for f in job.control.attempt.functions] == [0]


def test_functions_that_change_places_in_the_plan_are_refused(tmp_path: Path) -> None:
    job, more = Started(tmp_path), replace(SUMS, uid="more")
    frames = job.start(SUMS, more, places=("more", "sums"))
    assert [f.uid for f in frames.declared[MATCH].functions] == ["sums", "more"]
    job.ended(0)
    job.start(more, SUMS)  # declared in another order: the plan has them where they were
    with pytest.raises(Refused, match=r"'sums', 'more' changed places.* 'sums', this plan has 'sums', 'm"):
        job.start(SUMS, more)


def test_what_is_restored_is_checked_by_its_checkpoint_alone(tmp_path: Path) -> None:
    job, other = Started(tmp_path, SUMS), replace(SUMS, state=("sum: int64",), renamed={"sum": ("total",)})
    job.start(other)
    job.ended(9)
    past, plans = Past(job.root, job.control, job.manifest), {MATCH: plan(("sums",))}
    check_restored(past, declared(SUMS), plans)
    with pytest.raises(Refused, match="field 'sum' is no longer declared"):
        check_functions(past, declared(SUMS), plans)
    with pytest.raises(Refused, match="field 'total' is no longer declared"):
        check_restored(past, declared(replace(SUMS, state=("sum: int64",))), plans)


def test_functions_are_put_in_the_order_of_the_plan() -> None:
    stage = Declared("match", functions=[SUMS, replace(SUMS, uid="unused"), replace(SUMS, uid="more")])
    stage.place(("more", "", "sums"))
    assert [f.uid for f in stage.functions] == ["more", "sums"]


def test_functions_are_gathered_where_a_stage_is_built_and_have_one_uid_each() -> None:
    assert declaring() is None
    with gathering(Declared("match")) as found:
        inner = declaring()
        assert inner is found
        inner.add(SUMS, cast("Any", Count(2)))
        inner.add(replace(SUMS, uid="more"), cast("Any", Count(3)))
        with pytest.raises(GraphError, match="stage 'match': two stateful functions have the uid 'sums'"):
            inner.add(SUMS, cast("Any", Count(0)))
    assert declaring() is None
    assert found.dropped() == 5
