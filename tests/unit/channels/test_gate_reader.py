"""The planning half of the gate without Spark: logs in, positions and partitions out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyspark.sql import types as t
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles

from spark_abs.channels import follow
from spark_abs.channels.gate import (
    BackEdge,
    FilePartition,
    GateReader,
    GateSpec,
    RememberingGateReader,
    grouped,
)
from spark_abs.channels.gate_facts import offset_lines
from spark_abs.channels.schema import arrow_schema, conformed
from spark_abs.channels.taken import TakenHint, TakenNote
from spark_abs.codec import from_json, to_json
from spark_abs.errors import AbortReason, DamageError
from spark_abs.model import (
    AttemptId,
    Branch,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    DataFile,
    Position,
    RunId,
    Version,
    dumps_position,
)
from spark_abs.protocol.control import Aborted, begin_run, claim, overtake, settle
from spark_abs.protocol.credit import Capacity
from spark_abs.store.control import Control
from spark_abs.store.log import log_file, read_commit
from spark_abs.store.root import Root
from spark_abs.store.table import Table
from tests.channel_support import JOB, NUMBERS, Log, position, write_table

Kind = TypeVar("Kind", bound=GateReader)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A stage's native checkpoint as Spark would write it, and a reader of one of its inputs."""

    def __init__(self, root: Root, poll_ms: int = 0) -> None:
        self.root, self.clock = root, Clock()
        self.control = Control.create(root, JOB, 0)
        self.offsets = Path(root.path("native/1/s/offsets"))
        self.poll_ms = poll_ms
        self.batch = 0
        self.pauses = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def reader(self, channel: str = "a.main", **changes: Any) -> GateReader:
        return self.reader_of(GateReader, channel, **changes)

    def reader_of(self, kind: type[Kind], channel: str = "a.main", **changes: Any) -> Kind:
        spec = GateSpec(
            root=self.root.uri,
            start=position(channel, 0),
            schema=NUMBERS.json(),
            native=self.root.at("native/1/s"),
            path=(Branch(AttemptId(1), None),),
            run=RunId(1),
            attempt=AttemptId(1),
            floor=CheckpointId(0),
            control_version=self.control.version,
            max_entries=2,
            max_bytes=2**30,
            partition_bytes=2**20,
            poll_ms=self.poll_ms,
            native_poll_ms=self.poll_ms,
        )
        assert from_json(GateSpec, to_json(spec)) == spec
        return kind(replace(spec, **changes), NUMBERS, clock=self.clock, pause=self.pause)

    def pause(self, seconds: float) -> None:
        """Let time pass, and whatever happens meanwhile."""
        self.pauses += 1
        self.clock.now += seconds
        self.meanwhile()

    def planned(self, *positions: Position) -> None:
        """Write the next offset file."""
        self.offsets.mkdir(parents=True, exist_ok=True)
        lines = ["v1", "{}", *(to_json(p) for p in positions), "-"]
        (self.offsets / str(self.batch)).write_text("\n".join(lines))
        self.batch += 1


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(str(tmp_path))


LIMITED, ALL = ReadMaxFiles(2), ReadAllAvailable()


def after(reader: GateReader, start: Mapping[str, Any] | Position, limit: Any = LIMITED) -> tuple[Any, ...]:
    begin = dumps_position(start) if isinstance(start, Position) else dict(start)
    end = reader.latestOffset(begin, limit)
    return end["version"], end["epoch"], end["at_barrier"]


def test_the_first_position_is_a_constant(root: Root) -> None:
    """Spark asks again when batch 0 is repeated: what has come since must not move it."""
    log, stage = Log(root), Stage(root)
    reader = stage.reader()
    before = reader.initialOffset()
    log.batch(1, barrier_id=1)
    assert reader.initialOffset() == before == dumps_position(position("a.main", 0))


def test_limits_hold_and_all_available_lifts_them_up_to_the_barrier(root: Root) -> None:
    log, stage = Log(root), Stage(root)
    commits = [log.batch(n) for n in range(4)]
    commits += [log.batch(4, barrier_id=1), log.batch(5)]
    reader = stage.reader()
    start = reader.initialOffset()
    assert isinstance(reader.getDefaultReadLimit(), ReadMaxFiles)
    assert after(reader, start) == (commits[1], 0, False)
    assert after(reader, start, ALL) == (commits[4], 1, True)
    by_size = stage.reader(max_entries=10, max_bytes=1)
    assert after(by_size, start) == (commits[0], 0, False)  # one entry is never split, so one always fits


