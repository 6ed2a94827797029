"""Changes of keys, merged into a Delta table in one commit, see `protocol.change_data`.

A batch is folded to what its changes mean for each key, and one MERGE compares that with the rows that are
there. Columns of the frames: `k` the key as Delta stores it, `s` the sequence, `o` the order of arrival,
`gone` whether it is a delete, `row` the columns of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spark_abs.catalog.names import quoted
from spark_abs.codec import to_json
from spark_abs.errors import UsageError
from spark_abs.protocol.change_data import ChangeOptions
from spark_abs.sinks.delta import spark_writer
from spark_abs.sinks.delta.commit_metadata import SinkMetadata, Tombstones
from spark_abs.sinks.delta.epoch_files import ORDER
from spark_abs.sinks.delta.merge_history import Histories, one_of_sequence
from spark_abs.sinks.delta.merge_keys import StoredKey, named_struct
from spark_abs.sinks.delta.spark_writer import Clauses, Stamp
from spark_abs.sinks.delta.tombstones import TombstoneStore, said_before
from spark_abs.store.root import Root
from spark_abs.store.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NO_SEQUENCE, _ORDERED = "the change with key ", ", by which changes are ordered"


@dataclass(frozen=True, slots=True)
class Merging:
    """What is merged into, and how."""

    table: Table
    """As of the version read."""
    key: tuple[str, ...]
    options: ChangeOptions
    root: Root
    """Of the job; tombstones lie below it."""
    sink: str
    """Its name in paths."""
    notes: Iterator[SinkMetadata | None]
    """The metadata of the sink's commits, the newest first; read only for tombstones."""


def in_files(session: SparkSession, uris: Sequence[str]) -> DataFrame:
    """Return the rows of files of one directory with their `ORDER`: that of the names, then of the rows.

    Numbers in names grow: the thousandth file of a partition comes after `c999`, so the longer name is later.
    """
    from pyspark.sql import functions as F

    rows = session.read.parquet(*uris)
    place = rows.metadataColumn("_metadata")
    name, row = place["file_name"], place["row_index"]
    return rows.withColumn(ORDER, F.struct(F.length(name).alias("l"), name.alias("f"), row.alias("r")))


def merge_changes(rows: DataFrame, merging: Merging, note: SinkMetadata, stamp: Stamp) -> None:
    """Apply the changes of a batch, rows with their `ORDER`, in one commit, which also names the tombstones.

    Raises:
        UsageError: a change has no sequence; names its key.
        CommitConflict: another commit stands in the way.
    """
    options, key = merging.options, StoredKey(merging.table, merging.key)
    columns = options.stored([column for column in rows.columns if column != ORDER])
    with ExitStack() as kept, _unsequenced(merging.table):
        changes = _changes(rows, columns, key, options)
        store = TombstoneStore(merging.root, merging.sink, options.tombstones_ms)
        dead = Tombstones(merging.key, options.sequence_by)
        if options.keeps_tombstones:
            dead = store.live(said_before(merging.notes), dead)
        deleted = store.read(rows.sparkSession, dead)
        if options.scd_type == 2:
            changes = one_of_sequence(changes)
        else:
            if deleted is not None:
                changes = _not_late(changes, deleted, key)
            changes = _partial(changes, columns) if options.ignore_null_updates else _newest(changes)
        if options.keeps_tombstones:
            kept.callback(changes.persist().unpersist)
            dead = store.add(dead, changes.where("gone").select("k.*", "s.*"))
            stamp = replace(stamp, note=to_json(replace(note, tombstones=dead)))
        clauses = _clauses(key, columns, options)
        if options.scd_type == 2:
            histories = Histories(merging.table, key, columns, options.sequence_by)
            changes, clauses = histories.changed(changes, deleted), histories.clauses()
        spark_writer.merge(changes, merging.table.place, clauses, stamp)


