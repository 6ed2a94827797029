"""One handle for a root: what the command says, as tables and values, with nothing said twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest

import spark_abs
from spark_abs import CheckpointPending, ConfigError, Refused, RootNotFound, UsageError
from spark_abs.model import CheckpointId
from spark_abs.observe import listing, tables, verification
from spark_abs.observe.listing import CheckpointRow
from spark_abs.observe.tables import TableAt
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import CommandKind, ControlState
from spark_abs.snapshots.verify import Finding
from spark_abs.store.control import Control
from spark_abs.store.history import SCHEMA as HISTORY
from spark_abs.store.lease import own_lease, renew
from tests.root_support import SmallJob


def answered(command: str, given: CheckpointId | None, state: ControlState) -> ControlState:
    return ledger.answer(state, command, True, given, "done")


def answering(job: SmallJob, checkpoint: int | None, ends: str = "") -> Callable[[float], None]:
    """Return a pause in which the running job answers, and perhaps ends."""

    def pause(_: float) -> None:
        asked = [c for c in job.state.commands if not c.answered]
        given = None if checkpoint is None else CheckpointId(checkpoint)
        for command in asked:
            Control.open(job.root).update(partial(answered, command.id, given))
        if ends and not asked:
            Control.open(job.root).update(lambda s: ledger.end_run(s, job.run, ends))
            renew(job.root, own_lease(job.run, 0), 0, ended=True)

    return pause


def test_reading_verbs_load_no_spark_and_their_columns_are_those_of_the_rows(job: SmallJob) -> None:
    job.checkpoint(1)
    job.checkpoint(2, name="two")
    program = f"""
import sys, spark_abs
shop = spark_abs.open({job.root.uri!r})
assert shop.checkpoints().column("name").to_pylist() == [None, "two"]
assert shop.history(1).column("event").to_pylist() == ["completed"]
assert (shop.verify().num_rows, shop.verify("two").num_rows) == (0, 0)
(at,) = shop.tables("two").to_pylist()
assert (at["sink"], at["stage"], at["checkpoint"]) == ("totals", "b", 2)
assert (shop.status().job, shop.status().last.name) == ("job", "two")
sys.exit("pyspark" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert listing.SCHEMA.names == [f.name for f in fields(CheckpointRow)]
    assert tables.SCHEMA.names == [f.name for f in fields(TableAt)]
    assert verification.SCHEMA.names == [f.name for f in fields(Finding)]
    assert spark_abs.open(job.root.uri).history().schema == HISTORY


def test_damage_is_a_row(job: SmallJob) -> None:
    job.checkpoint(1)
    (file,) = Path(job.root.path("checkpoints")).glob("00000001-*.parquet")
    file.write_bytes(file.read_bytes()[:-20])
    handle = spark_abs.open(job.root.uri)
    (listed,) = handle.checkpoints().to_pylist()
    (found,) = handle.verify().to_pylist()
    assert file.name in listed["damage"]
    assert file.name in found["path"]


def test_a_root_that_is_not_there_is_said_by_whatever_is_asked(tmp_path: Path) -> None:
    handle = spark_abs.open(str(tmp_path / "nothing"))
    for ask in (handle.checkpoints, handle.history, handle.status, handle.verify):
        with pytest.raises(RootNotFound):
            ask()
    assert not (tmp_path / "nothing").exists()


def test_options_of_storage_are_given_once_and_others_are_none(tmp_path: Path) -> None:
    handle = spark_abs.open("s3://shop/root", region="eu-west-1", secret_access_key="s", access_key_id="k")
    assert (handle.root.storage.s3.region, repr(handle)) == ("eu-west-1", "JobRoot('s3a://shop/root')")
    with pytest.raises(ConfigError, match="'interval' is no setting of storage"):
        spark_abs.open(str(tmp_path), interval="10s")  # type: ignore[call-arg]  # as is tested
    program = f"import spark_abs; spark_abs.open({str(tmp_path)!r}).read('totals')"  # no session is there
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("spark_abs.errors.UsageError: no Spark session is active")


def test_back_to_a_checkpoint_and_the_plan_alone(job: SmallJob) -> None:
    job.checkpoint(1)
    job.checkpoint(2)
    handle = spark_abs.open(job.root.uri)
    assert handle.restore(1, dry_run=True).run is None
    assert job.rows() == [1, 2]
    assert handle.restore(1).plan.abandons == (2,)
    assert job.rows() == [1]
    assert handle.checkpoints().column("abandoned").to_pylist() == [False, True]


def test_a_savepoint_and_a_stop_of_a_job_that_runs(job: SmallJob) -> None:
    job.come_alive()
    handle = replace(spark_abs.open(job.root.uri), sleep=answering(job, 7, "stopped"))
    assert handle.savepoint("before") == 7
    assert handle.checkpoint() == 7
    assert handle.cancel(7) == handle.pause("clicks") == handle.resume() == handle.restart("b") == "done"
    assert handle.set(interval="30s") == "done"
    assert handle.stop(savepoint="last") == 7
    kinds = [(c.kind, c.name) for c in job.state.commands]
    assert kinds == [
        (CommandKind.SAVEPOINT, "before"),
        (CommandKind.CHECKPOINT, None),
        (CommandKind.CANCEL, "7"),
        (CommandKind.PAUSE, None),
        (CommandKind.RESUME, None),
        (CommandKind.RESTART, None),
        (CommandKind.SET, None),
        (CommandKind.STOP, "last"),
    ]
    with pytest.raises(Refused, match=r"no run of job 'job' is alive: run 1 ended \(stopped\)"):
        handle.savepoint("late")
    with pytest.raises(UsageError, match="give savepoint=NAME"):
        handle.stop(drain=True)


def test_a_savepoint_without_an_answer_in_time_may_still_come(job: SmallJob) -> None:
    """It is not refused: whoever asked must look, and not take it for granted that there is none."""
    job.come_alive()
    clock = [1_000]
    handle = replace(
        spark_abs.open(job.root.uri),
        clock_ms=lambda: clock[0],
        sleep=lambda s: clock.__setitem__(0, clock[0] + int(1000 * s)),
    )
    with pytest.raises(CheckpointPending, match="savepoint 'slow' may still complete") as late:
        handle.savepoint("slow", timeout=1)
    assert (isinstance(late.value, Refused), late.value.exit_code, clock[0]) == (False, 4, 2_000)
    assert [c.name for c in job.state.commands if not c.answered] == ["slow"]
