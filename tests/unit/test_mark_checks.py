"""Whether a run may still write to a sink, and whether the mark is the one that an epoch follows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from spark_abs.errors import CommitConflict, Fenced, Refused
from spark_abs.model import AttemptId, CheckpointId, RunId, Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.mark_checks import refuse_kept, refuse_moved, refuse_replaced, require_mark, require_run

OWNER = Owner("root", "job", "sent", RunId(2))


def mark(number: int) -> Mark:
    return Mark(AttemptId(1), CheckpointId(number), Version(10 * number))


@dataclass(frozen=True)
class Found:
    run: int
    mark: Mark | None = None


@pytest.mark.parametrize(
    ("run", "replaced", "recovered"),
    [(None, False, False), (0, False, False), (1, False, False), (2, False, True), (3, True, False)],
)
def test_only_the_run_that_has_recovered_a_sink_writes_to_it(
    run: int | None, replaced: bool, recovered: bool
) -> None:
    found = None if run is None else Found(run)
    with (
        pytest.raises(Fenced, match="run 2 of sink 'sent' was replaced by run 3")
        if replaced
        else nullcontext()
    ):
        refuse_replaced(OWNER, found)
    with nullcontext() if recovered else pytest.raises(CommitConflict, match="'sent' has changed"):
        assert require_run(OWNER, found) is found


@pytest.mark.parametrize("run", [None, 1, 2, 3])
@pytest.mark.parametrize("there", [None, 0, 1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_an_epoch_follows_the_mark_before_it_or_as_the_first_none(
    run: int | None, there: int | None, first: bool
) -> None:
    found = None if run is None else Found(run, None if there is None else mark(there))
    epoch = Epoch(OWNER, mark(1), mark(2), first=first)
    follows = run == 2 and (there is None if first else there == 1)
    with nullcontext() if follows else pytest.raises(CommitConflict):
        assert require_mark(epoch, found) is found


def test_a_refusal_names_the_sink_the_reason_and_the_way_on() -> None:
    refuse_kept(OWNER, "")
    refuse_moved(OWNER, "table a", "table a")
    with pytest.raises(Refused, match="what sink 'sent' has committed cannot be taken back: no history"):
        refuse_kept(OWNER, "no history")
    with pytest.raises(Refused, match="is now declared with table b; its mark counts only for table a: give"):
        refuse_moved(OWNER, "table a", "table b")
