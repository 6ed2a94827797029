"""What a checkpoint directory says of its query: its id, its committed batches, and what they have read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pyarrow import fs

from spark_abs.codec import from_json, parsed
from spark_abs.cuts.cut import Batch, Read
from spark_abs.cuts.lineage import Attempted
from spark_abs.errors import DamageError, Refused, UsageError
from spark_abs.rewind.journal import DIRECTORY, FENCE, Fence, Rewound
from spark_abs.snapshots.delta_offsets import DeltaOffset, delta_offset
from spark_abs.snapshots.layout import OffsetFile, parse_offsets, with_offsets
from spark_abs.snapshots.materialise import METADATA
from spark_abs.snapshots.parallel import in_threads
from spark_abs.store.storage import Place


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
    """Committed batches whose offsets, and those of the batch before, are there; oldest first."""
    offsets: Mapping[int, OffsetFile]
    texts: Mapping[int, str]
    """Batch to the text of its offsets, as of the batch: what a rewind has changed since is undone."""
    planned: int
    """The newest batch in the offset log, -1 if none."""
    committed: int
    """The newest batch in the commit log, -1 if none."""
    times: Mapping[int, Attempted]
    """Batch to the times of its files."""
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

    def read(self, table_id: str, uri: str) -> Read | None:
        """Return how far the query has read a table after each batch; None if it does not read it.

        Where a query reads a table through several sources, and they differ, a version is read in part.
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
            commits = {None if at.initial or at.index >= 0 else at.version for at in found}
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
    offsets = {number: parse_offsets(text) for number, text in texts.items()}
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
    names = [place.uri.rstrip("/").rpartition("/")[2] for place in places]
    if twice := sorted({place.uri for place in places if [p.uri for p in places].count(place.uri) > 1}):
        raise UsageError(f"checkpoint directory {twice[0]} is given twice")
    found = tuple(
        _read(place, name if names.count(name) == 1 else place.uri, fenced_by)
        for place, name in zip(places, names, strict=True)
    )
    ids = [query.id for query in found]
    if copies := [query.place.uri for query in found if ids.count(query.id) > 1]:
        raise UsageError(f"{' and '.join(copies)} are checkpoints of the same query: give one of them")
    return found


def fence_of(place: Place) -> Fence | None:
    """Return the fence of an unfinished rewind in a checkpoint directory, None if there is none."""
    return _fence_in(place.read(METADATA))


def _fence_in(data: bytes | None) -> Fence | None:
    if data is None or not data.startswith(FENCE.encode()):
        return None
    return from_json(Fence, data.decode().partition("\n")[2])


def rewinds_of(place: Place) -> tuple[Rewound, ...]:
    """Return what earlier rewinds did to a checkpoint directory, oldest first."""
    selector = fs.FileSelector(f"{place.path}/{DIRECTORY}", allow_not_found=True)
    names = sorted(i.base_name for i in place.fs.get_file_info(selector) if i.type is fs.FileType.Directory)
    found = (place.read(f"{DIRECTORY}/{name}/rewound.json") for name in names)
    rewinds = (from_json(Rewound, data) for data in found if data is not None)
    return tuple(sorted(rewinds, key=lambda rewind: rewind.at_ms))


def _read(place: Place, name: str, fenced_by: str) -> QueryFacts:
    data = place.read(METADATA)
    fence = _fence_in(data)
    if fence is not None and fence.rewind == fenced_by:
        data, fence = fence.metadata.encode(), None
    if data is None:
        raise UsageError(f"{place} is not the checkpoint of a streaming query: it has no file {METADATA}")
    if fence is not None:
        raise Refused(
            f"a rewind of {place} was begun and is not finished: call the command of that rewind again with "
            "--yes, which finishes it"
        )
    identity = parsed(data, dict, f"{place}/{METADATA}").get("id")
    if not isinstance(identity, str):
        raise DamageError(f"{place}/{METADATA} has no id")
    planned, committed = _times(place, "offsets"), _times(place, "commits")
    read = in_threads(partial(_text, place), sorted(planned))
    texts = {b: text for b, text in zip(sorted(planned), read, strict=True) if text is not None}
    texts |= {b: text for b, text in _changed(rewinds_of(place)).items() if b in texts}
    offsets = {b: parse_offsets(text) for b, text in texts.items()}
    if any(_is_auto_loader(line) for file in offsets.values() for line in file.lines):
        raise Refused(
            f"query {name!r} reads with Auto Loader, which keeps the names of the files it has read in a "
            "store of its own in the checkpoint: a rewind cannot bring it back"
        )
    whole = [
        b for b in sorted(committed.keys() & offsets.keys()) if b - 1 in offsets or _can_begin(b, offsets)
    ]
    return QueryFacts(
        name=name,
        place=place,
        metadata=data.decode(),
        id=identity,
        batches=tuple(Batch(b, _ended(b, committed, offsets)) for b in whole),
        offsets=offsets,
        texts=texts,
        planned=max(planned, default=-1),
        committed=max(committed, default=-1),
        others=_others(place),
        times={
            b: Attempted(offsets[b].timestamp_ms or planned[b], _ended(b, committed, offsets)) for b in whole
        },
    )


