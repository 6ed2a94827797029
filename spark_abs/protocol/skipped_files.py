"""Which input files a stage goes past: those that somebody names, of a batch that no output holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from spark_abs.errors import UsageError
from spark_abs.model import BatchId, StageId

_MOST_NAMED = 5
"""So many files are named in an error."""
_PATTERN = frozenset("*?[]{}")


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    """The first batch of a stage that has not ended."""

    stage: StageId
    batch: BatchId
    files: frozenset[str]
    """Those that it is to read, as Spark writes them in the logs of file sources."""
    held_by: tuple[str, ...] = ()
    """The outputs that have committed it, as text."""


def find_files(names: Iterable[str], files: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the files that each name stands for, without the names that stand for none.

    Args:
        names: URIs as an error of Spark has them, or whole paths.
        files: URIs as Spark writes them.
    """
    places: dict[str, list[str]] = {}
    for file in sorted(files):
        places.setdefault(_place(file, decode=True), []).append(file)
    found = {}
    for name in names:
        given = (_place(name, decode=_is_uri(name)), _place(name, decode=False))
        mine = (name,) if name in files else next((tuple(places[p]) for p in given if p in places), ())
        if mine:
            found[name] = mine
    return found


def choose_files(names: Sequence[str], batch: UnfinishedBatch, read: Collection[str]) -> tuple[str, ...]:
    """Return the files of an unfinished batch that names stand for.

    Args:
        names: as `find_files` takes them.
        batch: the batch.
        read: the files that finished batches have read; needed only if a name stands for no file of `batch`.

    Raises:
        UsageError: a name stands for no file of the batch, or an output holds the batch. It says which.
    """
    found = find_files(names, batch.files)
    for name in names:
        if name not in found:
            raise UsageError(_unknown(name, batch, bool(find_files([name], read))))
    if batch.held_by:
        raise UsageError(
            f"{', '.join(batch.held_by)} already has the rows of batch {batch.batch} of stage "
            f"{batch.stage!r}, those of {names[0]} too: start the job with restart='checkpoint', which goes "
            "back to before the batch, and skip the file if the batch fails again"
        )
    return tuple(dict.fromkeys(file for name in names for file in found[name]))


def _unknown(name: str, batch: UnfinishedBatch, read: bool) -> str:
    stage = f"stage {batch.stage!r}"
    if read:
        return (
            f"{stage} has read {name} in a batch that has ended: skipping it would have no effect; a restore "
            "to before that batch undoes its rows"
        )
    if not batch.files:
        return (
            f"{stage} has no unfinished batch that reads files: a file can be skipped once the batch that "
            "reads it has failed"
        )
    if _PATTERN & {*name}:
        said = "is a pattern, and files are skipped by their names alone"
    elif ".." in name.split("/"):
        said = "has '..' in it: give the path as the error of the batch has it"
    elif not _is_uri(name) and not name.startswith("/"):
        said = "is not a whole path"
    else:
        said = f"is no file of batch {batch.batch} of {stage}"
    listed = sorted(batch.files)
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    return f"{name} {said}; the batch is to read {', '.join(listed[:_MOST_NAMED])}{more}"


def _is_uri(name: str) -> bool:
    return "://" in name or name.startswith("file:/")


def _place(name: str, *, decode: bool) -> str:
    """Return a name in the form in which two names of one file are equal: a local file without a scheme."""
    if name.startswith("file:/"):
        name = "/" + name.removeprefix("file:").lstrip("/")
    return unquote(name) if decode else name
