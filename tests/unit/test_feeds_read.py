"""Which tables a query is known to read as change feeds, whatever Delta there is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]

from spark_abs.spark.plans import feeds_read


class Named:
    """Stands for an object of the JVM."""

    def __init__(self, name: str, **answers: Any) -> None:
        self._name = name
        for method, answer in answers.items():
            setattr(self, method, lambda answer=answer: answer)

    def getClass(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(getSimpleName=lambda: self._name)


class Foreign(Named):
    """A source of a Delta that does not show its options."""

    def options(self) -> Any:
        raise Py4JError("Method options([]) does not exist")


def source(table: str, feed: bool) -> Named:
    return Named("DeltaSource", tableId=table, options=Named("DeltaOptions", readChangeFeed=feed))


def query(*sources: Named) -> Named:
    leaves = [Named("StreamingExecutionRelation", source=one, **below()) for one in sources]
    return Named("MicroBatchExecution", logicalPlan=Named("Union", **below(*leaves)))


def below(*nodes: Named) -> dict[str, Any]:
    def seq(*items: Named) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: len(items), apply=items.__getitem__)

    return {"children": seq(*nodes), "subqueries": seq()}


def test_a_table_is_read_as_a_feed_alone() -> None:
    both = [source("both", feed=True), source("both", feed=False)]
    assert feeds_read(query(source("feed", feed=True), source("plain", feed=False), *both)) == ("feed",)


def test_nothing_is_known_of_a_delta_that_does_not_say() -> None:
    assert feeds_read(query(source("feed", feed=True), Foreign("DeltaSource", tableId="other"))) == ()
