"""From two topics to sinks of every kind: killed at any moment, taken over while frozen, brought back.

`KILLS=20` kills at so many random moments, and at every point of a send; `SEED` says at which ones.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import TopicPartition

import spark_abs
from spark_abs.cli.main import main
from spark_abs.errors import Refused
from spark_abs.restore.restoring import RestorePlan
from tests.crash.facts import check_root
from tests.crash.relay import (
    EXPIRES,
    FORGOTTEN_S,
    KAFKA,
    OUTSIDE,
    Found,
    Relay,
    after,
    as_read,
    points_of_sends,
)
from tests.outside.kafka_server import PATIENCE_S, KafkaServer
from tests.outside.server import PostgresServer

_log = logging.getLogger(__name__)
KILLS = int(os.environ.get("KILLS", "1"))
SEED = int(os.environ.get("SEED", "7"))
EVERY_POINT = KILLS >= 20

pytestmark = pytest.mark.timeout(900 + 120 * KILLS)


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaServer]:
    with KafkaServer(EXPIRES) as server:
        yield server


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.mark.long
def test_killed_and_taken_over_everything_is_everywhere_once(
    tmp_path: Path, broker: KafkaServer, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the job is down for longer than the broker keeps a transaction, and then its id."""
    chance = random.Random(SEED)
    relay = Relay(tmp_path, broker, postgres, "kills-").open(monkeypatch)
    points = [{f"send.{sink}.recover.before": 1} for sink in OUTSIDE]
    turns = [points_of_sends(chance, turn) for turn in range(4)]
    if not EVERY_POINT:
        points, turns = [points[SEED % len(points)]], [turns[SEED % len(turns)]]
    lives: list[dict[str, int]] = [*turns, *points, *({} for _ in range(KILLS))]
    chance.shuffle(lives)
    moments = 0
    forgotten: Callable[[], bool] = lambda: True  # noqa: E731
    for life in lives:
        with relay.process() as driver:
            driver.wait_ready()
            driver.wait_for(forgotten, "the broker to forget")
            if life:
                relay.feed()
                driver.told.clear()
                driver.say({"points": life})
                driver.wait_for_end(f"the death at {life}", relay.feed_while(driver))
            else:
                relay.start(driver)
                relay.until_next_checkpoint(driver)
                if moments == 0:
                    broker.restart()
                    relay.until_next_checkpoint(driver)
                    postgres.restart()
                    relay.until_all_is_read(driver)  # Kafka keeps no order of a key that changes partition
                    broker.grow("kills-in", 3)
                    relay.until_next_checkpoint(driver)
                moments += 1
                driver.wait_for(after(2 * chance.random()), "the moment to kill", lambda: relay.feed(5))
                driver.kill()
        forgotten = after(FORGOTTEN_S)

    # The run that is replaced is frozen within its transactions, and goes on with them when it wakes up.
    with relay.process() as first, relay.process() as second:
        first.wait_ready()
        second.wait_ready()
        within = points_of_sends(chance, SEED)
        relay.start(first, points=within, then="stay")
        at = lambda: {event["at"] for event in first.told if "at" in event} == within.keys()  # noqa: E731
        first.wait_for(at, lambda: f"all sends at {within}", relay.feed_while(first))
        first.signal(signal.SIGSTOP)
        relay.start(second, takeover=True)
        relay.until_next_checkpoint(second)
        relay.feed(100)
        first.say({"go": True})
        first.signal(signal.SIGCONT)
        assert relay.end(first) == "Fenced"
        relay.until_next_checkpoint(second)
        second.kill()
        assert relay.finish(first) == "", first.told
    _log.info(
        "seed %d: killed at %d moments and %d times at points, %d records in, %d matched; %s",
        SEED,
        KILLS + 1,
        len(lives) - KILLS,
        len(relay.placed),
        len(relay.paid),
        relay.wrong(),
    )
    relay.require_once()
    check_root(tmp_path, ["table"])
    relay.require_no_secret()


