"""Writing the rows of an epoch to a table of PostgreSQL, within an open transaction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from psycopg import errors

from spark_abs.errors import SinkFailed
from spark_abs.protocol.outside import Epoch
from spark_abs.sinks.delete_predicate import DeletePredicate
from spark_abs.sinks.postgres.changes import DELETE, ChangeStatements
from spark_abs.sinks.postgres.config import Postgres
from spark_abs.sinks.postgres.connection import Server
from spark_abs.sinks.postgres.copy import copy_text, with_nul
from spark_abs.sinks.postgres.schema import Column
from spark_abs.sinks.postgres.sql import Statements
from spark_abs.sinks.two_phase import Rows


class EpochWriter:
    """Writes epochs to one table: appends rows, replaces the row of each key, or applies its changes."""

    def __init__(self, config: Postgres, deletes: DeletePredicate) -> None:
        self._config, self._deletes = config, deletes

    def write(self, server: Server, table: Sequence[Column], epoch: Epoch, rows: Rows) -> None:
        """Write the rows of an epoch, and keep the rows that they replace if the sink has a history.

        Args:
            server: in a transaction.
            table: the columns of the table.
            epoch: whose rows.
            rows: the rows.
        """
        config = self._config
        stored = config.changes.stored(rows.schema.names)
        of = Statements(config.schema, config.table, config.key, stored)
        columns = {column.name: column for column in table}
        said = {"root": epoch.owner.root, "sink": epoch.owner.sink, "after": int(epoch.after.version)}
        said |= {"checkpoint": int(epoch.mark.checkpoint), "version": int(epoch.mark.version)}
        kept = {**said, "key": list(of.key), "columns": list(of.columns)}
        if config.folds:
            self._apply(server, ChangeStatements(of, config.changes, columns), rows, said, kept)
        elif config.mode == "upsert" or config.history:
            self._stage(server, of, columns, rows, kept)
        else:
            self._copy(server, of, columns, rows, staged=False)

    def _stage(
        self,
        server: Server,
        of: Statements,
        table: Mapping[str, Column],
        rows: Rows,
        kept: Mapping[str, object],
    ) -> None:
        config = self._config
        for statement in of.make_stage():
            server.execute(statement, {})
        self._copy(server, of, table, rows, staged=True)
        if config.history:
            server.execute(of.keep_replaced(), kept)
        if config.history and config.mode == "upsert":
            # Not ON CONFLICT: a key that came since would be replaced, and nothing is kept of its row.
            for statement in of.merge():
                server.execute(statement, {})
        else:
            server.execute(of.upsert() if config.mode == "upsert" else of.append(), {})

    def _apply(
        self,
        server: Server,
        changes: ChangeStatements,
        rows: Rows,
        said: Mapping[str, object],
        kept: Mapping[str, object],
    ) -> None:
        for statement in changes.make_stage():
            server.execute(statement, {})
        self._copy(server, changes.of, changes.table, rows, staged=True, marked=True)
        if changes.options.sequence_by:
            self._require_sequences(server, changes)
        server.execute(changes.fold(), said)
        if self._config.history:
            server.execute(changes.keep_changed(), kept)
        for statement in changes.apply():
            server.execute(statement, {})
        if changes.options.keeps_tombstones:
            for statement in changes.remember():
                server.execute(statement, said)

    def _require_sequences(self, server: Server, changes: ChangeStatements) -> None:
        found = server.execute(changes.without_sequence(), {}).fetchone()
        if found is not None:
            names = ", ".join(changes.options.sequence_by)
            key = ", ".join(f"{n}={v!r}" for n, v in zip(changes.of.key, found, strict=True))
            raise SinkFailed(
                f"table {self._config.target}: a change of key ({key}) has a null in sequence_by ({names}), "
                "so nothing says whether it is late: leave such rows out in the stage, or give them a value, "
                "and go back to a checkpoint before them"
            )

    def _copy(
        self,
        server: Server,
        of: Statements,
        table: Mapping[str, Column],
        rows: Rows,
        *,
        staged: bool,
        marked: bool = False,
    ) -> None:
        """Copy the rows; with `marked` each with whether it deletes its key."""
        arrays = [name in table and table[name].is_array for name in of.columns]
        to = Statements(of.schema, of.table, of.key, (*of.columns, DELETE)) if marked else of
        try:
            with server.cursor() as cursor, cursor.copy(to.copy(staged)) as copy:
                for batch in self._marked(of, rows) if marked else self._stored(of, rows):
                    copy.write(copy_text(batch, [*arrays, False] if marked else arrays))
        except (errors.CharacterNotInRepertoire, errors.UntranslatableCharacter) as error:
            found = next((with_nul(b, arrays) for b in self._stored(of, rows) if with_nul(b, arrays)), None)
            if found is None:
                raise
            raise SinkFailed(
                f"table {self._config.target}: column {found!r} has a string with a NUL character, which "
                "PostgreSQL does not store: replace it in the stage, for example with "
                f"replace({found}, char(0), ''), and go back to a checkpoint before these rows"
            ) from error

    def _stored(self, of: Statements, rows: Rows) -> Iterator[pa.RecordBatch]:
        return (batch.select(list(of.columns)) for batch in rows)

    def _marked(self, of: Statements, rows: Rows) -> Iterator[pa.RecordBatch]:
        for batch, deleted in self._deletes.of(rows):
            columns: list[Any] = [batch.column(name) for name in of.columns]
            yield pa.RecordBatch.from_arrays([*columns, deleted], names=[*of.columns, DELETE])
