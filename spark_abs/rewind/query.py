"""What a checkpoint directory says of its query: its id, its committed batches, and what they have read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pyarrow import fs

from spark_abs.codec import decoded, from_json, parsed
from spark_abs.cuts.cut import NEVER, Batch, Read
from spark_abs.cuts.lineage import Attempted
from spark_abs.errors import DamageError, Refused, UsageError
from spark_abs.model import is_number
from spark_abs.rewind.claim import Claim, claim_of
from spark_abs.rewind.files import holds_schema_log
from spark_abs.rewind.journal import DIRECTORY, FENCE, MARK, Fence, Rewound
from spark_abs.snapshots.capture import newest_batch
from spark_abs.snapshots.delta_offsets import DeltaOffset, delta_offset
from spark_abs.snapshots.layout import (
    OffsetFile,
    file_source_offset,
    is_file_source_log,
    parse_offsets,
    source_log_file,
)
from spark_abs.snapshots.materialise import METADATA
from spark_abs.snapshots.parallel import in_threads
from spark_abs.store.storage import Place, names_of

CLOCKS_MS = 2_000
"""By how much the clock of a commit and that of a checkpoint's files may differ."""


@dataclass(frozen=True, slots=True)
class QueryFacts:
    """A query as its checkpoint directory shows it."""

    name: str
    """The name of the directory, or its whole path where several have that name."""
    place: Place
    metadata: str
    """The text of the file with the query's id."""
    id: str
    batches: tuple[Batch, ...]
    """Committed batches whose offsets are there; oldest first."""
    offsets: Mapping[int, OffsetFile]
    texts: Mapping[int, str]
    """Batch to the text of its offsets."""
    made: Mapping[int, int]
    """Number that a rewind gave to the batch to which that went back: the old number of the batch."""
    planned: int
    """The newest batch in the offset log, -1 if none."""
    committed: int
    """The newest batch in the commit log, -1 if none."""
    times: Mapping[int, Attempted]
    """Batch to the times of its files; the last one may not have ended. Without those that a rewind made."""
    logs: Mapping[str, int]
    """File source to the newest number in its log."""
    others: tuple[str, ...]
    """Directories in the checkpoint that Spark does not write by itself."""

    @property
    def sources(self) -> tuple[tuple[str, DeltaOffset], ...]:
        """The Delta sources with an offset after the newest batch."""
        return self.sources_at(self.batches[-1].number) if self.batches else ()

    def sources_at(self, batch: int) -> tuple[tuple[str, DeltaOffset], ...]:
        """Return the Delta sources with an offset after a batch."""
        lines = self.offsets[batch].offsets
        return tuple((source, at) for source, line in lines.items() if (at := delta_offset(line)) is not None)

    def read(self, table_id: str, uri: str, is_last: Callable[[int, int], bool]) -> Read | None:
        """Return how far the query has read a table after each batch; None if it does not read it.

        Where a query reads a table through several sources, and they differ, a version is read in part.

        Args:
            table_id: the table.
            uri: where it is.
            is_last: says of a version and an index whether the version has no file left to read.
        """
        until: list[int | None] = []
        reads = False
        for batch in self.batches:
            found = [
                at
                for line in self.offsets[batch.number].offsets.values()
                if (at := delta_offset(line)) is not None and at.table_id == table_id
            ]
            reads = reads or bool(found)
            commits = {at.unread(is_last) for at in found}
            until.append((commits.pop() if len(commits) == 1 else None) if found else 0)
        return Read(self.name, uri, tuple(until)) if reads else None


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """A committed batch whose files are kept elsewhere: Spark may have deleted its own."""

    number: int
    ended_ms: int
    """No earlier than it was committed."""
    text: str
    """Its offsets."""
    before: str | None
    """The offsets of the batch before; None for the first."""


def with_kept(query: QueryFacts, kept: KeptBatch) -> QueryFacts:
    """Return a query that can also go back to a batch that is kept; Spark's own files win."""
    if any(batch.number == kept.number for batch in query.batches):
        return query
    texts = {kept.number: kept.text, **({kept.number - 1: kept.before} if kept.before is not None else {})}
    log = f"kept {query.place}/offsets"
    offsets = {number: parse_offsets(text, f"{log}/{number}") for number, text in texts.items()}
    began = offsets[kept.number].timestamp_ms or kept.ended_ms
    return replace(
        query,
        batches=tuple(sorted((*query.batches, Batch(kept.number, kept.ended_ms)), key=lambda b: b.number)),
        offsets={**offsets, **query.offsets},
        texts={**texts, **query.texts},
        times={**query.times, kept.number: Attempted(began, kept.ended_ms)},
    )


