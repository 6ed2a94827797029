# Databricks notebook source
# MAGIC %md
# MAGIC # spark_abs on Databricks
# MAGIC
# MAGIC A shop with two queries, `priced` and `totals`. A bad release multiplies all amounts by 100. One
# MAGIC restore brings the state, the positions and both tables back.
# MAGIC
# MAGIC It needs compute with **dedicated access mode** and Databricks Runtime 17.3 LTS or later. Install
# MAGIC the wheel of spark_abs as a library of the compute; the [guide](../spark_abs/guide/databricks.md)
# MAGIC says how, and what was not tested on Databricks. The notebook uses the existing session,
# MAGIC changes no setting of the compute, and stops nothing that it did not start. Outside of Databricks it
# MAGIC is a plain script: `python notebooks/databricks.py`.

# COMMAND ----------

# MAGIC %md
# MAGIC ## Where the job is
# MAGIC
# MAGIC The widget `base` is an empty directory in an object store, `s3://BUCKET/PATH`, which the driver and
# MAGIC all executors reach. It must not be below `dbfs:/` or `/Volumes`. On one machine, leave it empty.

# COMMAND ----------

import os
import tempfile

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import spark_abs

utilities = globals().get("dbutils")  # Databricks puts it there
if utilities is not None:
    utilities.widgets.text("base", "", "An empty directory, as s3://BUCKET/PATH, abfss:// or gs://")
    base = utilities.widgets.get("base").rstrip("/")
else:
    base = os.environ.get("SHOP_BASE", "")

there = globals().get("spark") or SparkSession.getActiveSession()
spark = there or spark_abs.spark_session("shop", "local[2]")

given, base = base, base or tempfile.mkdtemp(prefix="spark-abs-")
root = f"{base}/root"
spark_abs.Job("shop", root=root, spark=spark)  # refuses compute and places that no job can have
if not given and not spark.sparkContext.master.startswith("local"):
    raise ValueError("say in the widget `base` where the job is, as s3://BUCKET/PATH, abfss:// or gs://")
print(f"Spark {spark.version}, root {root}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Settings of the session
# MAGIC
# MAGIC These can be set while a session runs, and only this session has them. The first one is needed:
# MAGIC spark_abs knows the files of Spark's own state stores, and not those of
# MAGIC `com.databricks.sql.streaming.state.RocksDBStateStoreProvider`.

# COMMAND ----------

state_store = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
spark.conf.set("spark.sql.streaming.stateStore.providerClass", state_store)
spark.conf.set("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
spark.conf.set("spark.sql.shuffle.partitions", "2")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The job

# COMMAND ----------

ORDERS = "item string, cents long"


def arrive(*amounts):
    """Add a file of orders."""
    rows = spark.createDataFrame([("tea", cents) for cents in amounts], ORDERS)
    rows.coalesce(1).write.mode("append").json(f"{base}/orders")


def sum_of_items(priced):
    return priced.groupBy("item").agg(F.sum("cents").alias("cents"))


def shop(factor):
    job = spark_abs.Job("shop", root=root, spark=spark)
    orders = spark.readStream.schema(ORDERS).json(f"{base}/orders")
    priced = job.stage("priced", [orders], lambda o: o.withColumn("cents", o.cents * factor))
    totals = job.stage("totals", [priced], sum_of_items, output_mode="update")
    job.sink("sales", priced, table=f"{base}/sales")
    job.sink("totals", totals, table=f"{base}/totals")  # a row each time a total changes
    return job


def release(factor, savepoint):
    """Process what is there, then stop with a savepoint."""
    run = shop(factor).start()
    run.query("priced").processAllAvailable()
    run.stop(savepoint=savepoint)


def amounts(table):
    return sorted(row.cents for row in spark.read.format("delta").load(f"{base}/{table}").collect())


# COMMAND ----------

# MAGIC %md
# MAGIC ## A release, and a bad one

# COMMAND ----------

arrive(250, 300)
release(factor=1, savepoint="before-release")
print(f"at the savepoint: sales {amounts('sales')}, totals {amounts('totals')}")

arrive(400)
release(factor=100, savepoint="bad-release")
print(f"after the bad release: sales {amounts('sales')}, totals {amounts('totals')}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Back, and on with the right release

# COMMAND ----------

print(spark_abs.open(root, spark).restore("before-release"))
shop(factor=1).start(available_now=True).await_termination()

found = {table: amounts(table) for table in ("sales", "totals")}
print(f"restored and corrected: {found}")
assert found == {"sales": [250, 300, 400], "totals": [550, 950]}

# COMMAND ----------

# MAGIC %md
# MAGIC ## The checkpoints of the job
# MAGIC
# MAGIC They are a Delta table. `spark_abs.open(root, spark)` has more: `history`, `read`, `state`,
# MAGIC `verify`.

# COMMAND ----------

checkpoints = spark.read.format("delta").load(f"{root}/checkpoints")
checkpoints.select("id", "kind", "name").orderBy("id").show(truncate=False)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The end
# MAGIC
# MAGIC All files are below `base`: remove the directory when you are done. A session that was there goes
# MAGIC on.

# COMMAND ----------

if there is None:
    spark.stop()
if utilities is not None:
    utilities.notebook.exit(str(found))
