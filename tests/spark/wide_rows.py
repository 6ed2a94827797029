"""A process with little direct memory that sends wide rows through a channel; prints what the sinks have."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import spark_abs

ROWS = 8_000
WIDTH = 20_000


def main(base: Path) -> None:
    """Run it, on rows of twenty kilobytes: one text for all, and one for each that compresses well."""
    spark = spark_abs.spark_session(
        "wide",
        "local[2]",
        **{"spark.driver.memory": "1g", "spark.driver.extraJavaOptions": "-XX:MaxDirectMemorySize=128m"},
    )
    wide = F.lit("x" * WIDTH)
    rows = spark.range(0, ROWS, 1, 1).select("id", wide.alias("same"), F.concat(wide, "id").alias("own"))
    rows.write.parquet(str(base / "rows"))
    job = spark_abs.Job("wide", root=str(base / "root"), spark=spark)
    source = job.source("rows", spark.readStream.schema(rows.schema).parquet(str(base / "rows")))
    for name in ("same", "own"):

        def lengths(given: DataFrame, name: str = name) -> DataFrame:
            return given.select("id", F.length(name).alias("length"))

        stage = job.stage(name, [source], lengths)
        job.sink(name, stage, table=str(base / name))
    job.start(available_now=True).await_termination()
    for name in ("same", "own"):
        found = spark.read.format("delta").load(str(base / name)).agg(F.count("*"), F.sum("length"))
        (row,) = found.collect()
        sys.stdout.write(f"{name} {row[0]} {row[1]}\n")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
