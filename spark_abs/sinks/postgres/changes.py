"""Changes by key in PostgreSQL: which count, how they change a row, and the tombstones of deleted keys.

Their result is that of `change_data.arrive`, however the changes are divided into epochs. The changes of an
epoch are copied as they come. One statement locks the rows that they are about, drops late changes, and makes
one change of each key; the other statements apply these. So others may write to the table meanwhile; their
rows count, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from psycopg.sql import SQL, Composed

from spark_abs.protocol.change_data import ChangeOptions
from spark_abs.sinks.postgres.config import DELETED
from spark_abs.sinks.postgres.schema import Column
from spark_abs.sinks.postgres.sql import Identifier, Statements, listed_names, same_key

_FOLDED = "spark_abs_folded"
DELETE = "spark_abs_delete"
_OF_SINK = SQL("d.spark_abs_root = %(root)s AND d.spark_abs_sink = %(sink)s")
_OPEN = SQL("{} AND d.spark_abs_ended IS NULL").format(_OF_SINK)


@dataclass(frozen=True, slots=True)
class ChangeStatements:
    """The statements that apply the changes of an epoch; parameters as those of `Statements`."""

    of: Statements
    """Of the rows as they come: its stage has them, with `DELETE` as one more column."""
    options: ChangeOptions
    table: Mapping[str, Column]
    """The columns of the table."""

    @property
    def folded(self) -> Statements:
        """The statements whose stage has one change of each key."""
        return replace(self.of, staged=_FOLDED)

    def make_stage(self) -> Sequence[Composed]:
        """Make the tables for changes as they come, and for those that count."""
        raw, folded = self.of, self.folded
        made = SQL("CREATE TEMP TABLE {} ON COMMIT DROP AS SELECT *, false AS spark_abs_fresh FROM {} {}")
        delete = SQL("ALTER TABLE {} ADD COLUMN {} boolean NOT NULL DEFAULT false").format(
            raw.stage, Identifier(DELETE)
        )
        return (*raw.make_stage(), delete, made.format(folded.made_stage, raw.stage, SQL("WITH NO DATA")))

    def without_sequence(self) -> Composed:
        """Find the key of a change that says nothing of its place."""
        lacks = [SQL("{} IS NULL").format(Identifier(name)) for name in self.options.sequence_by]
        return SQL("SELECT {} FROM {} WHERE {} LIMIT 1").format(
            listed_names(self.of.key), self.of.stage, SQL(" OR ").join(lacks)
        )

    def fold(self) -> Composed:
        """Lock the rows of the keys, drop late changes, and make one change of those of each key."""
        key, sequence = listed_names(self.of.key), self.options.sequence_by
        known = SQL(
            "k AS MATERIALIZED (SELECT DISTINCT {key} FROM {stage}), "
            "t AS MATERIALIZED (SELECT true AS spark_abs_is, {theirs} FROM {target} t JOIN k ON {same} "
            "FOR UPDATE OF t)"
        ).format(
            key=key,
            stage=self.of.stage,
            theirs=SQL(", ").join(Identifier("t", name) for name in known_columns(self.of, sequence)),
            target=self.of.target,
            same=same_key(self.of.key, "t", "k"),
        )
        counted = SQL(
            "r AS (SELECT s.*, t.spark_abs_is IS NOT NULL AS spark_abs_there FROM {} s LEFT JOIN t ON {}{})"
        ).format(self.of.stage, same_key(self.of.key, "s", "t"), self._not_late())
        into = [*self.of.columns, DELETE, "spark_abs_n", "spark_abs_held", "spark_abs_fresh"]
        return SQL("INSERT INTO {} ({}) WITH {}, {} {}").format(
            self.folded.stage,
            listed_names(into),
            known,
            counted,
            self._nulls_ignored() if self.options.ignore_null_updates else self._newest(),
        )

    def _not_late(self) -> Composed:
        """Return the rest of a join of changes `s` with the rows `t` and tombstones that says which count."""
        sequence = self.options.sequence_by
        if not sequence:
            return SQL("").format()
        joined = [SQL("").format()]
        known = ["t"]
        if self.options.keeps_tombstones:
            known.append("d")
            joined.append(
                SQL("LEFT JOIN {} d ON {} AND {}").format(
                    tombstones(self.of), _OPEN, same_key(self.of.key, "s", "d")
                )
            )
        tests = [
            SQL("({} OR {} >= {})").format(
                SQL(" OR ").join(SQL("{} IS NULL").format(Identifier(at, name)) for name in sequence),
                self._place("s"),
                self._place(at),
            )
            for at in known
        ]
        return SQL("{} WHERE {}").format(SQL(" ").join(joined), SQL(" AND ").join(tests))

    def _newest(self) -> Composed:
        order = [listed_names(self.of.key)]
        order += [SQL("{} DESC").format(self._ordered("", name)) for name in self.options.sequence_by]
        return SQL(
            "SELECT DISTINCT ON ({key}) {columns}, {delete}, spark_abs_n, spark_abs_there, true FROM r "
            "ORDER BY {order}, spark_abs_n DESC"
        ).format(
            key=listed_names(self.of.key),
            columns=listed_names(self.of.columns),
            delete=Identifier(DELETE),
            order=SQL(", ").join(order),
        )

    def _nulls_ignored(self) -> Composed:
        """Return the last value of each column among changes that were the newest when they came."""
        key, delete = listed_names(self.of.key), Identifier(DELETE)
        place = SQL("0").format()
        if self.options.sequence_by:
            order = SQL(", ").join(self._ordered("", name) for name in self.options.sequence_by)
            place = SQL("rank() OVER (PARTITION BY {} ORDER BY {})").format(key, order)
        values = []
        for name in self.of.columns:
            last = name in self.of.key or name in self.options.sequence_by  # also those of a delete
            where = "true" if last else "spark_abs_n > spark_abs_gone AND {} IS NOT NULL"
            values.append(SQL("{} AS {}").format(self._last(name, where), Identifier(name)))
        return SQL(
            ", p AS (SELECT *, {place} AS spark_abs_place FROM r), "
            "m AS (SELECT *, max(spark_abs_place) OVER (PARTITION BY {key} ORDER BY spark_abs_n) "
            "AS spark_abs_most FROM p), "
            "c AS (SELECT *, coalesce(max(spark_abs_n) FILTER (WHERE {delete}) OVER (PARTITION BY {key}), 0) "
            "AS spark_abs_gone FROM m WHERE spark_abs_place >= spark_abs_most), "
            "e AS (SELECT {found}, max(spark_abs_n) AS spark_abs_n, max(spark_abs_gone) AS spark_abs_gone, "
            "bool_or(spark_abs_there) AS spark_abs_there FROM c GROUP BY {key}) "
            "SELECT {columns}, spark_abs_n = spark_abs_gone, spark_abs_n, spark_abs_there, "
            "spark_abs_gone > 0 FROM e"
        ).format(
            place=place,
            key=key,
            delete=delete,
            found=SQL(", ").join(values),
            columns=listed_names(self.of.columns),
        )

    def _last(self, name: str, where: str) -> Composed:
        """Return the value of a column in the last change that meets a condition."""
        column = self.table[name]
        value = Identifier("c", name)
        # An array of arrays has them all of one length: they go as text.
        text, back = (SQL("::text"), SQL("::" + column.said)) if column.is_array else (SQL(""), SQL(""))
        return SQL("((array_agg({}{} ORDER BY spark_abs_n DESC) FILTER (WHERE {}))[1]){}").format(
            value, text, SQL(where).format(value), back
        )

    def apply(self) -> Sequence[Composed]:
        """Delete, replace and add rows.

        A key that another writer has added since violates the unique index: the epoch is tried again.
        """
        of, delete = self.folded, Identifier("s", DELETE)
        same = same_key(of.key, "t", "s")
        found = []
        if self.options.apply_as_deletes:
            found.append(
                SQL("DELETE FROM {} t USING {} s WHERE {} AND {}").format(of.target, of.stage, delete, same)
            )
        others = [name for name in of.columns if name not in of.key]
        if others:
            pairs = [SQL("{} = {}").format(Identifier(name), self._kept(name)) for name in others]
            found.append(
                SQL("UPDATE {} t SET {} FROM {} s WHERE s.spark_abs_held AND NOT {} AND {}").format(
                    of.target, SQL(", ").join(pairs), of.stage, delete, same
                )
            )
        columns = listed_names(of.columns)
        found.append(
            SQL("INSERT INTO {} ({}) SELECT {} FROM {} s WHERE NOT s.spark_abs_held AND NOT {}").format(
                of.target, columns, columns, of.stage, delete
            )
        )
        return found

    def _kept(self, name: str) -> Composed:
        new = Identifier("s", name)
        if not self.options.ignore_null_updates:
            return SQL("{}").format(new)
        return SQL("CASE WHEN s.spark_abs_fresh THEN {0} ELSE coalesce({0}, {1}) END").format(
            new, Identifier("t", name)
        )

    def keep_changed(self) -> Composed:
        """Keep the rows as they are before the changes; parameters as of `Statements.keep_replaced`."""
        of, names = self.folded, list(self.table)
        kept = [
            SQL("coalesce({}, {})").format(Identifier("t", name), Identifier("s", name))
            if name in of.key
            else SQL("{}").format(Identifier("t", name))
            for name in names
        ]
        return SQL(
            "INSERT INTO {history} (spark_abs_root, spark_abs_sink, spark_abs_checkpoint, spark_abs_after, "
            "spark_abs_until, spark_abs_existed, spark_abs_deleted, spark_abs_key, spark_abs_columns, "
            "{columns}) SELECT %(root)s, %(sink)s, %(checkpoint)s, %(after)s, %(version)s, s.spark_abs_held, "
            "s.{delete}, %(key)s, %(columns)s, {kept} FROM {stage} s LEFT JOIN {target} t ON {same} "
            "WHERE s.spark_abs_held OR NOT s.{delete}"
        ).format(
            history=of.history,
            columns=listed_names(names),
            delete=Identifier(DELETE),
            kept=SQL(", ").join(kept),
            stage=of.stage,
            target=of.target,
            same=same_key(of.key, "t", "s"),
        )

    def _ordered(self, at: str, name: str) -> Composed:
        """Return a column of the sequence, ordered as Spark orders it: text by its bytes."""
        column = SQL("{}").format(Identifier(at, name) if at else Identifier(name))
        return SQL('{} COLLATE "C"').format(column) if self.table[name].is_text else column

    def _place(self, at: str) -> Composed:
        return SQL("ROW({})").format(
            SQL(", ").join(self._ordered(at, name) for name in self.options.sequence_by)
        )

    # -- tombstones

    def remember(self) -> Sequence[Composed]:
        """Let deleted keys have tombstones, and end those of keys that have changed; `version`."""
        of = self.folded
        names = listed_names(known_columns(of, self.options.sequence_by))
        ended = SQL("UPDATE {} d SET spark_abs_ended = %(version)s FROM {} s WHERE {} AND {}").format(
            tombstones(self.of), of.stage, _OPEN, same_key(of.key, "d", "s")
        )
        added = SQL(
            "INSERT INTO {} (spark_abs_root, spark_abs_sink, spark_abs_until, spark_abs_at, {}) "
            "SELECT %(root)s, %(sink)s, %(version)s, now(), {} FROM {} s WHERE s.{}"
        ).format(tombstones(self.of), names, names, of.stage, Identifier(DELETE))
        return (ended, added)


def tombstones(of: Statements) -> Identifier:
    """Name the table of which keys were deleted, and by what: each counts until its key is there again."""
    return Identifier(of.schema, of.table + DELETED)


def known_columns(of: Statements, sequence: Sequence[str]) -> Sequence[str]:
    """Return the columns that say of a row or tombstone whose it is and how new, each once."""
    return tuple(dict.fromkeys((*of.key, *sequence)))


def make_tombstones(of: Statements, sequence: Sequence[str]) -> Composed:
    """Make the table of tombstones."""
    return SQL(
        "CREATE TABLE IF NOT EXISTS {} AS SELECT ''::text AS spark_abs_root, ''::text AS spark_abs_sink, "
        "0::bigint AS spark_abs_until, 0::bigint AS spark_abs_ended, now() AS spark_abs_at, {} FROM {} "
        "WITH NO DATA"
    ).format(tombstones(of), listed_names(known_columns(of, sequence)), of.target)


def index_tombstones(of: Statements) -> Sequence[Composed]:
    """Make the ways by which tombstones are found; each has a name of the server's choice."""
    table = tombstones(of)
    return (
        SQL("CREATE INDEX ON {} ({})").format(table, listed_names(of.key)),
        SQL("CREATE INDEX ON {} (spark_abs_at)").format(table),
        SQL("CREATE INDEX ON {} (spark_abs_ended) WHERE spark_abs_ended IS NOT NULL").format(table),
    )


def forget_tombstones(of: Statements) -> Sequence[Composed]:
    """Return the statements that delete tombstones older than `kept` ms, and those that ended up to `floor`.

    Both are parameters of the SQL.
    """
    table = tombstones(of)
    return (
        SQL(
            "DELETE FROM {} d WHERE {} AND d.spark_abs_at < now() - %(kept)s * interval '1 millisecond'"
        ).format(table, _OF_SINK),
        SQL("DELETE FROM {} d WHERE {} AND d.spark_abs_ended <= %(floor)s").format(table, _OF_SINK),
    )


def undo_tombstones(of: Statements) -> Sequence[Composed]:
    """Bring the tombstones back to a mark; `version`."""
    table = tombstones(of)
    return (
        SQL("DELETE FROM {} d WHERE {} AND d.spark_abs_until > %(version)s").format(table, _OF_SINK),
        SQL("UPDATE {} d SET spark_abs_ended = NULL WHERE {} AND d.spark_abs_ended > %(version)s").format(
            table, _OF_SINK
        ),
    )
