"""Sessions of clicks, and orders that wait for the click before them: two stateful functions in Python.

    clicks ──┬── sessions ── table sessions
             └──┐
    orders ─────┴── decide ── table decided

A session ends when its user has not clicked for a while. An order belongs to the newest earlier click of its
user. Such a click may arrive after the order, so the order waits in a list until no earlier click can arrive.
The list is bounded, so a hot user, or a source of clicks that stops, does not make the state of `decide`
grow.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import pandas as pd
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

import spark_abs

CLICKS = "click_id string, user string, campaign string, click_time timestamp"
ORDERS = "order_id string, user string, amount_cents long, order_time timestamp"

OPEN = "open array<struct<start:long, end:long, clicks:long>>"
SESSIONS = "user string, session_start timestamp, session_end timestamp, clicks long"
WAITING = "clicks array<struct<at:long, campaign:string>>, waiting array<struct<at:long, order_id:string>>"
DECIDED = "order_id string, user string, order_time timestamp, campaign string, why string"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Durations in milliseconds."""

    late_by_ms: int = 10_000
    """Clicks and orders come at most this late."""
    gap_ms: int = 30_000
    """A session ends when its user has not clicked for longer than this."""
    match_within_ms: int = 60_000
    """A click counts for orders until this long after it."""
    kept: int = 1_000
    """The most clicks, and the most waiting orders, that are kept for a user.

    The oldest are dropped first.
    """


def millis(at: datetime.datetime) -> int:
    """Return a time as milliseconds since the epoch."""
    return round(at.timestamp() * 1000)


def stamp(at_ms: int) -> datetime.datetime:
    """Return milliseconds since the epoch as a time, in the form that Spark passes to Python."""
    return datetime.datetime.fromtimestamp(at_ms / 1000)  # noqa: DTZ006 - the local zone is Spark's meaning


def sessions(
    bounds: Bounds, key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState
) -> Iterator[tuple[Any, ...]]:
    """Merge clicks into the open sessions of a user; emit sessions that no later click can prolong."""
    spans = [(s.start, s.end, s.clicks) for s in state.get[0]] if state.exists else []
    spans += [(at, at, 1) for at in (millis(row.click_time) for row in rows)]
    merged: list[tuple[int, int, int]] = []
    for start, end, clicks in sorted(spans):
        if merged and start - merged[-1][1] <= bounds.gap_ms:
            first, last, before = merged.pop()
            start, end, clicks = first, max(end, last), clicks + before
        merged.append((start, end, clicks))
    watermark = state.getCurrentWatermarkMs()
    still_open = [span for span in merged if span[1] + bounds.gap_ms >= watermark]
    for start, end, clicks in merged:
        if end + bounds.gap_ms < watermark:
            yield key[0], stamp(start), stamp(end), clicks
    if still_open:
        state.update((still_open,))
        state.setTimeoutTimestamp(min(end for _, end, _ in still_open) + bounds.gap_ms)
    else:
        state.remove()


def decide(
    bounds: Bounds, key: tuple[Any, ...], rows: Iterator[Row], state: spark_abs.GroupState
) -> Iterator[tuple[Any, ...]]:
    """Let orders wait until no earlier click can arrive; then decide their campaign.

    The list of waiting orders is bounded by the watermark and by their number.
    """
    clicks, waiting = [], []
    if state.exists:
        clicks = [(c.at, c.campaign) for c in state.get[0]]
        waiting = [(o.at, o.order_id) for o in state.get[1]]
    for row in rows:
        if row.order_id is None:
            clicks.append((millis(row.at), row.campaign))
        else:
            waiting.append((millis(row.at), row.order_id))
    clicks, waiting = sorted(clicks), sorted(waiting)
    watermark = state.getCurrentWatermarkMs()
    surplus = max(0, len(waiting) - bounds.kept)
    for number, (at, order_id) in enumerate(waiting):
        if at >= watermark and number >= surplus:
            break
        found = [name for when, name in clicks if at - bounds.match_within_ms <= when <= at]
        why = "known" if at < watermark else "given up"
        yield order_id, key[0], stamp(at), found[-1] if found else None, why
    waiting = [order for n, order in enumerate(waiting) if order[0] >= watermark and n >= surplus]
    clicks = [one for one in clicks if one[0] >= watermark - bounds.match_within_ms][-bounds.kept :]
    if not clicks and not waiting:
        state.remove()
        return
    state.update((clicks, waiting))
    until = [at for at, _ in waiting] + [at + bounds.match_within_ms for at, _ in clicks]
    state.setTimeoutTimestamp(max(min(until), watermark))


def sessions_of(bounds: Bounds, clicks: DataFrame) -> DataFrame:
    """Return the finished sessions of clicks."""
    late_by = f"{bounds.late_by_ms} milliseconds"
    return spark_abs.flat_map_groups_with_state(
        clicks.withWatermark("click_time", late_by),
        "user",
        partial(sessions, bounds),
        OPEN,
        SESSIONS,
        uid="sessions",
        timeout="event-time",
    )


def decided(bounds: Bounds, clicks: DataFrame, orders: DataFrame) -> DataFrame:
    """Return the orders, each with the campaign of the newest click before it."""
    none, late_by = F.lit(None).cast("string"), f"{bounds.late_by_ms} milliseconds"
    clicked = clicks.select("user", F.col("click_time").alias("at"), "campaign", none.alias("order_id"))
    placed = orders.select("user", F.col("order_time").alias("at"), none.alias("campaign"), "order_id")
    return spark_abs.flat_map_groups_with_state(
        # A watermark each: that of the batch is the lesser one, whichever channel is ahead.
        clicked.withWatermark("at", late_by).unionByName(placed.withWatermark("at", late_by)),
        "user",
        partial(decide, bounds),
        WAITING,
        DECIDED,
        uid="waiting",
        timeout="event-time",
    )


def declare(spark: SparkSession, base: str, bounds: Bounds, **settings: object) -> spark_abs.Job:
    """Declare the job: input in `base/input`, written by `generate_events.py`, tables beside it."""

    def events(kind: str, schema: str) -> DataFrame:
        reader = spark.readStream.format("json").schema(schema).option("maxFilesPerTrigger", 8)
        return reader.load(f"{base}/input/{kind}")

    job = spark_abs.Job("sessions", root=f"{base}/root", spark=spark, **settings)  # type: ignore[arg-type]
    clicks = job.source("clicks", events("clicks", CLICKS))
    orders = job.source("orders", events("orders", ORDERS))
    finished = job.stage("sessions", [clicks], partial(sessions_of, bounds))
    known = job.stage("decide", [clicks, orders], partial(decided, bounds))
    job.sink("sessions", finished, table=f"{base}/sessions")
    job.sink("decided", known, table=f"{base}/decided")
    return job


@click.command()
@click.option("--base", required=True, help="Directory or URI of all data of the job.")
@click.option("--master", help="Spark's master; None: the master of spark-submit.")
@click.option("--available-now", is_flag=True, help="Process the present input, then end.")
@click.option("--late-by", default="10s", show_default=True, help="How late clicks and orders may come.")
@click.option("--gap", default="30s", show_default=True, help="Silence that ends a session.")
def main(base: str, master: str | None, available_now: bool, late_by: str, gap: str) -> None:
    """Run the job until it is stopped."""
    bounds = Bounds(*(round(pd.Timedelta(given).total_seconds() * 1000) for given in (late_by, gap)))
    spark = spark_abs.spark_session("sessions", master)
    run = declare(spark, base, bounds).start(available_now=available_now)
    try:
        run.await_termination()
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
