"""The Iceberg sink, on real tables of a SQL catalog."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pyarrow as pa
import pytest
import requests
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.table import Table
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    IdentityTransform,
    Transform,
    TruncateTransform,
)

from spark_abs.codec import from_json, to_json
from spark_abs.errors import (
    CommitConflict,
    CommitStateUnknown,
    DamageError,
    Fenced,
    Refused,
    SinkFailed,
    SinkUnreachable,
    UsageError,
)
from spark_abs.model import AttemptId, CheckpointId, RunId, Version
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.iceberg import catalog as iceberg_catalog
from spark_abs.sinks.iceberg import files as iceberg_files
from spark_abs.sinks.iceberg import sink as iceberg
from spark_abs.sinks.iceberg.files import DataFileWriter, elsewhere
from spark_abs.sinks.iceberg.mark import mark_in
from spark_abs.sinks.iceberg.sink import Iceberg, IcebergSink
from spark_abs.sinks.two_phase import Rows
from spark_abs.testing.two_phase import NotOnce, Row, check
from tests.outside.rest_catalog import RestCatalog

SECRET = "c0rrect-h0rse-never-written"
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
ORDERS = Iceberg("shop.orders", catalog_env="CATALOG")


class Some(Rows):
    """The rows of a batch."""

    def __init__(self, ids: Sequence[int], **more: list[Any] | pa.Array) -> None:
        self._batch = pa.RecordBatch.from_pydict(
            {"id": pa.array(ids, pa.int64()), "text": pa.array([f"t{i}" for i in ids], pa.string()), **more}
        )
        self.schema, self.count = self._batch.schema, self._batch.num_rows

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        yield self._batch


def mark(number: int) -> Mark:
    """Checkpoint `number`, whose cut is the entry of ten times that."""
    return Mark(AttemptId(1), CheckpointId(number), Version(10 * number))


class Sending:
    """A run that sends to a table, epoch by epoch."""

    def __init__(self, config: Iceberg = ORDERS, run: int = 1, name: str = "sent") -> None:
        self.owner = Owner("0123456789abcdef0123456789abcdef", "job", name, RunId(run))
        self.sink = IcebergSink(config)
        self.mark = self.sink.recover(self.owner)

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *_: object) -> None:
        self.sink.close()

    def epoch(self, floor: int = 0, savepoint: str | None = None, asked: Sequence[int] = ()) -> Epoch:
        number = 1 if self.mark is None else self.mark.checkpoint + 1
        before, first = self.mark or mark(0), self.mark is None
        entries = tuple(map(Version, asked))
        return Epoch(self.owner, before, mark(number), Version(10 * floor), first, savepoint, entries)

    def send(
        self, rows: Rows, floor: int = 0, savepoint: str | None = None, asked: Sequence[int] = ()
    ) -> None:
        epoch = self.epoch(floor, savepoint, asked)
        self.sink.commit(epoch, rows)
        self.mark = epoch.mark

    def back(self, number: int, *, keep: bool = False) -> None:
        self.sink.abort(self.owner, mark(number), keep=keep)
        self.mark = mark(number)


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    settings = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/w"}
    monkeypatch.setenv("CATALOG", json.dumps(settings))
    found = load_catalog("default", **settings)
    found.create_namespace("shop")
    yield found
    found.close()


@pytest.fixture
def rest(rest_catalog: RestCatalog, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    """The REST catalog, with nothing in its namespace."""
    monkeypatch.setenv("CATALOG", json.dumps(rest_catalog.properties))
    found = load_catalog("default", **rest_catalog.properties)
    found.create_namespace_if_not_exists("shop")
    for table in found.list_tables("shop"):
        found.drop_table(table)
    yield found
    found.close()


def ids(catalog: Catalog, table: str = "shop.orders") -> list[int]:
    found: list[int] = catalog.load_table(table).scan().to_arrow()["id"].to_pylist()
    return sorted(found)


def test_with_pyicebergs_own_repetition_the_sink_is_caught(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog.create_table("shop.orders", SCHEMA, properties={"commit.retry.min-wait-ms": "1"})
    monkeypatch.setattr(iceberg, "_commit_once", lambda _c, _t, making, *_: making.commit_transaction())

    def read() -> list[Row]:
        rows = catalog.load_table("shop.orders").scan().to_arrow()
        return list(zip(rows["id"].to_pylist(), rows["text"].to_pylist(), strict=True))

    with pytest.raises(NotOnce):
        check(lambda: IcebergSink(ORDERS), read, modules=[iceberg.__file__, iceberg_files.__file__], every=31)


def test_a_restore_goes_back_to_a_snapshot_and_keeps_the_abandoned_one(catalog: Catalog) -> None:
    table = catalog.create_table("shop.orders", SCHEMA)
    with Sending() as sending:
        for number in range(4):
            sending.send(Some([number]))
        left = catalog.load_table("shop.orders").current_snapshot()
        assert left is not None
        sending.back(2)
        assert ids(catalog) == [0, 1]
        sending.send(Some([20]))
        assert ids(catalog) == [0, 1, 20]
    table.refresh()
    tags = [name for name in table.refs() if name.startswith("spark_abs_abandoned_")]
    found = table.scan(snapshot_id=table.refs()[tags[0]].snapshot_id).to_arrow()["id"].to_pylist()
    assert sorted(found) == [0, 1, 2, 3]
    with Sending(run=2) as again:
        assert again.mark == mark(3)
        again.back(1, keep=True)
        assert ids(catalog) == [0, 1, 20]
        again.send(Some([21]))
        assert ids(catalog) == [0, 1, 20, 21]


@pytest.mark.parametrize("theirs", [[], [99]])
def test_before_its_first_epoch_a_sink_has_nothing(catalog: Catalog, theirs: list[int]) -> None:
    """Epochs begin with the entry after 20: a mark before that is before them all."""
    table = catalog.create_table("shop.orders", SCHEMA)
    with Sending() as sending:
        for number in theirs:
            table.refresh().append(pa.table({"id": [number], "text": ["theirs"]}))
        sending.sink.commit(Epoch(sending.owner, mark(2), mark(3), first=True), Some([3]))
        sending.mark = mark(3)
        sending.send(Some([4]))
        for number in (1, 0):
            sending.back(number)
            assert (ids(catalog), sending.sink.mark(sending.owner)) == (theirs, mark(number))
            sending.send(Some([10]))
            assert ids(catalog) == [10, *theirs]
        sending.back(0, keep=True)
        earlier = Mark(AttemptId(1), CheckpointId(0), Version(-1))
        assert "not known any more" in sending.sink.why_not(sending.owner, earlier)


def test_of_a_sink_that_has_forgotten_its_first_epoch_the_beginning_is_not_known(catalog: Catalog) -> None:
    catalog.create_table("shop.orders", SCHEMA)
    with Sending() as sending:
        sending.send(Some([1]))
        sending.send(Some([2]))
        sending.send(Some([3]), floor=2)
        assert "not known any more" in sending.sink.why_not(sending.owner, mark(1))
        with pytest.raises(Refused, match="not known any more"):
            sending.back(0)
    assert ids(catalog) == [1, 2, 3]


def test_a_savepoint_has_a_tag_which_stays(catalog: Catalog) -> None:
    table, tag = catalog.create_table("shop.orders", SCHEMA), "spark_abs_release_sent_01234567"
    with Sending() as sending:
        sending.send(Some([0]))
        sending.send(Some([1]), savepoint="release")
        sending.send(Some([2]))
        sending.back(1)
        sending.send(Some([10]))
    table.refresh()
    assert [name for name, ref in table.refs().items() if "abandoned" not in name] == ["main", tag]
    at_savepoint = table.scan(snapshot_id=table.refs()[tag].snapshot_id).to_arrow()["id"].to_pylist()
    assert (sorted(at_savepoint), ids(catalog)) == ([0, 1], [0, 10])

    # Two of one name: of a savepoint that was given up, and of the one that is there.
    with Sending(run=2) as sending:
        sending.send(Some([11]), savepoint="release")
    table.refresh()
    newest = table.scan(snapshot_id=table.refs()[tag].snapshot_id).to_arrow()["id"].to_pylist()
    assert sorted(newest) == ids(catalog) == [0, 10, 11]


def test_whoever_stands_where_the_branch_comes_back_to_commits_nothing(catalog: Catalog) -> None:
    """A run that stands still between its look and its commit, while a restore goes back to that place."""
    catalog.create_table("shop.orders", SCHEMA)
    with Sending() as old, Sending(run=2, name="other") as _:
        old.sink.recover(old.owner)
        old.send(Some([1]))

        class Late(Some):
            def __iter__(self) -> Iterator[pa.RecordBatch]:
                with Sending(run=3) as newer:
                    newer.send(Some([2]))
                    newer.back(1)
                yield from super().__iter__()

        with pytest.raises(CommitConflict):
            old.send(Late([3]))
        with pytest.raises(Fenced):
            old.sink.recover(old.owner)
    assert ids(catalog) == [1]


def test_a_rest_catalog_takes_rows_once_and_goes_back(rest: Catalog) -> None:
    """Append, an epoch without rows, savepoint, takeover, fence, way back: the server checks what we ask."""
    table = rest.create_table("shop.orders", SCHEMA)
    with Sending() as old:
        old.send(Some([0]))
        old.send(Some([]), savepoint="empty")
        old.send(Some([1]), savepoint="release")
        with Sending(run=2) as new:
            assert new.mark == mark(3)
            with pytest.raises((CommitConflict, Fenced)):
                old.send(Some([9]))
            with pytest.raises(Fenced):
                old.sink.recover(old.owner)
            new.send(Some([2]))
            assert ids(rest) == [0, 1, 2]
            new.back(2)
            new.send(Some([20]))
    table.refresh()
    assert ids(rest) == [0, 20]

    def at(tag: str) -> list[int]:
        found: list[int] = table.scan(snapshot_id=table.refs()[tag].snapshot_id).to_arrow()["id"].to_pylist()
        return sorted(found)

    (left,) = (name for name in table.refs() if name.startswith("spark_abs_abandoned_"))
    assert [at(f"spark_abs_{name}_sent_01234567") for name in ("empty", "release")] == [[0], [0, 1]]
    assert at(left) == [0, 1, 2]


def test_over_rest_whoever_was_overtaken_while_it_wrote_commits_nothing(rest: Catalog) -> None:
    rest.create_table("shop.orders", SCHEMA)
    with Sending() as old:
        old.send(Some([1]))

        class Late(Some):
            def __iter__(self) -> Iterator[pa.RecordBatch]:
                with Sending(run=2) as newer:
                    newer.send(Some([2]))
                    newer.back(1)
                yield from super().__iter__()

        with pytest.raises(CommitConflict):
            old.send(Late([3]))
    assert ids(rest) == [1]


class Relay:
    """An HTTP server before a REST catalog, that gives no answer to what `silent` says."""

    def __init__(self, uri: str, silent: Callable[[str], bool]) -> None:
        self.silent = silent
        self.over = Event()
        relay = self

        class Handler(BaseHTTPRequestHandler):
            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
                passed = {"Content-Type": "application/json"}
                request = Request(uri + self.path, body, passed, method=self.command)
                if self.path.startswith("/silent"):
                    relay.over.wait(60)
                    return
                try:
                    with urlopen(request, timeout=60) as answer:
                        status, said = answer.status, answer.read()
                except HTTPError as error:
                    status, said = error.code, error.read()
                if relay.silent(f"{self.command} {self.path}"):
                    relay.over.wait(60)
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            do_GET = do_POST = _any  # noqa: N815 - the base's names

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize("call", ["login", "config", "table", "commit"])
def test_a_call_that_gets_no_answer_ends(
    rest: Catalog, rest_catalog: RestCatalog, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Also one whose commit has taken place: what became of it is then read."""
    rest.create_table("shop.orders", SCHEMA)
    monkeypatch.setattr(iceberg_catalog, "TIMEOUTS_S", (5.0, 5.0))
    with Relay(rest_catalog.properties["uri"], lambda _: False) as relay:
        settings = {"type": "rest", "uri": relay.uri}
        if call == "login":
            settings |= {"credential": f"me:{SECRET}", "oauth2-server-uri": f"{relay.uri}/silent"}
        monkeypatch.setenv("CATALOG", json.dumps(settings))
        of_call = {
            "login": lambda _: False,
            "config": lambda asked: "/v1/config" in asked,
            "table": lambda asked: asked.startswith("GET") and asked.endswith("/tables/orders"),
            "commit": lambda asked: asked.startswith("POST") and asked.endswith("/tables/orders"),
        }
        began = time.monotonic()
        if call == "commit":
            with Sending() as sending:
                relay.silent = of_call[call]
                with pytest.raises((SinkUnreachable, CommitStateUnknown), match=r"(?i)timed out"):
                    sending.send(Some([1]))
                relay.silent = of_call["login"]
                assert sending.sink.recover(sending.owner) == mark(1)
        else:
            relay.silent = of_call[call]
            with pytest.raises(SinkUnreachable, match=r"(?i)timed out") as refused:
                IcebergSink(ORDERS).mark(Owner("0" * 32, "job", "sent", RunId(1)))
            assert SECRET not in str(refused.value)
        assert time.monotonic() - began < 40
    assert ids(rest) == ([1] if call == "commit" else [])


