"""What commits and small files rest on, against a server: no JVM."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import fs

from spark_abs.channels.trim import trim
from spark_abs.cli.main import main
from spark_abs.errors import CommitConflict, UsageError
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.model import ChannelId, CheckpointId, RunId, Version
from spark_abs.snapshots.materialise import clear_ahead, empty, is_whole, materialise, put
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.snapshots.verify import verify_state, verify_table
from spark_abs.store.control import Control
from spark_abs.store.history import History, HistoryEvent, HistoryRow
from spark_abs.store.lease import own_lease, read_lease, write_lease
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from spark_abs.store.table import Commit, Table
from tests.snapshot_support import manifest_of, store
from tests.stores.server import Azurite, Server

SCHEMA = pa.schema([("n", pa.int64())])
WRITERS, COMMITS = 4, 5


def test_of_two_commits_of_one_version_one_is_refused(root: Root) -> None:
    first = Table.ensure(root.place("t"), SCHEMA)
    second = Table.open(root.place("t"))
    assert first.commit_next(Commit(transactions={"a": 1})) == 1
    with pytest.raises(CommitConflict, match=r"another writer took version 1 of"):
        second.commit_next(Commit(transactions={"a": 2}))
    second.refresh()
    assert second.transaction("a") == 1


def test_what_an_edit_has_left_among_native_checkpoints_goes_with_the_next_run(root: Root) -> None:
    natives = root.place("native")
    clear_ahead(natives, RunId(3))  # there are none yet
    for directory in ("1/match", "ahead-2-4f/target", "ahead-3-8a/source"):
        put(natives, f"{directory}/metadata", [b"x"])
        put(natives, f"{directory}/state/0/1.zip", [b"x"])
    clear_ahead(natives, RunId(3))
    there = fs.FileSelector(natives.path, recursive=True)
    files = [i.path.removeprefix(f"{natives.path}/") for i in natives.fs.get_file_info(there) if i.is_file]
    assert {path.rpartition("/state/")[0] or path for path in files} == {
        "1/match", "1/match/metadata", "ahead-3-8a/source", "ahead-3-8a/source/metadata"
    }  # fmt: skip


def test_writers_that_race_for_versions_lose_nothing(root: Root) -> None:
    Table.ensure(root.place("t"), SCHEMA)
    together = threading.Barrier(WRITERS)

    def write(writer: int) -> list[Version | None]:
        table = Table.open(root.place("t"))
        together.wait()
        return [
            table.commit(lambda _, n=n: Commit(transactions={f"{writer}": n}))  # type: ignore[misc]
            for n in range(COMMITS)
        ]

    with ThreadPoolExecutor(WRITERS) as pool:
        versions = [v for taken in pool.map(write, range(WRITERS)) for v in taken]
    assert sorted(v for v in versions if v is not None) == list(range(1, WRITERS * COMMITS + 1))
    table = Table.open(root.place("t"))
    assert [table.transaction(f"{writer}") for writer in range(WRITERS)] == [COMMITS - 1] * WRITERS


def test_control_history_and_lease(root: Root) -> None:
    control = Control.create(root, "job", 0)
    assert Control.open(root).state == control.state
    History(root).append([HistoryRow(1, HistoryEvent.RUN_STARTED, control.state.attempt.id)])
    assert History(root).read()["event"].to_pylist() == ["run-started"]
    assert Checkpoints.open(root, "job").summaries() == ()
    lease = own_lease(RunId(1), 5)
    write_lease(root, lease)
    assert read_lease(root) == lease


def test_a_directory_is_what_lies_below_it(root: Root) -> None:
    place = root.place("native/1/a")
    assert not place.exists()
    empty(place)
    put(place, "offsets/0", [b"v1", b""])
    assert place.exists()
    assert place.read("offsets/0") == b"v1"
    empty(place)
    assert place.read("offsets/0") is None


def test_a_channel_is_trimmed(root: Root) -> None:
    channel = ChannelId("a.main")
    table = Table.ensure(root.place(root.channel(channel)), SCHEMA)
    for number in range(3):
        table.commit_next(Commit(transactions={"a": number}))
    trim(root, channel, Version(2))
    assert [Table.open(table.place).read_commit(v) is None for v in range(4)] == [True, True, False, False]
    assert Table.open(table.place).version == 3


def test_verbs_find_the_store_through_the_environment(root: Root, server: Server) -> None:
    Control.create(root, "shop", 0)
    for uri in (root.uri, root.uri.replace("s3a:", "s3:")):
        done = CliRunner().invoke(main, ["status", uri], env=server.environment)
        assert (done.exit_code, "shop" in done.output) == (0, True), done.output
    unreachable = {name: value for name, value in server.environment.items() if "ENDPOINT" in name}
    done = CliRunner().invoke(main, ["status", root.uri], env=unreachable)
    assert done.exit_code != 0
    assert server.secret not in done.output


def test_where_no_job_is_it_says_so(root: Root) -> None:
    with pytest.raises(UsageError, match="is not the root of a job"):
        Control.open(root)


def test_state_is_packed_verified_and_brought_back(root: Root, tmp_path: Path) -> None:
    """In threads that share the packs they read; to the store, and to a disk beside it."""
    kept = StateStorage.open(root, "job", RunId(1))
    data = {f"{number}.delta": os.urandom(100) for number in range(1, 30)}
    data |= {"metadata": b"{}", "1.snapshot": os.urandom(9 * 2**20)}
    stored = store(kept, CheckpointId(1), tmp_path / "native", **data).files
    assert verify_state(root, [manifest_of(1, stored)]) == ()
    for target in (root.place("native/1/stage"), Place(str(tmp_path / "back"))):
        materialise(root, stored, target=target, query_id="query")
        assert {path: target.read(path) for path in data if path != "metadata"} == {
            path: content for path, content in data.items() if path != "metadata"
        }
        assert is_whole(target, "query")


def test_a_blob_that_stands_for_a_directory_is_no_file(server: Server) -> None:
    """Hadoop makes one in an account of Azure without a hierarchical namespace."""
    if not isinstance(server, Azurite):
        pytest.skip("only Hadoop's connector for Azure makes them")
    top = server.storage.place(f"{server.top}/marked")
    for name in ("full", "full/inside", "empty"):
        top.fs.open_output_stream(f"{top.path}/{name}", metadata={"hdi_isfolder": "true"}).close()
    top.write("full/inside/file", b"1")
    top.write("plain", b"")
    wanted = {"full", "full/inside", "empty"}
    found = top.fs.get_file_info(fs.FileSelector(top.path, recursive=True))
    kinds = {info.path.removeprefix(f"{top.path}/"): info.type for info in found}
    assert len(found) == len(kinds)
    assert {name for name, kind in kinds.items() if kind is fs.FileType.Directory} == wanted
    assert {name for name, kind in kinds.items() if kind is fs.FileType.File} == {"full/inside/file", "plain"}
    assert all(top.fs.get_file_info(f"{top.path}/{name}").type is fs.FileType.Directory for name in wanted)
    top.fs.delete_dir(f"{top.path}/full")
    top.fs.delete_dir(f"{top.path}/empty")
    with pytest.raises(FileNotFoundError):
        top.fs.delete_dir(f"{top.path}/none")
    (left,) = top.fs.get_file_info(fs.FileSelector(top.path, recursive=True))
    assert left.path == f"{top.path}/plain"


def test_a_whole_table_is_found_whole_and_an_altered_file_is_named(root: Root) -> None:
    """A reader of Parquet and ZIP asks for the end of a file; Google's store refuses to read from there."""
    control = Control.create(root, "job", 1)
    assert verify_table(root, "control") == ()
    infos = root.fs.get_file_info(fs.FileSelector(root.path("control")))
    (name,) = (info.base_name for info in infos if info.is_file)
    data = root.read_whole(f"control/{name}")
    assert data is not None
    root.write_whole(f"control/{name}", data[:40] + bytes([data[40] ^ 1]) + data[41:])
    (found,) = verify_table(root, "control")
    assert (found.path, found.problem.partition(":")[0]) == (f"control/{name}", "altered")
    assert control.state.job == "job"