def _changes(rows: DataFrame, columns: Sequence[str], key: StoredKey, options: ChangeOptions) -> DataFrame:
    from pyspark.sql import functions as F

    ordered = [key.unpadded(quoted(column), column) for column in options.sequence_by]
    sequence = F.expr(named_struct("s", ordered or ["0"]))
    if options.sequence_by:
        lacks = " OR ".join(f"{quoted(column)} IS NULL" for column in options.sequence_by)
        which = F.to_json(F.struct(*map(quoted, key.columns)), {"ignoreNullFields": "false"})
        said = F.lit(f" has null in {', '.join(options.sequence_by)}{_ORDERED}")
        sequence = F.when(F.expr(lacks), F.raise_error(F.concat(F.lit(_NO_SEQUENCE), which, said))).otherwise(
            sequence
        )
    gone = F.expr(f"coalesce(({options.apply_as_deletes}), false)" if options.apply_as_deletes else "false")
    return rows.select(
        F.expr(key.struct()).alias("k"),
        sequence.alias("s"),
        F.col(quoted(ORDER)).alias("o"),
        gone.alias("gone"),
        F.struct(*map(quoted, columns)).alias("row"),
    )


def _not_late(changes: DataFrame, deleted: DataFrame, key: StoredKey) -> DataFrame:
    """Leave out changes that are older than a delete of an earlier batch."""
    from pyspark.sql import functions as F

    sequence = [column for column in deleted.columns if column not in key.names]
    dead = deleted.groupBy(*key.names).agg(F.max(F.struct(*sequence)).alias("dead"))
    same = " AND ".join(f"k.{name} <=> {name}" for name in key.names)
    joined = changes.join(dead, on=F.expr(same), how="left")
    return joined.where("dead IS NULL OR s >= dead").select(*changes.columns)


def _newest(changes: DataFrame) -> DataFrame:
    """Return the change of each key that counts."""
    from pyspark.sql import functions as F

    newest = F.max_by(F.struct("s", "gone", "row"), F.struct("s", "o"))
    return changes.groupBy("k").agg(newest.alias("n")).select("k", "n.*")


def _partial(changes: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Return of each key the newest value of each column, `sets`, after its last delete, at `dead`.

    In the order of those on time no sequence decreases: if the newest value of a column is older than a
    delete or a row, all its values are.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    so_far = Window.partitionBy("k").orderBy("o").rowsBetween(Window.unboundedPreceding, 0)
    on_time = changes.withColumn("newest", F.max("s").over(so_far)).where("s >= newest")
    values = [F.col(f"row.{quoted(column)}") for column in columns]
    each = on_time.groupBy("k").agg(
        F.max(F.when(F.col("gone"), F.struct("o", "s"))).alias("delete"),
        F.max_by(F.struct("s", "gone"), "o").alias("last"),
        *(
            F.max_by(F.struct("o", "s", v.alias("v")), F.when(v.isNotNull(), F.col("o"))).alias(f"c{n}")
            for n, v in enumerate(values)
        ),
    )
    sets = [
        F.expr(f"IF(delete IS NULL OR c{n}.o > delete.o, c{n}, NULL)").alias(f"c{n}")
        for n in range(len(values))
    ]
    return each.select("k", "last.*", F.expr("delete.s").alias("dead"), F.struct(*sets).alias("sets"))


def _clauses(key: StoredKey, columns: Sequence[str], options: ChangeOptions) -> Clauses:
    """Return the clauses that apply `_newest` or `_partial` changes."""
    ordered = [key.unpadded(f"old.{quoted(column)}", column) for column in options.sequence_by]
    stored = named_struct("s", ordered or ["0"])
    newer = f"new.s >= {stored}" if options.sequence_by else ""
    gone = "new.gone" if options.apply_as_deletes else ""
    if not options.ignore_null_updates:
        values = {column: f"new.row.{quoted(column)}" for column in columns}
        return Clauses(key.same("old", "new.k"), values, values, newer, gone)
    insert: dict[str, str] = {}
    update: dict[str, str] = {}
    for number, column in enumerate(columns):
        value = f"new.sets.c{number}"
        kept = f"IF(coalesce(new.dead >= {stored}, false), NULL, old.{quoted(column)})"
        insert[column] = f"{value}.v"
        update[column] = f"coalesce(IF({value}.s >= {stored}, {value}.v, NULL), {kept})"
    return Clauses(key.same("old", "new.k"), update, insert, newer, gone)


@contextmanager
def _unsequenced(table: Table) -> Iterator[None]:
    """Say which change has no sequence, where Spark has refused it."""
    try:
        yield
    except Exception as error:
        _, found, said = str(error).partition(_NO_SEQUENCE)
        if not found:
            raise
        which, _, _ = said.partition(_ORDERED)
        raise UsageError(
            f"{table.place}: {_NO_SEQUENCE}{which}{_ORDERED}: give each a value, or leave such rows out"
        ) from error
