"""Histories of keys in a Delta table: the effect of changes, late or not, on its rows.

The history of a key is its changes in the order of their sequence. Rows of the table are changes that are
known, and so is each end of one: a row, or a delete, began there. Each change then counts until the next one.
Columns of the frames as in `merge_changes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_abs.catalog.names import quoted
from spark_abs.protocol.change_data import END_AT, START_AT
from spark_abs.sinks.delta.merge_keys import StoredKey, named_struct
from spark_abs.sinks.delta.spark_writer import Clauses
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_DELETED, _STORED, _ARRIVED = 0, 1, 2
"""The origin of a change; of two changes with one sequence the greater origin counts."""


def one_of_sequence(changes: DataFrame) -> DataFrame:
    """Return the change that arrived last, for each key and sequence."""
    from pyspark.sql import functions as F

    last = F.max_by(F.struct("gone", "row"), "o")
    return changes.groupBy("k", "s").agg(last.alias("n")).select("k", "s", "n.*")


@dataclass(frozen=True, slots=True)
class Histories:
    """The histories in a table."""

    table: Table
    """As of the version read."""
    key: StoredKey
    columns: Sequence[str]
    """Those that rows and table have."""
    sequence_by: Sequence[str]

    def changed(self, changes: DataFrame, deleted: DataFrame | None) -> DataFrame:
        """Return the effect of changes, `one_of_sequence`: rows with their `until`, and rows to delete.

        Args:
            changes: of a batch.
            deleted: the tombstones.
        """
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        no_row = F.lit(None).cast(changes.schema["row"].dataType).alias("row")
        unknown = F.lit(None).cast(changes.schema["s"].dataType).alias("until")
        keys = changes.select("k").distinct()
        stored = _of_keys(self._stored(changes), keys, self.key)
        ends = stored.where("until IS NOT NULL").select("k", F.col("until").alias("s"))
        if deleted is not None:
            others = [name for name in deleted.columns if name not in self.key.names]
            known = deleted.select(F.struct(*self.key.names).alias("k"), F.struct(*others).alias("s"))
            ends = ends.unionByName(_of_keys(known, keys, self.key))
        events = (
            changes.select("k", "s", _from(_ARRIVED), "gone", "row", unknown)
            .unionByName(stored.select("k", "s", _from(_STORED), F.lit(False).alias("gone"), "row", "until"))
            .unionByName(ends.select("k", "s", _from(_DELETED), F.lit(True).alias("gone"), no_row, unknown))
        )
        counts = events.groupBy("k", "s").agg(
            F.max_by(F.struct("known", "gone", "row"), "known").alias("n"),
            F.max(F.col("known") == _STORED).alias("there"),
            F.max("until").alias("before"),
        )
        following = F.lead("s").over(Window.partitionBy("k").orderBy("s")).alias("until")
        found = counts.select("k", "s", "n.*", "there", "before", following)
        altered = f"IF(gone, there, known = {_ARRIVED} OR NOT (before <=> until))"
        return found.where(altered).select("k", "s", "until", "gone", "row")

    def clauses(self) -> Clauses:
        """Return the clauses that apply what has `changed`."""
        values = {column: f"new.row.{quoted(column)}" for column in self.columns}
        values |= {START_AT: self._moment("new.s"), END_AT: self._moment("new.until")}
        same = f"{self.key.same('old', 'new.k')} AND old.{START_AT} <=> {values[START_AT]}"
        return Clauses(same, values, values, gone="new.gone")

    def _stored(self, changes: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        from spark_abs.spark.session import read_version

        stored = read_version(changes.sparkSession, self.table.uri, self.table.version)
        return stored.select(
            F.expr(self.key.struct()).alias("k"),
            F.expr(self._sequence(START_AT)).alias("s"),
            F.expr(f"IF({END_AT} IS NULL, NULL, {self._sequence(END_AT)})").alias("until"),
            F.struct(*(F.col(quoted(column)).alias(column) for column in self.columns)).alias("row"),
        )

    def _moment(self, sequence: str) -> str:
        """Return a sequence as the table has it: a value, or a struct of several."""
        if len(self.sequence_by) == 1:
            return f"{sequence}.s0"
        fields = (f"{sequence}.s{number} AS {quoted(name)}" for number, name in enumerate(self.sequence_by))
        return f"IF({sequence} IS NULL, NULL, struct({', '.join(fields)}))"

    def _sequence(self, column: str) -> str:
        several = [f"{column}.{quoted(name)}" for name in self.sequence_by]
        return named_struct("s", several if len(several) > 1 else [column])


def _from(known: int) -> Column:
    from pyspark.sql import functions as F

    return F.lit(known).alias("known")


def _of_keys(rows: DataFrame, keys: DataFrame, key: StoredKey) -> DataFrame:
    from pyspark.sql import functions as F

    same = " AND ".join(f"mine.k.{name} <=> theirs.k.{name}" for name in key.names)
    return rows.alias("mine").join(keys.alias("theirs"), on=F.expr(same), how="left_semi")
