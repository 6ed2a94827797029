"""The facts that a plan is made from, read from the root and its sinks. Changes nothing, starts no JVM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pyarrow import fs

from spark_abs.manifest import Manifest, OutputVersion, StageSnapshot
from spark_abs.manifests.manifest_table import Summary
from spark_abs.model import NO_TABLE, AttemptId, ChannelId, SinkWriter, StageId, Version
from spark_abs.protocol.control import AttachedSink, ControlState
from spark_abs.restore.plan import Facts, ReaderFacts, SinkFacts
from spark_abs.sinks.delta.changes import NO_CHANGES, Own, changes_since, commits_since
from spark_abs.sinks.delta.commit_metadata import note_of
from spark_abs.sinks.delta.native_writable import why_not_native
from spark_abs.sinks.delta.rollback import ahead, missing, why_not_apart
from spark_abs.snapshots.layout import parse_offsets
from spark_abs.snapshots.table_edges import commits_at, delta_sources, edge_between, why_not_aligned
from spark_abs.store.root import Root
from spark_abs.store.storage import Place, location_of
from spark_abs.store.table import Table

CHANNELS = "channels"


def gather(
    root: Root,
    manifest: Manifest,
    *,
    known: Iterable[Manifest],
    completed: tuple[Summary, ...],
    attempt: AttemptId,
    state: ControlState,
) -> Facts:
    """Read the facts for a restore to `manifest`, without the live run and damaged manifests.

    Args:
        root: the job's root.
        manifest: the checkpoint to go back to.
        known: every manifest that can be read: all sinks that they name are fenced.
        completed: all completed checkpoints.
        attempt: the attempt that the restore will make, or has begun to make.
        state: the content of `control/`: it names every sink that the job has attached, also before the
            first manifest. The tables of forgotten queries are left alone, unless `manifest` includes the
            query.
    """
    begun = next((a.root for a in state.attempts if a.id == attempt), state.root)
    writer = SinkWriter(state.job, begun, StageId(""), "", attempt)
    own = Own(state.job, state.root, state.unnamed)
    gone = {f.stage for f in state.forgotten}
    records = [
        *(_Record(stage, output, True) for stage, output in _tables(manifest)),
        *(
            _Record(stage, output, False)
            for other in known
            for stage, output in _tables(other)
            if stage not in gone
        ),
        *(_Record(a.stage, _attached(a), False) for a in state.sinks if a.stage not in gone),
    ]
    return Facts(
        completed,
        tuple(_channels(root)),
        _is_table(root, "state"),
        tuple(_sink(found, own, writer, manifest.stages) for found in _by_table(root, records)),
    )


@dataclass(frozen=True, slots=True)
class _Record:
    """A sink and its table, as it is recorded."""

    stage: StageId
    output: OutputVersion
    here: bool
    """Whether the record is from the checkpoint that is restored."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A table of sinks, opened once; None if it is gone."""

    place: Place
    table: Table | None
    records: tuple[_Record, ...]


def _tables(manifest: Manifest) -> Iterator[tuple[StageId, OutputVersion]]:
    """Iterate the Delta tables outside the root that a manifest names."""
    for snapshot in manifest.stages:
        for output in snapshot.outputs:
            if output.kind in ("delta", "table"):
                yield snapshot.stage, output


def _attached(sink: AttachedSink) -> OutputVersion:
    kind = "delta" if sink.version is None else "table"
    return OutputVersion(
        sink.sink, kind, table=sink.table, table_id=sink.table_id, version=sink.version, name=sink.name
    )


def _by_table(root: Root, records: Iterable[_Record]) -> Iterator[_Found]:
    """Group records by their table, however its path is written."""
    by_location: dict[str, list[_Record]] = {}
    for record in records:
        by_location.setdefault(location_of(record.output.table), []).append(record)
    found: dict[str, _Found] = {}
    for location in sorted(by_location):
        place, mine = root.storage.place(location), tuple(by_location[location])
        table = Table.find(place)
        key = location if table is None else table.id
        before = found.get(key)
        records = (*before.records, *mine) if before else mine
        found[key] = replace(before, records=records) if before else _Found(place, table, records)
    yield from found.values()


