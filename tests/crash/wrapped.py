"""A process with wrapped queries of one root that is made to be killed.

Arguments: the number of a pipe, which is left alone; the directory of everything; the queries to start. One
copies `in-<name>` to `out-<name>`, or after `--catalog` to the table `out_<name>` of a catalog that outlives
the process; `<name>:<other>` reads `out-<other>` instead. While there is a file `hold`, or `hold-<name>`, it
says so in a file `held` at the beginning of a batch, and waits; while there is `hold-after`, at the end.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

import spark_abs
from tests.crash.driver import metastore, quick_session

CATALOG = "--catalog"


def main() -> None:
    """Start the queries and wait to be killed."""
    base, names = Path(sys.argv[2]), [name for name in sys.argv[3:] if name != CATALOG]
    spark = quick_session(
        str(base / "scratch"), "local[2]", **(metastore(base) if CATALOG in sys.argv else {})
    )
    root, pause = str(base / "root"), threading.Event()
    for text in names:
        name, _, other = text.partition(":")
        table = f"default.out_{name}" if CATALOG in sys.argv else str(base / f"out-{name}")

        def write(batch: DataFrame, number: int, table: str = table, name: str = name) -> None:
            while (base / "hold").exists() or (base / f"hold-{name}").exists():
                (base / "held").touch()
                pause.wait(0.05)
            writer = batch.write.format("delta").mode("append")
            app = spark_abs.current().app_id
            writer = writer.option("txnAppId", app).option("txnVersion", number)
            (writer.saveAsTable if CATALOG in sys.argv else writer.save)(table)
            while (base / "hold-after").exists():
                (base / "held").touch()
                pause.wait(0.05)

        function = spark_abs.foreach_batch(
            write, root=root, stage=name, interval="300ms", skip_unchanged=False, tables=[table]
        )
        read = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1)
        frame = read.json(str(base / f"in-{name}")) if not other else between(spark, base / f"out-{other}")
        started = frame.writeStream.foreachBatch(function)
        started.option("checkpointLocation", spark_abs.checkpoint_location(root, name)).start()
    pause.wait()


def between(spark: SparkSession, table: Path) -> DataFrame:
    """Return the rows of a table as a stream, once another query has made it."""
    pause = threading.Event()
    while not DeltaTable.is_deltatable(str(table)):
        pause.wait(0.05)
    return spark.readStream.format("delta").load(str(table))


if __name__ == "__main__":
    main()
