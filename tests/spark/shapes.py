"""Queries as parts of a job, each with the batch queries that its tables must equal at every checkpoint.

Event times are whole seconds, watermarks stand at half ones: nothing is ever due at the very moment of a
watermark. Rows come up to 30 seconds late, which is within every delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StructField, StructType

from spark_abs.job import Job
from spark_abs.model import ProviderName
from spark_abs.plan.specs import Output, Stage

SCHEMA = "id long, k long, v long, ts long, visit long"
SECONDS_PER_FILE = 60
ROWS_PER_FILE = 6
LATE = "34500 milliseconds"


def row(file: int, number: int) -> dict[str, object]:
    ident = file * ROWS_PER_FILE + number
    early = 3 if number == 1 else 0
    at = file * SECONDS_PER_FILE + number * 10 - early
    return {"id": ident, "k": ident * 5 % 7, "v": ident % 11, "ts": at, "visit": file // 2}


def clicks_of(file: int) -> list[dict[str, object]]:
    """Return six rows of one minute, and a copy of one of the minute before."""
    rows = [row(file, number) for number in range(ROWS_PER_FILE)]
    return [*rows, row(file - 1, 2)] if file else rows


def orders_of(file: int) -> list[dict[str, object]]:
    """Return three rows of one minute, each five seconds after a click of its key."""
    return [{**row(file, n), "ts": file * SECONDS_PER_FILE + n * 10 + 5} for n in (0, 3, 5)]


@dataclass(frozen=True)
class Shape:
    """What is declared on two sources, and a batch query for each sink by its name."""

    declare: Callable[[Job, Stage, Stage], Mapping[str, Output]]
    queries: Mapping[str, str]

    def add(self, job: Job, clicks: Stage, orders: Stage, tables: Path) -> None:
        for name, output in self.declare(job, clicks, orders).items():
            job.sink(name, output, table=str(tables / name))


def in_time(frame: DataFrame) -> DataFrame:
    return frame.withWatermark("ts", LATE)


def behind(watermark_of: str, view: str) -> str:
    """Return the rows of a view with the watermark of a stage at the same checkpoint."""
    return f"(SELECT * FROM {view} JOIN stages USING (checkpoint) WHERE stage = '{watermark_of}')"


def windows(provider: ProviderName, name: str = "") -> Shape:
    name = name or f"windows_{provider}"

    def count(frame: DataFrame) -> DataFrame:
        counts = in_time(frame).groupBy(F.window("ts", "25 seconds"), "k")
        sums = counts.agg(F.count("*").alias("n"), F.sum("v").alias("v"))
        return sums.selectExpr("window.end AS until", "k", "n", "v")

    def declare(job: Job, clicks: Stage, orders: Stage) -> Mapping[str, Output]:
        return {name: job.stage(name, [clicks], count, state_provider=provider)}

    query = f"""
        SELECT checkpoint, until, k, count(*) AS n, sum(v) AS v
        FROM (SELECT *, window(ts, '25 seconds').end AS until FROM {behind(name, "clicks")})
        WHERE until <= watermark GROUP BY checkpoint, until, k"""
    return Shape(declare, {name: query})


def _distinct(job: Job, clicks: Stage, orders: Stage) -> Mapping[str, Output]:
    def deduplicate(frame: DataFrame) -> DataFrame:
        return in_time(frame).dropDuplicates(["id", "ts"]).select("id", "ts")

    return {"distinct": job.stage("distinct", [clicks], deduplicate)}


DISTINCT = Shape(_distinct, {"distinct": "SELECT DISTINCT checkpoint, id, ts FROM clicks"})


def _joined(how: str) -> Callable[[DataFrame, DataFrame], DataFrame]:
    def join(clicks: DataFrame, orders: DataFrame) -> DataFrame:
        left = in_time(clicks).selectExpr("id AS click", "k AS ck", "ts AS clicked")
        right = in_time(orders).selectExpr("id AS bought", "k AS ok", "ts AS ordered")
        near = F.expr("ck = ok AND ordered BETWEEN clicked AND clicked + INTERVAL 20 SECONDS")
        return left.join(right, near, how).select("click", "clicked", "bought")

    return join


def _inner(job: Job, clicks: Stage, orders: Stage) -> Mapping[str, Output]:
    return {"inner_join": job.stage("inner_join", [clicks, orders], _joined("inner"))}


def _outer(job: Job, clicks: Stage, orders: Stage) -> Mapping[str, Output]:
    return {"outer_join": job.stage("outer_join", [clicks, orders], _joined("leftOuter"))}


_MATCHED = """
    SELECT c.checkpoint, c.id AS click, c.ts AS clicked, o.id AS bought
    FROM clicks c JOIN orders o ON c.checkpoint = o.checkpoint AND c.k = o.k
    AND o.ts BETWEEN c.ts AND c.ts + INTERVAL 20 SECONDS"""
_ALONE = f"""
    SELECT c.checkpoint, c.id AS click, c.ts AS clicked, CAST(NULL AS long) AS bought
    FROM {behind("outer_join", "clicks")} c LEFT ANTI JOIN orders o
    ON c.checkpoint = o.checkpoint AND c.k = o.k AND o.ts BETWEEN c.ts AND c.ts + INTERVAL 20 SECONDS
    WHERE c.ts + INTERVAL 20 SECONDS < c.watermark"""
INNER = Shape(_inner, {"inner_join": _MATCHED})
OUTER = Shape(_outer, {"outer_join": f"{_MATCHED} UNION ALL {_ALONE}"})

STEP = 4


def _milestones(key: tuple[int], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Say of a key each time that it has had four more rows, however they are spread over batches."""
    before = state.get[0] if state.exists else 0
    after = before + sum(len(frame) for frame in frames)
    state.update((after,))
    passed = [n for n in range(STEP, after + 1, STEP) if n > before]
    yield pd.DataFrame({"k": [key[0]] * len(passed), "n": passed}, dtype="int64")