def read_queries(places: Sequence[Place], fenced_by: str = "") -> tuple[QueryFacts, ...]:
    """Read checkpoint directories.

    Args:
        places: the directories.
        fenced_by: the id of the rewind whose fences are no obstacle.

    Raises:
        UsageError: one is not a checkpoint directory, or is given twice.
        Refused: a rewind of one was begun and is not finished.
        DamageError: a file is not as Spark writes it.
    """
    if twice := sorted({place.uri for place in places if [p.uri for p in places].count(place.uri) > 1}):
        raise UsageError(f"checkpoint directory {twice[0]} is given twice")
    found = tuple(
        _read(place, name, fenced_by)
        for place, name in zip(places, names_of([place.uri for place in places]), strict=True)
    )
    ids = [query.id for query in found]
    if copies := [query.place.uri for query in found if ids.count(query.id) > 1]:
        raise UsageError(f"{' and '.join(copies)} are checkpoints of the same query: give one of them")
    return found


def fence_of(place: Place) -> Fence | None:
    """Return the fence of an unfinished rewind in a checkpoint directory, None if there is none."""
    return _fence_in(place.read(METADATA))


def unfinished(places: Iterable[Place]) -> Claim | Fence | None:
    """Return the claim or the fence of an unfinished rewind on one of some directories, None if none is."""
    return next((held for place in places if (held := claim_of(place) or fence_of(place))), None)


def _fence_in(data: bytes | None) -> Fence | None:
    if data is None or not data.startswith(FENCE.encode()):
        return None
    return from_json(Fence, data.partition(b"\n")[2])


def rewinds_of(place: Place) -> tuple[Rewound, ...]:
    """Return what earlier rewinds did to a checkpoint directory, oldest first."""
    selector = fs.FileSelector(f"{place.path}/{DIRECTORY}", allow_not_found=True)
    names = sorted(i.base_name for i in place.fs.get_file_info(selector) if i.type is fs.FileType.Directory)
    found = (place.read(f"{DIRECTORY}/{name}/rewound.json") for name in names)
    rewinds = (from_json(Rewound, data) for data in found if data is not None)
    return tuple(sorted(rewinds, key=lambda rewind: rewind.at_ms))


def _read(place: Place, name: str, fenced_by: str) -> QueryFacts:
    data, claim = place.read(METADATA), claim_of(place)
    fence = _fence_in(data)
    if fence is not None and fence.rewind == fenced_by:
        data, fence = fence.metadata.encode(), None
    if data is None:
        raise UsageError(f"{place} is not the checkpoint of a streaming query: it has no file {METADATA}")
    if fence is not None or (claim is not None and claim.rewind != fenced_by):
        raise Refused(
            f"a rewind of {place} was begun and is not finished: call the command of that rewind again with "
            "--yes, which finishes it"
        )
    identity = parsed(data, dict, f"{place}/{METADATA}").get("id")
    if not isinstance(identity, str):
        raise DamageError(f"{place}/{METADATA} has no id")
    planned, committed = _times(place, "offsets"), _times(place, "commits")
    read = in_threads(lambda batch: place.read_text(f"offsets/{batch}"), sorted(planned))
    texts = {b: text for b, text in zip(sorted(planned), read, strict=True) if text is not None}
    offsets = {b: parse_offsets(text, f"{place}/offsets/{b}") for b, text in texts.items()}
    if any(_is_auto_loader(line) for file in offsets.values() for line in file.lines):
        raise Refused(
            f"query {name!r} reads with Auto Loader, which keeps the names of the files it has read in a "
            "store of its own in the checkpoint: a rewind cannot bring it back"
        )
    made = _made(rewinds_of(place))
    old = {b: made.get(b, b) for b in committed}
    ended = {b: _ended(old[b] if old[b] in committed else b, committed, offsets) for b in committed}
    late = _late(offsets)
    once = offsets.keys() - late
    whole = [b for b in sorted(committed.keys() & once) if b == 0 or b - 1 in once]
    return QueryFacts(
        name=name,
        place=place,
        metadata=decoded(data, f"{place}/{METADATA}"),
        id=identity,
        batches=tuple(Batch(b, ended[b]) for b in whole),
        made=made,
        offsets=offsets,
        texts=texts,
        planned=max(planned, default=-1),
        committed=max(committed, default=-1),
        logs=_source_logs(place, offsets.get(max(offsets, default=-1))),
        others=_others(place),
        times={
            b: Attempted(
                offsets[b].timestamp_ms or planned[b],
                ended.get(b, NEVER),
            )
            for b in sorted(offsets)
            if b not in made
            and b not in late
            and MARK not in offsets[b].conf
            and (b in committed or b == max(offsets))
        },
    )


