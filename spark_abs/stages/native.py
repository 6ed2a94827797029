"""The content of a stage's own Spark checkpoint: planned batches, finished batches, positions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from pyarrow import fs

from spark_abs.codec import from_json
from spark_abs.errors import AbsError, DamageError
from spark_abs.model import NO_BATCH, BatchId, Position, StageId, is_number, positions_of
from spark_abs.protocol.control import ControlState
from spark_abs.snapshots.capture import capture, newest_batch
from spark_abs.snapshots.layout import OffsetFile, parse_offsets
from spark_abs.store.root import Root
from spark_abs.store.storage import Place


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Spark's `metadata` file."""

    id: str


def native_of(root: Root, state: ControlState, stage: StageId) -> Place:
    """Return the place of a stage's Spark checkpoint in the newest attempt."""
    attempt = state.attempt
    return root.native(attempt.natives, attempt.id, attempt.directory(stage))


class NativeLog:
    """The offset and commit log of one query. Reading only; any thread may have its own."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def offsets_text(self, batch: BatchId) -> str:
        """Return the text of a planned batch.

        Raises:
            DamageError: there is no such batch.
        """
        text = self.find_offsets(batch)
        if text is None:
            raise DamageError(f"{self.place}/offsets/{batch} is missing: see `spark-abs verify`")
        return text

    def find_offsets(self, batch: BatchId) -> str | None:
        """Return the text of a planned batch, None if it does not exist (any more)."""
        return self.place.read_text(f"offsets/{int(batch)}")

    def offsets(self, batch: BatchId) -> OffsetFile:
        """Return a planned batch, parsed."""
        return self.parsed(batch, self.offsets_text(batch))

    def parsed(self, batch: int, text: str) -> OffsetFile:
        """Return the text of a planned batch, parsed; errors of it name the file."""
        return parse_offsets(text, f"{self.place}/offsets/{batch}")

    def positions(self, batch: BatchId) -> tuple[Position, ...]:
        """Return the positions of the stage's gates after a batch."""
        return positions_of(self.offsets(batch).lines)

    def consumed(self) -> tuple[Position, ...]:
        """Return how far the stage's gates have durably read: the positions of its last finished batch."""
        batch = self.newest_committed()
        return self.positions(batch) if batch != NO_BATCH else ()

    def watermark_ms(self) -> int:
        """Return the watermark under which the last finished batch ran, 0 if there is none."""
        batch = self.newest_committed()
        return self.offsets(batch).watermark_ms if batch != NO_BATCH else 0

    def query_id(self) -> str:
        """Return Spark's id of the query.

        Raises:
            DamageError: the checkpoint has no id.
        """
        data = self.place.read("metadata")
        if data is None:
            raise DamageError(f"{self.place}/metadata is missing: see `spark-abs verify`")
        return from_json(_Metadata, data).id

    def tables_read(self, batch: BatchId) -> frozenset[str]:
        """Return the ids of the Delta tables that a batch reads from as streams."""
        return tables_read(self.offsets(batch).lines)

    def has_committed(self, batch: BatchId) -> bool:
        """Say whether Spark has recorded the end of a batch."""
        return self.place.below(f"commits/{int(batch)}").exists()

    def stands_at(self, batch: BatchId) -> bool:
        """Say whether a batch is the last one: its end is recorded, and none is planned after it."""
        planned = self.place.below(f"offsets/{int(batch) + 1}").exists()
        return not planned and (batch == NO_BATCH or self.has_committed(batch))

    def newest_planned(self) -> BatchId:
        """Return the newest batch in the offset log, `NO_BATCH` if none."""
        return newest_batch(self.place, "offsets")

    def newest_committed(self) -> BatchId:
        """Return the newest batch in the commit log, `NO_BATCH` if none."""
        return newest_batch(self.place, "commits")

    def idle_at(self) -> BatchId | None:
        """Return the last batch if no other is planned, None while one is under way."""
        committed = self.newest_committed()
        return committed if self.newest_planned() == committed else None

    def repeats(self, batch: BatchId) -> bool:
        """Say whether a batch was planned with the offsets and the watermark of the one before it."""
        before, text = self.find_offsets(BatchId(batch - 1)), self.find_offsets(batch)
        if before is None or text is None:
            return False
        one, other = self.parsed(batch - 1, before), self.parsed(batch, text)
        return (one.offsets, one.watermark_ms) == (other.offsets, other.watermark_ms)


