"""One checkpoint directory: its files, the fences in it, and the way back to the end of a batch.

A batch is not given back its old number: it gets one above all that the query has ever used. So a driver
that was frozen while the rewind worked, and wakes up later, does no harm. It cannot plan its next batch,
since that number is there. Delta skips what it writes for the batch in hand, since the transaction is higher.
What it writes into the directory has numbers that nobody reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from pyarrow import fs

from spark_abs.codec import to_json
from spark_abs.errors import DamageError, Refused
from spark_abs.model import BatchId, Version, checked_relative
from spark_abs.rewind.files import advanced_source_log, later_schemas, newer, read_until
from spark_abs.rewind.journal import DIRECTORY, FENCE, MARK, Fence, Journal, QueryGoal, Rewound, top_of
from spark_abs.rewind.kept import KEPT, brought, forget_brought, record_brought
from spark_abs.rewind.query import fence_of
from spark_abs.rewind.state import chains, copies, empty_base, raised_lineage, with_lineage_of
from spark_abs.snapshots.capture import Captured, capture, newest_batch
from spark_abs.snapshots.delta_offsets import jumped
from spark_abs.snapshots.layout import (
    OffsetFile,
    parse_offsets,
    with_offsets,
    with_settings,
)
from spark_abs.snapshots.materialise import METADATA
from spark_abs.store.failpoint import Failpoint
from spark_abs.store.storage import Place


class Files:
    """The files of one checkpoint directory, and the copies of those that a rewind changes."""

    def __init__(self, place: Place, rewind: str) -> None:
        self.place = place
        self._top = top_of(rewind)
        self._kept = f"{self._top}/files"

    def listed(self) -> list[str]:
        """Return the paths of all files but ours, relative to the directory."""
        selector = fs.FileSelector(self.place.path, recursive=True)
        top = f"{self.place.path.rstrip('/')}/"
        found = (
            info.path.removeprefix(top)
            for info in self.place.fs.get_file_info(selector)
            if info.type is fs.FileType.File
        )
        return sorted(path for path in found if not path.startswith(f"{DIRECTORY}/"))

    def put_back(self, goal: QueryGoal, at: Failpoint) -> None:
        """Undo the changes of a rewind: take away what it made, move all copies to where they were."""
        top = f"{self.place.path}/{self._kept}"
        for info in self.place.fs.get_file_info(fs.FileSelector(top, allow_not_found=True, recursive=True)):
            if info.type is fs.FileType.File:
                at("back")
                path = checked_relative(info.path.removeprefix(f"{top}/"))
                self.place.move(f"{self._kept}/{path}", path)
        for path in self.listed() if goal.moves else ():
            if newer(path, goal.before, goal.logs):
                at("forget")
                self.place.remove(path)

    def put_in(self, at: Failpoint) -> None:
        """Move the files of a kept cut to their places, what is there to the copies."""
        come = brought(self.place, self._top)
        for path in come.files:
            if self.place.below(f"{self._top}/{KEPT}/{path}").exists():
                at("kept")
                directory, _, name = path.rpartition("/")
                for old in (path, f"{directory}/.{name}.crc") if path not in come.new else ():
                    copied = self.place.below(f"{self._kept}/{old}").exists()
                    if self.place.below(old).exists() and not copied:
                        self.take_away(old)
                self.place.move(f"{self._top}/{KEPT}/{path}", path)

    def hand_over(self, rewind: str, at: Failpoint) -> None:
        """Move the files of a kept cut to an undo, before copies are put back; it may put them in again.

        Args:
            rewind: the id of the undo.
            at: called with the name of each point where a kill is tried.
        """
        come, to = brought(self.place, self._top), top_of(rewind)
        if not come.files:  # there are none, or an earlier call has moved them
            return
        record_brought(self.place, to, come)
        for path in come.files:
            if self.place.below(path).exists():
                at("handed")
                self.place.move(path, f"{to}/{KEPT}/{path}")
        forget_brought(self.place, self._top)

    def take_out(self, rewind: str) -> None:
        """Delete files of a kept cut of which there were none before, also copies that were put back.

        Args:
            rewind: the id of the undo that they were handed to.
        """
        for path in brought(self.place, top_of(rewind)).new:
            self.place.remove(checked_relative(path))

    def forget_record(self) -> None:
        """Take away the record of the rewind: the directory is as it was before."""
        self.place.remove(f"{self._top}/rewound.json")

    def take_away(self, path: str) -> None:
        """Move a file to the copies, if another call has not."""
        with suppress(FileNotFoundError):
            self.place.move(path, f"{self._kept}/{path}")

    def rewrite(self, path: str, text: str) -> None:
        """Replace a file; what was there first is kept."""
        now = self.place.read(path)
        if now == text.encode():
            return
        if now is not None and not self.place.below(f"{self._kept}/{path}").exists():
            self.place.write(f"{self._kept}/{path}", now)
        directory, _, name = path.rpartition("/")
        self.place.remove(f"{directory}/.{name}.crc")
        self.place.write(path, text.encode())

    def text(self, path: str) -> str:
        """Return the text of a file, also of one that was taken away."""
        text = self.place.read_text(path)
        text = self.place.read_text(f"{self._kept}/{path}") if text is None else text
        if text is None:
            raise DamageError(f"{self.place}/{path} is missing")
        return text

    def text_in(self, directory: str, name: str) -> str:
        """Return the text of a file of a directory."""
        return self.text(f"{directory}/{name}")

    def names(self, directory: str) -> list[str]:
        """Return the names of the files of a directory, also of those taken away."""
        found: set[str] = set()
        for top in (directory, f"{self._kept}/{directory}"):
            selector = fs.FileSelector(f"{self.place.path}/{top}", allow_not_found=True)
            found |= {
                i.base_name for i in self.place.fs.get_file_info(selector) if i.type is fs.FileType.File
            }
        return sorted(found)


def put_fence(place: Place, fence: Fence) -> None:
    """Make sure that Spark cannot start the query of a directory."""
    # A store that tears a file loses the id: this copy has it.
    place.write(f"{top_of(fence.rewind)}/{METADATA}", fence.metadata.encode())
    place.remove(f".{METADATA}.crc")  # it would not be that of the new file
    place.write(METADATA, f"{FENCE}\n{to_json(fence)}".encode())


def lift_fence(place: Place, rewind: str) -> None:
    """Let Spark start the query again."""
    fence = fence_of(place)
    if fence is not None and fence.rewind == rewind:
        place.write(METADATA, fence.metadata.encode())


def occupy(place: Place, goal: QueryGoal, rewind: str) -> None:
    """Take the number that a driver that still runs would plan next.

    Raises:
        Refused: a driver has planned it.
    """
    if not goal.moves:
        return
    path, text = f"offsets/{goal.before + 1}", with_settings(goal.offsets, {MARK: rewind})
    if not place.create(path, text.encode()) and not _is_occupied(place, path, rewind):
        raise Refused(f"query {goal.name!r} has begun batch {goal.before + 1} meanwhile: stop it first")


def vacate(place: Place, rewind: str) -> None:
    """Give that number back: the rewind does not take place."""
    path = f"offsets/{newest_batch(place, 'offsets')}"
    if _is_occupied(place, path, rewind):
        place.remove(path)


def _is_occupied(place: Place, path: str, rewind: str) -> bool:
    text = place.read_text(path)
    return text is not None and parse_offsets(text, f"{place}/{path}").conf.get(MARK) == rewind


def least_number(query: QueryGoal, paths: Iterable[str]) -> int:
    """Return the least number for a batch whose state gets versions that no earlier driver writes.

    Such a driver may still end the newest batch, and so write the version after it.

    Args:
        query: what becomes of the query.
        paths: the files of the batch.
    """
    bases = [chain.base for chain in chains(paths)]
    return query.batch + query.before + 2 - min(bases, default=query.before + 2)


def check_sources(place: Place, goal: QueryGoal, rewind: str) -> None:
    """See that the logs of file sources have all entries up to the batch.

    Raises:
        DamageError: one has not.
    """
    _source_logs(goal, parse_offsets(goal.offsets), Files(place, rewind))


def check_schemas(place: Place, goal: QueryGoal, rewind: str) -> None:
    """See that the logs of schemas can be read.

    Raises:
        DamageError: an entry is damaged.
        Refused: an entry has a format that is not known.
    """
    files = Files(place, rewind)
    later_schemas(files.listed(), parse_offsets(goal.offsets), files.text)


def _source_logs(query: QueryGoal, offsets: OffsetFile, files: Files) -> dict[str, str]:
    """Return the files of the logs of file sources that are missing or change: path to text."""
    made: dict[str, str] = {}
    for source, newest in query.logs.items():
        top = f"sources/{source}"
        texts = advanced_source_log(
            files.names(top), read_until(offsets, source), newest + 1, partial(files.text_in, top)
        )
        made |= {f"{top}/{name}": text for name, text in texts.items()}
    return made


def bring_back(
    place: Place, query: QueryGoal, journal: Journal, versions: dict[str, Version], at: Failpoint
) -> None:
    """Bring a checkpoint directory back to the end of a batch, under a new number. Can be repeated.

    Args:
        place: the directory.
        query: what becomes of its query.
        journal: the rewind.
        versions: table to the version that the rewind has made.
        at: called with the name of each point where a kill is tried.
    """
    record = f"{top_of(journal.rewind)}/rewound.json"
    if place.read(record) is not None:
        return
    if journal.undoes:  # it goes to batches that Spark has
        forget_brought(place, top_of(journal.rewind))
    if query.moves:
        _change(Files(place, journal.rewind), query, versions, at)
    made = Rewound(journal.rewind, journal.at_ms, query.batch, query.number)
    place.write(record, to_json(made).encode())


def _change(files: Files, query: QueryGoal, versions: dict[str, Version], at: Failpoint) -> None:
    place, offsets = files.place, parse_offsets(query.offsets)
    place.create(f"offsets/{query.before + 1}", query.offsets.encode())  # an undo has taken it away
    files.put_in(at)
    logs = _source_logs(query, offsets, files)
    read = {source: read_until(offsets, source) for source in query.logs}
    for path in files.listed():
        if newer(path, query.batch, read) and not newer(path, query.before, query.logs):
            at("file")
            files.take_away(path)
    for path in later_schemas(files.listed(), offsets, files.text):
        at("schema")
        directory, _, name = path.rpartition("/")
        files.take_away(path)
        files.take_away(f"{directory}/.{name}.crc")
    for path, text in logs.items():
        at("log")
        files.rewrite(path, text)
    _copy_state(place, capture(place.fs, place.path, BatchId(query.batch), source_logs=False), query, at)
    ends = {source: json.dumps({"logOffset": newest + 1}) for source, newest in query.logs.items()}
    jumps = {source: int(versions[table]) + 1 for source, table in query.jumps.items()}
    text = jumped(with_offsets(query.offsets, ends), jumps)
    # Spark plans the last batch again at a start: from the same offsets it reads nothing.
    for batch in (query.number - 1, query.number):
        at("offsets")
        files.rewrite(f"offsets/{batch}", text)
    files.rewrite(f"commits/{query.number}", files.text(f"commits/{query.batch}"))


def _copy_state(place: Place, captured: Captured, query: QueryGoal, at: Failpoint) -> None:
    """Copy the state of the batch to the versions of its new number."""
    by, codec = query.number - query.batch, captured.offsets.codec if captured.offsets else ""
    for chain in chains(file.path for file in captured.files):
        at("state")
        for path, content in empty_base(chain, by, captured.provider, codec).items():
            place.write(path, content)
        changelog = with_lineage_of(chain)
        for to, path in copies(chain, by).items():
            if path == changelog:
                content = _bytes(place, path)
                place.write(to, raised_lineage(chain, by, codec, content))
            else:
                place.fs.copy_file(f"{place.path}/{path}", f"{place.path}/{to}")


def _bytes(place: Place, path: str) -> bytes:
    data = place.read(path)
    if data is None:
        raise DamageError(f"{place}/{path} is missing")
    return data
