"""What a start says of the tables that the last run has left."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from spark_abs.compatibility.restored import Past
from spark_abs.compatibility.same_tables import require_same_table
from spark_abs.errors import TableChanged
from spark_abs.model import StageId
from spark_abs.plan.specs import Existing, Output, SinkSpec
from spark_abs.protocol.control import AttachedSink, attach
from spark_abs.store.storage import Place
from spark_abs.store.table import Table
from tests.root_support import SCHEMA, SmallJob


def test_a_table_made_anew_is_refused_until_it_is_said_to_be_taken_over(tmp_path: Path) -> None:
    """That a sink writes beside rows of others does not say that its own may be gone."""
    job = SmallJob(tmp_path)
    known = AttachedSink(StageId("b"), "totals", job.table, job.sink.table_id, attempt=job.attempt)
    past = Past(job.root, attach(job.state, [known]), None)

    def look(existing: Existing | None) -> None:
        source = cast(Output, None)  # nothing is asked of it
        require_same_table(SinkSpec("totals", source, job.table, None, existing), past)

    said: tuple[Any, ...] = (None, "append", "take_over")
    for existing in said:
        look(existing)
    shutil.rmtree(job.table)
    for now in ("is gone", "was replaced by a different table"):
        for existing in said[:2]:
            with pytest.raises(TableChanged, match=now):
                look(existing)
        look("take_over")
        Table.ensure(Place(job.table), SCHEMA, {})
    past = Past(job.root, attach(job.state, [replace(known, took_over=job.run)]), None)
    with pytest.raises(TableChanged, match="rename the sink and declare it with existing='take_over'"):
        look("take_over")
