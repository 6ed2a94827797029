"""What a sink outside must do so that every row is in it once: the contract for sinks of one's own.

The first phase of a two-phase commit is done when a checkpoint is complete: the rows of its epoch lie in the
channel of the output, durable, and are handed out until the sink has them. So a sink stages nothing and
leaves nothing open: it commits rows and mark at once, refuses runs that were replaced, and returns its mark.
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
    """The columns of every batch, whichever version of the job wrote the rows."""
    count: int
    """The number of rows."""

    @abstractmethod
    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Iterate record batches of at most some ten thousand rows; each is read when it is asked for.

        Raises:
            DamageError: a file with rows is missing.
        """

    def each_part(self, work: Callable[[Rows], T]) -> list[T]:
        """Divide the rows into parts, call `work` with each, and return the results in the order of the rows.

        Many rows are divided among tasks of Spark: `work` and its results are pickled, the modules that it
        needs must be installed on the executors, and Spark may call it twice for a part, even at the same
        time, and use one result. Its errors may appear in Spark's logs. Few rows are one part, which is
        worked on in this thread.

        Raises:
            SinkUnreachable: a task failed or was lost.
            SinkFailed: an executor lacks a module.
        """
        return [work(self)]


class TwoPhaseSink(ABC):
    """A sink that commits an epoch and its mark at once. Used from one thread at a time.

    Every method may be called again after a crash at any of its steps, by this process or another one. The
    error decides what the run does: after `SinkUnreachable`, `CommitConflict` and `OSError` it tries again,
    beginning with `recover`; `Fenced` ends the run, which was replaced; any other error fails it.

    `spark_abs.testing.two_phase.check` tests every promise of this contract.
    """

    each_batch: bool = False
    """Whether each batch is an epoch, which is sent when its stage has committed it. Otherwise an epoch has
    the rows up to a checkpoint, and is sent when that is complete. With batches, a restore more often finds
    rows in the sink that it has to undo."""

    def check(self, schema: pa.Schema) -> None:  # noqa: B027 - many take any rows
        """Check before a job starts that the sink can take rows of a schema; changes nothing.

        Raises:
            UsageError: it cannot; names every column that does not fit.
        """

    def rows_of_others(self, owner: Owner) -> str:
        """Describe the rows that the target has from others; empty if it has none, or this root has written.

        Called before the sink writes to the target for the first time, unless `existing=` says that it may.
        Changes nothing. Also empty where several writers are usual, as with a topic.
        """
        del owner
        return ""

    @abstractmethod
    def mark(self, owner: Owner) -> Mark | None:
        """Return the mark that was committed last, None if there is none; changes nothing, refuses no run.

        Of an epoch that is committed in several parts, it is the mark of the epoch from the first part on.
        """

    @abstractmethod
    def recover(self, owner: Owner) -> Mark | None:
        """Refuse older runs of the owner's sink from now on, and return the mark; None if there is none.

        Of an epoch that is committed in several parts, it is the mark before the epoch until the last part is
        committed.

        Called before anything is sent, and after every failure. Once it has returned, no commit of an older
        run can succeed, not even a commit that is under way, and the mark stays as it is.

        Raises:
            Fenced: a newer run has recovered the sink.
        """

    @abstractmethod
    def commit(self, epoch: Epoch, rows: Rows) -> None:
        """Commit the rows and `epoch.mark` at once, all or nothing, durably.

        Raises:
            Fenced: a run newer than `epoch.owner.run` has recovered the sink.
            CommitConflict: the mark is not `epoch.after`; or the sink has a mark, and this is `epoch.first`.
        """

    def rests(self, owner: Owner) -> bool:
        """Say whether a start that has no run to refuse and no rows to send may put `recover` off.

        Only if `recover` has nothing to finish: no epoch is committed in part. Changes nothing.
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
        """Take back the rows that were committed after `back`, and store `back` as the mark.

        With `keep` the rows stay, and only the mark goes back. A sink that has committed nothing stays
        without a mark: its first epoch is still to come. Called by a restore, after `recover`.

        Raises:
            Refused: the rows cannot be taken back.
            Fenced: a newer run has recovered the sink.
        """

    def close(self) -> None:  # noqa: B027 - many have no connections
        """Close connections; the next call is `recover`, or of a method that changes nothing."""
