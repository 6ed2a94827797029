"""What an edit refuses as it is said, before Spark has anything to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructType

from spark_abs.errors import Refused, UsageError
from spark_abs.restore.edit import Edit
from spark_abs.restore.edited_rows import form_of_frame
from spark_abs.restore.rewrite import require_rewritable
from spark_abs.state.evolution import evolve
from tests.unit.observe.test_state_at import AGGREGATION, FORM, OURS, Jobs, transform

NO_SESSION: Any = None


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


def ended(unique_ids: dict[str, object] | None = None) -> tuple[str, str]:
    """The end of the batch of the first checkpoint."""
    said = {"nextBatchWatermarkMs": 0} | ({} if unique_ids is None else {"stateUniqueIds": unique_ids})
    return "commits/1", f"v{1 if unique_ids is None else 2}\n{json.dumps(said)}"


def test_an_edit_that_changes_nothing_is_not_written(jobs: Jobs) -> None:
    edit = Edit(NO_SESSION, jobs.root, jobs.checkpoint(AGGREGATION))
    assert repr(edit) == "Edit(checkpoint 1 of job 'job', changes nothing)"
    with pytest.raises(UsageError, match="nothing is changed"):
        edit.write("corrected")
    with pytest.raises(UsageError, match="is not a name"):
        edit.write("not a name")
    with pytest.raises(UsageError, match="'latest' means the newest checkpoint"):
        edit.write("latest")


def test_state_that_needs_rocksdb_stays_there(jobs: Jobs) -> None:
    edit = Edit(NO_SESSION, jobs.root, jobs.checkpoint(transform(0, OURS), functions=(FORM,)))
    with pytest.raises(Refused, match=r"only RocksDB can keep the state of operator 0 \(transform"):
        edit.keep_in("match", "hdfs")
    with pytest.raises(UsageError, match="provider 'disk' is not one of rocksdb, hdfs"):
        edit.keep_in("match", "disk")  # type: ignore[arg-type]  # as is tested


def test_what_has_no_state_cannot_be_edited(jobs: Jobs) -> None:
    edit = Edit(NO_SESSION, jobs.root, jobs.checkpoint(AGGREGATION))
    for stage in ("pass", "new"):
        with pytest.raises(UsageError, match="it has no state"):
            edit.remove(stage)
    with pytest.raises(UsageError, match="is Spark's own: only the state of functions can be replaced"):
        edit.replace("match", NO_SESSION)


def test_state_format_2_is_refused(jobs: Jobs) -> None:
    first = jobs.checkpoint(AGGREGATION)
    plain, dated = jobs.files(ended()), jobs.files(ended({"0": [["a"]]}))
    require_rewritable(jobs.root, replace(first.stages[0], files=plain))
    with pytest.raises(Refused, match="state format 2"):
        require_rewritable(jobs.root, replace(first.stages[0], files=dated))


def test_rows_of_another_form_have_no_past() -> None:
    """A name that a field had before is free again: nothing is left that was written so."""
    plain: Any = SimpleNamespace(columns=["key", "value"])
    plain.schema = StructType().add("key", StructType().add("user", LongType()))
    plain.schema = plain.schema.add("value", StructType().add("sum", LongType()))
    past = replace(FORM, renamed={"n": ("total",)}, dropped=("last",), defaults={"n": "1"}, older=("00",))
    form = form_of_frame(plain, past)
    assert form == replace(FORM, key=("user: int64",), state=("sum: int64",))
    declared = replace(form, state=("sum: int64", "total: int64", "last: int64"))
    assert evolve(form, declared).obstacles == ()
    with pytest.raises(UsageError, match="number of key groups must be 1 to 32768, found 32769"):
        form_of_frame(plain, replace(FORM, key_groups=2**15 + 1))
