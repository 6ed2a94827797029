"""What a restore finds of a sink outside that cannot be asked."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from spark_abs.advice import command_line
from spark_abs.codec import to_json
from spark_abs.errors import (
    AbsError,
    DamageError,
    Refused,
    SinkFailed,
    SinkUnreachable,
    TakenOver,
    UsageError,
)
from spark_abs.manifest import Manifest
from spark_abs.model import AttemptId, Branch, CheckpointId, StageId, Version
from spark_abs.protocol.control import OutsideSink, begin_job
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.restore.outside import OutsideFacts, Own, outside_facts, outside_steps
from spark_abs.restore.steps import KeepSink
from spark_abs.sinks.delta.options import EpochTable
from spark_abs.sinks.registry import require_supported
from spark_abs.sinks.two_phase import Rows, TwoPhaseSink
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Table

BEGIN = Mark(AttemptId(1), CheckpointId(0), Version(0))


class Gone(TwoPhaseSink):
    """Cannot be asked for its mark."""

    def __init__(self, error: AbsError) -> None:
        self._error = error

    def mark(self, owner: Owner) -> Mark | None:
        raise self._error

    def recover(self, owner: Owner) -> Mark | None:
        return None

    def commit(self, epoch: Epoch, rows: Rows) -> None:
        pass

    def abort(self, owner: Owner, back: Mark, *, keep: bool) -> None:
        pass


def found_of(kind: str, settings: str, own: Own) -> OutsideFacts:
    """Ask the one sink of a job."""
    record = OutsideSink("sent", StageId("a"), "main", kind, settings, BEGIN, begun=True)
    state: Any = begin_job("job", 1)
    state = type(state)(state.job, state.root, state.attempts, outside=(record,))
    (found,) = outside_facts(
        Root("/none"),
        state,
        manifest=cast(Manifest, None),
        known=(),
        attempt=Branch(AttemptId(2), None),
        own=own,
    )
    return found


@pytest.mark.parametrize("kind", [DamageError, SinkUnreachable, SinkFailed, UsageError])
def test_a_restore_says_of_a_sink_that_cannot_be_asked_why_and_may_go_on(kind: type[AbsError]) -> None:
    """Its server is away, its schema was dropped, or the variable with its address is not set any more."""
    found = found_of("own", "", {"sent": Gone(kind("no way"))})
    assert found.gone == "it cannot be asked: no way"
    with pytest.raises(Refused, match="no way"):
        list(outside_steps([found], force=False))


@pytest.mark.parametrize(("prepared", "refused"), [(True, True), ("no", True), (False, False), (None, False)])
def test_a_sink_that_ran_with_prepared_transactions_is_refused_with_the_way_on(
    monkeypatch: pytest.MonkeyPatch, prepared: object, refused: bool
) -> None:
    """Settings as earlier versions wrote them; where they are accepted, the server is asked next."""
    monkeypatch.setenv("NOWHERE", "host=127.0.0.1 port=1")
    stored = {"table": "orders", "schema": "public", "mode": "append", "dsn_env": "NOWHERE"}
    settings = json.dumps(stored if prepared is None else {**stored, "prepared": prepared})
    found = found_of("postgres", settings, {})
    way = "once with the earlier version and prepared=False"
    assert (way in found.gone, "public.orders" in found.gone) == (refused, not refused)
    with pytest.raises(UsageError, match=way) if refused else nullcontext():
        require_supported("postgres", settings)


def test_a_table_that_another_root_has_taken_over_stands_in_no_way() -> None:
    """Nothing of this root gets there any more, whatever is restored."""
    found = found_of("own", "", {"sent": Gone(TakenOver("it was taken over by another root"))})
    (step,) = outside_steps([found], force=False)
    assert step == KeepSink(("sent",), "it was taken over by another root: its rows stay")


def test_a_sink_of_ones_own_is_given_in_python_wherever_it_is_asked_for() -> None:
    assert found_of("own", "", {}).gone.endswith("give it with sinks={'sent': …}")
    with command_line():
        said = found_of("own", "", {}).gone
    assert said.endswith("from Python, with spark_abs.open(root).restore(checkpoint, sinks={'sent': …})")


@pytest.mark.parametrize("plain", [True, False])
def test_of_a_table_of_whole_checkpoints_it_says_whether_only_spark_can_write_it(
    tmp_path: Path, plain: bool
) -> None:
    uri, feed = str(tmp_path / "each"), {"delta.enableChangeDataFeed": "true"}
    Table.ensure(Place(uri), pa.schema([("n", pa.int64())]), {} if plain else feed)
    found = found_of("delta", to_json(EpochTable(uri)), {})
    assert (found.gone, found.where, found.spark_table) == ("", " (Delta)", "" if plain else uri)