def test_half_an_answer_is_asked_for_again_and_not_said(
    rest: Catalog, rest_catalog: RestCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest.create_table("shop.orders", SCHEMA)
    monkeypatch.setenv("CATALOG", json.dumps(rest_catalog.properties))
    text = requests.Response.text
    for part in ("/v1/config", "/tables/orders"):

        def half(answer: requests.Response, part: str = part) -> str:
            said: str = text.fget(answer)  # type: ignore[attr-defined]
            return f'{{"token": "{SECRET}", ' if part in answer.url else said

        with monkeypatch.context() as patched:
            patched.setattr(requests.Response, "text", property(half))
            with pytest.raises(SinkUnreachable, match="sent a reply that cannot be read") as refused:
                IcebergSink(ORDERS).mark(Owner("0" * 32, "job", "sent", RunId(1)))
            assert SECRET not in f"{refused.value!r} {refused.value.__cause__!r}"


def test_an_epoch_without_rows_moves_the_mark_and_adds_no_snapshot(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = catalog.create_table("shop.orders", SCHEMA)
    with Sending() as sending:
        sending.send(Some([0]))
        before = len(table.refresh().snapshots())
        for _ in range(3):
            sending.send(Some([]))
        assert (len(table.refresh().snapshots()), sending.sink.mark(sending.owner)) == (before, mark(4))
        sending.back(2)  # where the same snapshot was the newest: nothing is abandoned
        assert list(table.refresh().refs()) == ["main"]
        sending.send(Some([1]))
        sending.send(Some([]))
        sending.back(3)
        sending.back(2)
        assert ids(catalog) == [0]
    with Sending(run=2) as again:
        assert again.mark == mark(2)
        once = iceberg._commit_once

        def overtaken(*given: Any) -> None:
            monkeypatch.setattr(iceberg, "_commit_once", once)
            Sending(run=3).sink.close()
            once(*given)

        monkeypatch.setattr(iceberg, "_commit_once", overtaken)
        with pytest.raises(CommitConflict):
            again.send(Some([]))
    with Sending(run=4) as last:
        assert last.mark == mark(2)


def test_an_expired_snapshot_is_named_by_the_refusal(catalog: Catalog) -> None:
    """And what the mark does not name may expire; rows then go on."""
    table = catalog.create_table("shop.orders", SCHEMA)
    with Sending() as sending:
        for number in range(4):
            sending.send(Some([number]))
        metadata = table.refresh().metadata
        second = metadata.snapshots[2].snapshot_id  # after the one of the start and that of the first epoch
        table.maintenance.expire_snapshots().by_id(second).commit()
        assert sending.sink.why_not(sending.owner, mark(2)) == f"snapshot {second} of the table has expired"
        assert sending.sink.why_not(sending.owner, mark(3)) == ""
        sending.sink.recover(sending.owner)
        sending.send(Some([4]))
    assert ids(catalog) == [0, 1, 2, 3, 4]


def expire(table: Table) -> None:
    """Expire every snapshot but the newest of a branch and those with a tag."""
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    table.refresh().maintenance.expire_snapshots().older_than(tomorrow).commit()
    table.refresh()


UNKNOWN = "snapshots after it have expired, so it is not known whether others have committed meanwhile"


@pytest.mark.parametrize("version", ["1", "2"])
def test_after_an_expiry_of_all_but_a_savepoint_a_job_starts_and_sends(
    catalog: Catalog, version: str
) -> None:
    table = catalog.create_table("shop.orders", SCHEMA, properties={"format-version": version})
    with Sending() as sending:
        sending.send(Some([0]))
        sending.send(Some([1]), savepoint="release")
    for theirs in (98, 99):
        table.refresh().append(pa.table({"id": [theirs], "text": ["theirs"]}))
    expire(table)
    assert len(table.snapshots()) == 2
    with Sending(run=2) as again:
        assert again.mark == mark(2)
        again.send(Some([2]))
    # Two starts, nothing sent between, and an expiry.
    Sending(run=3).sink.close()
    expire(table)
    with Sending(run=4) as last:
        assert last.mark == mark(3)
        last.send(Some([3]))
    assert ids(catalog) == [0, 1, 2, 3, 98, 99]


def test_after_a_savepoint_two_starts_and_an_expiry_the_job_goes_on(catalog: Catalog) -> None:
    table = catalog.create_table("shop.orders", SCHEMA)
    with Sending() as sending:
        sending.send(Some([0]), savepoint="release")
    for run in (2, 3):
        Sending(run=run).sink.close()
    expire(table)
    with Sending(run=4) as again:
        again.send(Some([1]))
    assert ids(catalog) == [0, 1]


def test_what_an_expiry_hides_is_said_to_be_unknown(catalog: Catalog) -> None:
    """A way back to a savepoint, over snapshots that have expired."""
    table = catalog.create_table("shop.orders", SCHEMA)
    with Sending() as sending:
        sending.send(Some([0]), savepoint="release")
        for number in range(1, 4):
            sending.send(Some([number]))
        expire(table)
        assert sending.sink.why_not(sending.owner, mark(1)) == UNKNOWN
        with pytest.raises(Refused, match=UNKNOWN):
            sending.back(1)
        table.append(pa.table({"id": [99], "text": ["theirs"]}))
        assert "others have committed to the table since" in sending.sink.why_not(sending.owner, mark(1))
        sending.back(1, keep=True)
        sending.send(Some([10]))
    assert ids(catalog) == [0, 1, 2, 3, 10, 99]


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("expired", [False, True])
def test_a_branch_that_was_set_back_is_refused_whoever_has_committed_since(
    catalog: Catalog, version: str, others: int, expired: bool
) -> None:
    table = catalog.create_table("shop.orders", SCHEMA, properties={"format-version": version})
    with Sending() as sending:
        sending.send(Some([0]))
        before = table.refresh().current_snapshot()
        assert before is not None
        table.manage_snapshots().create_tag(before.snapshot_id, "before").commit()
        sending.send(Some([1]), savepoint="release")
        if expired:
            expire(table)
        table.refresh().manage_snapshots().rollback_to_snapshot(before.snapshot_id).commit()
        for theirs in range(others):
            table.refresh().append(pa.table({"id": [90 + theirs], "text": ["theirs"]}))
        with pytest.raises(Refused, match="set the branch forward to that snapshot"):
            sending.sink.recover(sending.owner)


def test_a_branch_that_begins_anew_is_refused_although_nothing_on_it_is_older(catalog: Catalog) -> None:
    """As after `CREATE OR REPLACE TABLE`: its snapshot has no parent, and none between has expired."""
    table = catalog.create_table("shop.orders", SCHEMA)
    with Sending() as sending:
        sending.send(Some([0]), savepoint="release")
        table.refresh().manage_snapshots().remove_branch("main").commit()
        table.refresh().append(pa.table({"id": [99], "text": ["theirs"]}))
        with pytest.raises(Refused, match="set the branch forward to that snapshot"):
            sending.sink.recover(sending.owner)


def test_the_mark_names_what_a_restore_may_ask_for_and_no_more(catalog: Catalog) -> None:
    """An old savepoint, and two checkpoints at a time: the mark does not grow."""
    table = catalog.create_table("shop.orders", SCHEMA)
    with Sending() as sending:
        sending.send(Some([0]))
        sending.send(Some([1]), savepoint="release")
        for number in range(2, 30):
            asked = (20, 10 * number - 10, 10 * number)
            sending.send(Some([number]), floor=2, asked=asked if number > 10 else ())
        found = mark_in(table.refresh().metadata, sending.owner)
        assert found is not None
        assert [kept.version for kept in found.kept] == [20, 280, 290, 300]
        assert "not known any more" in sending.sink.why_not(sending.owner, mark(10))
        sending.back(29)
        assert ids(catalog) == list(range(29))
        sending.back(2)
    assert ids(catalog) == [0, 1]


def test_files_of_a_commit_that_did_not_take_place_are_deleted(catalog: Catalog, tmp_path: Path) -> None:
    table = catalog.create_table("shop.orders", SCHEMA)

    class Disturbed(Some):
        def __iter__(self) -> Iterator[pa.RecordBatch]:
            yield from super().__iter__()
            table.refresh().append(pa.table({"id": [99], "text": ["theirs"]}))

    class Torn(Some):
        def __iter__(self) -> Iterator[pa.RecordBatch]:
            yield from super().__iter__()
            raise DamageError("a file is not there any more")

    with Sending() as sending:
        with pytest.raises(CommitConflict):
            sending.send(Disturbed([1]))
        sending.sink.recover(sending.owner)
        with pytest.raises(DamageError, match=r"table shop\.orders: a file is not there any more"):
            sending.send(Torn([2]))
    files = {str(path) for path in tmp_path.rglob("*.parquet")}
    named = {task.file.file_path.removeprefix("file://") for task in table.refresh().scan().plan_files()}
    assert files == named


def test_a_writer_goes_to_other_processes_without_what_opens_the_catalog(
    catalog: Catalog, tmp_path: Path
) -> None:
    table = catalog.create_table("shop.orders", SCHEMA)
    table.append(pa.table({"id": [0], "text": ["t"]}))
    io = PyArrowFileIO({"uri": SECRET, "token": SECRET, "credential": SECRET, "s3.region": "here"})
    writer = DataFileWriter.of(table.metadata, io)
    moved = pickle.dumps(writer)
    assert SECRET.encode() not in moved
    assert writer.properties == {"s3.region": "here"}
    first, second = (pickle.loads(moved)(Some(range(3))) for _ in range(2))
    (one,), (other,) = first.files, second.files
    assert (one.record_count, one.file_path == other.file_path) == (3, False)
    assert not elsewhere(PyArrowFileIO({"s3.signer": "S3V4RestSigner"}))


def test_rows_of_others_are_not_undone(catalog: Catalog) -> None:
    table = catalog.create_table("shop.orders", SCHEMA)
    with Sending() as sending:
        sending.send(Some([0]))
        sending.send(Some([1]))
        table.refresh()
        table.append(pa.table({"id": [99], "text": ["theirs"]}))
        with pytest.raises(Refused, match="others have committed to the table since"):
            sending.back(1)
        sending.sink.recover(sending.owner)
        sending.send(Some([2]))
        assert sending.sink.why_not(sending.owner, mark(2)) != ""
    assert ids(catalog) == [0, 1, 2, 99]


def test_a_branch_that_somebody_has_set_back_is_refused(catalog: Catalog) -> None:
    table = catalog.create_table("shop.orders", SCHEMA)
    with Sending() as sending:
        sending.send(Some([0]))
        table.refresh()
        before = table.current_snapshot()
        assert before is not None
        sending.send(Some([1]))
        table.refresh()
        table.manage_snapshots().rollback_to_snapshot(before.snapshot_id).commit()
        with pytest.raises(Refused, match="set the branch forward to that snapshot"):
            sending.sink.recover(sending.owner)


@pytest.mark.parametrize(
    ("kind", "value", "transform"),
    [
        (pa.date32(), 3_700_000, None),  # of the year 12100
        (pa.date32(), 3_700_000, DayTransform()),
        (pa.timestamp("us"), 3_700_000 * 86_400 * 10**6, None),
        (pa.timestamp("us"), 3_700_000 * 86_400 * 10**6, DayTransform()),
        (pa.float64(), float("nan"), IdentityTransform()),
    ],
)
def test_rows_that_the_table_can_never_take_are_not_tried_again(
    catalog: Catalog, tmp_path: Path, kind: pa.DataType, value: float, transform: Transform[Any, Any] | None
) -> None:
    schema = SCHEMA.append(pa.field("value", kind))
    table = catalog.create_table("shop.orders", schema)
    if transform is not None:
        with table.update_spec() as update:
            update.add_field("value", transform, "part")
    numbers = pa.array([value], pa.float64() if kind == pa.float64() else pa.int64())
    values = numbers.cast(pa.int32()).cast(kind) if kind == pa.date32() else numbers.cast(kind)
    with Sending() as sending:
        sending.sink.check(schema)
        with pytest.raises(SinkFailed, match=r"table shop\.orders: (Overflow|ZeroDivision)Error"):
            sending.send(Some([1], value=values))
    assert ids(catalog) == []


def test_what_only_looks_like_a_fault_of_the_rows_is_tried_again(catalog: Catalog) -> None:
    """Errors of a store that are also a ValueError."""
    catalog.create_table("shop.orders", SCHEMA)

    class Torn(Some):
        def __init__(self, error: Exception) -> None:
            super().__init__([1])
            self._error = error

        def __iter__(self) -> Iterator[pa.RecordBatch]:
            raise self._error

    errors = (
        json.JSONDecodeError("half", "{", 1),
        requests.exceptions.JSONDecodeError("half", "{", 1),
        requests.ConnectionError("gone"),
        pa.ArrowMemoryError("full"),
    )
    with Sending() as sending:
        for error in errors:
            with pytest.raises(SinkUnreachable):
                sending.send(Torn(error))
            sending.sink.recover(sending.owner)


def test_partitions_are_those_of_the_table(catalog: Catalog) -> None:
    made = catalog.create_table("shop.orders", SCHEMA)
    catalog.drop_table("shop.orders")
    key, text = (made.schema().find_field(name).field_id for name in ("id", "text"))
    spec = PartitionSpec(
        PartitionField(key, 1000, BucketTransform(4), "bucket"),
        PartitionField(text, 1001, IdentityTransform(), "text"),
    )
    catalog.create_table("shop.orders", made.schema(), partition_spec=spec)
    with Sending() as sending:
        sending.send(Some(range(20)))
    table = catalog.load_table("shop.orders")
    assert ids(catalog) == list(range(20))
    assert table.scan(row_filter="id = 7").to_arrow()["text"].to_pylist() == ["t7"]
    assert len(list(table.scan(row_filter="text = 't7'").plan_files())) == 1


PARTITIONED: dict[str, tuple[pa.DataType, list[Any], str, Transform[Any, Any]]] = {
    "zeros": (pa.float64(), [0.0, -0.0, 1.0, None, -1.5], "value", IdentityTransform()),
    "zeros of another width": (pa.float32(), [-0.0, 0.0, 0.1, None, -0.0], "value", IdentityTransform()),
    "zeros within a struct": (
        pa.struct([("x", pa.float64())]),
        [{"x": 0.0}, {"x": -0.0}, {"x": None}, None],
        "value.x",
        IdentityTransform(),
    ),
    "text": (pa.string(), ["", None, " ", "a", "A", "a ", "a/b=c%20\n"], "value", IdentityTransform()),
    "beginnings": (pa.string(), ["", None, " ", "a", "A", "ab"], "value", TruncateTransform(1)),
    "bytes": (pa.binary(), [b"", None, b"\0", b"a"], "value", IdentityTransform()),
}


@pytest.mark.parametrize("name", PARTITIONED)
def test_values_that_are_equal_or_look_alike_are_in_the_table_once(catalog: Catalog, name: str) -> None:
    kind, values, column, transform = PARTITIONED[name]
    table = catalog.create_table("shop.orders", SCHEMA.append(pa.field("value", kind)))
    with table.update_spec() as update:
        update.add_field(column, transform, "part")
        update.add_field("text", TruncateTransform(1), "beginning")
    with Sending() as sending:
        for _ in range(2):
            sending.send(Some(range(len(values)), value=pa.array(values, kind)))
    rows = catalog.load_table("shop.orders").scan().to_arrow().sort_by("id").to_pydict()
    assert rows["id"] == [number for number in range(len(values)) for _ in range(2)]
    wanted = pa.array([value for value in values for _ in range(2)], kind).to_pylist()
    assert repr(rows["value"]) == repr(wanted)


def test_columns_are_added_when_that_is_asked_for(catalog: Catalog) -> None:
    catalog.create_table("shop.orders", SCHEMA)
    wider = Some([1], price=[2.5])
    with pytest.raises(UsageError, match=r"(?s)cannot take the rows.*price.*evolve=True"):
        IcebergSink(ORDERS).check(wider.schema)
    evolving = Iceberg("shop.orders", catalog_env="CATALOG", evolve=True)
    IcebergSink(evolving).check(wider.schema)
    assert catalog.load_table("shop.orders").schema().column_names == ["id", "text"]
    with Sending(evolving) as sending:
        sending.send(Some([0]))
        sending.send(wider)
    rows = catalog.load_table("shop.orders").scan().to_arrow().sort_by("id").to_pydict()
    assert rows["price"] == [None, 2.5]
    with pytest.raises(UsageError, match="cannot take the rows"):
        IcebergSink(evolving).check(pa.schema([("id", pa.string()), ("text", pa.string())]))
    with pytest.raises(UsageError, match=r"has no table shop\.none: make one with these columns"):
        IcebergSink(Iceberg("shop.none", catalog_env="CATALOG")).check(SCHEMA)


def test_other_branches_stay_as_they_are(catalog: Catalog) -> None:
    table = catalog.create_table("shop.orders", SCHEMA)
    table.append(pa.table({"id": [0], "text": ["t"]}))
    snapshot = table.current_snapshot()
    assert snapshot is not None
    table.manage_snapshots().create_branch(snapshot.snapshot_id, "audit").commit()
    with Sending(Iceberg("shop.orders", catalog_env="CATALOG", branch="audit")) as sending:
        sending.send(Some([1]))
        sending.send(Some([2]))
        sending.back(1)
    assert ids(catalog) == [0]
    table.refresh()
    found = table.scan(snapshot_id=table.refs()["audit"].snapshot_id).to_arrow()["id"].to_pylist()
    assert sorted(found) == [0, 1]


@pytest.mark.parametrize("name", ["", "orders", "a b.c", "../a.b", "a.b\n", "a'.b", "a..b", "a.b;c", "a.*"])
def test_what_is_no_name_of_a_table_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"is not the name of a table|says no namespace"):
        Iceberg(name)


@pytest.mark.parametrize("words", [{"key": "id"}, {"key": "id", "sequence_by": "at"}, {"sequence_by": "at"}])
def test_a_merge_by_key_is_refused_with_the_reason(words: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"would merge rows by key, and this sink only appends") as refused:
        Iceberg("shop.orders", **words)
    assert all(f"{word}=" in str(refused.value) for word in words)
    assert from_json(Iceberg, to_json(ORDERS)) == ORDERS


def test_secrets_are_in_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for settings in (
        f"not JSON {SECRET}",
        json.dumps(
            {"type": "sql", "uri": f"sqlite:///{tmp_path}/{SECRET}/none.db", "warehouse": "file:///w"}
        ),
        json.dumps({"type": "rest", "uri": "http://127.0.0.1:1", "token": SECRET}),
        json.dumps({"type": SECRET, "token": SECRET}),
    ):
        monkeypatch.setenv("CATALOG", settings)
        with pytest.raises((UsageError, SinkUnreachable)) as refused:
            IcebergSink(ORDERS).check(SCHEMA)
        said.append(f"{refused.value!r} {refused.value.__cause__!r}")
    assert SECRET not in "".join(said)


def test_names_of_columns_are_any_text(catalog: Catalog) -> None:
    names = ["'; DROP TABLE x --", 'a"b', "a\nb", "../x", "*?[a]", "{0}", "%s", "a b/ü"]
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), *((n, pa.string()) for n in names)])
    catalog.create_table("shop.orders", schema)
    more = {name: [name] for name in names}
    with Sending() as sending:
        sending.sink.check(schema)
        sending.send(Some([1], **more))
        sending.send(Some([2], **more))
        sending.back(1)
    (row,) = catalog.load_table("shop.orders").scan().to_arrow().to_pylist()
    assert {name: row[name] for name in names} == {name: name for name in names}


def test_rows_of_others_are_told_from_those_of_the_root(catalog: Catalog) -> None:
    table = catalog.create_table("shop.orders", SCHEMA)
    comes = Owner("0123456789abcdef0123456789abcdef", "job", "sent", RunId(1))
    assert IcebergSink(ORDERS).rows_of_others(comes) == ""
    table.append(pa.table({"id": [1, 2], "text": ["a", "b"]}, schema=SCHEMA))
    assert IcebergSink(ORDERS).rows_of_others(comes) == "2 rows"
    with Sending():  # killed right after it came
        assert IcebergSink(ORDERS).rows_of_others(comes) == ""
    assert IcebergSink(ORDERS).rows_of_others(replace(comes, sink="renamed")) == ""
    assert IcebergSink(ORDERS).rows_of_others(replace(comes, root="another")) == "2 rows"
