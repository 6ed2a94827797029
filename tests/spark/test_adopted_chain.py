"""A job takes the place of a chain of native queries, at a cut where nothing is unread between them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import spark_abs
from spark_abs.cli.main import main
from spark_abs.cli.root_command import Context
from spark_abs.job import Job
from spark_abs.store.failpoint import Failpoint, no_failpoint
from tests.job_support import Feed, manifests
from tests.spark.conftest import Start, killed_at


def without_repeats(rows: DataFrame) -> DataFrame:
    return rows.dropDuplicates(["id"])


def counts(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").agg(F.count("*").alias("n"))


@dataclass
class Chain:
    """Files to bronze, each id once to silver, counts to gold: three queries with tables between them."""

    spark: SparkSession
    base: Path

    def __post_init__(self) -> None:
        self.feed = Feed(self.spark, self.base / "in", "id long, k long")

    @property
    def root(self) -> str:
        return str(self.base / "root")

    def at(self, what: str, query: str) -> str:
        return str(self.base / what / query)

    def arrive(self, *ids: int) -> None:
        self.feed.write(*({"id": i, "k": i % 3} for i in ids))

    def run(self, *queries: str) -> None:
        """Run native queries to the end of what is there, one after the other."""
        for query in queries or ("bronze", "silver", "gold"):
            frame, mode = self.feed.stream(), "append"
            if query != "bronze":
                source = {"silver": "bronze", "gold": "silver"}[query]
                rows = self.spark.readStream.format("delta").option("maxFilesPerTrigger", 1)
                frame = rows.load(self.at("t", source))
                frame = without_repeats(frame) if query == "silver" else counts(frame)
                mode = "append" if query == "silver" else "complete"
            writer = frame.writeStream.format("delta").outputMode(mode).trigger(availableNow=True)
            at = writer.option("checkpointLocation", self.at("c", query))
            at.start(self.at("t", query)).awaitTermination()

    def job(self, failpoint: Failpoint = no_failpoint, silver: Any = without_repeats) -> Job:
        job = Job("job", root=self.root, spark=self.spark, keep=20)
        job.failpoint = failpoint
        bronze = job.source("bronze", self.feed.stream(), adopt=self.at("c", "bronze"))
        second = job.stage("silver", [bronze], silver, adopt=self.at("c", "silver"))
        third = job.stage("gold", [second], counts, output_mode="complete", adopt=self.at("c", "gold"))
        for name, stage in (("bronze", bronze), ("silver", second), ("gold", third)):
            job.sink(name, stage, table=self.at("t", name))
        return job

    def is_whole(self) -> None:
        """Compare every table with pandas."""
        sent = pd.DataFrame([row for rows in self.feed.files for row in rows])
        once = sent.drop_duplicates()
        held = {name: DeltaTable(self.at("t", name)).to_pandas() for name in ("bronze", "silver", "gold")}
        assert sorted(held["bronze"]["id"]) == sorted(sent["id"])
        assert sorted(held["silver"]["id"]) == sorted(once["id"])
        assert (
            dict(zip(held["gold"]["k"], held["gold"]["n"], strict=True)) == once.groupby("k").size().to_dict()
        )


@pytest.fixture
def chain(spark: SparkSession, tmp_path: Path) -> Chain:
    chain = Chain(spark, tmp_path)
    chain.arrive(1, 2, 2)
    chain.arrive(2, 3)
    chain.run()
    chain.is_whole()
    return chain


def test_a_chain_goes_on_as_a_job_wherever_its_start_is_killed(chain: Chain, start: Start) -> None:
    """Every row once in every table; the first checkpoint has all, and is gone back to."""
    chain.arrive(3, 4)
    points = [
        "adopt.silver.copy.after",
        "change.record.after",
        "adopt.silver.fence.before",
        "adopt.gold.fence.after",
        "start.state.after",
    ]
    for point in points:
        killed_at(point, lambda kill: start(chain.job(kill), available_now=True))
    start(chain.job(), available_now=True).await_termination()
    chain.is_whole()
    first = max(m.id for m in manifests(chain.root))
    chain.arrive(1, 5)
    chain.arrive(5, 6, 7)
    assert chain.job().check().ok
    start(chain.job(), available_now=True).await_termination()
    chain.is_whole()
    spark_abs.open(chain.root, chain.spark).restore(first)
    start(chain.job(), available_now=True).await_termination()
    chain.is_whole()


def test_what_is_unread_between_queries_is_refused_until_a_rewind(chain: Chain, start: Start) -> None:
    """The message names the stage and the command; other operators are refused, too."""
    chain.arrive(3, 4)
    chain.run("bronze")
    said = str(chain.job().check())
    assert not chain.job().check().ok
    assert f"stage 'silver' cannot adopt {chain.at('c', 'silver')}" in said
    assert "has further rows, which a channel would not have" in said
    assert "`spark-abs rewind --checkpoints ... --tables ...`" in said
    assert "stage 'gold' cannot adopt" not in said
    rewind = ["rewind", "--checkpoints", f"{chain.base}/c/*", "--tables", f"{chain.base}/t/*", "--yes"]
    done = CliRunner().invoke(main, rewind, obj=Context(pause=lambda _: None))
    assert done.exit_code == 0, done.output
    checked = chain.job().check()
    assert checked.ok, str(checked)
    other = str(chain.job(silver=lambda rows: rows.where("k >= 0")).check())
    assert "its query has state for dropDuplicates, and the declared frame needs state for nothing" in other
    start(chain.job(), available_now=True).await_termination()
    chain.is_whole()


SCRIPT = """
from pyspark.sql import SparkSession, functions as F
import spark_abs