def test_a_gate_that_is_not_told_where_it_stands_remembers(root: Root) -> None:
    """Spark before 4.2 takes each answer as the end of a batch, and says the newest end after a start."""
    log, stage = Log(root), Stage(root)
    commits = [log.batch(n) for n in range(6)]
    reader = stage.reader_of(RememberingGateReader)
    first = reader.latestOffset()
    assert first["version"] == commits[1]
    stage.planned(position("a.main", commits[1]))
    second = reader.latestOffset()
    assert second["version"] == commits[3]
    assert len(reader.partitions(first, second)) == 1
    stage.planned(position("a.main", commits[3]))

    again = stage.reader_of(RememberingGateReader)  # the second batch was planned, and killed
    assert again.partitions(second, second) == []
    assert len(again.partitions(first, second)) == 1, "the batch is repeated as it was"
    third = again.latestOffset()
    assert third["version"] == commits[5]
    stage.planned(position("a.main", commits[5]))
    assert again.latestOffset() is third
    assert again.partitions(first, second) != [], "what was planned before does not move it"
    assert again.latestOffset() is third

    with pytest.raises(DamageError, match=r"the offset of channel b\.main to the gate of channel a\.main"):
        stage.reader_of(RememberingGateReader).partitions(*2 * [dumps_position(position("b.main", 1))])


def test_an_idle_input_stays_where_it_is(root: Root) -> None:
    """Spark compares offsets as text: the very same object must come back, or an empty batch starts."""
    Log(root).batch()
    reader = Stage(root).reader()
    start = reader.initialOffset()
    assert list(reader.latestOffset(start, ALL).items()) == list(start.items())


def test_a_stage_that_rests_waits_in_one_call_for_news_of_any_of_its_inputs(root: Root) -> None:
    """Spark asks twenty times a second; the first row after a pause must not be later for it."""
    log, other, stage = Log(root), Log(root, "b"), Stage(root)
    reader = stage.reader(others=(ChannelId("b.main"),))
    start = reader.initialOffset()
    stage.planned(position("a.main", 0), position("b.main", 0))
    for pauses in (0, 1):  # the first call sees a batch, the second what there is of the other input
        stage.pauses = 0
        assert (reader.latestOffset(start, LIMITED) is start, stage.pauses) == (True, pauses)
    for pauses in (10, 20, 40, 50, 50):
        stage.pauses = 0
        assert reader.latestOffset(start, LIMITED) is start
        assert pauses <= stage.pauses <= pauses + 1
    for at_barrier, pauses in ((True, 50), (False, 10)):  # a barrier alone makes no rest short again
        stage.planned(position("a.main", 0), replace(position("b.main", 0), at_barrier=at_barrier))
        reader.latestOffset(start, LIMITED)
        stage.pauses = 0
        assert reader.latestOffset(start, LIMITED) is start
        assert pauses <= stage.pauses <= pauses + 1
    stage.meanwhile, stage.pauses = other.batch, 0
    assert (reader.latestOffset(start, LIMITED) is start, stage.pauses) == (True, 1)
    stage.meanwhile, stage.pauses = partial(log.batch, 7), 0
    assert after(reader, start) == (1, 0, False)
    assert stage.pauses == 1


