"""What was stored stays readable: examples of every version, kept as files, and pinned names of fields.

A test here that fails means that roots in the world cannot be read any more. Do not change an example: a
new format takes a new one beside it (`adr/002-stored-formats.md`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from spark_abs.channels.entries import EntryMetadata, encode_note
from spark_abs.codec import from_json, to_json, to_plain
from spark_abs.errors import AbortReason, DamageError, Fenced
from spark_abs.manifest import (
    Location,
    Manifest,
    OperatorShape,
    OperatorState,
    Origin,
    OutputVersion,
    SourceShape,
    StageShape,
    StageSnapshot,
    StateFunction,
    StoredFile,
    Timings,
)
from spark_abs.manifests.manifest_table import SCHEMA as CHECKPOINTS
from spark_abs.model import (
    AttemptId,
    Barrier,
    BatchId,
    ChannelId,
    CheckpointId,
    CheckpointKind,
    CheckpointMode,
    LookupVersion,
    Position,
    RunId,
    RunKind,
    SinkWriter,
    StageId,
    Version,
    app_id,
    barrier_app_id,
    dumps_position,
    positions_of,
    run_app_id,
)
from spark_abs.protocol.attempt import Attempt, Rebuilt, StartedFunctions
from spark_abs.protocol.change_data import ChangeOptions
from spark_abs.protocol.control import (
    Aborted,
    Claim,
    Command,
    CommandKind,
    LaterRecord,
    OutsideSink,
    Paused,
    Run,
    SkippedFile,
    answer,
    require_current,
    skip,
)
from spark_abs.protocol.evaluation import Staged
from spark_abs.protocol.outside import Mark
from spark_abs.protocol.watch import Watch
from spark_abs.sinks.delta.commit_metadata import (
    CommittedEpoch,
    PlannedBatch,
    SinkMetadata,
    TombstoneFile,
    Tombstones,
)
from spark_abs.sinks.delta.options import EpochTable
from spark_abs.sinks.iceberg.mark import IcebergMark, Kept
from spark_abs.sinks.iceberg.sink import Iceberg
from spark_abs.sinks.kafka.config import Kafka
from spark_abs.sinks.postgres.sink import Postgres
from spark_abs.state.group import Head
from spark_abs.state.processor import Record
from spark_abs.state.segments import SegmentMetadata
from spark_abs.store.activity import (
    Backlog,
    Disk,
    Earlier,
    Late,
    Longest,
    Phase,
    RunActivity,
    Skips,
    StageActivity,
)
from spark_abs.store.control import SCHEMA as CONTROL
from spark_abs.store.control import Control
from spark_abs.store.history import SCHEMA as HISTORY
from spark_abs.store.history import HistoryEvent
from spark_abs.store.lease import Lease
from spark_abs.store.root import Root
from spark_abs.store.table import Table

FORMATS = Path(__file__).parent / "formats"
ADR = Path(__file__).parents[2] / "spark_abs" / "adr" / "002-stored-formats.md"


@pytest.mark.parametrize("example", sorted(FORMATS.glob("manifest-*.json")), ids=lambda path: path.stem)
def test_a_manifest_of_every_version_is_read_whole(example: Path) -> None:
    plain = json.loads(example.read_text())
    manifest = from_json(Manifest, example.read_text())
    assert manifest.v == int(example.stem.rpartition("-")[2])
    for stage in plain["stages"]:  # fields that came after the first manifests
        later = {"alignment_bytes": 0, "end_to_end_ms": 0, "backpressured_ms": 0}
        for operator in stage["operators"]:
            operator.setdefault("function", "")
        for output in stage["outputs"]:
            output.setdefault("name", "")
        stage.setdefault("carried", None)
        stage.setdefault("directory", "")
        stage.setdefault("feeds", [])
        stage.setdefault("lookups", [])
        stage["timings"] = {**later, **stage["timings"]}
        stage["positions"] = [
            {"feedback": False, "mode": "aligned", **position} for position in stage["positions"]
        ]
    for shape in plain["graph"]:
        for field in ("functions", "sources", "operators"):
            shape.setdefault(field, [])
        shape.setdefault("tables", {})
        shape.setdefault("output_mode", "")
        shape.setdefault("by_place", None)
        shape.setdefault("lookups", {})
    plain.setdefault("edited", None)
    plain.setdefault("outside", None)
    assert to_plain(manifest) == {"mode": "aligned", **plain}


def test_a_manifest_with_fields_of_a_later_hand_is_read_and_one_with_a_field_missing_is_damage() -> None:
    plain = json.loads((FORMATS / "manifest-1.json").read_text())
    assert from_json(Manifest, json.dumps({**plain, "colour": "red"})).id == 7
    del plain["stages"][0]["cut_batch"]
    with pytest.raises(DamageError, match=r"Manifest\.stages\[0\]: field 'cut_batch' is missing"):
        from_json(Manifest, json.dumps(plain))


def test_the_position_that_spark_stores() -> None:
    position = Position(ChannelId("clicks.main"), AttemptId(2), Version(41), CheckpointId(7), True, RunId(3))
    line = (
        '{"channel": "clicks.main", "attempt": 2, "version": 41, "epoch": 7, '
        '"at_barrier": true, "closed": 3, "v": 1}'
    )
    assert dumps_position(position) == json.loads(line)
    assert positions_of(["{}", line, '{"logOffset": 4}', "-", line]) == (position, position)
    unaligned = replace(position, mode=CheckpointMode.UNALIGNED)
    assert dumps_position(unaligned) == {**json.loads(line), "mode": "unaligned"}
    assert positions_of([json.dumps(dumps_position(unaligned))]) == (unaligned,)
    with pytest.raises(DamageError, match="format 2"):
        positions_of([line.replace('"v": 1', '"v": 2')])


def test_the_metadata_of_a_channel_commit() -> None:
    barrier = Barrier(CheckpointId(7), CheckpointKind.CHECKPOINT, 1767225600000)
    note = EntryMetadata(AttemptId(2), RunId(3), BatchId(12), barrier, watermark=0, offsets="v1\n{}")
    assert json.loads(encode_note(note)) == {
        "attempt": 2,
        "run": 3,
        "batch": 12,
        "barrier": {
            "id": 7,
            "kind": "checkpoint",
            "timestamp_ms": 1767225600000,
            "name": None,
            "mode": "aligned",
        },
        "watermark": 0,
        "offsets": "v1\n{}",
        "v": 1,
    }
    files = Staged("late", "channels/match.late", "data/2-3-12-0123456789ab", 1, 20, 1234)
    assert json.loads(encode_note(replace(note, evaluated=(files,))))["evaluated"] == [
        {
            "output": "late",
            "table": "channels/match.late",
            "directory": "data/2-3-12-0123456789ab",
            "files": 1,
            "rows": 20,
            "size": 1234,
        }
    ]
    end = EntryMetadata(AttemptId(2), RunId(3), end=True)
    assert json.loads(encode_note(end)) == {"attempt": 2, "run": 3, "batch": -1, "end": True, "v": 1}


def test_a_barrier_from_before_there_were_modes_is_aligned() -> None:
    old = '{"id": 7, "kind": "savepoint", "timestamp_ms": 5, "name": "mine"}'
    assert from_json(Barrier, old) == Barrier(CheckpointId(7), CheckpointKind.SAVEPOINT, 5, "mine")


def test_application_ids() -> None:
    assert app_id("job", "match", "main", AttemptId(2)) == "job/match/main@2"
    assert barrier_app_id("job", "match", "main", AttemptId(2)) == "job/match/main@2/barrier"
    assert run_app_id("job") == "job/run"
    first = SinkWriter("job", "4f", StageId("match"), "matched", AttemptId(2))
    assert (first.app, first.restore_app) == ("job#4f/match@2", "job#4f@2/restore")
    assert first.owner == "job#4f"


def test_an_attempt_from_before_roots_had_an_identity_goes_on_under_its_ids() -> None:
    old = SinkWriter("job", "", StageId("match"), "matched", AttemptId(2))
    assert (old.app, old.restore_app) == ("job/match/matched@2", "job/match/matched@2/restore")
    assert old.owner == "job"


def test_an_attempt_that_does_not_say_where_its_native_checkpoints_are_has_them_below_the_root() -> None:
    old = '{"id":1,"parent":null,"checkpoint":null,"plan":"","ready":true,"created_ms":5}'
    assert from_json(Attempt, old) == Attempt(AttemptId(1), None, None, "", True, 5, "native")


def test_records_of_a_later_version_in_control_are_read_and_written_back(tmp_path: Path) -> None:
    """A driver reads `control/` while a newer command, restore or run writes to it."""
    root = Root(str(tmp_path))
    Control.create(root, "job", 0)
    rows = [
        ("command", "one", '{"id":"one","kind":"explode","name":null,"asked_ms":5,"colour":"red"}'),
        ("run", "2", '{"id":2,"attempt":1,"host":"here","pid":1,"started_ms":5,"ended":null,"kind":"dream"}'),
        ("aborted", "3", '{"id":3,"reason":"bored","detail":""}'),
        ("whim", "w", '{"sort":"odd"}'),
    ]
    later = pa.Table.from_pylist(
        [{"kind": kind, "id": key, "v": 1, "body": body} for kind, key, body in rows], schema=CONTROL
    )
    write_deltalake(str(tmp_path / "control"), later, mode="append")
    control = Control.open(root)
    with pytest.raises(Fenced, match="replaced by run 2"):
        require_current(control.state, RunId(1))
    control.update(lambda state: answer(state, "one", False, None, "what is that?"))
    state = Control.open(root).state
    assert (state.commands[0].kind, state.commands[0].message) == ("explode", "what is that?")
    assert (state.runs[0].kind, state.aborted[0].reason) == ("dream", "bored")
    assert state.later == (LaterRecord("whim", "w", 1, '{"sort":"odd"}'),)
    assert isinstance(from_json(Run, to_json(Run(RunId(1), AttemptId(1), "here", 1, 5))).kind, RunKind)
    with pytest.raises(DamageError, match=r"Command\.kind: expected .*CommandKind.*, found int"):
        from_json(Command, '{"id":"one","kind":7,"name":null,"asked_ms":5}')


def test_an_earlier_version_refuses_a_root_whose_stages_skip_files(tmp_path: Path) -> None:
    """It would read them; and so does this version with a kind of rows that it must not overlook."""
    root = Root(str(tmp_path))
    one = SkippedFile(StageId("orders"), "file:///in/7.json", "ann@desk", 5, RunId(2))
    Control.create(root, "job", 0).update(lambda state: skip(state, [one]))
    assert Control.open(root).state.skipped == (one,)
    rows = Table.open(root.place("control")).read().to_pylist()
    assert {row["kind"]: row["v"] for row in rows} == {"job": 1, "attempt": 1, "skipped": 2}
    whim = pa.Table.from_pylist([{"kind": "whim", "id": "w", "v": 2, "body": "{}"}], schema=CONTROL)
    write_deltalake(str(tmp_path / "control"), whim, mode="append")
    with pytest.raises(DamageError, match="control/ has format 2, the newest known is 1: upgrade spark_abs"):
        Control.open(root).update(lambda state: skip(state, [one]))


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("job", "{torn", "not JSON"),
        ("job", "[]", "expected an object"),
        ("job", '{"job":"shop"}', "field 'last_claimed' is missing"),
        ("job", '{"job":"shop","last_claimed":"x"}', r"last_claimed: expected .*int.*, found str"),
        ("job", '{"job":null,"last_claimed":1}', r"job: expected .*str.*, found NoneType"),
        ("run", "{torn", "not JSON"),
        ("run", '{"id":2}', "field 'attempt' is missing"),
    ],
)
def test_rows_of_control_that_are_torn_are_damage_of_the_root(
    tmp_path: Path, kind: str, body: str, said: str
) -> None:
    root = Root(str(tmp_path))
    Control.create(root, "shop", 0)
    torn = pa.Table.from_pylist([{"kind": kind, "id": "shop", "v": 1, "body": body}], schema=CONTROL)
    write_deltalake(str(tmp_path / "control"), torn, mode="append")
    with pytest.raises(DamageError, match=f"^{tmp_path}/control cannot be read: .*{said}"):
        _ = Control.open(root).state


def test_what_a_watcher_was_given_is_read_back_and_an_earlier_version_had_none(tmp_path: Path) -> None:
    control = Control.create(Root(str(tmp_path)), "watched-queries", 1)
    assert control.state.watch is None
    watch = Watch(("/c/a", "/c/b"), (), "3 1d:all", "10m")
    control.update(lambda state: dataclasses.replace(state, watch=watch))
    assert Control.open(Root(str(tmp_path))).state.watch == watch


def test_a_sink_commit_from_before_it_told_what_batches_read() -> None:
    old = '{"sink":"j/s/o","attempt":1,"run":1,"batch":3,"barrier":null,"cancel":null,"restored":null,"v":1}'
    assert from_json(SinkMetadata, old) == SinkMetadata("j/s/o", AttemptId(1), RunId(1), BatchId(3))


def words_of_the_record() -> set[str]:
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", ADR.read_text()))))


@pytest.mark.parametrize(
    "stored",
    [
        *(Manifest, StageSnapshot, StageShape, StoredFile, Location, OperatorState, OutputVersion, Timings),
        *(OperatorShape, SourceShape, StateFunction, Head, SegmentMetadata, Record, Origin),
        *(LookupVersion, Position, Barrier, EntryMetadata, Attempt, Run, Claim, Aborted, Command, Lease),
        *(SinkMetadata, PlannedBatch, Rebuilt, StartedFunctions, Staged, OutsideSink, Mark, Postgres, Kafka),
        *(Paused, SkippedFile, RunActivity, Skips, StageActivity, Backlog, Late, Disk, Earlier, Longest),
        Watch,
        *(Iceberg, IcebergMark, Kept, EpochTable, CommittedEpoch, ChangeOptions, Tombstones, TombstoneFile),
    ],
)
def test_every_stored_field_is_in_the_record_of_formats(stored: type) -> None:
    assert dataclasses.is_dataclass(stored)
    assert {f.name for f in dataclasses.fields(stored)} <= words_of_the_record()


@pytest.mark.parametrize("schema", [CONTROL, CHECKPOINTS, HISTORY], ids=["control", "checkpoints", "history"])
def test_every_column_is_in_the_record_of_formats(schema: pa.Schema) -> None:
    assert set(schema.names) <= words_of_the_record()


@pytest.mark.parametrize(
    "closed", [CheckpointKind, CheckpointMode, AbortReason, HistoryEvent, CommandKind, Phase]
)
def test_every_value_of_a_closed_list_is_in_the_record_of_formats(closed: type[StrEnum]) -> None:
    assert [m.value for m in closed if f"`{m.value}`" not in ADR.read_text()] == []