@pytest.mark.long
def test_back_to_a_savepoint_the_plan_is_what_happens_to_every_sink(
    tmp_path: Path, broker: KafkaServer, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, root = Relay(tmp_path, broker, postgres, "back-").open(monkeypatch), str(tmp_path / "root")
    with relay.process() as driver:
        driver.wait_ready()
        relay.feed(100)
        relay.start(driver)
        relay.until_all_is_read(driver)
        driver.say({"stop": "early"})
        assert relay.end(driver) == "", driver.told
        relay.require_once()
        then, early = relay.found(), relay.checkpoints()[-1]
        relay.feed(100)
        assert relay.finish(driver) == "", driver.told
        relay.require_once()
        now = relay.found()

        # What Kafka has it keeps, and that is said, with the offsets: they hold what came after and no more.
        with pytest.raises(Refused, match=r"sink out \(Kafka\) has committed") as refused:
            spark_abs.open(root).restore("early")
        relay.said.append(str(refused.value))
        assert _within(str(refused.value), broker, "back-out") == _behind(then, now)
        assert relay.found() == now

        # The plan as people and programs read it is the plan that is carried out.
        command = ["restore", root, "--to", "early", "--force", "outside"]
        text = CliRunner().invoke(main, [*command, "--dry-run"])
        shown = CliRunner().invoke(main, [*command, "--dry-run", "--output", "json"])
        relay.said += [text.output, shown.output]
        assert relay.found() == now
        assert relay.marks() == dict.fromkeys(OUTSIDE, relay.checkpoints()[-1])
        plan = spark_abs.open(root).restore("early", force=["outside"]).plan
        steps: Any = plan.plain()["steps"]
        assert json.loads(shown.stdout)["plan"]["steps"] == json.loads(json.dumps(steps))
        said = re.sub(r"\s+", " ", text.stdout)
        assert all(re.sub(r"\s+", " ", step["says"]) in said for step in steps), text.stdout
        assert not [note for note in plan.notes if "not known" in note]
        assert _promised(plan) == {
            "out": "stays",
            "totals": "stays",
            "sent": "stays",
            "last": "goes back",
            "lake": "goes back",
            "match/table": "goes back",
        }
        assert relay.found() == Found(now.out, now.totals, now.sent, then.last, then.lake, then.table)
        assert relay.marks() == dict.fromkeys(OUTSIDE, early)

        # What stays is there again, all else once.
        assert relay.finish(driver) == "", driver.told
        again = relay.found()
        assert again.out == {k: [*ns, *ns[len(then.out[k]) :]] for k, ns in now.out.items()}
        assert as_read(again.sent) == as_read(now.sent) + as_read(now.sent - then.sent)
        assert {k: pairs[-1] for k, pairs in again.totals.items()} == again.last == relay.last_of()
        assert again.lake == again.table
        assert as_read(again.table) == Counter(relay.paid)

        relay.require_no_secret()

    # Nobody to ask: a plan says so.
    monkeypatch.setattr("spark_abs.sinks.kafka.client.PATIENCE_S", 1.0)
    monkeypatch.setattr("spark_abs.sinks.kafka.marks.PATIENCE_S", 1.0)
    broker.stop()
    postgres.stop()
    try:
        plan = spark_abs.open(root).restore(relay.checkpoints()[-1], dry_run=True, force=["outside"]).plan
    finally:
        broker.start()
        postgres.start()
    assert any("whether the records are there is not known" in note for note in plan.notes)
    assert _promised(plan) | dict.fromkeys((*KAFKA, "sent", "last"), "not asked") == _promised(plan)
    relay.said.append(str(plan.plain()))
    relay.require_no_secret()


def test_records_that_are_gone_stop_restores_and_starts_until_they_are_given_up(
    tmp_path: Path, broker: KafkaServer, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records after a checkpoint are dropped, and their topic is made anew."""
    relay, root = Relay(tmp_path, broker, postgres, "gone-").open(monkeypatch), str(tmp_path / "root")
    with relay.process() as driver:
        driver.wait_ready()
        finish = partial(relay.finish, driver, alone=True)
        relay.feed(100)
        assert finish() == "", driver.told
        late, wanted = relay.checkpoints()[-1], _ends(broker, "gone-in")
        relay.feed(100)
        assert finish() == "", driver.told
        ends = _ends(broker, "gone-in")
        assert ends[0] > wanted[0] > 0
        _delete_before(broker, "gone-in", {0: ends[0]})
        with pytest.raises(Refused, match=rf"gone-in\[0\] from \d+, but its records begin at {ends[0]}"):
            spark_abs.open(root).restore(late)
        plan = spark_abs.open(root).restore(late, force=["inputs"]).plan
        assert any("their rows will be missing" in note for note in plan.notes)
        assert finish() == "Refused"
        said = driver.message(relay.base)
        assert f"but its records begin at {ends[0]}" in said
        assert 'option("failOnDataLoss", "false")' in said
        allowed = {"failOnDataLoss": "false"}
        assert finish(options=allowed) == "", driver.message(relay.base)

        # So they are when a start goes back to the newest checkpoint.
        relay.feed(100)
        _delete_before(broker, "gone-in", _ends(broker, "gone-in"))
        assert finish(restart="checkpoint") == "Refused"
        assert "but its records begin at" in driver.message(relay.base)
        assert finish(restart="checkpoint", options=allowed) == "", driver.message(relay.base)

        # A topic of the same name is not the same topic.
        broker.drop("gone-in")
        broker.make("gone-in")
        assert finish() == "Refused"
        assert "the topic was recreated" in driver.message(relay.base)


def _promised(plan: RestorePlan) -> dict[str, str]:
    """What a plan says of the rows of each sink."""
    found = {}
    for step in plan.plain()["steps"]:  # type: ignore[attr-defined]
        match step:
            case {"step": "ReturnOutside", "sink": sink, "keep": keep}:
                found[sink] = "stays" if keep else "goes back"
            case {"step": "FenceOutside", "sink": sink}:
                found[sink] = "as it is"
            case {"step": "RestoreSink", "sinks": sinks}:
                found |= dict.fromkeys(sinks, "goes back")
            case {"step": "KeepSink", "sinks": sinks}:
                found |= dict.fromkeys(sinks, "not asked")
    return found


def _within(refusal: str, broker: KafkaServer, topic: str) -> Counter[tuple[str, int]]:
    """The records at the offsets that a refusal names."""
    said = re.findall(rf"{topic}\[(\d+)\] (\d+) to (\d+)", refusal)
    ranges = {int(partition): range(int(begin), int(end) + 1) for partition, begin, end in said}
    assert ranges, refusal
    return Counter(
        ((m.key() or b"").decode(), int(m.value() or b""))
        for m in broker.read(topic)
        if m.offset() in ranges.get(m.partition() or 0, ())
    )


def _behind(then: Found, now: Found) -> Counter[tuple[str, int]]:
    before, after = (Counter((k, n) for k, ns in one.out.items() for n in ns) for one in (then, now))
    return after - before


def _ends(broker: KafkaServer, topic: str) -> dict[int, int]:
    ends: dict[int, int] = {}
    for message in broker.read(topic):
        number, offset = message.partition(), message.offset()
        assert number is not None
        assert offset is not None
        ends[number] = offset + 1
    return ends


def _delete_before(broker: KafkaServer, topic: str, offsets: dict[int, int]) -> None:
    asked = [TopicPartition(topic, number, offset) for number, offset in offsets.items()]
    admin = broker.admin()
    for done in admin.delete_records(asked).values():
        done.result(PATIENCE_S)
