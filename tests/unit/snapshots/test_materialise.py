"""A cut comes back as a native checkpoint of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest

from spark_abs.errors import DamageError, Refused
from spark_abs.model import NO_BATCH, BatchId, CheckpointId
from spark_abs.snapshots import materialise as module
from spark_abs.snapshots import state_storage as kept_module
from spark_abs.snapshots.capture import CapturedFile, CaptureIncomplete
from spark_abs.snapshots.materialise import fresh_query_id, materialise
from spark_abs.snapshots.state_storage import StaleCapture, StateStorage, Stored
from spark_abs.snapshots.sweep import sweep
from spark_abs.snapshots.take import StageCopy, snapshot_stage
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from tests.native_support import Native
from tests.snapshot_support import packs_in

ONE = CheckpointId(1)
POSITION = '{"channel":"a.main","attempt":1,"version":4,"epoch":2,"at_barrier":true,"closed":0,"v":1}'


@pytest.fixture
def native(tmp_path: Path) -> Native:
    """Three batches; a schema file whose absolute path the operator's metadata holds."""
    made = Native(tmp_path / "native place")
    for batch in range(3):
        made.batch(batch, [POSITION, '{"logOffset":1}'])
        made.changes(batch + 1)
    made.snapshot(1, ["a.sst"])
    schema = made.put("state/0/_stateSchema/default/0_s", "schema")
    (made.directory / "state/0/_metadata/metadata").unlink()
    operator = json.dumps(made.operator([Place(str(schema)).in_spark_files]))
    made.put("state/0/_metadata/v2/0", f"v2\n{operator}")
    for number in range(3):
        made.put(f"sources/1/{number}", 'v1\n{"path":"file:/x","timestamp":1,"batchId":0}')
    return made


def taken(kept: StateStorage, native: Native, batch: int = 1) -> StageCopy:
    return snapshot_stage(kept, ONE, Place(str(native.directory)), BatchId(batch))


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_what_a_stage_acknowledges(kept: StateStorage, native: Native) -> None:
    copy = taken(kept, native)
    assert (copy.cut_batch, copy.watermark_ms, copy.shuffle_partitions) == (1, 1000, 1)
    assert [p.channel for p in copy.positions] == ["a.main"]
    assert copy.offsets == (native.directory / "offsets/1").read_text()
    assert copy.provider == native.provider
    assert [o.name for o in copy.operators] == ["stateStoreSave"]
    assert copy.size_new == sum({f.sha256: f.size for f in copy.files}.values())
    assert taken(kept, native).size_new == 0


def test_a_snapshot_that_spark_has_made_anew_is_not_copied_anew(kept: StateStorage, native: Native) -> None:
    """As long as the copy of the one before it is there: sweeping may have taken it."""
    taken(kept, native, 1)
    native.snapshot(3, ["b.sst"])
    second = taken(kept, native, 2)
    names = {f.path.rpartition("/")[2] for f in second.files}
    assert {"1.zip", "2.changelog", "3.changelog"} <= names
    assert not {"3.zip", "b.sst"} & names
    kept.unpin(ONE, completed=True)
    sweep(kept, list)
    assert "3.zip" in {f.path.rpartition("/")[2] for f in taken(kept, native, 2).files}


def test_a_stage_without_a_batch_acknowledges_nothing(kept: StateStorage, tmp_path: Path) -> None:
    copy = snapshot_stage(kept, ONE, Place(str(tmp_path / "none")), NO_BATCH)
    assert (copy.files, copy.offsets, copy.watermark_ms, copy.size_new) == ((), "", None, 0)


def test_the_directory_is_the_cut_under_another_id(
    root: Root, kept: StateStorage, native: Native, tmp_path: Path
) -> None:
    """Byte for byte but for the query's id and the places of schema files."""
    copy, query = taken(kept, native), fresh_query_id()
    told: list[int] = []
    target = tmp_path / "new place"
    materialise(root, copy.files, target=Place(str(target)), query_id=query, progress=told.append)
    found, original = tree(target), tree(native.directory)
    assert json.loads(found.pop("metadata")) == {"id": query}
    moved = found.pop("state/0/_metadata/v2/0").decode()
    assert f'"file:{target}/state/0/_stateSchema/default/0_s"'.replace(" ", "%20") in moved
    assert found == {path: original[path] for path in found}
    assert found.keys() == {f.path for f in copy.files} - {"metadata", "state/0/_metadata/v2/0"}
    assert sum(told) == sum(f.size for f in copy.files if f.path != "metadata")