base, spark = {base!r}, SparkSession.getActiveSession()
orders = spark.readStream.schema("id long, k long").option("maxFilesPerTrigger", 1).json(base + "/in")
job = spark_abs.Job("job", root=base + "/root", spark=spark)
bronze = job.source("files", orders)
silver = job.stage("once", [bronze], lambda rows: rows.dropDuplicates(["id"]))
gold = job.stage("numbers", [silver], lambda rows: rows.groupBy("k").agg(F.count("*").alias("n")), {mode})
for name, stage in (("bronze", bronze), ("silver", silver), ("gold", gold)):
    job.sink(name, stage, table=base + "/t/" + name)
job.start(available_now=True).await_termination()
"""


def adopt(chain: Chain, script: Path, *arguments: str, exits: int = 0) -> Result:
    called = ["adopt", str(script), "--root", chain.root, "--checkpoints", f"{chain.base}/c/*", *arguments]
    result = CliRunner().invoke(main, called, obj=Context())
    assert result.exit_code == exits, (result.output, result.exception)
    return result


def test_the_command_finds_which_stage_adopts_which_query(chain: Chain, tmp_path: Path) -> None:
    """Afterwards the script, which says nothing of it, goes on."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(base=str(tmp_path), mode="output_mode='update'"))
    said = adopt(chain, script, "--yes", exits=1).output
    assert "in output mode 'complete'" in said
    assert not Path(chain.root).exists()
    script.write_text(SCRIPT.format(base=str(tmp_path), mode="output_mode='complete'"))
    said = adopt(chain, script, "--dry-run").output
    assert f"adopts {tmp_path}/c/silver: query" in said
    assert not Path(chain.root).exists()
    chain.arrive(3, 4)
    done = json.loads(adopt(chain, script, "--yes", "--output", "json").stdout)
    assert done["applied"]
    savepoint = spark_abs.open(chain.root).checkpoints().to_pylist()[-1]
    assert (savepoint["id"], savepoint["name"]) == (done["savepoint"], "adopted")
    assert json.loads(adopt(chain, script, "--yes", "--output", "json").stdout) == done
    assert (
        f"savepoint 'adopted', checkpoint {done['savepoint']}, has all"
        in adopt(chain, script, "--yes").output
    )
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    chain.is_whole()
