"""The statements of the PostgreSQL sink: names are quoted, values are parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.sql import SQL, Composed, Literal
from psycopg.sql import Identifier as Quoted

from spark_abs.sinks.postgres.config import HISTORY
from spark_abs.sinks.postgres.schema import Column, quoted

MARKER = "spark_abs_marker"
_STAGED = "spark_abs_rows"


class Identifier(Quoted):
    """A quoted name whose `%` begins no parameter: for statements that are executed with parameters."""

    def as_bytes(self, context: Any = None) -> bytes:
        """Return the name as a statement has it."""
        return super().as_bytes(context).replace(b"%", b"%%")


_OWN = SQL("root = %(root)s AND sink = %(sink)s")
_OF_SINK = SQL("h.spark_abs_root = %(root)s AND h.spark_abs_sink = %(sink)s")


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements for one table; parameters are `root`, `sink` and those that each statement names."""

    schema: str
    table: str
    key: Sequence[str]
    columns: Sequence[str]
    staged: str = _STAGED
    """The name of the temporary table of rows before they are merged."""

    @property
    def stage(self) -> Identifier:
        """The stage: rows before they are merged."""
        return Identifier("pg_temp", self.staged)

    @property
    def made_stage(self) -> Identifier:
        """That table in a statement that makes it."""
        return Identifier(self.staged)

    @property
    def marker(self) -> Identifier:
        """The table of marks."""
        return Identifier(self.schema, MARKER)

    @property
    def history(self) -> Identifier:
        """The history: replaced rows, by epoch."""
        return Identifier(self.schema, self.table + HISTORY)

    @property
    def target(self) -> Identifier:
        """The table itself."""
        return Identifier(self.schema, self.table)

    def look(self) -> Composed:
        """Read whether the table has a row."""
        return SQL("SELECT 1 FROM {} LIMIT 1").format(self.target)

    def look_for_root(self) -> Composed:
        """Read whether a sink of a root has a mark for the table; `root`, `target`."""
        return SQL("SELECT 1 FROM {} WHERE root = %(root)s AND target = %(target)s LIMIT 1").format(
            self.marker
        )

    def make_marker(self) -> Composed:
        """Make the table of marks."""
        return SQL(
            "CREATE TABLE IF NOT EXISTS {} (root text, sink text, target text NOT NULL, run bigint NOT NULL, "
            "attempt bigint, checkpoint bigint, version bigint, history_from bigint, history_table bigint, "
            "committed_at timestamptz, PRIMARY KEY (root, sink))"
        ).format(self.marker)

    def add_marker(self) -> Composed:
        """Add the row of a sink; `target`."""
        return SQL(
            "INSERT INTO {} (root, sink, target, run) VALUES (%(root)s, %(sink)s, %(target)s, 0) "
            "ON CONFLICT DO NOTHING"
        ).format(self.marker)

    def read_marker(self, lock: bool = False) -> Composed:
        """Read the row of a sink: run, target, the beginning of the history, and the mark."""
        return SQL(
            "SELECT run, target, CASE WHEN history_table = {} THEN history_from END, attempt, checkpoint, "
            "version FROM {} WHERE {}{}"
        ).format(self._history_id(), self.marker, _OWN, SQL(" FOR UPDATE" if lock else ""))

    def take(self) -> Composed:
        """Let a run own the row; `run`, `history_from`."""
        return SQL(
            "UPDATE {} SET run = %(run)s, history_from = %(history_from)s, history_table = {} WHERE {}"
        ).format(self.marker, self._history_id(), _OWN)

    def set_mark(self) -> Composed:
        """Write the mark; `attempt`, `checkpoint`, `version`."""
        return SQL(
            "UPDATE {} SET attempt = %(attempt)s, checkpoint = %(checkpoint)s, version = %(version)s, "
            "committed_at = now() WHERE {}"
        ).format(self.marker, _OWN)

    def copy(self, staged: bool) -> Composed:
        """Take rows as CSV; the only statement that is executed without parameters."""
        into = Quoted("pg_temp", self.staged) if staged else Quoted(self.schema, self.table)
        columns = SQL(", ").join(map(Quoted, self.columns))
        return SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(into, columns)

    def make_stage(self) -> Sequence[Composed]:
        """Create a temporary table for rows before they are merged, numbered in their order."""
        made = SQL("CREATE TEMP TABLE {} ON COMMIT DROP AS SELECT {} FROM {} WITH NO DATA")
        return (
            made.format(self.made_stage, listed_names(self.columns), self.target),
            SQL(
                "ALTER TABLE {} ADD COLUMN spark_abs_n bigint GENERATED ALWAYS AS IDENTITY, "
                "ADD COLUMN spark_abs_held boolean NOT NULL DEFAULT false"
            ).format(self.stage),
        )

    def append(self) -> Composed:
        return SQL("INSERT INTO {} ({}) SELECT {} FROM {} ORDER BY spark_abs_n").format(
            self.target, listed_names(self.columns), listed_names(self.columns), self.stage
        )

    def upsert(self) -> Composed:
        """Add or replace by key: of several rows of a key the last counts."""
        others = [name for name in self.columns if name not in self.key]
        action: SQL | Composed = SQL("DO NOTHING")
        if others:
            pairs = [SQL("{0} = EXCLUDED.{0}").format(Identifier(name)) for name in others]
            action = SQL("DO UPDATE SET {}").format(SQL(", ").join(pairs))
        return SQL("INSERT INTO {} ({}) SELECT {} FROM {} ON CONFLICT ({}) {}").format(
            self.target,
            listed_names(self.columns),
            listed_names(self.columns),
            self._newest(),
            listed_names(self.key),
            action,
        )

    def merge(self) -> Sequence[Composed]:
        """Replace the rows that `keep_replaced` has locked, and add the others.

        A key that another writer has added since violates the unique index: the epoch is tried again.
        """
        columns = listed_names(self.columns)
        added = SQL("INSERT INTO {} ({}) SELECT {} FROM {} WHERE NOT spark_abs_held").format(
            self.target, columns, columns, self._newest()
        )
        others = [name for name in self.columns if name not in self.key]
        if not others:
            return (added,)
        pairs = [SQL("{} = {}").format(Identifier(n), Identifier("s", n)) for n in others]
        replaced = SQL("UPDATE {} t SET {} FROM {} WHERE s.spark_abs_held AND {}").format(
            self.target, SQL(", ").join(pairs), self._newest(), same_key(self.key, "t", "s")
        )
        return (replaced, added)

    def _newest(self) -> Composed:
        return SQL("(SELECT DISTINCT ON ({0}) * FROM {1} ORDER BY {0}, spark_abs_n DESC) s").format(
            listed_names(self.key), self.stage
        )

    # -- history

    def make_history(self) -> Composed:
        """Create the table of the rows that others replaced."""
        return SQL(
            "CREATE TABLE IF NOT EXISTS {} AS SELECT ''::text AS spark_abs_root, ''::text AS spark_abs_sink, "
            "0::bigint AS spark_abs_checkpoint, 0::bigint AS spark_abs_after, 0::bigint AS spark_abs_until, "
            "false AS spark_abs_existed, false AS spark_abs_deleted, ARRAY[]::text[] AS spark_abs_key, "
            "ARRAY[]::text[] AS spark_abs_columns, {} FROM {} WITH NO DATA"
        ).format(self.history, listed_names(self.columns), self.target)

    def add_deleted(self) -> Composed:
        """Add the column for deleted rows to a history that an earlier version made."""
        return SQL(
            "ALTER TABLE {} ADD COLUMN IF NOT EXISTS spark_abs_deleted boolean NOT NULL DEFAULT false"
        ).format(self.history)

    def keep_replaced(self) -> Composed:
        """Lock the rows that will be replaced, keep what they are, and note in the stage which they are.

        One statement: what is kept is what is locked, and nobody changes it before it is replaced.
        Parameters are `checkpoint`, `after`, `version`, and the names `key` and `columns`.
        """
        kept = [Identifier("s" if name in self.key else "t", name) for name in self.columns]
        theirs = [Identifier("t", name) for name in self.columns]
        return SQL(
            "WITH s AS MATERIALIZED (SELECT * FROM {newest}), "
            "t AS MATERIALIZED (SELECT true AS spark_abs_is, {theirs} FROM {target} t JOIN s ON {same} "
            "FOR UPDATE OF t), "
            "noted AS (UPDATE {stage} n SET spark_abs_held = true FROM t WHERE {noted}) "
            "INSERT INTO {history} (spark_abs_root, "
            "spark_abs_sink, spark_abs_checkpoint, spark_abs_after, spark_abs_until, spark_abs_existed, "
            "spark_abs_key, spark_abs_columns, {columns}) SELECT %(root)s, %(sink)s, %(checkpoint)s, "
            "%(after)s, %(version)s, t.spark_abs_is IS NOT NULL, %(key)s, %(columns)s, {kept} FROM s LEFT "
            "JOIN t ON {same}"
        ).format(
            newest=self._newest(),
            theirs=SQL(", ").join(theirs),
            target=self.target,
            same=same_key(self.key, "t", "s"),
            stage=self.stage,
            noted=same_key(self.key, "n", "t"),
            history=self.history,
            columns=listed_names(self.columns),
            kept=SQL(", ").join(kept),
        )

    def forget_history(self) -> Composed:
        """Delete history that no restore needs; `floor`."""
        return SQL("DELETE FROM {} h WHERE {} AND h.spark_abs_until <= %(floor)s").format(
            self.history, _OF_SINK
        )

    def straddling(self) -> Composed:
        """Find epochs that were sent as one and lie before and after a mark; `version`."""
        return SQL(
            "SELECT DISTINCT h.spark_abs_checkpoint FROM {} h WHERE {} AND h.spark_abs_after < %(version)s "
            "AND h.spark_abs_until > %(version)s"
        ).format(self.history, _OF_SINK)

    def epochs_behind(self) -> Composed:
        """Find the epochs to undo, newest first, with their keys and columns; `version`."""
        return SQL(
            "SELECT DISTINCT h.spark_abs_until, h.spark_abs_key, h.spark_abs_columns FROM {} h WHERE {} AND "
            "h.spark_abs_until > %(version)s ORDER BY 1 DESC"
        ).format(self.history, _OF_SINK)

    def undo(self, whole: Sequence[str]) -> Sequence[Composed]:
        """Undo one epoch; `until`. Of rows that it has deleted `whole` are the columns that come back."""
        where = SQL("{} AND h.spark_abs_until = %(until)s AND {}").format(
            _OF_SINK, same_key(self.key, "t", "h")
        )
        found = [
            SQL("DELETE FROM {} t USING {} h WHERE NOT h.spark_abs_existed AND {}").format(
                self.target, self.history, where
            )
        ]
        others = [name for name in self.columns if name not in self.key]
        if others:
            pairs = [SQL("{} = {}").format(Identifier(n), Identifier("h", n)) for n in others]
            found.append(
                SQL("UPDATE {} t SET {} FROM {} h WHERE h.spark_abs_existed AND {}").format(
                    self.target, SQL(", ").join(pairs), self.history, where
                )
            )
        found.append(
            SQL(
                "INSERT INTO {target} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM {history} h "
                "WHERE {mine} AND h.spark_abs_until = %(until)s AND h.spark_abs_existed AND "
                "h.spark_abs_deleted AND NOT EXISTS (SELECT 1 FROM {target} t WHERE {same})"
            ).format(
                target=self.target,
                columns=listed_names(whole),
                history=self.history,
                mine=_OF_SINK,
                same=same_key(self.key, "t", "h"),
            )
        )
        return found

    def drop_history(self) -> Composed:
        """Delete the history of epochs after a mark; `version`."""
        return SQL("DELETE FROM {} h WHERE {} AND h.spark_abs_until > %(version)s").format(
            self.history, _OF_SINK
        )

    def _history_id(self) -> Composed:
        """Return the id of the history table, which a new table of the same name does not have; else null."""
        name = ".".join(quoted(part) for part in (self.schema, self.table + HISTORY))
        return SQL("to_regclass({})::oid::bigint").format(Literal(name.replace("%", "%%")))


def add_column(table: Identifier, column: Column) -> Composed:
    """Add a column that another table has got."""
    return SQL("ALTER TABLE {} ADD COLUMN IF NOT EXISTS {} {}").format(
        table, Identifier(column.name), SQL(column.said)
    )


def fit_column(table: Identifier, column: Column) -> Composed:
    """Give a column the type that it has in another table by now."""
    return SQL("ALTER TABLE {0} ALTER COLUMN {1} TYPE {2} USING {1}::{2}").format(
        table, Identifier(column.name), SQL(column.said)
    )


def same_key(key: Sequence[str], one: str, other: str) -> Composed:
    """Say that rows of two relations have one key; none of its columns is null."""
    return SQL(" AND ").join(
        SQL("{} = {}").format(Identifier(one, name), Identifier(other, name)) for name in key
    )


def listed_names(names: Sequence[str]) -> Composed:
    """Return names with commas between them."""
    return SQL(", ").join(map(Identifier, names))
