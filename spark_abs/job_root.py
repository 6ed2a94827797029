"""One handle to read and control a root from outside of the job that owns it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Unpack

import pyarrow as pa

from spark_abs.errors import UsageError
from spark_abs.logs import speak
from spark_abs.manifests.find import check_savepoint_name
from spark_abs.model import CheckpointId
from spark_abs.observe.client import PATIENCE_S, ask_run, new_command, resume_sources, set_live, stop_run
from spark_abs.observe.inspect import Inspection
from spark_abs.observe.listing import checkpoint_table, event_table
from spark_abs.observe.progress import SILENT, Progress
from spark_abs.observe.skipping import skip_files
from spark_abs.observe.status import JobStatus, job_status, lease_timeout_ms
from spark_abs.observe.tables import create_views, read_sink, tables_at
from spark_abs.observe.verification import finding_table, verify_one, verify_root
from spark_abs.protocol.control import Command, CommandKind
from spark_abs.report.face import root_face
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
    """Return a handle on a root. It reads nothing before a method is called, and starts no JVM.

        shop = spark_abs.open("/data/shop", spark)
        shop.checkpoints().to_pandas()
        shop.read("sales", "before-release")

    Args:
        root: the job's root.
        spark: a session, for methods that return or take frames; None: the active session of this thread.
            `read` and `views` also take a session of Spark Connect.
        storage: options to reach an object store, if neither the environment nor the session has them.

    Raises:
        ConfigError: an option is unknown or cannot be read.
    """
    session = spark if spark is not None else _active_session()
    conf = session_settings(session) if session is not None else {}
    return JobRoot(Root(root, Storage.given(conf, storage)), session)


@dataclass(frozen=True, repr=False)
class JobRoot:
    """A root: the stored checkpoints of a job, and the job itself if it runs.

    Each call reads the root again. All methods raise RootNotFound if there is no job at the root, and
    DamageError if its tables cannot be read. Safe to use from any thread.
    """

    root: Root
    spark: SparkSession | None = None
    _: KW_ONLY
    clock_ms: Callable[[], int] = now_ms
    sleep: Callable[[float], None] = time.sleep
    """Called with the seconds to wait between two queries of a running job."""
    failpoint: Failpoint = no_failpoint

    def __repr__(self) -> str:
        return f"JobRoot({self.root.uri!r})"

    def _repr_html_(self) -> str:
        return root_face(self.root, self.clock_ms())

    def checkpoints(self) -> pa.Table:
        """Return completed checkpoints and savepoints by id, without reading manifests.

        Columns: `id`, `kind`, `name`, `attempt`, `run`, `triggered_ms`, `completed_ms`, `age_ms` since its
        completion, `duration_ms` from trigger to completion, `size_new` (bytes written), `size_full` (bytes
        that a restore reads), `abandoned` (a restore went back to before it), `edited` (an edit made it),
        `damage` (the problem with its row; then perhaps only the id is known).
        """
        return checkpoint_table(self.root, self.clock_ms())

    def history(self, limit: int | None = None) -> pa.Table:
        """Return the events of all checkpoints and runs by time, of deleted checkpoints too.

        Columns are those of `history/`: `at_ms`, `event`, `checkpoint`, `attempt`, `run`, `kind`, `name`,
        `stage`, `reason`, `detail`, durations that end in `_ms`, sizes in bytes.

        Args:
            limit: return only the newest events, at most this many.
        """
        return event_table(self.root, limit)

    def status(self) -> JobStatus:
        """Return the status of the job: attempt, newest run and whether it is alive, open checkpoints."""
        return job_status(self.root, self.clock_ms(), lease_timeout_ms())

    @property
    def inspect(self) -> Inspection:
        """What the root holds as Arrow tables: stages, channels, state, failures, restores, retention, sinks.

        shop.inspect.state().group_by("stage").aggregate([("size", "sum")])
        """
        return Inspection(self.root, self.clock_ms)

    def verify(self, checkpoint: str | int | None = None, *, progress: Progress = SILENT) -> pa.Table:
        """Read every byte of a checkpoint, or all data that the job needs, and return the damage.

        Columns: `path` (below the root), `problem`, `checkpoint` (which cannot be restored because of it),
        `stage`. No rows mean no damage.

        Args:
            checkpoint: an id, the name of a savepoint, or `latest`; None: everything.
            progress: called with the part that is being read.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
        """
        if checkpoint is None:
            return finding_table(verify_root(self.root, progress))
        return finding_table(verify_one(self.root, checkpoint, progress))

    def read(self, name: str, checkpoint: str | int = "latest") -> DataFrame:
        """Read a Delta sink as it was at a checkpoint.

        Tables that are read at the same checkpoint are consistent: no row of one reflects more input than a
        row of another. While the job runs, `latest` changes: to read several tables, give the checkpoint's
        id.

        Args:
            name: the sink.
            checkpoint: an id, the name of a savepoint, or `latest`.

        Raises:
            UsageError: the checkpoint has no such sink, or several tables of this name, as a wrapped query
                that writes several has; the sink is a function; or there is no session.
            CheckpointNotFound: there is no such checkpoint.
            Refused: the table was replaced since the checkpoint.
        """
        return read_sink(self._session(), self.root, name, checkpoint)

    def tables(self, checkpoint: str | int = "latest") -> pa.Table:
        """Return the versions of the job's Delta tables at a checkpoint, for any reader of Delta.

        Columns: `sink`, `stage`, `table` (its URI), `version`, `checkpoint` (its id), `name` (in a catalog,
        empty if it was declared by its path). If the checkpoint is aligned, these versions are consistent: no
        row reflects more input than another row. If it is unaligned or at least once, tables of some stages
        have rows that were still in flight to others.

        Args:
            checkpoint: an id, the name of a savepoint, or `latest`.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
            Refused: a table was replaced since, or is gone.
        """
        return tables_at(self.root, checkpoint)

    def views(self, checkpoint: str | int = "latest", prefix: str = "") -> pa.Table:
        """Make a temporary view of each Delta table as of a checkpoint, in the session of this handle.

        Returns `tables(checkpoint)` with the name of each view in a column `view`: the prefix and the sink's
        name, with `_` in place of `-`.

        Args:
            checkpoint: an id, the name of a savepoint, or `latest`.
            prefix: prefix of each view's name.

        Raises:
            UsageError: a view would have an empty name, two views the same name, or there is no session.
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

        A stateful function of this package (`map_groups_with_state` and variants) gives a row for each key:
        structs `key` and `value`, `timeout_ms` and `expires_ms` (null for none). A key with only a timeout
        has a null `value`. Spark's own operators give the columns of Spark's state reader: `key` and `value`,
        for a map `user_map_key` and `user_map_value`, for a list `list_element`, for timers
        `expiration_timestamp_ms`.

        The call reads the whole state from the files of the checkpoint and caches the rows in Spark; a
        running job is not disturbed. It needs temporary disk space: in a temporary directory of this machine,
        or next to the native checkpoints of the job if the session has executors on other machines.

        Args:
            stage: the stage.
            checkpoint: an id, the name of a savepoint, or `latest`.
            operator: a stateful operator by its number, or a function by its uid; needed if the stage has
                several.
            store: a part of the operator's state: `left` or `right` of a join, a state variable or `timers`
                of a `transformWithState`; needed if there are several.
            diff: another checkpoint: return the differences from it. `change` is `added`, `removed` or
                `changed`; `before` holds the value at `diff`, `after` the value at `checkpoint`. Where keys
                may repeat (joins, lists, timers) only whole rows are added or removed.

        Raises:
            UsageError: there is no such stage, operator or store, the stage has no state, or `operator` or
                `store` must be given; the message lists the choices. Or the state schema differs between the
                checkpoints.
            CheckpointNotFound: there is no such checkpoint.
            DamageError: stored bytes are missing or altered.
        """
        from spark_abs.observe.state import state_frame
        from spark_abs.observe.state_at import find_state, same_at

        session = self._classic("state of a checkpoint")
        found = find_state(self.root, stage, checkpoint, operator, store)
        return state_frame(
            session, self.root, found, None if diff is None else same_at(self.root, found, diff)
        )

    def restore(
        self,
        to: str | int | datetime,
        *,
        force: bool | Collection[ForceName] = False,
        fallback: bool = False,
        dry_run: bool = False,
        native_root: str | None = None,
        shuffle_partitions: Wanted | None = None,
        sinks: Own = NO_SINKS,
        progress: Progress = SILENT,
    ) -> RestoreResult:
        """Restore the job to a checkpoint: state, positions, channels and Delta sinks together.

        The job must not be running; start it afterwards. A JVM is needed only if the plan shows it, for some
        sinks and for new partitions: then the session of this handle is used, or a session is started. If the
        restore is killed, call it again with the same arguments.

        Args:
            to: an id, the name of a savepoint, `latest`: the newest on the current path, or a moment: the
                newest there whose cut was made by then (UTC unless the datetime has a zone). An id may also
                name a checkpoint that an earlier restore abandoned.
            force: obstacles to override. `run`: fence a run that is alive. `rows`: undo changes that others
                have made to a sink's rows since. `inputs`: lose the rows of input files that are gone.
                `outside`: leave rows that a sink outside has committed and cannot take back. True: all of
                these. Rows of jobs on other roots always stay.
            fallback: if the checkpoint is damaged, take the newest intact one before it on the current path.
            dry_run: only return the plan. Works beside a live run, too.
            native_root: the new `native_root` of the job; None leaves it as it was.
            shuffle_partitions: the new number of state partitions: a number for all stages that keep state,
                or numbers by stage. State must be in RocksDB. None leaves it as it was. Declare the stage
                with the same number: if it ever begins without state again, the declared number counts.
            sinks: your own two-phase sinks by name, since the root cannot create them.
            progress: called with each step.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
            RunAlive: a run of the job is alive.
            Refused: others have changed a sink since, or the state cannot be repartitioned.
            UsageError: there is no such stage.
            DamageError: the checkpoint is damaged; the message says where.
            Fenced: another restore or run has taken over in the meantime.
        """
        from spark_abs.restore.apply import RestoreResult, apply
        from spark_abs.restore.prepare import prepare

        speak(self.spark)
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
        """Begin an edit of a checkpoint or savepoint. `Edit.write` makes a new savepoint; the original stays.

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
            Refused: this Spark cannot rewrite state; Spark 4.2 can.
        """
        from spark_abs.manifests.find import lookup
        from spark_abs.restore.edit import Edit

        return Edit(self._classic("an edit"), self.root, lookup(self.root, from_).manifest)

    def savepoint(self, name: str, timeout: float | None = None) -> CheckpointId:
        """Take a savepoint of the running job and return its id when it is complete.

        Args:
            name: of the savepoint.
            timeout: seconds to wait for it; None: until the job ends.

        Raises:
            UsageError: the name is not valid.
            Refused: no run is alive, the run ended before it answered, or the savepoint failed.
            CheckpointPending: no answer within `timeout`; the savepoint may still complete.
        """
        check_savepoint_name(name)
        command = new_command(CommandKind.SAVEPOINT, self.clock_ms(), name)
        return _id_of(self._ask(command, timeout).checkpoint)

    def checkpoint(self, timeout: float | None = None) -> CheckpointId:
        """Take a checkpoint of the running job now and return its id when it is complete; as `savepoint`."""
        command = new_command(CommandKind.CHECKPOINT, self.clock_ms())
        return _id_of(self._ask(command, timeout).checkpoint)

    def cancel(self, checkpoint: str | int) -> str:
        """Abort an open checkpoint of the running job and return what happened.

        Args:
            checkpoint: its id, or the name of a savepoint.

        Raises:
            Refused: no run is alive, the checkpoint is not open, or it was completed first.
        """
        return self._ask(new_command(CommandKind.CANCEL, self.clock_ms(), str(checkpoint))).message

    def pause(self, *stages: str) -> str:
        """Let sources of the running job begin no further batch, and return what happened.

        A batch under way ends. Checkpoints go on. The pause holds until `resume`, over restarts, too.

        Args:
            stages: the names of sources; none for all.

        Raises:
            Refused: no run is alive, or a source cannot be paused.
        """
        return self._ask(new_command(CommandKind.PAUSE, self.clock_ms(), stages=stages)).message

    def resume(self, *stages: str) -> str:
        """Let paused sources read again, also while no run is alive, and return what happened.

        Args:
            stages: the names of sources; none for all that are paused.

        Raises:
            UsageError: a source is not paused.
            Refused: the run refused it, or did not answer.
        """
        return resume_sources(self.root, stages, self.clock_ms, self.sleep).message

    def restart(self, stage: str, timeout: float | None = None) -> str:
        """Start a stage of the running job again when its batch has ended, and return what happened.

        A stage that has failed and waits for its restart is started at once.

        Args:
            stage: its name.
            timeout: seconds to wait for the answer; None: until the job ends.

        Raises:
            Refused: no run is alive, there is no such stage, it could not be started, or no answer came in
                time: the stage may still be restarted.
        """
        command = new_command(CommandKind.RESTART, self.clock_ms(), stages=[stage])
        return self._ask(command, timeout).message

    def skip_file(self, stage: str, *files: str, timeout: float | None = None) -> str:
        """Let a stage go past input files that fail its batch, also while no run is alive.

        A live run starts the stage again without them. They stay skipped, over restarts and restores.
        Returns what happened.

        Args:
            stage: its name.
            files: as the error of the batch names them, or whole paths.
            timeout: seconds to wait for the answer of a live run; None: until the job ends.

        Raises:
            UsageError: no run is alive, and there is no such stage, a file is none of its unfinished batch,
                or an output already has rows of the batch.
            Refused: the run refused it for such a reason, or no answer came in time.
        """
        return skip_files(self.root, stage, files, self.clock_ms, self.sleep, timeout_s=timeout).message

    def stop(self, savepoint: str | None = None, drain: bool = False) -> CheckpointId | None:
        """Stop the running job gracefully, wait until it has ended, and return the savepoint's id, if any.

        Args:
            savepoint: first take a savepoint of this name; nothing is processed after it.
            drain: emit all open windows before the savepoint, see `Run.stop`.

        Raises:
            UsageError: the name is not valid, or `drain` is given without a savepoint.
            Refused: no run is alive, the run was killed or failed, or the savepoint failed.
        """
        answer, _ = stop_run(self.root, savepoint, drain, self.clock_ms, self.sleep)
        return answer.checkpoint

    def set(self, **settings: Unpack[LiveSettings]) -> str:
        """Change settings of the running job until it ends, and return the changes.

        Raises:
            ConfigError: a setting cannot be changed while a job runs, or the value is not valid. Nothing was
                changed.
            Refused: no run is alive, or the run refused the change.
        """
        given = {name: str(value) for name, value in settings.items() if value is not None}
        return set_live(self.root, given, self.clock_ms, self.sleep).message

    def forget(self, stage: str) -> None:
        """Forget a wrapped query that is gone for good: later checkpoints no longer include it.

        Its tables stay as they are, and a restore to a later checkpoint does not touch them. A restore to a
        checkpoint that includes the query restores it, with its tables. If the query is started again, it
        takes part again, from its native checkpoint.

        Args:
            stage: the query's uid.

        Raises:
            UsageError: the root has no wrapped queries, or none of this name.
            Refused: the query runs.
        """
        forget_query(self.root, stage, self.clock_ms, self.sleep)

    def dispose(self, savepoint: str | int) -> CheckpointId:
        """Remove a savepoint and return its id. The next clean-up deletes the data that only it needed.

        Args:
            savepoint: its id or name. The job may run.

        Raises:
            CheckpointNotFound: there is no such savepoint.
            DamageError: its row cannot be read.
            Refused: it is not a savepoint, or the job may still need it.
        """
        from spark_abs.restore.dispose import dispose_savepoint

        return dispose_savepoint(self.root, savepoint, self.clock_ms).id

    def _ask(self, command: Command, timeout: float | None = PATIENCE_S) -> Command:
        return ask_run(self.root, command, self.clock_ms, self.sleep, timeout)

    def _session(self) -> SparkSession:
        session = self.spark if self.spark is not None else _active_session()
        if session is None:
            raise UsageError("no Spark session is active: pass spark=spark_abs.spark_session(...)")
        return session

    def _classic(self, what: str) -> SparkSession:
        from spark_abs.spark.session import require_classic

        session = self._session()
        require_classic(session, what)
        return session


def _active_session() -> SparkSession | None:
    """Return the active session of this thread, if any, without importing Spark."""
    if "pyspark.sql" not in sys.modules:
        return None
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()


def _id_of(found: CheckpointId | None) -> CheckpointId:
    assert found is not None, "a savepoint that was taken has an id"
    return found
