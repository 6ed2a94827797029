"""What is stored of a stage's plan has one text in every supported Spark: a job is known again by it.

`stored_shapes.json` is the same for all of them: `python -m tests.spark.test_stored_shapes` writes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as t

from spark_abs.codec import to_json
from spark_abs.model import ChannelId
from spark_abs.plan.columns import unread_columns, used_columns
from spark_abs.plan.fingerprint import kept_by_place, operator_shapes
from spark_abs.spark.plans import optimized
from spark_abs.spark.session import spark_session

GOLDEN = Path(__file__).with_name("stored_shapes.json")
COLUMNS = "v long, ts timestamp, s string, d double, dec decimal(10,2), a array<long>, st struct<x: long>"
KEYS = (
    "lower(s)",
    "substring(s, 1, 2)",
    "coalesce(s, 'x')",
    "date_trunc('hour', ts)",
    "st.x",
    "to_timestamp(s)",
    "s LIKE 'a%'",
    "s IN ('a', 'b')",
    "v BETWEEN 1 AND 2",
    "date_add(to_date(ts), 1)",
    "ts + INTERVAL 1 DAY",
    "nvl(s, 'q')",
    "pmod(hash(s), 8)",
    "array_contains(a, 3L)",
    "element_at(a, 1)",
    "try_cast(s AS int)",
    "extract(DAY FROM ts)",
    "named_struct('a', v)",
    "get_json_object(s, '$.a')",
    "split(s, ',')[0]",
    "transform(a, x -> x + 1)",
    "v / 2",
    "IF(v > 3, raise_error('no ' || s), s)",
)
VALUES = (
    "count(1)",
    "sum(v)",
    "avg(d)",
    "sum(dec)",
    "max(ts)",
    "collect_list(a)",
    "approx_count_distinct(s)",
    "stddev(d)",
    "percentile_approx(v, 0.5)",
    "max_by(s, v)",
    "bool_or(v > 1)",
    "first(s, true)",
    "sum(v) FILTER (WHERE v > 2)",
    "try_sum(v)",
    "count_if(v > 1)",
    "array_agg(v)",
    "corr(d, d)",
    "sum(IF(v > 9, CAST(raise_error(concat('a(', s)) AS BIGINT), v))",
)


def _grouped(*keys: str) -> Callable[[DataFrame], DataFrame]:
    return lambda frame: frame.groupBy(*map(F.expr, keys)).agg(*map(F.expr, VALUES))


def _joined(frame: DataFrame) -> DataFrame:
    right = frame.selectExpr("s AS s2", "timestamp AS ts2", "v AS v2")
    near = "ts2 >= timestamp AND ts2 <= timestamp + INTERVAL 1 HOUR"
    return frame.alias("l").join(right.alias("r"), F.expr(f"s = s2 AND {near} AND v > 3"), "left_outer")


CASES: Mapping[str, Callable[[DataFrame], DataFrame]] = {
    "by each key": _grouped(*KEYS),
    "windows": _grouped("window(timestamp, '1 minute')", "s"),
    "windows that slide": _grouped("window(timestamp, '1 minute', '30 seconds')"),
    "sessions": _grouped("session_window(timestamp, '1 minute')", "s"),
    "what is exploded": lambda frame: _grouped("e")(frame.withColumn("e", F.explode("a"))),
    "duplicates": lambda frame: frame.dropDuplicates(["s", "v"]),
    "duplicates for a time": lambda frame: frame.dropDuplicatesWithinWatermark(["s"]),
    "distinct": lambda frame: frame.select("s", "v").distinct(),
    "a join": _joined,
}


def shapes(spark: SparkSession) -> Mapping[str, object]:
    """Return what is stored of each case, over a channel whose columns nothing has read yet."""
    schema = t.StructType.fromJson(spark.createDataFrame([], COLUMNS).schema.jsonValue())
    rate = spark.readStream.format("rate").load().withWatermark("timestamp", "10 minutes")
    unread = unread_columns(ChannelId("up.main"), schema, "value")
    found = {}
    for name, declare in CASES.items():
        frame = declare(rate.select(*unread, "timestamp", "value"))
        plan = optimized(frame)
        assert plan is not None
        found[name] = {
            "operators": [json.loads(to_json(shape)) for shape in operator_shapes(frame)],
            "by_place": kept_by_place(plan),
            "used": {str(c): sorted(places) for c, places in (used_columns(plan) or {}).items()},
        }
    return found


def test_shapes_are_those_of_every_spark(spark: SparkSession) -> None:
    golden = json.loads(GOLDEN.read_text())
    found = json.loads(json.dumps(shapes(spark)))
    assert found.keys() == golden.keys()
    for name in found:
        assert found[name] == golden[name], name


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(shapes(spark_session("shapes", "local[1]")), indent=1) + "\n")