def tables_read(lines: Sequence[str]) -> frozenset[str]:
    """Return the ids of the Delta tables that the lines of an offset file name."""
    found = set()
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found.add(str(json.loads(line)["reservoirId"]))
    return frozenset(found)


def clear_unplanned(native: Place) -> None:
    """Remove the remains of a killed plan of batch 0: Spark would refuse to begin.

    Only the owner of the root may call this, before the query starts. Costs a listing.
    """
    if NativeLog(native).newest_planned() == NO_BATCH:
        native.fs.delete_dir_contents(f"{native.path}/offsets", missing_dir_ok=True)


def clear_leftovers(native: Place) -> None:
    """Remove checksum files and unfinished files of the two logs (ADR 8).

    A query that writes without checksum files must find none: after a file is rewritten, its old checksum
    would not match. And if a driver froze while it wrote a log's file, it finds nothing to rename when it
    wakes up.

    Only the owner of the root may call this, before the query starts. It can be repeated after a kill. Costs
    a listing of all files.
    """
    selector = fs.FileSelector(native.path, allow_not_found=True, recursive=True)
    for info in native.fs.get_file_info(selector):
        parent, _, name = info.path.removeprefix(f"{native.path}/").rpartition("/")
        hidden = info.type is fs.FileType.File and name.startswith(".")
        if hidden and (name.endswith(".crc") or (name.endswith(".tmp") and parent in ("offsets", "commits"))):
            with contextlib.suppress(FileNotFoundError):
                native.fs.delete_file(info.path)


def plan_batch(native: Place, batch: BatchId, text: str) -> None:
    """Make a batch the next one of a query, in place of plans after its last finished batch.

    Only while the query does not run. It can be repeated after a kill.
    """
    log = NativeLog(native)
    done = log.newest_committed()
    if batch != done + 1:
        raise DamageError(f"{native}: batch {batch} cannot come next, {done} is the last finished")
    forget_plans(native)
    native.write(f"offsets/{int(batch)}", text.encode())


def forget_plans(native: Place) -> None:
    """Remove the plans of batches after the last finished batch. None of them may have begun."""
    done = NativeLog(native).newest_committed()
    selector = fs.FileSelector(f"{native.path}/offsets", allow_not_found=True)
    for info in native.fs.get_file_info(selector):
        # The checksum that Spark leaves beside a file goes too: it would not be that of the new one.
        number = info.base_name.removeprefix(".").removesuffix(".crc")
        if is_number(number) and int(number) > done:
            native.fs.delete_file(info.path)


def check_native(native: Place, least: BatchId) -> str | None:
    """Describe the problem of a native checkpoint, None if a query can start from it.

    Reads the logs and lists the state files from which the last finished batch is loaded; not their bytes.

    Args:
        native: the checkpoint.
        least: the newest batch in a manifest or an output. A checkpoint that ends before it is lost or old,
            and a query that started from it would plan new batches under used numbers.
    """
    if native.read("metadata") is None:
        if least == NO_BATCH:
            return None
        return f"{native}/metadata is missing" if native.exists() else f"{native} is missing"
    log = NativeLog(native)
    try:
        planned, committed = log.newest_planned(), log.newest_committed()
        if planned != NO_BATCH:
            log.offsets(planned)
        if committed > planned or planned > committed + 1:
            return f"{native}: batch {planned} is the last planned and {committed} the last finished"
        if committed != NO_BATCH:
            capture(native.fs, native.path, committed)
    except AbsError as error:
        return str(error)
    if planned < least:
        return f"{native} ends with batch {planned}, but batch {least} was written: it is an old copy"
    return None
