"""The generator: the same files for the same seed, lateness within its bound, nothing half written."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
from click.testing import CliRunner

from generate_events import HOT_USER, START, WRONG_FACTOR, Traffic, main, write_file

TRAFFIC = Traffic(hot_share=0.2)


def seconds(event: dict[str, object], column: str) -> float:
    when = event[column]
    assert isinstance(when, datetime)
    return (when - START).total_seconds()


def test_every_event_arrives_exactly_once_whatever_files_were_asked_for() -> None:
    ids = [event["click_id"] for number in range(20) for event in TRAFFIC.file("clicks", number)]
    assert len(ids) == len(set(ids))
    born_early = {i for i in ids if str(i) < "c000018"}
    assert len(born_early) == 18 * TRAFFIC.clicks_per_slice


def test_events_are_late_and_never_later_than_the_bound() -> None:
    times = [seconds(event, "order_time") for n in range(50) for event in TRAFFIC.file("orders", n)]
    newest, lateness = 0.0, 0.0
    for at in times:
        newest = max(newest, at)
        lateness = max(lateness, newest - at)
    assert any(later < earlier for earlier, later in pairwise(times))
    assert TRAFFIC.slice_seconds < lateness <= TRAFFIC.late_seconds


def test_one_user_is_hot() -> None:
    users = [event["user"] for n in range(10) for event in TRAFFIC.file("clicks", n)]
    assert 0.15 < users.count(HOT_USER) / len(users) < 0.25


def test_wrong_orders_differ_in_their_amount_alone() -> None:
    right, wrong = TRAFFIC.file("orders", 3), TRAFFIC.file("orders", 3, wrong=True)
    assert [{**o, "amount_cents": int(str(o["amount_cents"])) * WRONG_FACTOR} for o in right] == wrong


def test_a_file_that_is_there_is_left_alone_and_no_other_name_stays(tmp_path: Path) -> None:
    assert write_file(tmp_path, "clicks", 0, "json", TRAFFIC.file("clicks", 0))
    (target,) = (tmp_path / "clicks").iterdir()
    before = target.read_text()
    assert not write_file(tmp_path, "clicks", 0, "json", TRAFFIC.file("clicks", 1))
    assert [p.name for p in (tmp_path / "clicks").iterdir()] == ["clicks-000000.json"]
    assert target.read_text() == before


def test_json_and_parquet_hold_the_same_events_and_it_stops_by_count(tmp_path: Path) -> None:
    for form in ("json", "parquet"):
        done = CliRunner().invoke(main, [str(tmp_path / form), "--files", "2", "--format", form])
        assert done.exit_code == 0, done.output
    lines = (tmp_path / "json" / "orders" / "orders-000001.json").read_text().splitlines()
    rows = pq.read_table(tmp_path / "parquet" / "orders" / "orders-000001.parquet").to_pylist()
    plain = [json.loads(line) for line in lines]
    assert [r["order_id"] for r in rows] == [o["order_id"] for o in plain]
    assert [r["order_time"] for r in rows] == [datetime.fromisoformat(o["order_time"]) for o in plain]
    assert len(list((tmp_path / "json" / "clicks").iterdir())) == 2