def _channels(root: Root) -> Iterator[ChannelId]:
    selector = fs.FileSelector(root.path(CHANNELS), allow_not_found=True)
    for info in root.fs.get_file_info(selector):
        if info.type is fs.FileType.Directory and _is_table(root, f"{CHANNELS}/{info.base_name}"):
            yield ChannelId(info.base_name)


def _is_table(root: Root, relative: str) -> bool:
    return root.fs.get_file_info(root.path(f"{relative}/_delta_log")).type is fs.FileType.Directory


def _sink(found: _Found, own: Own, writer: SinkWriter, parts: Sequence[StageSnapshot]) -> SinkFacts:
    here = [r for r in found.records if r.here]
    recorded = [r.output for r in here or found.records]
    sinks = tuple(dict.fromkeys((r.stage, r.output.output) for r in (*here, *found.records)))
    by_function = any(o.kind == "table" for o in recorded)
    table, name = found.table, next((o.name for o in reversed(recorded) if o.name), "")
    if table is None:
        return SinkFacts(sinks, found.place.uri, None, by_function=by_function, later=not here, name=name)
    if by_function:
        target: Version | None = min(NO_TABLE if o.version is None else o.version for o in recorded)
    elif here:
        target = min((o.version for o in recorded if o.version is not None), default=None)
    else:
        target = _attached_at(table, own)
    recorded_id = next((o.table_id for o in recorded if o.table_id), table.id)
    marks = {replace(writer, stage=stage, sink=sink).restore_app for stage, sink in sinks}
    done = any(table.transaction(mark) is not None for mark in marks)
    table_id = table.id
    if by_function and target is not None and table_id != recorded_id and table.was(recorded_id, target):
        table_id = recorded_id  # the function has replaced it, and its log goes on
    there = target is not None and target <= table.version and table_id == recorded_id and not done
    changes, gone, entangled = NO_CHANGES, "", ""
    stuck: tuple[str, ...] = ()
    needs_spark = why_not_native(table.delta) is not None
    if there and target is not None:
        changes, gone = changes_since(table, target, own), missing(table, target)
        entangled = "" if gone else why_not_apart(table, target, own, changes)
        if by_function and needs_spark and not gone:
            stuck = tuple(ahead(table, target, writer.job, writer.owner))
    return SinkFacts(
        sinks,
        found.place.uri,
        current=table.version,
        recorded_id=recorded_id,
        table_id=table_id,
        target=target,
        changes=changes,
        gone=gone,
        entangled=entangled,
        by_function=by_function,
        later=not here,
        needs_spark=needs_spark,
        name=name,
        stuck=stuck,
        readers=tuple(_readers(found, recorded_id, target, parts)) if by_function else (),
    )


def _readers(
    found: _Found, table_id: str, target: Version | None, parts: Sequence[StageSnapshot]
) -> Iterator[ReaderFacts]:
    """Iterate the stages of the checkpoint that have read the table of a function as a stream."""
    writer = next((record.stage for record in found.records if record.here), found.records[0].stage)
    output = OutputVersion("", "table", table=found.place.uri, table_id=table_id, version=target)
    for part in (part for part in parts if part.offsets):
        offsets, storage = parse_offsets(part.offsets), found.place.storage
        edge = edge_between(
            part.stage,
            part.cut_batch,
            offsets,
            feeds=part.feeds,
            writer=writer,
            output=output,
            storage=storage,
        )
        if edge is not None:
            misfit = why_not_aligned(edge, commits_at(storage, edge.table))
            yield ReaderFacts(part.stage, tuple(delta_sources(offsets, table_id)), misfit)


def _attached_at(table: Table, own: Own) -> Version | None:
    """Return the version at which the job attached the table; None if the log no longer has it."""
    for version, commit in commits_since(table, Version(-1)):
        note = note_of(commit, table.uri) if commit is not None else None
        if note is not None and own.wrote(note):
            return version if note.attached else None
    return None