def test_it_is_repeatable_and_never_takes_a_directory_of_another_query(
    root: Root, kept: StateStorage, native: Native, tmp_path: Path
) -> None:
    copy, target = taken(kept, native), tmp_path / "new"
    materialise(root, copy.files, target=Place(str(target)), query_id="query")
    (target / "offsets/2").write_text("a batch planned since")
    materialise(root, copy.files, target=Place(str(target)), query_id="query")
    assert (target / "offsets/2").exists()
    with pytest.raises(Refused, match="belongs to query query"):
        materialise(root, copy.files, target=Place(str(target)), query_id="another")


class Killed(Exception):
    """The process ends here."""


def test_killed_after_any_file_it_begins_again(
    root: Root, kept: StateStorage, native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory without the id is not a checkpoint: it is emptied and written once more."""
    copy, put, write = taken(kept, native), module.put, Place.write
    materialise(root, copy.files, target=Place(str(tmp_path / "whole")), query_id="query")
    for point in range(len(copy.files)):
        target, left = tmp_path / f"killed{point}", [point]

        def dies(*args: Any, writing: Callable[..., None], left: list[int] = left) -> None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            writing(*args)

        monkeypatch.setattr(module, "put", partial(dies, writing=put))
        monkeypatch.setattr(Place, "write", partialmethod(dies, writing=write))
        with pytest.raises(Killed):
            materialise(root, copy.files, target=Place(str(target)), query_id="query")
        monkeypatch.undo()
        assert not (target / "metadata").exists()
        (target / "offsets").mkdir(exist_ok=True)
        (target / "offsets/9").write_text("of something else")
        materialise(root, copy.files, target=Place(str(target)), query_id="query")
        assert tree(target).keys() == tree(tmp_path / "whole").keys()


def test_a_stage_that_had_run_no_batch_starts_afresh(root: Root, tmp_path: Path) -> None:
    materialise(root, (), target=Place(str(tmp_path / "new")), query_id="query")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("spoil", ["pack", "table"])
def test_damage_leaves_nothing_that_looks_whole(
    root: Root, kept: StateStorage, native: Native, tmp_path: Path, spoil: str
) -> None:
    copy = taken(kept, native)
    state = Path(root.uri, "state")
    if spoil == "pack":
        (state / copy.files[0].at.pack).unlink()
    else:
        state.rename(state.with_name("gone"))
    with pytest.raises(DamageError):
        materialise(root, copy.files, target=Place(str(tmp_path / "new")), query_id="query")
    assert not (tmp_path / "new/metadata").exists()


def test_stored_paths_may_not_leave_the_directory(
    root: Root, kept: StateStorage, native: Native, tmp_path: Path
) -> None:
    file = taken(kept, native).files[0]
    for path in ("../outside", "/etc/outside", "a/../../outside"):
        bad = type(file)(path, file.size, file.sha256, file.at)
        with pytest.raises(DamageError, match="leaves its root"):
            materialise(root, [bad], target=Place(str(tmp_path / "new")), query_id="query")


def test_a_purge_during_the_copy_captures_again(
    kept: StateStorage, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer snapshot replaces changes that Spark purges: the second capture finds it."""
    chunks, purged = kept_module._chunks, False

    def purging(filesystem: object, directory: str, file: CapturedFile) -> object:
        nonlocal purged
        if file.path.endswith("2.changelog") and not purged:
            purged = True
            native.snapshot(2, ["b.sst"])
            (native.directory / file.path).unlink()
        return chunks(filesystem, directory, file)

    monkeypatch.setattr(kept_module, "_chunks", purging)
    names = [f.path.rpartition("/")[2] for f in taken(kept, native).files]
    assert "2.zip" in names
    assert "2.changelog" not in names


def test_copies_that_are_tried_again_leave_no_packs(
    root: Root, kept: StateStorage, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changes between two looks spoils the pack each time."""
    chunks = kept_module._chunks

    def changing(filesystem: object, directory: str, file: CapturedFile) -> object:
        if file.path.endswith("2.changelog"):
            return iter([os.urandom(file.size)])
        return chunks(filesystem, directory, file)

    monkeypatch.setattr(kept_module, "HELD", 0)
    monkeypatch.setattr(kept_module, "_chunks", changing)
    with pytest.raises(CaptureIncomplete, match=r"2\.changelog changed"):
        taken(kept, native)
    assert (packs_in(root), kept.active()) == ([], {})


def test_a_copy_that_never_succeeds_is_declined(
    kept: StateStorage, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> Stored:
        raise StaleCapture("offsets/1 changed while it was copied")

    monkeypatch.setattr(kept, "store", stale)
    with pytest.raises(CaptureIncomplete, match="offsets/1 changed"):
        taken(kept, native)
