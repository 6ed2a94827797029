"""Iceberg as a sink: the rows of an epoch and its mark in one snapshot, after the checkpoint.

Every commit requires that the branch still ends with the snapshot on which it is based, and is tried once:
pyiceberg's own repetition would add the rows after commits of other writers. A run that takes over adds an
empty snapshot, so the commits of older runs fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

import pyarrow as pa

try:
    from pydantic import ValidationError
    from pyiceberg import exceptions
    from pyiceberg.catalog import Catalog
    from pyiceberg.io.pyarrow import _check_pyarrow_schema_compatible
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.update import AssertRefSnapshotId, AssertTableUUID
    from pyiceberg.table.update.snapshot import ManageSnapshots
except ImportError as missing:
    raise ImportError("an Iceberg sink needs pyiceberg: pip install 'spark-abs[iceberg]'") from missing

from spark_abs.codec import to_json
from spark_abs.errors import (
    CommitConflict,
    CommitStateUnknown,
    Refused,
    SinkFailed,
    SinkUnreachable,
    UsageError,
)
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.iceberg.catalog import REFUSED, Reached, reach
from spark_abs.sinks.iceberg.config import Iceberg
from spark_abs.sinks.iceberg.files import DataFileWriter, delete, elsewhere, write
from spark_abs.sinks.iceberg.mark import (
    CHECKPOINT,
    FORMAT,
    SUMMARY,
    IcebergMark,
    Kept,
    has_marks,
    head_of,
    mark_in,
    property_of,
    rows_of,
    since,
    snapshot_to,
    summary_of,
    tag_of,
)
from spark_abs.sinks.marked import MarkedSink, refuse_replaced, require_unchanged
from spark_abs.sinks.two_phase import Rows

__all__ = ["Iceberg", "IcebergSink"]


class IcebergSink(MarkedSink[IcebergMark]):
    """The sink behind `Iceberg`. Not thread-safe."""

    def __init__(self, config: Iceberg) -> None:
        self._config = config
        self._reached: Reached | None = None

    # -- what the job and a restore call

    def check(self, schema: pa.Schema) -> None:
        """Compare the table with the rows; changes nothing."""
        # This object may be at work for a run, in another thread.
        with closing(IcebergSink(self._config)) as look:
            look._check(schema)

    def _check(self, schema: pa.Schema) -> None:
        config = self._config
        with self._working() as catalog:
            try:
                table = catalog.load_table(config.table)
            except exceptions.NoSuchTableError:
                columns = "\n  ".join(f"{f.name}: {f.type}" for f in schema)
                raise UsageError(
                    f"catalog {config.catalog} has no table {config.table}: make one with these columns\n"
                    f"  {columns}"
                ) from None
            self._fitting(table.transaction(), schema, UsageError)

    def rows_of_others(self, owner: Owner) -> str:
        """Say which rows the branch has, if no sink of the root has been there."""
        with self._working() as catalog:
            metadata = catalog.load_table(self._config.table).metadata
        return "" if has_marks(metadata, owner.root) else rows_of(metadata, self._config.branch)

    def rests(self, owner: Owner) -> bool:
        """Say yes: an epoch is in the table whole, and nothing forgets the mark."""
        del owner
        return True

    def why_not(self, owner: Owner, back: Mark) -> str:
        """Say why the branch cannot go back."""
        with self._working() as catalog:
            metadata = catalog.load_table(self._config.table).metadata
            found = mark_in(metadata, owner)
            if found is None or found.mark is None or found.mark == back:
                return ""
            target = snapshot_to(metadata, owner, found, back)
            if target is None:
                return "the snapshot of the table that belongs to that checkpoint is not known any more"
            if metadata.snapshot_by_id(target) is None:
                return f"snapshot {target} of the table has expired"
            branch = self._config.branch
            after = since(metadata, branch, target)
            if after is None:
                return f"snapshot {target} is not on branch {branch!r} of the table any more"
            ours = summary_of(owner)
            others = [
                s.snapshot_id
                for s in after.snapshots
                if s.summary is None or s.summary.additional_properties.get(SUMMARY) != ours
            ]
        if others:
            return f"others have committed to the table since: snapshots {', '.join(map(str, others))}"
        if not after.whole:
            return (
                "snapshots after it have expired, so it is not known whether others have committed meanwhile"
            )
        return ""

    def close(self) -> None:
        super().close()
        reached, self._reached = self._reached, None
        if reached is not None:
            with suppress(Exception):
                reached.catalog.close()

    # -- the mark, and the commits

    def _read_mark(self, owner: Owner) -> IcebergMark | None:
        with self._working() as catalog:
            return mark_in(catalog.load_table(self._config.table).metadata, owner)

    def _fence(self, owner: Owner) -> IcebergMark:
        """Add an empty snapshot with the number of the run, after which the commits of older runs fail."""
        with self._working() as catalog:
            table = catalog.load_table(self._config.table)
            found = self._mark_of(table, owner) or IcebergMark(FORMAT, owner.root, owner.sink, 0)
            known = replace(found, run=int(owner.run))
            self._commit(catalog, table, owner=owner, state=known, mark=known.mark)
        return known

    def _add(self, epoch: Epoch, known: IcebergMark, rows: Rows) -> IcebergMark:
        """Write the rows to files, and add these and the mark in one commit.

        Without rows the mark alone is changed, and the table has no snapshot more.
        """
        with self._working() as catalog:
            table = catalog.load_table(self._config.table)
            known = require_unchanged(epoch.owner, known, self._mark_of(table, epoch.owner))
            return self._append(catalog, table, epoch, known, rows)

    def _go_back(self, owner: Owner, known: IcebergMark, back: Mark, *, keep: bool) -> IcebergMark:
        """Let the branch go back to the snapshot of a mark; where it stood stays under a tag."""
        with self._working() as catalog:
            table = catalog.load_table(self._config.table)
            known = require_unchanged(owner, known, self._mark_of(table, owner))
            head = head_of(table.metadata, self._config.branch)
            going = head if keep else snapshot_to(table.metadata, owner, known, back)
            if going is None:
                raise Refused(
                    f"the snapshot of table {self._config.target} that belongs to checkpoint "
                    f"{back.checkpoint} is not known any more"
                )
            kept = (*(k for k in known.kept if k.version < back.version), Kept(back.version, going))
            state = replace(known, mark=back, kept=kept)
            # Where nothing was added after it the branch stays.
            self._commit(
                catalog, table, owner=owner, state=state, mark=back, going=None if going == head else going
            )
        return state

    def _mark_of(self, table: Table, owner: Owner) -> IcebergMark | None:
        """Read the mark, and refuse a table without the snapshot that the mark names.

        Raises:
            Fenced: a newer run has recovered the sink.
            Refused: somebody has set the branch back.
        """
        found = mark_in(table.metadata, owner)
        if found is None:
            return None
        refuse_replaced(owner, found)
        newest = found.kept[-1].snapshot if found.kept else None
        branch = self._config.branch
        if (
            newest is not None
            and table.metadata.snapshot_by_id(newest) is not None
            and since(table.metadata, branch, newest) is None
        ):
            raise Refused(
                f"branch {branch!r} of table {self._config.table} was set back behind snapshot {newest}, "
                f"which sink {owner.sink!r} has committed: set the branch forward to that snapshot again, or "
                "give the sink another name, under which it begins anew"
            )
        return found

    def _append(
        self, catalog: Catalog, table: Table, epoch: Epoch, known: IcebergMark, rows: Rows
    ) -> IcebergMark:
        making = table.transaction()
        written: list[DataFile] = []
        if rows.count:
            self._fitting(making, rows.schema, SinkFailed)
            written = self._write(making, table, rows)
        branch = self._config.branch
        head = head_of(table.metadata, branch)
        assert head is not None, "recover adds a snapshot"
        snapshot = head
        if written:
            producer = making.update_snapshot(self._summary(epoch.owner, epoch.mark), branch)
            with producer.fast_append() as append:
                for file in written:
                    append.append_data_file(file)
            snapshot = append.snapshot_id
        if epoch.savepoint is not None:
            ManageSnapshots(making).create_tag(snapshot, tag_of(epoch)).commit()
        state = known.with_epoch(epoch, head, snapshot)
        making.set_properties({property_of(epoch.owner): to_json(state)})
        ends = AssertRefSnapshotId.model_validate({"ref": branch, "snapshot-id": head})
        try:
            _commit_once(catalog, table, making, ends)
        except exceptions.CommitFailedException:
            # Looked up, not believed: what lies between may have sent a request twice.
            if catalog.load_table(self._config.table).metadata.snapshot_by_id(snapshot) is None:
                delete(table.io, written)
            raise
        return state

    def _write(self, making: Transaction, table: Table, rows: Rows) -> list[DataFile]:
        """Write the rows to data files; if a part cannot be written, those of the others are deleted."""
        metadata = making.table_metadata
        if elsewhere(table.io):
            wrote = rows.each_part(DataFileWriter.of(metadata, table.io))
        else:
            wrote = [write(metadata, table.io, rows)]
        files = [file for part in wrote for file in part.files]
        for part in wrote:
            if part.error is not None:
                delete(table.io, files)
                raise type(part.error)(self._hidden(f"table {self._config.target}: {part.error}"))
        return files

    def _commit(
        self,
        catalog: Catalog,
        table: Table,
        *,
        owner: Owner,
        state: IcebergMark,
        mark: Mark | None,
        going: int | None = None,
    ) -> None:
        """Commit an empty snapshot with a mark; on top of an older snapshot if one is given."""
        making = table.transaction()
        if going is not None:
            left = head_of(table.metadata, self._config.branch)
            assert left is not None
            managing = ManageSnapshots(making)
            managing.create_tag(left, f"spark_abs_abandoned_{left}")
            # With the tag, in one step: pyiceberg takes one requirement of a kind, and this one counts.
            updates, requirements = making._set_ref_snapshot(going, self._config.branch, "branch")
            managing._updates += updates
            managing._requirements += requirements
            managing.commit()
        producer = making.update_snapshot(self._summary(owner, mark), self._config.branch)
        with producer.fast_append():
            pass
        making.set_properties({property_of(owner): to_json(state)})
        _commit_once(catalog, table, making)

    def _summary(self, owner: Owner, mark: Mark | None) -> dict[str, str]:
        said = {SUMMARY: summary_of(owner), "spark_abs.run": str(owner.run)}
        if mark is not None:
            said |= {"spark_abs.attempt": str(mark.attempt), CHECKPOINT: str(mark.checkpoint)}
        return said

    def _fitting(self, making: Transaction, schema: pa.Schema, wrong: type[UsageError | SinkFailed]) -> None:
        """Compare rows with the table, or with `evolve` add columns to the transaction."""
        try:
            if self._config.evolve:
                with making.update_schema() as update:
                    update.union_by_name(schema)
            _check_pyarrow_schema_compatible(
                making.table_metadata.schema(), schema, format_version=making.table_metadata.format_version
            )
        except (ValueError, TypeError, exceptions.ValidationError, NotImplementedError) as error:
            hint = "" if self._config.evolve else "\nIceberg(…, evolve=True) adds columns"
            raise wrong(f"table {self._config.target} cannot take the rows: {error}{hint}") from None

    # -- connections

    @contextmanager
    def _working(self) -> Iterator[Catalog]:
        """Yield the catalog, and raise errors that say how to go on for those of pyiceberg.

        Raises:
            CommitConflict: another writer has committed to the branch.
            CommitStateUnknown: the catalog did not answer whether it committed.
            SinkUnreachable: the next try may succeed.
            SinkFailed: the catalog refused it.
        """
        try:
            if self._reached is None:
                self._reached = reach(self._config.catalog, self._config.catalog_env)
            yield self._reached.catalog
        except exceptions.CommitFailedException:
            raise CommitConflict(f"table {self._config.target} was changed by another commit") from None
        except exceptions.CommitStateUnknownException as error:
            raise CommitStateUnknown(self._clean(error)) from None
        except REFUSED as error:
            raise SinkFailed(self._clean(error)) from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] == "spark_abs":
                raise
            self._say(error)

    def _say(self, error: Exception) -> NoReturn:
        self.close()
        raise SinkUnreachable(self._clean(error)) from None

    def _clean(self, error: Exception) -> str:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, ValidationError):  # quotes the answer, and that may hold a token
            said = f"catalog {self._config.catalog} sent a reply that cannot be read"
        return self._hidden(f"table {self._config.target}: {said}")

    def _hidden(self, text: str) -> str:
        return text if self._reached is None else self._reached.clean(text)


def _commit_once(catalog: Catalog, table: Table, making: Transaction, *required: AssertRefSnapshotId) -> None:
    """Commit a transaction if the table has not changed since it began; try once."""
    requirements = (*making._requirements, *required, AssertTableUUID(uuid=table.metadata.table_uuid))
    catalog.commit_table(table, requirements, making._updates)
