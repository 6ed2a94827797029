"""What a restore finds of a sink outside that cannot be asked."""

from __future__ import annotations

from typing import Any, cast

import pytest

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
from spark_abs.restore.outside import OutsideFacts, outside_facts, outside_steps
from spark_abs.restore.steps import KeepSink
from spark_abs.sinks.two_phase import Rows, TwoPhaseSink
from spark_abs.store.root import Root

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


@pytest.mark.parametrize("kind", [DamageError, SinkUnreachable, SinkFailed, UsageError])
def test_a_restore_says_of_a_sink_that_cannot_be_asked_why_and_may_go_on(kind: type[AbsError]) -> None:
    """Its server is away, its schema was dropped, or the variable with its address is not set any more."""
    found = _found(kind("no way"))
    assert found.gone == "it cannot be asked: no way"
    with pytest.raises(Refused, match="no way"):
        list(outside_steps([found], force=False))


def test_a_table_that_another_root_has_taken_over_stands_in_no_way() -> None:
    """Nothing of this root gets there any more, whatever is restored."""
    (step,) = outside_steps([_found(TakenOver("it was taken over by another root"))], force=False)
    assert step == KeepSink(("sent",), "it was taken over by another root: what it has sent stays")


def _found(error: AbsError) -> OutsideFacts:
    record = OutsideSink("sent", StageId("a"), "main", "own", "", BEGIN, begun=True)
    state: Any = begin_job("job", 1)
    state = type(state)(state.job, state.root, state.attempts, outside=(record,))
    branch, own = Branch(AttemptId(2), None), {"sent": Gone(error)}
    (found,) = outside_facts(Root("/none"), state, cast(Manifest, None), (), branch, own)
    return found
