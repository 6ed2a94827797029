"""Which rows delete their key: a predicate in Spark's SQL, evaluated by Spark over record batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_abs.errors import SinkUnreachable, UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NUMBER = "spark_abs number"
_BATCHES, _BYTES = 8, 16 * 2**20
"""How many record batches one job of Spark looks at, and after how many bytes it begins with fewer."""


def without_plan(error: Exception) -> str:
    """Return what Spark's analysis says of an expression, without the plan that stands below it."""
    return str(error).partition(";\n")[0].strip()


def require_one_answer(said: str, plan: Any) -> None:
    """Require that a predicate gives a row the same answer whenever it is asked.

    Args:
        said: the table and the predicate, for the message.
        plan: Spark's analysed plan with the predicate.

    Raises:
        UsageError: something in it is random, or asks other tables.
    """
    if not plan.deterministic() or not plan.subqueriesAll().isEmpty():
        raise UsageError(
            f"{said} may give a row another answer when it is asked again: compute a column in the stage, "
            "and name that"
        )


class DeletePredicate:
    """A predicate over the columns of rows; null is false. Needs a session, but not for an empty text."""

    def __init__(self, who: str, text: str, session: Callable[[], SparkSession] | None) -> None:
        """Take the text; the first use parses it.

        Args:
            who: the table, for messages.
            text: in Spark's SQL; empty for no deletes.
            session: called when there is something to evaluate.
        """
        self._who, self._text, self._session = who, text, session
        self._reads: tuple[pa.Schema, tuple[str, ...]] | None = None

    def check(self, schema: pa.Schema) -> None:
        """Check that each row can be asked, and always gives the same answer.

        Raises:
            UsageError: it is no such predicate.
        """
        if self._text:
            self._columns(schema)

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, pa.BooleanArray]]:
        """Iterate the batches, each with which of its rows delete their key.

        Raises:
            SinkUnreachable: the session has ended.
        """
        some: list[pa.RecordBatch] = []
        for batch in batches:
            some.append(batch)
            if len(some) == _BATCHES or sum(one.nbytes for one in some) > _BYTES:
                yield from self._asked(some)
                some = []
        if some:
            yield from self._asked(some)

    def _asked(self, batches: Sequence[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, pa.BooleanArray]]:
        rows = sum(batch.num_rows for batch in batches)
        found = self._numbers(batches) if self._text and rows else pa.array([], pa.int64())
        first = 0
        for batch in batches:
            numbers = pa.array(np.arange(first, first + batch.num_rows))
            yield batch, pc.is_in(numbers, value_set=found)
            first += batch.num_rows

    def _numbers(self, batches: Sequence[pa.RecordBatch]) -> pa.Array:
        """Return the numbers of the rows that meet the predicate, counted over all batches."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]

        columns = list(self._columns(batches[0].schema))
        table = pa.Table.from_batches(batches).select(columns)
        table = table.append_column(_NUMBER, pa.array(np.arange(table.num_rows)))
        try:
            found = self._met(table.schema, table).select(f"`{_NUMBER}`").toArrow()
        except (Py4JError, AttributeError) as error:  # of a context that was stopped there is no JVM
            raise SinkUnreachable(
                f"table {self._who}: apply_as_deletes cannot be evaluated: {error}"
            ) from None
        return found.column(0).combine_chunks()

    def _columns(self, schema: pa.Schema) -> tuple[str, ...]:
        """Return which columns the predicate reads; raises as `check`."""
        if self._reads is None or self._reads[0] != schema:
            self._reads = (schema, self._read_by(schema))
        return self._reads[1]

    def _read_by(self, schema: pa.Schema) -> tuple[str, ...]:
        from pyspark.errors import PySparkException

        said = f"table {self._who}: apply_as_deletes={self._text!r}"
        try:
            plan: Any = self._met(schema)._jdf.queryExecution().analyzed()
        except PySparkException as error:
            raise UsageError(
                f"{said} is no predicate over the columns of the rows: {without_plan(error)}"
            ) from None
        require_one_answer(said, plan)
        references = plan.references().toSeq()
        return tuple({references.apply(at).name(): None for at in range(references.size())})

    def _met(self, schema: pa.Schema, table: pa.Table | None = None) -> DataFrame:
        """Return the rows of a table, or none, that meet the predicate."""
        from pyspark.sql import functions as F

        from spark_abs.spark.versions import from_arrow_schema

        kind = from_arrow_schema(schema)
        rows: Any = schema.empty_table() if table is None else table
        if self._session is None:
            raise UsageError(
                f"table {self._who}: apply_as_deletes is evaluated by Spark, and there is no session"
            )
        return self._session().createDataFrame(rows, kind).where(F.expr(self._text))
