"""The plan of a restore as a value, and the context in which its steps are carried out.

A plan is computed, printed and stored without any step being carried out. To carry steps out, `apply` hands
each the same `Restoring`. Every step may be repeated.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spark_abs.codec import to_plain
from spark_abs.errors import CheckpointNotFound
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.markup import plan
from spark_abs.model import (
    FORMAT,
    AttemptId,
    ChannelId,
    CheckpointId,
    RunId,
    StageId,
    Version,
)
from spark_abs.protocol.attempt import NATIVES
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.snapshots.materialise import empty, is_whole
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control
from spark_abs.store.lease import Heartbeat
from spark_abs.store.root import Root
from spark_abs.store.storage import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_abs.sinks.delta.sink import DeltaSink


class Step(ABC):
    """One step of a restore: a frozen dataclass, whose name and fields are part of the stored plan."""

    __slots__ = ()

    @abstractmethod
    def sentence(self) -> str:
        """Return the effect of the step as a sentence for a person."""

    @abstractmethod
    def act(self, restoring: Restoring) -> None:
        """Carry the step out. Repeatable: after a kill the restore begins again with its first step."""

    def bytes_to_write(self) -> int:
        """Return the number of bytes that it will report to `Restoring.written`."""
        return 0

    def table_for_spark(self) -> str:
        """Return the table that the step changes if only Spark can write it, else an empty text."""
        return ""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The steps of a restore, and their parameters. `control/` stores it as JSON with the attempt."""

    job: str
    checkpoint: CheckpointId
    name: str | None
    parent: AttemptId
    attempt: AttemptId
    replaces: RunId | None
    """The newest run when this was planned: if a newer one has begun since, plan again."""
    newest: AttemptId
    """The newest attempt when this was planned; equal to `attempt` if an unfinished restore is resumed."""
    abandons: tuple[CheckpointId, ...]
    """Checkpoints that leave the current path."""
    channels: Mapping[ChannelId, Version]
    """The last entry that counts in each channel: see `protocol.path`."""
    queries: Mapping[str, str]
    """The query id that each restored stage gets: a step that is repeated must write the same."""
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    """Sentences that a person should read before agreeing."""
    natives: str = NATIVES
    """Where the native checkpoints of the attempt are."""
    partitions: Mapping[str, int] = field(default_factory=dict)
    """The shuffle partitions of the stages whose number changes."""
    base: CheckpointId | None = None
    """The checkpoint that `checkpoint` was made from by an edit."""
    v: int = FORMAT

    @property
    def needs_spark(self) -> bool:
        return bool(self.partitions or self.spark_tables)

    @property
    def spark_tables(self) -> tuple[str, ...]:
        """The tables of sinks that only Spark can write."""
        return tuple(dict.fromkeys(filter(None, (step.table_for_spark() for step in self.steps))))

    def _repr_html_(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        head = f"Restore of job {self.job} to checkpoint {self.checkpoint}{name}, as attempt {self.attempt}"
        return plan(head, (step.sentence() for step in self.steps), self.notes)

    @property
    def continues(self) -> bool:
        """Whether this finishes a restore that was begun before."""
        return self.newest == self.attempt

    def plain(self, sentences: bool = True) -> dict[str, object]:
        """Return the plan as plain JSON values; each step says its type, and its sentence if wanted."""
        plain: dict[str, object] = to_plain(self)
        plain["steps"] = [
            {
                "step": type(step).__name__,
                **({"says": step.sentence()} if sentences else {}),
                **to_plain(step),
            }
            for step in self.steps
        ]
        return plain

    def stored(self) -> str:
        return json.dumps(self.plain(sentences=False), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Prestaged:
    """The native directories of a planned restore that were written while its checkpoint was verified.

    Nothing uses them before the restore moves them into their places. They lie beside those places, so that
    moving is a rename.
    """

    place: Place
    """`<natives>/ahead-<newest run when it was planned>-<chance>`, on a local disk."""

    def move(self, stage: StageId, target: Place, query: str) -> bool:
        """Move a stage's directory into its place; False if `target` is complete already. Repeatable.

        Raises:
            Refused: `target` belongs to another query.
        """
        written = self.place.below(stage)
        if not written.exists() or is_whole(target, query):
            return False
        empty(target)
        target.fs.move(written.path, target.path)
        return True

    def discard(self) -> None:
        """Remove the directories that were not moved. Repeatable."""
        with suppress(FileNotFoundError):
            self.place.fs.delete_dir(self.place.path)


class Restoring:
    """The context of steps while a restore is carried out; `run` is 0 until the first step is done."""

    def __init__(
        self,
        root: Root,
        plan: RestorePlan,
        manifest: Manifest,
        *,
        undo_others: bool = False,
        prestaged: Prestaged | None = None,
        own_sinks: Mapping[str, TwoPhaseSink],
        spark: SparkSession | None = None,
    ) -> None:
        self.root, self.plan, self.manifest = root, plan, manifest
        self.undo_others, self.prestaged, self.own_sinks = undo_others, prestaged, own_sinks
        self.run = RunId(0)
        self.began_ms = now_ms()
        self.control = Control.open(root)
        self.counted: Callable[[int], None] = lambda _: None
        """Receives the bytes that the current step has written."""
        self._spark = spark
        self._heartbeat = Heartbeat(root, self.control)

    def beat(self) -> None:
        """Renew the lease; long steps call it again and again.

        Raises:
            Fenced: another run has taken over.
        """
        self._heartbeat(self.run)

    def written(self, size: int) -> None:
        """Report bytes, and renew the lease."""
        self.counted(size)
        self.beat()

    def session(self) -> SparkSession:
        """Return the session, started if there is none."""
        from spark_abs.spark.session import apply_storage_conf, session_at

        places = (self.root.uri, *self.plan.spark_tables)
        if self._spark is None:
            self._spark = session_at(places, f"restore of {self.plan.job}")
        apply_storage_conf(self._spark, self.root.storage, places)
        return self._spark

    def delta_sink(self, table: str, sinks: Sequence[str]) -> DeltaSink:
        """Return a handle on the table of sinks, given as `<stage>/<sink>`; commits as the first of them."""
        # It imports Spark's types, which a plan is made and shown without.
        from spark_abs.sinks.delta.sink import DeltaSink

        state = self.control.state
        stage, _, sink = sinks[0].partition("/")
        writer = state.writer(state.attempt, StageId(stage), sink)
        return DeltaSink(self.root, table, writer=writer, run=self.run, session=self.session)

    def require_retained(self, otherwise: str) -> None:
        """Refuse if the run that was alive has retired the checkpoint; once it is fenced it no longer can."""
        checkpoint = self.plan.checkpoint
        try:
            Checkpoints.open(self.root, self.plan.job).load(checkpoint)
        except CheckpointNotFound as error:
            raise CheckpointNotFound(
                f"checkpoint {checkpoint} was retired while the restore was being prepared: choose another "
                f"checkpoint, see `spark-abs list`; {otherwise}"
            ) from error
