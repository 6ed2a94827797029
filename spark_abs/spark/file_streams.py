"""File sources in the plan of a streaming frame. Private API, written for Spark 4.2."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

from spark_abs.spark.plans import items

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILE_FORMAT = "org.apache.spark.sql.execution.datasources.FileFormat"
_METADATA = "_metadata"


def without_files(frame: DataFrame, files: Collection[str]) -> DataFrame:
    """Return a streaming frame whose file sources do not read some files.

    Spark evaluates the filter on the list of a batch's files and opens none of these. The columns of all
    operators stay, and so does the state. The session must be the active one.

    Args:
        frame: the frame.
        files: the files, as Spark writes them in the logs of file sources.
    """
    if not files:
        return frame
    session: Any = frame.sparkSession
    plan = _Filter(session, sorted({form for file in files for form in _forms(file)})).applied(
        frame._jdf.queryExecution().analyzed()
    )
    return _frame(session, plan)


class _Filter:
    """Puts a filter on each file source of a plan. A source that occurs twice stays one source."""

    def __init__(self, session: SparkSession, files: Sequence[str]) -> None:
        self._session: Any = session
        self._files = files
        self._done: list[tuple[Any, Any]] = []

    def applied(self, node: Any) -> Any:
        """Return a plan with the filter."""
        if node.getClass().getSimpleName() == "StreamingRelation":
            return self._filtered(node)
        before = list(items(node.children()))
        after = [self.applied(child) for child in before]
        if all(one.equals(other) for one, other in zip(before, after, strict=True)):
            return node
        return node.withNewChildren(self._session._jvm.org.apache.spark.api.python.PythonUtils.toSeq(after))

    def _filtered(self, relation: Any) -> Any:
        jvm: Any = self._session._jvm
        if not jvm.py4j.reflection.TypeUtil.isInstanceOf(
            _FILE_FORMAT, relation.dataSource().providingInstance()
        ):
            return relation
        for known, made in self._done:
            if known.equals(relation):
                return made
        rows = _frame(self._session, relation)
        path = rows.metadataColumn(_METADATA).getField("file_path")
        made = rows.where(~path.isin(list(self._files)))._jdf.queryExecution().analyzed()
        self._done.append((relation, made))
        return made


def _frame(session: Any, plan: Any) -> DataFrame:
    rows = session._jvm.org.apache.spark.sql.classic.Dataset.ofRows(session._jsparkSession, plan)
    return DataFrame(rows, session)


def _forms(file: str) -> tuple[str, ...]:
    """Return a URI of a file in all forms that Spark may give to its metadata column."""
    if not file.startswith("file:/"):
        return (file,)
    path = file.removeprefix("file:").lstrip("/")
    return (f"file:/{path}", f"file:///{path}")
