"""What a plan needs to know, read from the root and its sinks. Changes nothing, starts no JVM."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyarrow import fs

from spark_abs.manifest import Manifest, OutputVersion
from spark_abs.model import AttemptId, ChannelId, StageId, Version, app_id
from spark_abs.protocol.control import AttachedSink
from spark_abs.restore.plan import Facts, SinkFacts
from spark_abs.sinks.plain import why_not_plain
from spark_abs.store.checkpoints import Summary
from spark_abs.store.log import LogCommit
from spark_abs.store.root import Root
from spark_abs.store.storage import location_of
from spark_abs.store.table import Table

CHANNELS = "channels"


def gather(
    root: Root,
    manifest: Manifest,
    known: Iterable[Manifest],
    completed: tuple[Summary, ...],
    attempt: AttemptId,
    attached: Iterable[AttachedSink],
) -> Facts:
    """Read the facts for a restore to `manifest`, but for who is alive and what is damaged.

    Args:
        root: the job's root.
        manifest: the checkpoint to go back to.
        known: every manifest that can be read: sinks that only they name are fenced too.
        completed: all completed checkpoints.
        attempt: the attempt that the restore will make, or has begun to make.
        attached: every sink that the job has come to, also those that no manifest names yet.
    """
    recorded = dict(_tables(manifest))
    sinks = {
        (a.stage, a.sink, a.table): OutputVersion(a.sink, "delta", a.table, a.table_id, None)
        for a in attached
    }
    for other in known:
        sinks |= _tables(other)
    sinks |= recorded
    return Facts(
        completed,
        tuple(_channels(root)),
        _is_table(root, "state"),
        tuple(
            _sink(root, manifest.job, key[0], output, recorded.get(key), attempt)
            for key, output in sorted(sinks.items(), key=lambda item: item[0])
        ),
    )


def _tables(manifest: Manifest) -> dict[tuple[StageId, str, str], OutputVersion]:
    """Return the Delta tables outside the root that a manifest names, by stage, sink and place."""
    return {
        (s.stage, o.output, location_of(o.table)): o
        for s in manifest.stages
        for o in s.outputs
        if o.kind in ("delta", "table")
    }


def _channels(root: Root) -> Iterator[ChannelId]:
    selector = fs.FileSelector(root.path(CHANNELS), allow_not_found=True)
    for info in root.fs.get_file_info(selector):
        if info.type is fs.FileType.Directory and _is_table(root, f"{CHANNELS}/{info.base_name}"):
            yield ChannelId(info.base_name)


def _is_table(root: Root, relative: str) -> bool:
    return root.fs.get_file_info(root.path(f"{relative}/_delta_log")).type is fs.FileType.Directory


def _sink(
    root: Root,
    job: str,
    stage: StageId,
    output: OutputVersion,
    recorded: OutputVersion | None,
    attempt: AttemptId,
) -> SinkFacts:
    place, name = root.storage.place(output.table), f"{job}/{stage}/{output.output}"
    by_function = output.kind == "table"
    try:
        table = Table.open(place)
    except FileNotFoundError:
        later = recorded is None
        return SinkFacts(stage, output.output, place.uri, None, by_function=by_function, later=later)
    target = recorded.version if recorded is not None else _attached_at(table, name)
    done = table.transaction(f"{app_id(job, stage, output.output, attempt)}/restore") is not None
    there = target is not None and target <= table.version and table.id == output.table_id
    return SinkFacts(
        stage=stage,
        sink=output.output,
        table=place.uri,
        current=table.version,
        recorded_id=output.table_id,
        table_id=table.id,
        target=target,
        foreign=(
            tuple(_foreign(table, name, target))
            if there and target is not None and not done and not by_function
            else ()
        ),
        gone=_gone(table, target) if there and target is not None and not done else "",
        by_function=by_function,
        later=recorded is None,
        needs_spark=why_not_plain(table.delta) is not None,
    )


def _attached_at(table: Table, sink: str) -> Version | None:
    """Return the version at which the sink first came to the table; None if the log does not say any more."""
    for version in range(table.version + 1):
        commit = table.read_commit(version)
        if commit is not None and (note := _note(commit, sink)) is not None:
            return Version(version) if note.get("attached") is True else None
    return None


def _foreign(table: Table, sink: str, after: Version) -> Iterator[Version]:
    for version in range(after + 1, table.version + 1):
        commit = table.read_commit(version)
        if commit is None or (commit.data_change and _note(commit, sink) is None):
            yield Version(version)


def _note(commit: LogCommit, sink: str) -> dict[str, object] | None:
    """Return what the job has written into a commit of its sink, None for everybody else's."""
    try:
        plain = json.loads(commit.metadata or "null")
    except ValueError:
        return None
    return plain if isinstance(plain, dict) and plain.get("sink") == sink else None


def _gone(table: Table, version: Version) -> str:
    """Say what keeps a version of a table from coming back, empty if nothing does."""
    try:
        handle = DeltaTable(table.uri, version=int(version), storage_options=table.place.options)
        then = handle.file_uris()
    except (DeltaError, OSError) as error:
        return f"version {version} cannot be opened any more: {error}"
    storage = table.place.storage
    missing = [u for u in set(then) - set(table.delta.file_uris()) if not storage.place(u).exists()]
    return f"{len(missing)} files of version {version} are gone, as {missing[0]}" if missing else ""
