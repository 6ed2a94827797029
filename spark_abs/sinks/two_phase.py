"""What a sink outside must do so that every row is in it once: the contract for sinks of one's own.

The first phase of a two-phase commit is done when a checkpoint is complete: the rows of its epoch lie in the
channel of the output, durable, and are handed out until the sink has them. So a sink stages nothing and
leaves nothing open; it commits rows and mark at once, refuses whoever was replaced, and tells its mark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow as pa

from spark_abs.protocol.outside import Epoch, Mark, Owner

T = TypeVar("T")


class Rows(ABC):
    """The rows of an epoch, in the order in which the output's stage wrote them; may be read again."""

    schema: pa.Schema
    """What every batch has, whichever version of the job wrote it."""
    count: int
    """How many rows there are."""

    @abstractmethod
    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Iterate record batches of at most some ten thousand rows, read while they are asked for.

        Raises:
            DamageError: rows are not there any more.
        """

    def each_part(self, work: Callable[[Rows], T]) -> list[T]:
        """Call `work` with parts that together are all rows, and return its results in the order of the rows.

        Many rows are parts for tasks of Spark, on whichever machine: `work` and its results are pickled, what
        it needs must be installed there, and a call may be repeated, also beside the first, with one result
        that counts. What it raises may be in Spark's logs. Few rows are one part, in this thread.

        Raises:
            SinkUnreachable: a task did not come to its end.
            SinkFailed: an executor lacks a module.
        """
        return [work(self)]


class TwoPhaseSink(ABC):
    """A sink that commits an epoch and its mark at once. Used from one thread at a time.

    Every method may be called again after a crash at any of its steps, by this process or another. What is
    raised decides what becomes of the run: `SinkUnreachable`, `CommitConflict` and `OSError` are tried again,
    from `recover` on; `Fenced` ends this run, which was replaced; anything else fails it.

    `spark_abs.testing.two_phase.check` tests all that is said here.
    """

    each_batch: bool = False
    """Whether each batch is an epoch, sent when its stage has committed it, and not all up to a checkpoint
    after its completion. What a restore undoes is then more often in the sink."""

    def check(self, schema: pa.Schema) -> None:  # noqa: B027 - many take whatever comes
        """Say before a job starts whether rows of a schema can be taken; changes nothing.

        Raises:
            UsageError: they cannot; names every column.
        """

    def rows_of_others(self, owner: Owner) -> str:
        """Say for a person which rows are there, empty if none are or the owner's root has been there.

        Asked before the sink first comes, unless somebody has said that it writes beside them. Changes
        nothing. Empty, too, where writing beside others is what one does, as with a topic.
        """
        del owner
        return ""

    @abstractmethod
    def mark(self, owner: Owner) -> Mark | None:
        """Return what was committed last, None if nothing was; changes nothing, refuses nobody.

        Of an epoch that goes in several parts that is the mark of the epoch, from its first part on.
        """

    @abstractmethod
    def recover(self, owner: Owner) -> Mark | None:
        """Refuse older runs of the owner's sink from now on, and return the mark; None if there is none.

        Of an epoch that goes in several parts that is the mark before it, until its last part is committed.

        Called before anything is sent, and after every failure. When it has returned, no commit of an older
        run takes place any more, also none that is under way, and the mark is what stays.

        Raises:
            Fenced: a newer run has been here.
        """

    @abstractmethod
    def commit(self, epoch: Epoch, rows: Rows) -> None:
        """Commit the rows and `epoch.mark` at once, all or nothing, durably.

        Raises:
            Fenced: a newer run than `epoch.owner.run` has been here.
            CommitConflict: the mark is not `epoch.after`, or with `epoch.first` there is one.
        """

    def rests(self, owner: Owner) -> bool:
        """Say whether a start with nobody to refuse and nothing to send may leave `recover` until it has.

        Only where `recover` has nothing to finish: no epoch of which a part is there. Changes nothing.
        """
        del owner
        return False

    def spark_table(self) -> str:
        """Return the Delta table of the sink if only Spark can write it, else nothing; changes nothing."""
        return ""

    def why_not(self, owner: Owner, back: Mark) -> str:
        """Say why rows committed after `back` cannot be taken back, empty if they can; changes nothing."""
        return (
            f"{type(self).__name__} cannot undo committed rows, so sink {owner.sink!r} cannot go back to "
            f"checkpoint {back.checkpoint}"
        )

    @abstractmethod
    def abort(self, owner: Owner, back: Mark, *, keep: bool) -> None:
        """Take back what was committed after `back`, and let that be the mark: the job was restored.

        With `keep` the rows stay, and only the mark goes back. Called after `recover`, by a restore.

        Raises:
            Refused: it cannot.
            Fenced: a newer run has been here.
        """

    def close(self) -> None:  # noqa: B027 - many have no connections
        """Let go of connections; nothing is called afterwards but from `recover` on."""
