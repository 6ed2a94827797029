"""Calls that a type checker must accept; `tests/unit/test_typing.py` reads this file, nothing runs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession

import spark_abs


def declared(spark: SparkSession, clicks: DataFrame, config: dict[str, object]) -> spark_abs.Run:
    job = spark_abs.Job(
        "shop",
        root="/data/shop",
        spark=spark,
        config=config,
        interval="10s",
        mode="unaligned",
        max_concurrent=2,
        synchronous=False,
        tolerable_failures="unlimited",
        capacity_entries=500,
        restart_strategy="fixed-delay",
        restart_multiplier=2,
        endpoint=None,
    )
    again = job.feedback("again", "id long")
    source = job.source("clicks", clicks, state_provider="hdfs", outputs={"late": lambda batch: batch})
    stage: spark_abs.Stage = job.stage(
        "match", [source["late"], again, clicks], lambda a, b, c: a, output_mode="update", begin="earliest"
    )
    again.close(stage)
    job.stage("older", [source], lambda rows: rows, adopt="/data/older_checkpoint")
    job.sink("old", job.source("old", clicks, adopt="/data/old_checkpoint"), table="/data/old")
    job.sink("out", stage, table="/data/out", existing="take_over")
    job.sink("mail", stage["main"], foreach_batch=lambda frame, batch: None)
    assert job.explain(allow_non_restored_state=True).stages[0].native
    assert job.check(to=3).ok
    return job.start(restart="checkpoint", takeover=True)


def running(run: spark_abs.Run) -> int | None:
    try:
        run.savepoint("before", timeout=2.5)
        run.set(interval="30s", mode="at_least_once")
        assert run.cancel(run.checkpoint(timeout=2)) == run.pause("clicks") + run.restart("match")
        assert run.skip_file("clicks", "file:///in/7.json") == run.resume()
        run.follow()
    except spark_abs.CheckpointPending as late:
        return late.exit_code
    except (spark_abs.Refused, spark_abs.StageFailed, spark_abs.DamageError):
        raise
    return run.stop(savepoint="last", drain=True)


def looked_at(spark: SparkSession) -> spark_abs.Edit:
    shop = spark_abs.open("s3://bucket/shop", spark, region="eu-west-1", allow_http=False)
    rows: list[dict[str, object]] = shop.checkpoints().to_pylist()
    assert rows == shop.history(limit=3).to_pylist() == shop.verify("latest").to_pylist()
    assert shop.status().alive is None
    assert shop.cancel("before") == shop.pause() == shop.resume("clicks") == shop.restart("match")
    assert shop.skip_file("clicks", "/in/7.json", "/in/8.json", timeout=2.5) == shop.resume()
    assert shop.checkpoint() > 0
    assert shop.inspect.state(7).num_rows == shop.inspect.sinks().num_rows == 0
    sales: DataFrame = shop.read("sales", "before")
    shop.state("count", 7, operator=0, diff="latest").unionByName(sales)
    assert shop.restore("before", force=["run", "rows"], shuffle_partitions={"count": 8}).run == 7
    shop.forget("daily")
    return shop.edit("before").keep_in("count", "rocksdb")


def handle(root: str) -> spark_abs.JobRoot:
    return spark_abs.open(root)


def wrapped(frame: DataFrame) -> None:
    write = spark_abs.foreach_batch(lambda batch, number: None, root="/r", stage="daily", interval="1m")
    where = spark_abs.checkpoint_location("/r", "daily", adopt="/old", region="eu-west-1")
    frame.writeStream.foreachBatch(write).option("checkpointLocation", where).start()


def built(builder: SparkSession.Builder) -> SparkSession:
    connectors = [spark_abs.DELTA_CONNECTOR, spark_abs.KAFKA_CONNECTOR, spark_abs.S3_CONNECTOR]
    connectors += [spark_abs.AZURE_CONNECTOR, spark_abs.GOOGLE_CONNECTOR]
    spark_abs.configure(builder, packages=["org.example:jar:1", *connectors]).getOrCreate()
    return spark_abs.spark_session("shop", "local[2]", **{"spark.sql.shuffle.partitions": "2"})


def outside(job: spark_abs.Job, stage: spark_abs.Output, own: spark_abs.TwoPhaseSink) -> None:
    job.sink("rows", stage, postgres="rows")
    job.sink("merged", stage, table=spark_abs.Delta("merged", key="key", partition_by=["day"], evolve=True))
    job.sink("shown", stage, table=spark_abs.Delta("shown", visible="checkpoint"))
    job.sink("last", stage, postgres=spark_abs.Postgres("last", mode="upsert", key=("key",), history=True))
    job.sink("topic", stage, kafka="topic")
    job.sink("many", stage, kafka=spark_abs.Kafka(bootstrap="here:9092"))
    job.sink("lake", stage, iceberg="shop.orders")
    job.sink("wide", stage, iceberg=spark_abs.Iceberg("shop.wide", evolve=True))
    job.sink("own", stage, two_phase=own)


class Own(spark_abs.TwoPhaseSink):
    def mark(self, owner: spark_abs.Owner) -> spark_abs.Mark | None:
        return self.recover(owner)

    def recover(self, owner: spark_abs.Owner) -> spark_abs.Mark | None:
        return None

    def commit(self, epoch: spark_abs.Epoch, rows: spark_abs.Rows) -> None:
        assert epoch.mark.checkpoint
        list(rows)

    def abort(self, owner: spark_abs.Owner, back: spark_abs.Mark, *, keep: bool) -> None:
        raise spark_abs.Refused(f"{owner.sink} cannot go back to {back.checkpoint}")


def write(batch: DataFrame, _: int) -> None:
    at: spark_abs.Current = spark_abs.current()
    batch.write.option("txnAppId", at.app_id).option("txnVersion", at.batch).save("/data/out")


def count(key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState) -> tuple[Any, ...]:
    before = state.get[0] if state.exists else 0
    state.update((before + sum(1 for _ in rows),))
    return (*key, before)


def each(key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState) -> Iterator[Row]:
    state.setTimeoutDuration(1_000)
    yield from rows


def at_once(rows: pa.Table, states: pa.Table, batch: spark_abs.GroupBatch) -> spark_abs.GroupAnswer:
    return spark_abs.GroupAnswer(states if batch.batch else None, output=rows, removed=batch.timed_out)


def with_state(frame: DataFrame) -> None:
    spark_abs.map_groups_with_state(frame, "k", count, "n long", "k string, n long", ttl="1h", uid="counts")
    spark_abs.flat_map_groups_with_state(frame, ["k"], each, "n long", "k string", timeout="processing-time")
    spark_abs.map_batches_with_state(frame, "k", at_once, "n long", "k string", output_mode="update")
