"""The checkpoints of a job, or of wrapped queries, as the moments of a bisection."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from spark_abs.bisection.condition import CannotAsk
from spark_abs.bisection.files import files_between
from spark_abs.bisection.moments import BEGINNING, Began, Between, Input, Moment, Ran, TableVersion
from spark_abs.errors import DamageError, Refused
from spark_abs.manifest import CHANNEL, Manifest, StageShape, StageSnapshot, StoredFile
from spark_abs.manifests.find import list_manifests, load, newest_first
from spark_abs.manifests.manifest_table import Summary
from spark_abs.model import NO_BATCH, CheckpointMode, RunKind, StageId, positions_of
from spark_abs.observe.sources import readable
from spark_abs.observe.tables import SeveralTables, table_at
from spark_abs.protocol.control import WATCHED_JOB, ControlState
from spark_abs.snapshots.layout import file_source_offset, parse_offsets
from spark_abs.snapshots.operators import stored_texts
from spark_abs.store.control import Control
from spark_abs.store.root import Root


@dataclass(slots=True)
class JobMoments:
    """The completed checkpoints of a root on its current path."""

    root: Root
    state: ControlState
    summaries: tuple[Summary, ...]
    """Oldest first."""
    _manifests: dict[int, Manifest] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Root) -> JobMoments:
        """List the checkpoints of a root; rows that are damaged are left out.

        Raises:
            UsageError: there is no job at this root.
            Refused: it is the root of a watcher.
            DamageError: a log cannot be read.
        """
        state = Control.open(root).state
        if state.job == WATCHED_JOB:
            raise Refused(
                f"{root.uri} has kept cuts of queries that are not ours: give their checkpoint directories "
                'and tables, as `spark-abs bisect "CONDITION" --checkpoints ... --tables ...`'
            )
        completed = list_manifests(root, state.job).completed
        return cls(root, state, tuple(reversed(newest_first(completed, state))))

    @property
    def count(self) -> int:
        """See `Moments`."""
        return len(self.summaries)

    def names(self) -> frozenset[str]:
        """See `Moments`: the sinks with tables, of the newest checkpoint that can be read."""
        outside = {sink.sink for sink in self.state.outside}
        for at in reversed(range(self.count)):
            try:
                stages = self._manifest(at).stages
            except DamageError:
                continue
            return frozenset(
                outside
                | {o.output for s in stages for o in s.outputs if o.kind != CHANNEL and o.version is not None}
            )
        return frozenset(outside)

    def moment(self, at: int) -> Moment:
        """See `Moments`."""
        found = self.summaries[at]
        said = f"checkpoint {found.id}" + (f" ({found.name})" if found.name else "")
        return Moment(said, found.acked_ms, found.id, found.name)

    def table(self, at: int, name: str) -> TableVersion:
        """See `Moments`."""
        try:
            found = table_at(self.root, name, self.summaries[at].id)
        except SeveralTables as error:
            raise CannotAsk(str(error)) from error
        return TableVersion(self.root.storage.place(found.table), found.version)

    def between(self, good: int, bad: int) -> Between:
        """See `Moments`."""
        before, after = self._manifest(good), self._manifest(bad)
        return Between(
            tuple(self._ran(before.stage(s.stage), s) for s in after.stages),
            tuple(
                Began(run.id, run.attempt, run.started_ms, run.host, run.pid)
                for run in self.state.runs
                if before.run < run.id <= after.run and run.kind is RunKind.JOB
            ),
            declared_anew(before.graph, after.graph),
        )

    def command(self, at: int) -> str:
        """See `Moments`."""
        return f"spark-abs restore {shlex.quote(self.root.uri)} --to {self.summaries[at].id}"

    def notes(self, good: int, bad: int) -> tuple[str, ...]:
        """See `Moments`."""
        return tuple(
            f"{self.moment(at).said} was made in mode {mode}: rows in flight are in some of its tables and "
            "not in others"
            for at in (good, bad)
            if (mode := self._manifest(at).mode) is not CheckpointMode.ALIGNED
        )

    def _manifest(self, at: int) -> Manifest:
        if at not in self._manifests:
            self._manifests[at] = load(self.root, self.summaries[at])
        return self._manifests[at]

    def _ran(self, before: StageSnapshot | None, after: StageSnapshot) -> Ran:
        since = NO_BATCH if before is None else before.cut_batch
        was = {} if before is None else _offsets(before)
        inputs = tuple(self._inputs(after, was)) if after.offsets else ()
        return Ran(after.stage, since, after.cut_batch, inputs)

    def _inputs(self, after: StageSnapshot, was: Mapping[str, str]) -> Iterator[Input]:
        for source, offset in _offsets(after).items():
            if positions_of([offset]) or was.get(source) == offset:
                continue
            since = readable(was[source]) if source in was else BEGINNING
            until = file_source_offset(offset)
            files = () if until is None else self._files(after, source, _number(was.get(source)), until)
            yield Input(source, since, readable(offset), files)

    def _files(self, snapshot: StageSnapshot, source: str, after: int, until: int) -> tuple[str, ...]:
        below = f"sources/{source}/"
        logs: dict[str, StoredFile] = {
            file.path.removeprefix(below): file for file in snapshot.files if file.path.startswith(below)
        }

        def read(name: str) -> str:
            return stored_texts(self.root, [logs[name]])[logs[name].path]

        return files_between(logs, after, until, read)


def declared_anew(before: tuple[StageShape, ...], after: tuple[StageShape, ...]) -> tuple[str, ...]:
    """Name the stages that are declared differently; what a fingerprint does not have cannot be seen."""
    was, now = ({shape.stage: _comparable(shape) for shape in graph} for graph in (before, after))
    names: list[StageId] = sorted(was.keys() | now.keys())
    return tuple(str(name) for name in names if was.get(name) != now.get(name))


def _comparable(shape: StageShape) -> StageShape:
    return replace(shape, channels={})


def _offsets(snapshot: StageSnapshot) -> Mapping[str, str]:
    return parse_offsets(snapshot.offsets).offsets if snapshot.offsets else {}


def _number(offset: str | None) -> int:
    number = file_source_offset(offset)
    return -1 if number is None else number