def _changed(rewinds: Sequence[Rewound]) -> dict[int, str]:
    """Return the offsets that rewinds have changed, as Spark had written them: batch to text."""
    found: dict[int, str] = {}
    for rewind in rewinds:
        found = {b: text for b, text in found.items() if b < rewind.batch}  # later ones are written anew
        found |= {int(b): text for b, text in rewind.offsets.items()}
    return found


def _ended(batch: int, committed: Mapping[int, int], offsets: Mapping[int, OffsetFile]) -> int:
    """Return when a batch had ended: the plan of the next batch has a date, which a copied file has not."""
    following = offsets.get(batch + 1)
    if following is None or not following.timestamp_ms:
        return committed[batch]
    return min(committed[batch], following.timestamp_ms)


def _others(place: Place) -> tuple[str, ...]:
    infos = place.fs.get_file_info(fs.FileSelector(place.path))
    names = {info.base_name for info in infos if info.type is fs.FileType.Directory}
    return tuple(sorted(names - {"offsets", "commits", "sources", "state", DIRECTORY}))


def _is_auto_loader(line: str) -> bool:
    try:
        plain = json.loads(line)
    except ValueError:
        return False
    return isinstance(plain, dict) and "seqNum" in plain


def _can_begin(batch: int, offsets: Mapping[int, OffsetFile]) -> bool:
    """Say whether a query can be resumed after its first batch.

    Spark plans the last batch again at a start. The first one of a Delta source begins where the options of
    the query say, which are not in storage, and its plan would contain the restore of the table.
    """
    return batch == 0 and all(delta_offset(line) is None for line in offsets[0].offsets.values())


def _times(place: Place, log: str) -> dict[int, int]:
    """Return the batches of a log with the times of their files, in ms."""
    selector = fs.FileSelector(f"{place.path}/{log}", allow_not_found=True)
    return {
        int(info.base_name): (info.mtime_ns or 0) // 1_000_000
        for info in place.fs.get_file_info(selector)
        if info.base_name.isdecimal()
    }


def _text(place: Place, batch: int) -> str | None:
    """Return the text of a batch's offsets, None if Spark has deleted it since the listing."""
    data = place.read(f"offsets/{batch}")
    return None if data is None else data.decode()


def newest_planned(place: Place) -> int:
    """Return the newest batch in the offset log, -1 if none."""
    return max(_times(place, "offsets"), default=-1)


def is_still(query: QueryFacts) -> bool:
    """Say whether a query has neither planned nor committed a batch since it was read."""
    planned, committed = (max(_times(query.place, log), default=-1) for log in ("offsets", "commits"))
    return (planned, committed) == (query.planned, query.committed)


def resumed(before: str, text: str) -> str:
    """Return the offsets of the batch before the last one, from which Spark plans the last one again.

    Its Delta sources get the offsets of the last batch: that plan then reads nothing of a table, neither the
    restore of it nor what comes before the first offset of a source.

    Args:
        before: the content of `offsets/<b-1>`.
        text: the content of `offsets/<b>`.
    """
    last = parse_offsets(text).offsets
    return with_offsets(before, {source: line for source, line in last.items() if delta_offset(line)})


def jumped(text: str, jumps: Mapping[str, int]) -> str:
    """Return the text of an offset file in which Delta sources begin at the start of a later version.

    Args:
        text: the content of `offsets/<b>`.
        jumps: source, as `OffsetFile.offsets` names it, to the version.
    """
    offsets = parse_offsets(text).offsets
    return with_offsets(text, {s: _start_of(offsets[s], v) for s, v in jumps.items() if s in offsets})


def _start_of(offset: str, version: int) -> str:
    """Return the offset of a Delta source at the start of a version; another source's stays."""
    if delta_offset(offset) is None:
        return offset
    plain = {**json.loads(offset), "reservoirVersion": version, "isStartingVersion": False}
    # -1 stands for the start of a version in sources of version 1, -100 in later ones.
    plain["index"] = -1 if plain.get("sourceVersion", 1) == 1 else -100
    return json.dumps(plain, separators=(",", ":"))
