"""Whether a run may still write to a sink, and whether the mark is the one that an epoch follows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import pytest

from spark_abs.errors import CommitConflict, Fenced, Refused
from spark_abs.model import AttemptId, CheckpointId, RunId, Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.marked import (
    MarkedSink,
    refuse_moved,
    refuse_replaced,
    require_mark,
    require_run,
    require_unchanged,
)
from spark_abs.sinks.two_phase import Rows

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
    second = Epoch(OWNER, mark(1), mark(2), first=first)
    follows = run == 2 and (there is None if first else there == 1)
    with nullcontext() if follows else pytest.raises(CommitConflict):
        assert require_mark(second, found) is found


def test_a_refusal_names_the_sink_the_reason_and_the_way_on() -> None:
    refuse_moved(OWNER, "table a", "table a")
    with pytest.raises(Refused, match="is now declared with table b; its mark counts only for table a: give"):
        refuse_moved(OWNER, "table a", "table b")


@pytest.mark.parametrize("stored", [None, Found(2), Found(2, mark(1)), Found(2, mark(2)), Found(3, mark(1))])
def test_a_commit_stands_on_the_mark_that_is_known(stored: Found | None) -> None:
    """Whatever another object of the run, or a newer run, has stored meanwhile."""
    known = Found(2, mark(1))
    error = Fenced if stored is not None and stored.run == 3 else CommitConflict
    with nullcontext() if stored == known else pytest.raises(error):
        assert require_unchanged(OWNER, known, stored) is stored


class Listed(MarkedSink[Found]):
    """Keeps its mark in a cell that others share, and tells which steps it was asked for."""

    def __init__(self, cell: list[Found], back: str = "") -> None:
        self.cell, self.back, self.steps, self.fails = cell, back, list[str](), False

    def _read_mark(self, owner: Owner) -> Found | None:
        return self.cell[-1] if self.cell else None

    def _fence(self, owner: Owner) -> Found:
        stored = self._read_mark(owner)
        refuse_replaced(owner, stored)
        return self._store("fence", Found(int(owner.run), None if stored is None else stored.mark))

    def _add(self, epoch: Epoch, known: Found, rows: Rows) -> Found:
        require_unchanged(epoch.owner, known, self._read_mark(epoch.owner))
        return self._store("add", Found(known.run, epoch.mark))

    def _go_back(self, owner: Owner, known: Found, back: Mark, *, keep: bool) -> Found:
        return self._store("keep" if keep else "undo", Found(known.run, back))

    def why_not(self, owner: Owner, back: Mark) -> str:
        return self.back

    def _store(self, step: str, stored: Found) -> Found:
        self.steps.append(step)
        if self.fails:
            raise OSError(step)
        self.cell.append(stored)
        return stored


def epoch(number: int, run: int = 2) -> Epoch:
    owner = Owner("root", "job", "sent", RunId(run))
    return Epoch(owner, mark(number - 1), mark(number), first=number == 1)


def test_after_a_step_that_failed_a_sink_commits_nothing_before_it_has_read_its_mark_again() -> None:
    rows = cast(Rows, None)
    sink = Listed([])
    with pytest.raises(CommitConflict):  # `recover` comes first
        sink.commit(epoch(1), rows)
    assert (sink.mark(OWNER), sink.recover(OWNER)) == (None, None)
    sink.commit(epoch(1), rows)
    sink.fails = True
    with pytest.raises(OSError, match="add"):
        sink.commit(epoch(2), rows)
    sink.fails = False
    with pytest.raises(CommitConflict):
        sink.commit(epoch(2), rows)
    assert sink.recover(OWNER) == mark(1)
    sink.commit(epoch(2), rows)
    assert sink.steps == ["fence", "add", "add", "fence", "add"]
    assert Listed(sink.cell).recover(epoch(1, run=3).owner) == mark(2)
    with pytest.raises(Fenced):
        sink.commit(epoch(3), rows)
    with pytest.raises(Fenced):
        sink.recover(OWNER)
    assert sink.mark(OWNER) == mark(2)


def test_a_sink_goes_back_once_and_only_if_it_can_or_leaves_its_rows() -> None:
    sink = Listed([Found(1, mark(2))], back="no history")
    with pytest.raises(Refused, match="'sent' cannot take back the rows that it has committed: no history"):
        sink.abort(OWNER, mark(1), keep=False)
    assert sink.steps == []
    sink.abort(OWNER, mark(1), keep=True)
    sink.abort(OWNER, mark(1), keep=True)
    assert (sink.steps, sink.mark(OWNER)) == (["fence", "keep"], mark(1))
    sink.back = ""
    sink.abort(OWNER, mark(0), keep=False)
    empty = Listed([])
    empty.abort(OWNER, mark(1), keep=False)  # it has committed nothing
    assert (sink.steps, empty.steps) == (["fence", "keep", "undo"], ["fence"])
