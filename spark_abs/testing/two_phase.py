"""Test your own sink: it must hold each row exactly once, despite failures and late runs.

    def test_my_sink(tmp_path):
        two_phase.check(lambda: MySink(tmp_path), lambda: rows_in(tmp_path))

Commits, recoveries and rollbacks are stopped at every line of the sink's module and at every return from it,
once by an error and once by a pause during which another run takes over. Then the rows are compared.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import count
from types import CodeType, FrameType, TracebackType
from typing import Any

import pyarrow as pa

from spark_abs.errors import CommitConflict, Fenced, SinkUnreachable
from spark_abs.model import NO_EPOCH, AttemptId, CheckpointId, RunId, Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.two_phase import Rows, TwoPhaseSink

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
"""The schema of the rows."""

Row = tuple[int, str | None]
Make = Callable[[], TwoPhaseSink]
Read = Callable[[], Collection[Row]]

_BATCHES, _ROWS = 2, 2
_VISITS = 2
"""How often a line counts as a step: loops over existing rows would give too many steps."""
_PATIENCE_S = 60.0
_TRIES = 20
_AGAIN = (SinkUnreachable, CommitConflict, OSError)
_BLOCKED_S = 0.05
"""How long to wait for a run that may itself wait for the paused run."""


class NotOnce(AssertionError):
    """The sink lost rows, has rows twice, or accepted a commit of a replaced run."""


class Stopped(BaseException):
    """Raised at a step like the end of the process; a sink must not catch it."""


def check(make: Make, read: Read, *, modules: Collection[str] = (), every: int = 1) -> None:
    """Check the whole contract of `TwoPhaseSink`; raise `NotOnce` with the violation.

    Args:
        make: creates the sink again on the same place, as another process would.
        read: returns all rows that readers see in that place, as pairs of `id` and `text`.
        modules: files whose lines count as steps; by default the file of the sink's class.
        every: stop only at every n-th step, for a slow sink.
    """
    _Check(make, read, modules, every).run()


class _Some(Rows):
    """The rows of an epoch."""

    def __init__(self, number: int) -> None:
        self.schema = SCHEMA
        self.rows: list[Row] = [
            (number * 100 + n, None if n == 1 else f'"{number}",\n\\{n}') for n in range(_BATCHES * _ROWS)
        ]
        self.count = len(self.rows)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for start in range(0, self.count, _ROWS):
            ids, texts = zip(*self.rows[start : start + _ROWS], strict=True)
            yield pa.record_batch([pa.array(ids, pa.int64()), pa.array(texts, pa.string())], schema=SCHEMA)


class _Steps:
    """Counts executed lines and returns in some files, and acts at one of them. A context of one thread."""

    def __init__(self, files: Collection[str], at: int, act: Callable[[], None]) -> None:
        self._files, self._left, self._act = files, at, act
        self.reached = False
        self._visits: Counter[tuple[CodeType, int, str]] = Counter()

    def __enter__(self) -> _Steps:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        place = (frame.f_code, frame.f_lineno, event)
        if event in ("line", "return") and not self.reached and self._visits[place] < _VISITS:
            self._visits[place] += 1
            self._left -= 1
            if self._left < 0:
                self.reached = True
                self._act()
        return self._trace


class _Check:
    def __init__(self, make: Make, read: Read, modules: Collection[str], every: int) -> None:
        self._every = every
        self._new_sink, self._read = make, read
        self._made: list[TwoPhaseSink] = []
        self._observer = make()
        self._files = modules or {inspect.getfile(type(self._make()))}
        self._run = RunId(0)
        self._epoch = 0
        self._mark: Mark | None = None
        self._there: list[Row] = []
        """The expected rows and mark."""
        self._undo: list[tuple[Mark, list[Row]]] = []

    def run(self) -> None:
        """Check it all."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # what is stopped as by a kill closes nothing
            try:
                self._run_all()
            finally:
                self._close()
                self._observer.close()
                gc.collect()

    def _run_all(self) -> None:
        self._require(self._make().mark(self._next()) is None, "a new place has a mark")
        self._require(self._recover(self._next()) is None, "a new place has a mark after recover")
        self._abort_nothing()
        self._commit()
        self._refusals()
        self._each(self._stop_commit)
        self._each(self._freeze_commit)
        self._each(self._stop_recover)
        self._rollbacks()

    # -- the parts

    def _abort_nothing(self) -> None:
        """A sink that has committed nothing stays without a mark: its first epoch is still to come."""
        back = Mark(AttemptId(1), NO_EPOCH, Version(0))
        for keep in (False, True):
            sink, owner = self._make(), self._next()
            sink.recover(owner)
            if keep or not sink.why_not(owner, back):
                sink.abort(owner, back, keep=keep)
                self._look(f"an abort (keep={keep}) without a commit before it")

    def _refusals(self) -> None:
        """A run that is older or does not know the mark commits nothing.

        A second `recover` changes nothing.
        """
        old, new = self._next(), self._next()
        sink = self._make()
        sink.recover(old)
        self._require(self._recover(new) == self._mark, "recover lost the mark")
        with suppress(Fenced, CommitConflict, SinkUnreachable, OSError):
            sink.commit(self._new_epoch(old), _Some(self._epoch + 1))
            self._require(False, f"a commit of run {old.run} was accepted after run {new.run}")
        with suppress(Fenced):
            self._make().recover(old)
            self._require(False, f"run {old.run} recovered after run {new.run}")
        self._look("calls of a replaced run")
        first = self._new_epoch(new)
        self._commit()
        newest = self._next()
        sink = self._make()
        sink.recover(newest)
        with suppress(CommitConflict):
            sink.commit(Epoch(newest, first.after, first.mark, first=first.first), _Some(self._epoch))
            self._require(False, "the same epoch was committed twice")
        self._look("a repeated commit")

    def _stop_commit(self, step: int) -> bool:
        owner, sink = self._next(), self._make()
        sink.recover(owner)
        epoch, rows = self._new_epoch(owner), _Some(self._epoch + 1)
        steps = _Steps(self._files, step, _stop)
        with suppress(Stopped), steps:
            sink.commit(epoch, rows)
        self._settle(epoch, rows, f"a commit that ended at step {step}")
        return steps.reached

    def _freeze_commit(self, step: int) -> bool:
        """Pause a commit while another run takes over and commits the same epoch; then resume the commit."""
        owner, sink = self._next(), self._make()
        sink.recover(owner)
        epoch, rows = self._new_epoch(owner), _Some(self._epoch + 1)
        frozen, go = threading.Event(), threading.Event()

        def stand_still() -> None:
            frozen.set()
            go.wait(_PATIENCE_S)

        steps = _Steps(self._files, step, stand_still)
        old = threading.Thread(target=self._late, args=(sink, epoch, rows, steps, frozen), daemon=True)
        old.start()
        frozen.wait(_PATIENCE_S)
        newer = self._next()
        failed: list[BaseException] = []
        new = threading.Thread(target=self._take_over, args=(newer, epoch, rows, failed), daemon=True)
        new.start()
        new.join(_BLOCKED_S if steps.reached else _PATIENCE_S)
        go.set()
        for thread in (old, new):
            thread.join(_PATIENCE_S)
            self._require(not thread.is_alive(), f"step {step}: a run waits for ever")
        for error in failed:
            raise error
        self._mark, self._epoch = epoch.mark, self._epoch + 1
        self._there += rows.rows
        self._look(f"a run that was paused at step {step} of its commit while another run committed")
        return steps.reached

    def _late(
        self, sink: TwoPhaseSink, epoch: Epoch, rows: Rows, steps: _Steps, frozen: threading.Event
    ) -> None:
        try:
            with suppress(Exception), steps:
                sink.commit(epoch, rows)
        finally:
            frozen.set()

    def _take_over(self, owner: Owner, epoch: Epoch, rows: Rows, failed: list[BaseException]) -> None:
        try:
            sink, tries = self._make(), 0
            while True:
                try:
                    if sink.recover(owner) != epoch.mark:
                        sink.commit(Epoch(owner, epoch.after, epoch.mark, first=epoch.first), rows)
                    return
                except _AGAIN:  # the other one came between: a run tries again, from `recover` on
                    tries += 1
                    if tries == _TRIES:
                        raise
        except BaseException as error:  # noqa: BLE001 - the thread's edge: raised by whoever waits for it
            failed.append(error)

    def _stop_recover(self, step: int) -> bool:
        steps = _Steps(self._files, step, _stop)
        with suppress(Stopped), steps:
            self._make().recover(self._next())
        self._look(f"a recovery that ended at step {step}")
        self._require(self._recover(self._next()) == self._mark, "recover lost the mark")
        return steps.reached

    def _rollbacks(self) -> None:
        """Stop `abort` at every step: with undo if the sink can undo, and with keep."""
        for keep in (False, True):
            for step in count(0, self._every):
                self._commit()
                back, before = self._undo[-3]
                owner = self._next()
                self._recover(owner)
                if not keep and self._make().why_not(owner, back):
                    break
                steps = _Steps(self._files, step, _stop)
                with suppress(Stopped), steps:
                    self._make().abort(owner, back, keep=keep)
                sink = self._make()
                owner = self._next()
                sink.recover(owner)
                sink.abort(owner, back, keep=keep)
                self._require(sink.mark(owner) == back, f"abort left a mark other than {back}")
                self._mark, self._there = back, self._there if keep else list(before)
                self._undo = [pair for pair in self._undo if pair[0].version <= back.version]
                self._look(f"an abort (keep={keep}) that was stopped at step {step} and repeated")
                self._commit()
                if not steps.reached:
                    break

    # -- the means

    def _each(self, part: Callable[[int], bool]) -> None:
        for step in count(0, self._every):
            if not part(step):
                return

    def _next(self) -> Owner:
        self._run = RunId(self._run + 1)
        return Owner("the root", "job", "sink", self._run)

    def _make(self) -> TwoPhaseSink:
        self._made.append(self._new_sink())
        return self._made[-1]

    def _close(self) -> None:
        while self._made:
            self._made.pop().close()

    def _recover(self, owner: Owner) -> Mark | None:
        return self._make().recover(owner)

    def _new_epoch(self, owner: Owner) -> Epoch:
        number = self._epoch + 1
        after = self._mark or Mark(AttemptId(1), NO_EPOCH, Version(0))
        version = Version(after.version + 10)
        return Epoch(
            owner, after, Mark(AttemptId(1), CheckpointId(number), version), first=self._mark is None
        )

    def _commit(self) -> None:
        sink, owner = self._make(), self._next()
        sink.recover(owner)
        epoch, rows = self._new_epoch(owner), _Some(self._epoch + 1)
        sink.commit(epoch, rows)
        self._settle(epoch, rows, "a commit")

    def _settle(self, epoch: Epoch, rows: _Some, behind: str) -> None:
        """Check that a stopped commit has left all or nothing, and commit the missing epochs again."""
        owner, sink = self._next(), self._make()
        mark = sink.recover(owner)
        if mark != epoch.mark:
            expected = None if epoch.first else epoch.after
            self._require(mark == expected, f"after {behind} the mark is {mark}")
            self._look(behind)
            sink = self._make()  # looking has closed the other one
            sink.recover(owner)
            sink.commit(Epoch(owner, epoch.after, epoch.mark, first=epoch.first), rows)
        self._mark, self._epoch = epoch.mark, self._epoch + 1
        self._there += rows.rows
        self._undo.append((epoch.mark, list(self._there)))
        self._look(f"{behind}, and its repeat")

    def _look(self, behind: str) -> None:
        found, wanted = sorted(self._read(), key=repr), sorted(self._there, key=repr)
        if found != wanted:
            lost = [row for row in wanted if row not in found]
            more = [row for row in found if row not in wanted or found.count(row) > wanted.count(row)]
            raise NotOnce(f"after {behind}: lost rows {lost[:3]}, unexpected rows {more[:3]}")
        mark = self._observer.mark(self._next())
        self._require(mark == self._mark, f"after {behind} the mark is {mark}, not {self._mark}")
        self._close()

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise NotOnce(what)


def _stop() -> None:
    raise Stopped
