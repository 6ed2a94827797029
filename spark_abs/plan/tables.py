"""Which Delta table a path leads to: refuse tables that two sinks write, or that a stage of the job reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spark_abs.errors import DamageError, GraphError, UsageError
from spark_abs.model import StageId
from spark_abs.plan.graph import JobGraph, SinkDecl
from spark_abs.spark.plan_facts import PlanFacts
from spark_abs.store.root import DIRECTORIES, Root
from spark_abs.store.storage import Storage
from spark_abs.store.table import Table


@dataclass(frozen=True, slots=True)
class TableRef:
    """A table, independent of the spelling of its path."""

    uri: str
    location: str
    """The path of the table, with symbolic links resolved."""
    id: str
    """The id of the table; empty if the table does not exist yet or its log cannot be read here."""

    def is_same(self, other: TableRef) -> bool:
        """Say whether both are one table."""
        return self.location == other.location or self.has_id(other.id)

    def has_id(self, table_id: str) -> bool:
        """Say whether the table is known to have this id."""
        return bool(self.id) and self.id == table_id


def refer(storage: Storage, uri: str) -> TableRef:
    """Return the table to which a path leads."""
    place = storage.place(uri)
    try:
        found = Table.open(place).id
    except (FileNotFoundError, DamageError):
        found = ""
    return TableRef(place.uri, os.path.realpath(place.path) if place.local else place.uri, found)


def refuse_shared_sinks(sinks: Sequence[SinkDecl], storage: Storage) -> None:
    """Refuse two sinks of a job that write one table.

    Raises:
        GraphError: names both and their paths.
    """
    written = [(sink, refer(storage, sink.written)) for sink in sinks if sink.written is not None]
    for number, (sink, table) in enumerate(written):
        for other, same in written[:number]:
            if table.is_same(same):
                raise GraphError(
                    f"sinks {other.name!r} and {sink.name!r} write the same table {_paths(same, table)}: a "
                    "table has one writer; give one of them another table"
                )


def refuse_around_root(tables: Iterable[str], root: Root) -> None:
    """Refuse a table that holds the root of the job, or is among what the job makes there.

    Delta's VACUUM deletes what it does not know below a table, and a clean-up of the root does so there.

    Raises:
        UsageError: names the table.
    """
    for uri in tables:
        table = root.storage.place(uri)
        if table.holds(root.top):
            raise UsageError(
                f"the root {root.uri} is in table {table}, whose VACUUM would delete it: give "
                "another root or another table"
            )
        if any(root.place(name).holds(table) for name in DIRECTORIES):
            raise UsageError(f"table {table} is among the files of the root {root.uri}: give another table")


def refuse_own_reads(graph: JobGraph, plans: Mapping[StageId, PlanFacts], storage: Storage) -> None:
    """Refuse a stage that reads the table of a sink of its own job, as a stream or as a static frame.

    Barriers do not pass through tables: the stage would read rows of a later epoch in an earlier one, and a
    restore would remove rows that the stage has read.

    Raises:
        GraphError: the message names stage, table and sink, and the input to use instead.
    """
    written = [(sink, refer(storage, sink.written)) for sink in graph.sinks if sink.written is not None]
    for stage in graph.stages if written else ():
        facts = plans[stage.name]
        for uri in dict.fromkeys((*facts.streamed_tables, *facts.static_tables, *facts.lookup_tables)):
            read = refer(storage, uri)
            for sink, table in written:
                if table.is_same(read):
                    raise GraphError(
                        f"stage {stage.name!r} reads {_paths(table, read)}, the table of sink {sink.name!r} "
                        "of this job: barriers do not pass through tables, so a checkpoint would not have "
                        f"both at one cut. Use {sink.stage}.{sink.output} as the input instead, also if the "
                        "stage adopts a query"
                    )


def _paths(first: TableRef, second: TableRef) -> str:
    return first.uri if first.uri == second.uri else f"{first.uri} ({second.uri} is the same)"
