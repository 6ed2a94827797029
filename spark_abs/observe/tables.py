"""The tables of a job at one consistent cut: which version of each is part of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_abs.errors import Refused, UsageError
from spark_abs.manifest import CHANNEL, Manifest, OutputVersion
from spark_abs.manifests.find import lookup
from spark_abs.model import CheckpointId, RunId, StageId, Version, checked_name
from spark_abs.protocol.control import OutsideSink
from spark_abs.protocol.outside import Mark, Owner
from spark_abs.sinks.kind import SinkTable
from spark_abs.sinks.registry import table_of
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class SeveralTables(UsageError):
    """A name has several tables at a checkpoint: a wrapped query gives its own to each that it writes."""


@dataclass(frozen=True, slots=True)
class TableAt:
    """A Delta table of a job at a checkpoint."""

    sink: str
    stage: StageId
    table: str
    """Its URI."""
    version: Version
    """The last version that is part of the checkpoint."""
    checkpoint: CheckpointId
    name: str = ""
    """Its name in a catalog; empty if it was declared by its path."""


SCHEMA = pa.schema(
    [
        ("sink", pa.string()),
        ("stage", pa.string()),
        ("table", pa.string()),
        ("version", pa.int64()),
        ("checkpoint", pa.int64()),
        ("name", pa.string()),
    ]
)
"""A `TableAt` as columns."""


def tables_at(root: Root, checkpoint: str | int) -> pa.Table:
    """Return the tables of a checkpoint, see `JobRoot.tables`."""
    manifest = lookup(root, checkpoint).manifest
    return pa.Table.from_pylist([asdict(at) for at in _tables(root, manifest)], schema=SCHEMA)


def table_at(root: Root, name: str, checkpoint: str | int = "latest") -> TableAt:
    """Return the table of a sink at a checkpoint. No JVM; errors as `JobRoot.read`."""
    manifest = lookup(root, checkpoint).manifest
    sinks = [(s.stage, o) for s in manifest.stages for o in s.outputs if o.kind != CHANNEL]
    behind = {record.sink: (record, table) for record, table in _after_checkpoints(root, manifest)}
    if name in behind and (found := _table_after(root, manifest, *behind[name])) is not None:
        return found
    named = {o.output for _, o in sinks}
    if name not in named:
        known = ", ".join(sorted({*named, *behind} - {name})) or "none"
        raise UsageError(f"checkpoint {manifest.id} has no sink {name!r}: it has {known}")
    tables = [(stage, o) for stage, o in sinks if o.output == name and o.kind != "function"]
    if len(tables) > 1:
        places = ", ".join(root.storage.place(o.table).uri for _, o in tables)
        raise SeveralTables(
            f"checkpoint {manifest.id} has several tables of the name {name!r}: {places}; "
            f"spark_abs.open({root.uri!r}).tables({manifest.id}) has the version of each, for any reader of "
            "Delta"
        )
    for stage, output in tables:
        if output.version is not None:
            return _checked(root, manifest, stage, output, output.version)
    raise UsageError(f"sink {name!r} is a function: a function has no versions to read")


def read_sink(session: SparkSession, root: Root, name: str, checkpoint: str | int) -> DataFrame:
    """Read a Delta sink as it was at a checkpoint; see `JobRoot.read`."""
    return _frame(session, root, table_at(root, name, checkpoint))


def create_views(session: SparkSession, root: Root, checkpoint: str | int, prefix: str) -> pa.Table:
    """Make a temporary view of each table of a checkpoint; see `JobRoot.views`."""
    manifest = lookup(root, checkpoint).manifest
    found = _tables(root, manifest)
    views = {checked_name(prefix + at.sink, "view").replace("-", "_"): at for at in found}
    if len({view.lower() for view in views}) < len(found):
        names = ", ".join(at.sink for at in found)
        raise UsageError(
            f"sinks {names} would share a view: names of views have '_' for '-', and ignore case"
        )
    for view, at in views.items():
        _frame(session, root, at).createOrReplaceTempView(view)
    return pa.Table.from_pylist([asdict(at) for at in found], schema=SCHEMA).add_column(
        0, "view", [list(views)]
    )


def _tables(root: Root, manifest: Manifest) -> tuple[TableAt, ...]:
    found = [
        _checked(root, manifest, stage.stage, output, output.version)
        for stage in manifest.stages
        for output in stage.outputs
        if output.kind != CHANNEL and output.version is not None
    ]
    behind = (_table_after(root, manifest, *known) for known in _after_checkpoints(root, manifest))
    found += [at for at in behind if at is not None]
    return tuple(sorted(found, key=lambda at: at.sink))


def _after_checkpoints(root: Root, manifest: Manifest) -> Iterator[tuple[OutsideSink, SinkTable]]:
    """Iterate the Delta sinks of a checkpoint that write its rows after it is complete."""
    for record in Control.open(root).state.outside:
        table = table_of(record.kind, record.settings, root.storage)
        if table is not None and any(_cuts(manifest, record)):
            yield record, table


def _cuts(manifest: Manifest, record: OutsideSink) -> Iterator[Mark]:
    """Iterate the cut in the channel of a sink: one, or none if the sink came to the job later."""
    for stage in manifest.stages:
        for output in stage.outputs:
            here = (stage.stage, output.output, output.kind) == (record.stage, record.output, CHANNEL)
            if here and output.version is not None and output.version >= record.first.version:
                yield Mark(manifest.cut.attempt, manifest.id, output.version)


def _table_after(root: Root, manifest: Manifest, record: OutsideSink, table: SinkTable) -> TableAt | None:
    """Return the table of a sink at a checkpoint, None if the sink had left the job."""
    state = Control.open(root).state
    (cut,) = _cuts(manifest, record)
    owner = Owner(state.root, state.job, record.sink, RunId(0))
    ahead = state.on_path(manifest.attempt, manifest.id)
    try:
        version = table.version_at(owner, cut, ahead)
        if version is None and _had_left(manifest, record, table, owner):
            return None
    except FileNotFoundError:
        raise Refused(f"sink {record.sink!r} has lost its table: {table.path} is gone") from None
    if version is None:
        raise Refused(
            f"no version of {table.path} has exactly the rows of checkpoint {manifest.id}: sink "
            f"{record.sink!r} writes the rows of a checkpoint after it, and "
            + (
                "has not written them yet: ask again later"
                if ahead
                else "the log of the table no longer goes back so far"
            )
        )
    uri = root.storage.place(table.path).uri
    return TableAt(
        record.sink, record.stage, table=uri, version=version, checkpoint=manifest.id, name=table.name
    )


def _had_left(manifest: Manifest, record: OutsideSink, table: SinkTable, owner: Owner) -> bool:
    if manifest.outside is not None:
        return record.sink not in manifest.outside
    # What an edit made has the number of the edit, in which no sink takes part.
    return manifest.edited is None and table.had_left(owner, manifest.run)


def _checked(
    root: Root, manifest: Manifest, stage: StageId, output: OutputVersion, version: Version
) -> TableAt:
    place = root.storage.place(output.table)
    try:
        table = Table.open(place)
    except FileNotFoundError:
        raise Refused(f"sink {output.output!r} has lost its table: {place} is gone") from None
    if table.id != output.table_id:
        raise Refused(
            f"{place} is not the table of checkpoint {manifest.id} (its id is {table.id}, recorded was "
            f"{output.table_id}): it is a different Delta table, so the recorded version cannot be used"
        )
    return TableAt(
        output.output, stage, table=place.uri, version=version, checkpoint=manifest.id, name=output.name
    )


def _frame(session: SparkSession, root: Root, at: TableAt) -> DataFrame:
    from spark_abs.spark.session import apply_storage_conf, read_version

    apply_storage_conf(session, root.storage, [at.table])
    return read_version(session, at.table, at.version)