def _ended(batch: int, committed: Mapping[int, int], offsets: Mapping[int, OffsetFile]) -> int:
    """Return when a batch had ended: the plan of the next batch has a date, which a copied file has not.

    What a rewind puts in the place of the next batch has the date of this one.
    """
    begun, following = (offsets[b].timestamp_ms if b in offsets else 0 for b in (batch, batch + 1))
    return min(committed[batch], following) if following > begun else committed[batch]


def _others(place: Place) -> tuple[str, ...]:
    known = {"offsets", "commits", "sources", "state", DIRECTORY}
    return tuple(
        sorted(name for name in _directories(place) if name not in known and _is_strange(place, name))
    )


def _is_strange(place: Place, name: str) -> bool:
    """Say whether a directory is neither a log of schemas nor holds only such."""
    inside = _directories(place, name)
    return not holds_schema_log(name) and not (inside and all(map(holds_schema_log, inside)))


def _directories(place: Place, below: str = "") -> list[str]:
    infos = place.fs.get_file_info(fs.FileSelector(f"{place.path}/{below}".rstrip("/")))
    return [info.base_name for info in infos if info.type is fs.FileType.Directory]


def _is_auto_loader(line: str) -> bool:
    try:
        plain = json.loads(line)
    except ValueError:
        return False
    return isinstance(plain, dict) and "seqNum" in plain


def _made(rewinds: Sequence[Rewound]) -> dict[int, int]:
    """Return the batches that rewinds have made: number to the number under which the batch had run."""
    made: dict[int, int] = {}
    for rewind in rewinds:
        if rewind.number != rewind.batch:
            made[rewind.number] = made.get(rewind.batch, rewind.batch)
    return made


def _late(offsets: Mapping[int, OffsetFile]) -> set[int]:
    """Return the batches that were planned after a later one: by a driver that was frozen.

    It can only write numbers again that Spark has deleted meanwhile.
    """
    found, following = set(), NEVER
    for batch in sorted(offsets, reverse=True):
        if offsets[batch].timestamp_ms > following + CLOCKS_MS:
            found.add(batch)
        elif offsets[batch].timestamp_ms:
            following = min(following, offsets[batch].timestamp_ms)
    return found


def _source_logs(place: Place, offsets: OffsetFile | None) -> dict[str, int]:
    """Return the newest number in the log of each file source."""
    top = f"{place.path}/sources/"
    names: dict[str, dict[int, str]] = {}
    for info in place.fs.get_file_info(fs.FileSelector(top, allow_not_found=True, recursive=True)):
        source, _, name = info.path.removeprefix(top).partition("/")
        if (log := source_log_file(name)) is not None:
            names.setdefault(source, {})[log.number] = name

    def lists_files(source: str) -> bool:
        if offsets is not None and source in offsets.offsets:
            return file_source_offset(offsets.offsets[source]) is not None
        texts = (place.read_text(f"sources/{source}/{name}") for name in names[source].values())
        return any(is_file_source_log(text) for text in texts if text is not None)

    return {source: max(found) for source, found in names.items() if lists_files(source)}


def _times(place: Place, log: str) -> dict[int, int]:
    """Return the batches of a log with the times of their files, in ms."""
    selector = fs.FileSelector(f"{place.path}/{log}", allow_not_found=True)
    return {
        int(info.base_name): (info.mtime_ns or 0) // 1_000_000
        for info in place.fs.get_file_info(selector)
        if is_number(info.base_name)
    }


def is_still(query: QueryFacts) -> bool:
    """Say whether a query has neither planned nor committed a batch since it was read."""
    newest = tuple(newest_batch(query.place, log) for log in ("offsets", "commits"))
    return newest == (query.planned, query.committed)