def test_a_stage_that_rests_asks_for_one_file_of_an_input(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, stage = Log(root), Stage(root)
    log.batch(), log.batch()
    os.unlink(root.path(f"channels/a.main/{log_file(1)}"))  # cleaned up; batches have read it
    reader = stage.reader(others=(ChannelId("b.main"),), start=position("a.main", 2))
    stage.planned(position("a.main", 2), position("b.main", 0))
    start = reader.initialOffset()
    for _ in range(6):
        reader.latestOffset(start, LIMITED)
    opening = Mock(wraps=read_commit)
    monkeypatch.setattr(follow, "read_commit", opening)
    stage.pauses = 0
    assert reader.latestOffset(start, LIMITED) is start
    assert (stage.pauses, opening.call_count) == (50, 11)  # at first, and ten times a second
    log.batch(7)
    assert after(reader, start) == (3, 0, False)


@pytest.mark.parametrize(
    ("inputs", "waiting"),
    [("ab", "a"), ("ba", "b"), ("a", "a"), ("bcda", "b"), ("bcdea", ""), ("aa", ""), ("baa", "b"), ("", "")],
)
def test_only_the_input_that_spark_asks_first_waits(root: Root, inputs: str, waiting: str) -> None:
    """What was answered before would be old, and `processAllAvailable` would return too early."""
    stage, pauses = Stage(root), dict.fromkeys("ab", 0)
    for name in "abcde":
        Log(root, name)
    readers = {name: stage.reader(f"{name}.main", others=(ChannelId("c.main"),)) for name in "ab"}
    if inputs:
        stage.planned(*(position(f"{name}.main", 0) for name in inputs))
    for _ in range(3):  # they see a batch, then what there is of the others, then nothing
        for name, reader in readers.items():
            stage.pauses, start = 0, reader.initialOffset()
            assert reader.latestOffset(start, LIMITED) is start
            pauses[name] = stage.pauses
    assert {name for name in pauses if pauses[name]} == set(waiting)


def test_a_stage_that_is_at_work_or_reads_something_else_too_never_waits(root: Root) -> None:
    Log(root).batch()
    stage = Stage(root)
    reader, mixed = stage.reader(others=()), stage.reader()
    start = reader.initialOffset()
    for _ in range(3):  # of the other input
        stage.planned(position("a.main", 0), position("b.main", 0))
        assert reader.latestOffset(start, LIMITED) is start
    for _ in range(3):
        assert mixed.latestOffset(start, LIMITED) is start
        assert reader.latestOffset(start, ALL) is start
    assert stage.pauses == 0


def test_a_stage_whose_inputs_have_ended_does_not_wait(root: Root) -> None:
    """A bounded run would end later for each stage; an end marker of another run counts for nothing."""
    log, rounds, stage = Log(root), Log(root, "b"), Stage(root)
    ended = replace(position("a.main", log.batch(1)), closed=RunId(1))
    open_again = replace(ended, closed=RunId(9))
    there = replace(position("b.main", rounds.batch()), feedback=True)
    for own, other, waits in ((ended, there, False), (open_again, there, True), (ended, open_again, True)):
        reader, stage.pauses = stage.reader(others=(ChannelId("b.main"),)), 0
        stage.planned(own, other)
        for _ in range(3):
            assert after(reader, own) == (own.version, 0, False)
        assert (stage.pauses > 0) is waits


def test_an_input_waits_while_the_way_back_of_its_stage_is_full(root: Root) -> None:
    """What counts are entries with rows, after the stage's newest offset file; that input is read (P17)."""
    log, rounds, stage = Log(root), Log(root, "b"), Stage(root)
    first, there = log.batch(1), replace(position("b.main", 0), feedback=True)
    rounds.batch(1)
    back = BackEdge(there, (Branch(AttemptId(1), None),))
    reader = stage.reader(back=(back,), capacity=Capacity(entries=2))
    start = reader.initialOffset()
    assert after(reader, start) == (first, 0, False)
    second = rounds.batch(2)
    rounds.batch()
    assert reader.latestOffset(start, ALL) is start
    feedback_edge = stage.reader("b.main", start=there)
    assert after(feedback_edge, feedback_edge.initialOffset()) == (second, 0, False)
    stage.planned(position("a.main", 0), replace(there, version=Version(second)))
    assert after(reader, start) == (first, 0, False)


def test_blocked_until_the_neighbour_has_it_or_it_is_aborted(root: Root) -> None:
    """The newest offset file says where the neighbour is; `control/` says what is off (P8, P9)."""
    log, stage = Log(root), Stage(root)
    one, two, three = log.batch(1, barrier_id=1), log.batch(2, barrier_id=2), log.batch(3)
    mine, other = position("a.main", one, 1, True), position("b.main", 4)
    reader = stage.reader()
    stage.planned(position("a.main", 0), other)
    stage.planned(mine, other)
    assert after(reader, mine) == (one, 1, True)
    stage.planned(mine, position("b.main", 5, 1, True))
    assert after(reader, mine) == (two, 2, True)
    mine = position("a.main", two, 2, True)
    stage.planned(mine, position("b.main", 5, 1, True))
    assert after(reader, mine) == (two, 2, True)
    expired = Aborted(CheckpointId(2), AbortReason.EXPIRED)
    stage.control.update(lambda state: settle(state, (expired,)))
    assert after(reader, mine) == (two, 2, True)  # it looks at control/ ten times a second, not at each poll
    stage.clock.now = 0.1
    assert after(reader, mine) == (three, 2, False)


def test_an_abort_is_heard_of_though_its_commit_was_trimmed(root: Root) -> None:
    """A gate looks into `control/` only while it is blocked: its place in that log may be gone by then."""
    log, stage = Log(root), Stage(root)
    one, two = log.batch(1, barrier_id=7), log.batch(2)
    mine = position("a.main", one, 7, True)
    stage.planned(mine, position("b.main", 4))
    reader = stage.reader()
    for number in range(7, 27):
        expired = Aborted(CheckpointId(number), AbortReason.EXPIRED)
        stage.control.update(partial(settle, aborted=(expired,)))
    control = Table.open(root.place("control"))
    control.trim_log(0)
    assert not Path(root.path(f"control/_delta_log/{2:020d}.json")).exists()
    assert after(reader, mine) == (two, 7, False)


def test_a_barrier_alone_is_left_to_the_agent_for_a_moment(root: Root, tmp_path: Path) -> None:
    """The stage may be at its cut already: then no batch is planned for the barrier."""
    log, stage = Log(root), Stage(root)
    start, note = position("a.main", 0), TakenNote(str(tmp_path / "taken"))
    reader = stage.reader(taken=note.path)
    stage.planned(start)
    barrier = log.batch(barrier_id=1)
    assert after(reader, start) == (0, 0, False)
    stage.clock.now = 2.0
    assert after(reader, start) == (barrier, 1, True)  # nobody has taken it
    note.write(CheckpointId(1))
    assert after(reader, start) == (0, 0, False)
    rows = log.batch(1)
    assert after(reader, start) == (rows, 1, False)


def test_no_barrier_is_left_to_an_agent_before_the_first_batch(root: Root, tmp_path: Path) -> None:
    log, stage = Log(root), Stage(root)
    barrier = log.batch(barrier_id=1)
    reader = stage.reader(taken=str(tmp_path / "taken"))
    assert after(reader, position("a.main", 0)) == (barrier, 1, True)


def test_an_input_at_a_barrier_goes_on_once_its_stage_has_taken_it(root: Root, tmp_path: Path) -> None:
    """The other input has nothing before the barrier, and stays before it."""
    log, stage = Log(root), Stage(root)
    one, two = log.batch(1, barrier_id=1), log.batch(2)
    mine, note = position("a.main", one, 1, True), TakenNote(str(tmp_path / "taken"))
    stage.planned(mine, position("b.main", 0))
    reader = stage.reader(taken=note.path)
    assert after(reader, mine) == (one, 1, True)
    note.write(CheckpointId(1))
    assert after(reader, mine) == (two, 1, False)


def test_a_note_that_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    hint = TakenHint(str(tmp_path / "taken"))
    assert not hint.look()
    (tmp_path / "taken").write_text("half a numb")
    assert (hint.look(), hint.newest) == (False, 0)
    TakenNote(hint._path).write(CheckpointId(7))
    assert [hint.look(), hint.look(), hint.newest] == [True, False, 7]
    TakenNote(str(tmp_path / "gone" / "taken")).write(CheckpointId(8))  # no more than a hint


def test_blocked_until_the_checkpoint_becomes_unaligned(root: Root) -> None:
    """`control/` says it, also to a gate whose place in that log is gone (P16)."""
    log, stage = Log(root), Stage(root)
    one, two = log.batch(1, barrier_id=1), log.batch(2)
    mine = position("a.main", one, 1, True)
    stage.planned(mine, position("b.main", 4))
    run = stage.control.update(lambda state: begin_run(state, "host", 1, 0)).runs[-1].id
    stage.control.update(
        lambda state: claim(state, run, kind=CheckpointKind.CHECKPOINT, name=None, now_ms=0)[0]
    )
    reader = stage.reader()
    assert after(reader, mine) == (one, 1, True)
    stage.control.update(lambda state: overtake(state, run, CheckpointId(1)))
    stage.clock.now = 0.1
    assert after(reader, mine) == (two, 1, False)
    for _ in range(20):
        run = stage.control.update(lambda state: begin_run(state, "host", 1, 0)).runs[-1].id
    Table.open(root.place("control")).trim_log(0)
    assert after(stage.reader(control_version=Version(0)), mine) == (two, 1, False)


def test_ids_before_the_run_need_no_waiting_for(root: Root) -> None:
    log, stage = Log(root), Stage(root)
    one, two = log.batch(1, barrier_id=3), log.batch(2)
    mine = position("a.main", one, 3, True)
    stage.planned(mine, position("b.main", 4))
    assert after(stage.reader(floor=CheckpointId(3)), mine) == (two, 3, False)


def test_a_restart_in_the_middle_of_the_offsets(root: Root) -> None:
    """A materialised checkpoint has two offset files, with numbers well above zero."""
    log, stage = Log(root), Stage(root)
    one, two = log.batch(1, barrier_id=1), log.batch(2)
    mine = position("a.main", one, 1, True)
    stage.batch = 99
    stage.planned(mine, position("b.main", 4))
    stage.planned(mine, position("b.main", 5, 1, True))
    assert after(stage.reader(), mine) == (two, 1, False)


def test_partitions_hold_the_files_of_a_batch_and_read_gives_its_rows(root: Root) -> None:
    log, stage = Log(root), Stage(root)
    commits = [log.batch(*range(n, n + 3)) for n in (0, 10, 20)]
    reader = stage.reader(partition_bytes=1)
    start, end = (
        dumps_position(position("a.main", commits[0])),
        dumps_position(position("a.main", commits[2])),
    )
    for _ in range(2):  # and again, as after a restart
        parts = reader.partitions(start, end)
        batches = [batch for part in parts for batch in reader.read(part)]
        assert [batch.column("n").to_pylist() for batch in batches] == [[10, 11, 12], [20, 21, 22]]
        reader.commit(end)
    assert reader.partitions(end, end) == []


def test_limits_and_partitions_go_by_bytes_before_compression(root: Root) -> None:
    """Two entries of 400 kB in files of a hundredth of that: one fills a batch, and each is a partition."""
    log, stage = Log(root), Stage(root)
    texts = [f"{'x' * 20_000}{n}" for n in range(20)]
    one, two = (log.rows(pa.table({"n": range(20), "text": texts})) for _ in range(2))
    assert (
        sum(file.stat().st_size for file in Path(root.path("channels/a.main/data")).rglob("*.parquet"))
        < 99_999
    )
    first = position("a.main", 0)
    assert after(stage.reader(max_bytes=500_000), first)[0] == one
    assert after(stage.reader(max_bytes=900_000), first)[0] == two
    offsets = (dumps_position(position("a.main", version)) for version in (0, two))
    assert len(stage.reader(partition_bytes=500_000).partitions(*offsets)) == 2


def test_groups_keep_the_order_and_the_size() -> None:
    files = [DataFile(str(size), size, 1) for size in (3, 3, 3, 9, 1)]
    assert [[f.size for f in group] for group in grouped(files, 6)] == [[3, 3], [3], [9], [1]]


def test_a_hole_between_two_positions_is_damage(root: Root) -> None:
    log, stage = Log(root), Stage(root)
    commits = [log.batch(n) for n in range(3)]
    (Path(root.path("channels/a.main/_delta_log")) / f"{commits[1]:020d}.json").unlink()
    with pytest.raises(DamageError, match=f"commit {commits[1]}"):
        stage.reader().partitions(*(dumps_position(position("a.main", v)) for v in (0, commits[2])))


@pytest.mark.parametrize("ruin", ["missing", "torn", "another type"])
def test_a_file_that_is_not_what_was_written_is_damage(root: Root, ruin: str) -> None:
    log, stage = Log(root), Stage(root)
    log.batch(1)
    (file,) = Path(root.path("channels/a.main/data")).rglob("*.parquet")
    match ruin:
        case "missing":
            file.unlink()
        case "torn":
            file.write_bytes(file.read_bytes()[:-30])
        case _:
            words = write_table(root, "a.main", pa.table({"n": ["not a number"]}))
            Path(root.path(f"channels/a.main/{words.files[0].path}")).rename(file)
    with pytest.raises(DamageError, match=r"part-0\.parquet of a channel cannot be read"):
        list(stage.reader().read(FilePartition([str(file.relative_to(root.path("channels/a.main")))])))


def test_a_batch_is_brought_into_the_declared_schema() -> None:
    """Columns by name, in the declared order and types; what a file lacks is null, other columns are left."""
    declared = arrow_schema(
        t.StructType(
            [
                t.StructField("new", t.ArrayType(t.StringType())),
                t.StructField("when", t.TimestampType()),
                t.StructField("price", t.DecimalType(10, 2)),
            ]
        )
    )
    batch = pa.record_batch(
        {
            "price": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
            "left": pa.array([1, 2]),
            "when": pa.array([0, 1], pa.timestamp("ms", "UTC")),
        }
    )
    found = conformed(batch, declared)
    assert found.schema.equals(declared)
    assert found.column("new").null_count == 2
    required = t.StructType([t.StructField("must", t.LongType(), False)])
    with pytest.raises(pa.ArrowInvalid, match="must is missing"):
        conformed(batch, arrow_schema(required))


def test_offset_logs_of_both_formats_are_read_and_others_refused() -> None:
    assert offset_lines('v1\n{"m":1}\n{"a":1}\n-', "offsets/3") == ['{"a":1}', "-"]
    assert offset_lines('v2\n{"m":1}\nsource0:{"a":1}', "offsets/3") == ['{"a":1}']
    with pytest.raises(DamageError, match=r"offsets/3 has offset log format 'v3'"):
        offset_lines("v3\n{}\n", "offsets/3")


def test_the_gate_is_cheap_to_import_and_needs_no_more_than_executors_have() -> None:
    """Executors have pyspark and pyarrow; Spark imports the module in each of its Python workers."""
    above = "plan", "stages", "checkpointing", "compatibility", "run", "job", "wrapped", "session"
    heavy = "deltalake", "click", "rich", "yaml", "delta", *(f"spark_abs.{room}" for room in above)
    program = (
        "import sys, pyspark.sql.datasource; before = set(sys.modules)\n"
        "import spark_abs.channels.gate\n"
        f"print([m for m in {heavy!r} if m in set(sys.modules) - before])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_position_of_a_newer_format_is_refused(root: Root) -> None:
    Log(root)
    newer = {**dumps_position(position("a.main", 0)), "v": 2}
    with pytest.raises(DamageError, match="format 2"):
        Stage(root).reader().latestOffset(newer, ALL)


def test_stage_offsets_are_not_asked_for_before_the_next_poll(root: Root) -> None:
    log, stage = Log(root), Stage(root, poll_ms=200)
    one, two = log.batch(1, barrier_id=1), log.batch(2)
    mine, reader = position("a.main", one, 1, True), stage.reader()
    stage.planned(mine, position("b.main", 4))
    assert after(reader, mine) == (one, 1, True)
    stage.planned(mine, position("b.main", 5, 1, True))
    assert after(reader, mine) == (one, 1, True)
    stage.clock.now = 0.2
    assert after(reader, mine) == (two, 1, False)


def test_the_first_offset_file_is_seen_at_once(root: Root) -> None:
    """Until it is, a gate knows of no other input: it would go on from a barrier that one of them lacks."""
    log, stage = Log(root), Stage(root, poll_ms=5000)
    one, mine = log.batch(1, barrier_id=1), position("a.main", 1, 1, True)
    log.batch(2)
    reader = stage.reader()
    assert after(reader, reader.initialOffset()) == (one, 1, True)
    stage.planned(mine, position("b.main", 0))
    assert after(reader, mine) == (one, 1, True)
