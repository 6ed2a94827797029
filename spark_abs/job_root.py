"""One handle for all that can be asked of a root, and done with it, from outside of the job that owns it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Unpack

import pyarrow as pa

from spark_abs.logs import speak
from spark_abs.manifests.find import check_savepoint_name
from spark_abs.model import CheckpointId
from spark_abs.observe.client import ask_run, new_command, set_live, stop_run
from spark_abs.observe.events import event_table
from spark_abs.observe.listing import checkpoint_table
from spark_abs.observe.live_run import lease_timeout_ms
from spark_abs.observe.progress import SILENT, Progress
from spark_abs.observe.status import JobStatus, job_status
from spark_abs.observe.tables import active_session, create_views, read_sink, tables_at
from spark_abs.observe.verification import finding_table, verify_one, verify_root
from spark_abs.protocol.control import CommandKind
from spark_abs.restore.forget import forget_query
from spark_abs.restore.outside import NO_SINKS, Own
from spark_abs.restore.refusals import ForceName, forces
from spark_abs.settings import session_settings
from spark_abs.settings_keywords import LiveSettings, StorageSettings
from spark_abs.store.clock import now_ms
from spark_abs.store.failpoint import Failpoint, no_failpoint
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_abs.restore.apply import RestoreResult
    from spark_abs.restore.edit import Edit
    from spark_abs.restore.rescale import Wanted


def open(root: str, spark: SparkSession | None = None, **storage: Unpack[StorageSettings]) -> JobRoot:  # noqa: A001
    """Return a handle on a root; nothing is read before it is asked, and no JVM is started.

        shop = spark_abs.open("/data/shop", spark)
        shop.checkpoints().to_pandas()
        shop.read("sales", "before-release")

    Args:
        root: the job's root.
        spark: a session, for what returns or takes frames; the active one of this thread if None.
        storage: how an object store is reached, where neither environment nor session say it.

    Raises:
        ConfigError: an option is unknown, or cannot be read.
    """
    session = spark if spark is not None else _active_session()
    conf = session_settings(session) if session is not None else {}
    return JobRoot(Root(root, Storage.given(conf, storage)), session)


@dataclass(frozen=True, repr=False)
class JobRoot:
    """A root: what the job there has kept, and the job itself if it runs.

    Whatever is asked is read anew. All methods raise RootNotFound where there is no job at the root, and
    DamageError where its tables cannot be read. Safe to use from any thread.
    """

    root: Root
    spark: SparkSession | None = None
    _: KW_ONLY
    clock_ms: Callable[[], int] = now_ms
    pause: Callable[[float], None] = time.sleep
    """Called with seconds between two looks at a running job."""
    failpoint: Failpoint = no_failpoint

    def __repr__(self) -> str:
        return f"JobRoot({self.root.uri!r})"

    def checkpoints(self) -> pa.Table:
        """Return completed checkpoints and savepoints, by id; reads no manifests.

        Columns: `id`, `kind`, `name`, `attempt`, `run`, `triggered_ms`, `completed_ms`, `age_ms` since its
        completion, `duration_ms` from trigger to completion, `size_new` (bytes that it wrote), `size_full`
        (bytes that a restore reads), `abandoned` (a restore went back to before it), `edited` (an edit made
        it), `damage` (what is wrong with its row; then only the id may be known).
        """
        return checkpoint_table(self.root, self.clock_ms())

    def history(self, limit: int | None = None) -> pa.Table:
        """Return the events of all checkpoints and runs by time, also of those that are gone.

        Columns are those of `history/`: `at_ms`, `event`, `checkpoint`, `attempt`, `run`, `kind`, `name`,
        `stage`, `reason`, `detail`, durations that end in `_ms`, sizes in bytes.

        Args:
            limit: only so many, the newest.
        """
        return event_table(self.root, limit)

    def status(self) -> JobStatus:
        """Return how the job stands: attempt, newest run and whether it is alive, open checkpoints."""
        return job_status(self.root, self.clock_ms(), lease_timeout_ms())

    def verify(self, checkpoint: str | int | None = None, *, progress: Progress = SILENT) -> pa.Table:
        """Read every byte of a checkpoint, or of all of them and what else the job needs; return the damage.

        Columns: `path` (below the root), `problem`, `checkpoint` (the one that cannot come back because of
        it), `stage`. No rows: nothing is damaged.

        Args:
            checkpoint: an id, the name of a savepoint, or `latest`; None: everything.
            progress: told what is read.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
        """
        if checkpoint is None:
            return finding_table(verify_root(self.root, progress))
        return finding_table(verify_one(self.root, checkpoint, progress))

    def read(self, name: str, checkpoint: str | int = "latest") -> DataFrame:
        """Read a Delta sink as it was at a checkpoint.

        Tables read at the same checkpoint belong together: no row of one has seen more input than any row of
        another. While the job runs `latest` moves on: to read several tables, name the checkpoint by its id.

        Args:
            name: the sink.
            checkpoint: an id, the name of a savepoint, or `latest`.

        Raises:
            UsageError: there is no such sink at the checkpoint, it is a function, or there is no session.
            CheckpointNotFound: there is no such checkpoint.
            Refused: the table was replaced since.
        """
        return read_sink(self._session(), self.root, name, checkpoint)

    def tables(self, checkpoint: str | int = "latest") -> pa.Table:
        """Return which versions of the job's Delta tables belong to a checkpoint, for any reader of Delta.

        Columns: `sink`, `stage`, `table` (its URI), `version`, `checkpoint` (its id), `name` (in a catalog,
        empty if it was declared by its path). No row that a reader finds in these versions has seen more
        input than any other, if the checkpoint is aligned. Of one that is unaligned, or at least once, rows
        in flight are in the tables of some stages and not of others.

        Args:
            checkpoint: an id, the name of a savepoint, or `latest`.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
            Refused: a table was replaced since, or is gone.
        """
        return tables_at(self.root, checkpoint)

    def views(self, checkpoint: str | int = "latest", prefix: str = "") -> pa.Table:
        """Make a temporary view of each Delta table as it was at a checkpoint, in the session of this handle.

        Returns `tables(checkpoint)` with the name of each view in a column `view`: the prefix and the sink,
        `_` in place of `-`.

        Args:
            checkpoint: an id, the name of a savepoint, or `latest`.
            prefix: what the names begin with.

        Raises:
            UsageError: a view would have no name, two would have the same, or there is no session.
            CheckpointNotFound: there is no such checkpoint.
            Refused: a table was replaced since, or is gone.
        """
        return create_views(self._session(), self.root, checkpoint, prefix)

    def state(
        self,
        stage: str,
        checkpoint: str | int = "latest",
        *,
        operator: int | str | None = None,
        store: str | None = None,
        diff: str | int | None = None,
    ) -> DataFrame:
        """Return the state of a stage at a checkpoint.

        Of a function of ours (`map_groups_with_state` and its kin) there is a row for each key: structs `key`
        and `value`, `timeout_ms` and `expires_ms` (null for none); a key that has only a timeout has a null
        `value`. Of Spark's own operators the columns are those of its state reader: `key` and `value`, for a
        map `user_map_key` and `user_map_value`, for a list `list_element`, for timers
        `expiration_timestamp_ms`.

        All of it is read now, from the bytes that the checkpoint names, and Spark keeps the rows; a job that
        runs is not touched. Until that is done it is on a disk, too: a temporary directory of this machine,
        or beside the native checkpoints of the job if the session has executors elsewhere.

        Args:
            stage: the stage.
            checkpoint: an id, the name of a savepoint, or `latest`.
            operator: which stateful operator, by its number, or a function by its uid; needed if there are
                several.
            store: which part of it: `left` or `right` of a join, a state variable or `timers` of a
                `transformWithState`; needed if there are several.
            diff: another checkpoint: return what is different from there. `change` is `added`, `removed` or
                `changed`; `before` and `after` hold what it was and is. Where keys may repeat (joins, lists,
                timers) whole rows are added or removed.

        Raises:
            UsageError: there is no such stage, operator or store, it has no state, or must be chosen; says
                which there are. Or its form at the other checkpoint is another one.
            CheckpointNotFound: there is no such checkpoint.
            DamageError: its bytes are missing or altered.
        """
        from spark_abs.observe.state import state_frame
        from spark_abs.observe.state_at import find_state, same_at

        session, found = self._session(), find_state(self.root, stage, checkpoint, operator, store)
        return state_frame(
            session, self.root, found, None if diff is None else same_at(self.root, found, diff)
        )

    def restore(
        self,
        to: str | int,
        *,
        force: bool | Collection[ForceName] = False,
        fallback: bool = False,
        dry_run: bool = False,
        native_root: str | None = None,
        shuffle_partitions: Wanted | None = None,
        sinks: Own = NO_SINKS,
        progress: Progress = SILENT,
    ) -> RestoreResult:
        """Bring the job back to a checkpoint: state, positions, channels and Delta sinks together.

        The job must not be running; start it afterwards. Needs no JVM, unless the plan says so, for a sink or
        for partitions: then the session of this handle is used, or one is started. Killed in the middle, call
        it again with the same arguments.

        Args:
            to: an id, the name of a savepoint, or `latest`: the newest on the current path. An id may name a
                checkpoint that an earlier restore left behind.
            force: what to go on in spite of: `run`, a run that is alive, which is fenced; `rows`, rows of
                sinks that others have changed since, which is undone; `inputs`, input files that are gone,
                whose rows are lost; `outside`, rows that a sink outside has committed and cannot take back.
                True: all of them. Rows that jobs on other roots wrote always stay.
            fallback: if that checkpoint is damaged, take the newest intact one before it on the current path.
            dry_run: only plan, beside a run that is alive too.
            native_root: the `native_root` of the job from now on; None if it stays what it was.
            shuffle_partitions: into how many partitions state is divided from now on: a number for all stages
                that keep state, or numbers by stage. State must be in RocksDB. None leaves it as it was.
                Declare the stage with the same number: a later start without a past takes what is declared.
            sinks: two-phase sinks of your own, by name: a root does not know how to make them.
            progress: told each step.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
            RunAlive: a run of the job is alive.
            Refused: others have changed a sink since, or state cannot be given other partitions.
            UsageError: there is no such stage.
            DamageError: the checkpoint is damaged; says what.
            Fenced: another restore or run has taken over meanwhile.
        """
        from spark_abs.restore.apply import RestoreResult, apply
        from spark_abs.restore.prepare import prepare

        speak()
        prepared = prepare(
            self.root,
            to,
            force=forces(force),
            fallback=fallback,
            native_root=native_root,
            shuffle_partitions=shuffle_partitions,
            sinks=sinks,
            writing=not dry_run,
            dry_run=dry_run,
            progress=progress,
        )
        if dry_run:
            return RestoreResult(prepared.plan, None)
        return apply(self.root, prepared, spark=self.spark, failpoint=self.failpoint, progress=progress)

    def edit(self, from_: str | int = "latest") -> Edit:
        """Begin to change a checkpoint or savepoint: `Edit.write` makes a new savepoint, the original stays.

            edit = spark_abs.open(root, spark).edit("before-release")
            wrong = edit.state("count").where("value.total < 0")
            edit.correct("count", wrong.selectExpr("key", "named_struct('total', 0L) AS value"))
            edit.write("corrected")

        The job must not run when the savepoint is written.

        Args:
            from_: an id, the name of a savepoint, or `latest`.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
            DamageError: its manifest is damaged.
        """
        from spark_abs.manifests.find import lookup
        from spark_abs.restore.edit import Edit

        return Edit(self._session(), self.root, lookup(self.root, from_).manifest)

    def savepoint(self, name: str, timeout: float | None = None) -> CheckpointId:
        """Take a savepoint of the running job, and return its id when it is complete.

        Args:
            name: of the savepoint.
            timeout: seconds to wait for it; None: until the job ends.

        Raises:
            UsageError: the name is no name.
            Refused: no run is alive, it ended before it answered, or the savepoint was not taken.
            CheckpointPending: `timeout` went by; the savepoint may still complete.
        """
        check_savepoint_name(name)
        command = new_command(CommandKind.SAVEPOINT, self.clock_ms(), name)
        return _id_of(ask_run(self.root, command, self.clock_ms, self.pause, timeout).checkpoint)

    def stop(self, savepoint: str | None = None, drain: bool = False) -> CheckpointId | None:
        """Stop the running job in order, and return when it has ended; with a name, the id of the savepoint.

        Args:
            savepoint: take an exact savepoint first, after which nothing is processed.
            drain: let every window out before the savepoint, see `Run.stop`.

        Raises:
            UsageError: the name is no name, or a drain has none.
            Refused: no run is alive, it was killed or failed meanwhile, or the savepoint was not taken.
        """
        answer, _ = stop_run(self.root, savepoint, drain, self.clock_ms, self.pause)
        return answer.checkpoint

    def set(self, **settings: Unpack[LiveSettings]) -> str:
        """Change settings of the running job until it ends; return what was changed.

        Raises:
            ConfigError: one cannot be set while a job runs, or not to this; nobody was asked.
            Refused: no run is alive, or it says no.
        """
        given = {name: str(value) for name, value in settings.items() if value is not None}
        return set_live(self.root, given, self.clock_ms, self.pause).message

    def forget(self, stage: str) -> None:
        """Do without a wrapped query that is gone for good: no later checkpoint carries its part on.

        Its tables stay as they are, and a restore to a checkpoint that has no part of it leaves them alone. A
        restore to one that has brings it back as it was, tables included. If the query comes again it takes
        part again, from where its native checkpoint stands.

        Args:
            stage: the query's uid.

        Raises:
            UsageError: these are not wrapped queries, or none of them is called so.
            Refused: the query runs.
        """
        forget_query(self.root, stage, self.clock_ms, self.pause)

    def dispose(self, savepoint: str | int) -> CheckpointId:
        """Remove a savepoint, and return its id; what only it needed goes with the next clean-up of a run.

        Args:
            savepoint: its id or name. The job may run.

        Raises:
            CheckpointNotFound: there is no such savepoint.
            DamageError: its row cannot be read.
            Refused: it is no savepoint, or the job may still need it.
        """
        from spark_abs.restore.dispose import dispose_savepoint

        return dispose_savepoint(self.root, savepoint, self.clock_ms).id

    def _session(self) -> SparkSession:
        return self.spark if self.spark is not None else active_session()


def _active_session() -> SparkSession | None:
    """Return the session of this thread, None if there is none; imports no Spark to find that out."""
    if "pyspark.sql" not in sys.modules:
        return None
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()


def _id_of(found: CheckpointId | None) -> CheckpointId:
    assert found is not None, "a savepoint that was taken has an id"
    return found