def _counted(job: Job, clicks: Stage, orders: Stage) -> Mapping[str, Output]:
    def count(frame: DataFrame) -> DataFrame:
        no_timeout = GroupStateTimeout.NoTimeout
        schema = "k long, n long"
        return frame.groupBy("k").applyInPandasWithState(_milestones, schema, "n long", "append", no_timeout)

    return {"milestones": job.stage("milestones", [clicks], count)}


MILESTONES = Shape(
    _counted,
    {
        "milestones": f"""
            SELECT checkpoint, k, explode(sequence(bigint({STEP}), n, bigint({STEP}))) AS n
            FROM (SELECT checkpoint, k, count(*) AS n FROM clicks GROUP BY checkpoint, k)
            WHERE n >= {STEP}"""
    },
)


class Visit(StatefulProcessor):
    """Counts the rows of a visit, and lets it out 40 seconds of event time after its last row."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        fields = [StructField(name, LongType()) for name in ("n", "v", "last")]
        self.state = handle.getValueState("visit", StructType(fields))

    def handleInputRows(self, key, rows, timerValues):  # type: ignore[no-untyped-def] # noqa: N802, N803
        n, v, last = self.state.get() or (0, 0, 0)
        for one in rows:
            n, v, last = n + 1, v + one.v, max(last, int(one.ts.timestamp() * 1000))
        self.state.update((n, v, last))
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        self.handle.registerTimer(last + 40_000)
        return iter(())

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):  # type: ignore[no-untyped-def] # noqa: N802, N803
        n, v, _ = self.state.get() or (0, 0, 0)
        self.state.clear()
        yield Row(visit=key[0], n=n, v=v)

    def close(self) -> None:
        pass


def _visits(job: Job, clicks: Stage, orders: Stage) -> Mapping[str, Output]:
    def follow(frame: DataFrame) -> DataFrame:
        visits = in_time(frame).groupBy("visit")
        return visits.transformWithState(Visit(), "visit long, n long, v long", "append", "EventTime")

    return {"visits": job.stage("visits", [clicks], follow, state_provider="rocksdb")}


VISITS = Shape(
    _visits,
    {
        "visits": f"""
            SELECT checkpoint, visit, count(*) AS n, sum(v) AS v FROM {behind("visits", "clicks")}
            GROUP BY checkpoint, visit, watermark HAVING max(ts) + INTERVAL 40 SECONDS <= watermark"""
    },
)


def _neighbours(job: Job, clicks: Stage, orders: Stage) -> Mapping[str, Output]:
    def join(one: DataFrame, two: DataFrame) -> DataFrame:
        left, right = one.selectExpr("id", "v"), two.selectExpr("id AS next", "v AS w")
        return left.join(right, F.expr("id + 1 = next"))

    return {"neighbours": job.stage("neighbours", [clicks, clicks], join)}


NEIGHBOURS = Shape(
    _neighbours,
    {
        "neighbours": """
            SELECT a.checkpoint, a.id, a.v, b.id AS next, b.v AS w
            FROM clicks a JOIN clicks b ON a.checkpoint = b.checkpoint AND a.id + 1 = b.id"""
    },
)


def _diamond(job: Job, clicks: Stage, orders: Stage) -> Mapping[str, Output]:
    left = job.stage("left", [clicks], lambda frame: frame.select("id", "v"))
    right = job.stage(
        "right", [clicks], lambda frame: frame.where("v <> 3").selectExpr("id AS rid", "2 * v AS w")
    )
    joined = job.stage("diamond", [left, right], lambda one, two: one.join(two, F.expr("id = rid")))
    return {"diamond": joined}


DIAMOND = Shape(
    _diamond,
    {
        "diamond": """
            SELECT a.checkpoint, a.id, a.v, b.id AS rid, 2 * b.v AS w
            FROM clicks a JOIN clicks b ON a.checkpoint = b.checkpoint AND a.id = b.id WHERE b.v <> 3"""
    },
)


def _split(job: Job, clicks: Stage, orders: Stage) -> Mapping[str, Output]:
    apart = {
        "even": lambda batch: batch.where("id % 2 = 0"),
        "odd": lambda batch: batch.where("id % 2 = 1").select("id"),
    }
    split = job.stage("split", [clicks], lambda frame: frame.select("id", "v"), outputs=apart)
    sums = job.stage("sums", [split["even"]], lambda frame: frame.selectExpr("id", "v * v AS square"))
    return {
        "all": split,
        "odd": split["odd"],
        "odd_again": split["odd"],
        "even": split["even"],
        "squares": sums,
    }


SPLIT = Shape(
    _split,
    {
        "all": "SELECT checkpoint, id, v FROM clicks",
        "odd": "SELECT checkpoint, id FROM clicks WHERE id % 2 = 1",
        "odd_again": "SELECT checkpoint, id FROM clicks WHERE id % 2 = 1",
        "even": "SELECT checkpoint, id, v FROM clicks WHERE id % 2 = 0",
        "squares": "SELECT checkpoint, id, v * v AS square FROM clicks WHERE id % 2 = 0",
    },
)
