"""A process with jobs that write tables by their names in a catalog that outlives it, made to be killed.

    changes (adopted) ─┬─ table raw_N             with VARCHAR: Delta's own writer
                       └─ joined ── customers_N   a lookup: the newest version in each batch
                            ├─ table joined_N     appended
                            └─ table last_N       the newest change of a key, with deletes

N is the name of the directory of a job. The process does as `driver` does, runs the native query that a job
adopts, and restores.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import spark_abs
from spark_abs.store.failpoint import Failpoint
from tests.crash.driver import Driver, Events, metastore, quick_session

SCHEMA = "id long, country string, op string, n long"
KEY = ("country", "id")


def table(base: Path, kind: str) -> str:
    return f"default.{kind}_{base.name}"


def changes(spark: SparkSession, base: Path) -> DataFrame:
    read = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    return read.json(str(base / "input"))


def join(changes: DataFrame, customers: DataFrame) -> DataFrame:
    return changes.join(customers, "id", "left").select("id", "country", "op", "n", "name")


def declare(
    spark: SparkSession, base: Path, config: Mapping[str, object], failpoint: Failpoint
) -> spark_abs.Job:
    job = spark_abs.Job("tables", root=str(base / "root"), spark=spark, config=config)
    job.failpoint = failpoint
    customers = job.lookup("customers", table=table(base, "customers"), refresh="batch")
    source = job.source("changes", changes(spark, base), adopt=str(base / "old"))
    joined = job.stage("joined", [source, customers], join)
    job.sink("raw", source, table=table(base, "raw"))
    job.sink("joined", joined, table=table(base, "joined"))
    last = spark_abs.Delta(
        table(base, "last"), key=KEY, partition_by="country", sequence_by="n", apply_as_deletes="op = 'D'"
    )
    job.sink("last", joined, table=last)
    return job


class TablesDriver(Driver):
    def obey(self, command: dict[str, Any]) -> None:
        match command:
            case {"native": base}:
                self._do(base, partial(self._native, Path(base)))
            case {"restore": base, "to": checkpoint}:
                root = str(Path(base) / "root")
                self._do(base, partial(spark_abs.open(root, self._spark).restore, checkpoint))
            case _:
                super().obey(command)

    def _native(self, base: Path) -> None:
        """Run the query that the job adopts, for all that has arrived."""
        kind = "id LONG, country STRING, op VARCHAR(8), n LONG"
        self._spark.sql(f"CREATE TABLE {table(base, 'raw')} ({kind}) USING delta")
        writer = changes(self._spark, base).writeStream.format("delta").trigger(availableNow=True)
        at = f"{self._spark.conf.get('spark.sql.warehouse.dir')}/raw_{base.name}"
        writer.option("checkpointLocation", str(base / "old")).start(at).awaitTermination()

    def _do(self, base: str, do: Callable[[], object]) -> None:
        def told() -> None:
            try:
                do()
            except Exception as error:  # noqa: BLE001 - the thread's edge: the test is told
                self._events.tell(base=base, ended=type(error).__name__, message=str(error))
            else:
                self._events.tell(base=base, ended="")

        threading.Thread(target=told, daemon=True).start()


def main() -> None:
    scratch, catalog = sys.argv[2:]
    events = Events(int(sys.argv[1]))
    settings = {**metastore(catalog), "spark.sql.warehouse.dir": f"{catalog}/warehouse"}
    spark = quick_session(scratch, "local[2]", **settings)
    events.tell(ready=True)
    driver = TablesDriver(spark, events, declare)
    for line in sys.stdin:
        driver.obey(json.loads(line))


if __name__ == "__main__":
    main()
