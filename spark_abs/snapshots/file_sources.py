"""The files that the file sources of a native checkpoint have listed, from Spark's own log of them."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote, urlparse

from pyarrow import fs

from spark_abs.model import NO_BATCH, BatchId
from spark_abs.snapshots.capture import newest_batch
from spark_abs.snapshots.layout import (
    SourceEntry,
    file_source_offset,
    is_file_source_log,
    parse_offsets,
    source_entries,
    source_log_file,
)
from spark_abs.store.storage import Place, Storage


class FileSources:
    """The logs of a stage's file sources, up to its last finished batch and after it. No query may run."""

    def __init__(self, native: Place) -> None:
        """Take the place of the native checkpoint."""
        self._native = native
        self.finished = newest_batch(native, "commits")
        """The last finished batch, `NO_BATCH` if none is."""
        path = f"offsets/{int(self.finished)}"
        text = None if self.finished == NO_BATCH else native.read_text(path)
        self._offsets = {} if text is None else parse_offsets(text, f"{native}/{path}").offsets

    @property
    def unfinished(self) -> BatchId:
        """The batch that reads what is planned."""
        return BatchId(self.finished + 1)

    def planned(self) -> frozenset[str]:
        """Return the files that batches after the last finished one are to read, as Spark writes them."""
        return frozenset(e.path for log, until in self._logs() for e in logged_after(log, until))

    def read(self) -> frozenset[str]:
        """Return the files that finished batches have read. Reads the logs from their beginning."""
        return frozenset(
            e.path for log, until in self._logs() for e in logged_after(log, -1) if e.batch <= until
        )

    def _logs(self) -> Iterator[tuple[Place, int]]:
        """Iterate the logs, each with its last batch that a finished batch of the stage has read."""
        top = fs.FileSelector(f"{self._native.path}/sources", allow_not_found=True)
        for info in self._native.fs.get_file_info(top):
            log, offset = self._native.below(f"sources/{info.base_name}"), self._offsets.get(info.base_name)
            until = file_source_offset(offset)
            if until is not None:
                yield log, until
            elif offset is None and _is_file_source(log):
                yield log, -1


def _is_file_source(log: Place) -> bool:
    """Say whether the log of a source is that of a file source; other sources have numbered files, too."""
    names = (i.base_name for i in log.fs.get_file_info(fs.FileSelector(log.path, allow_not_found=True)))
    texts = (log.read(name) or b"" for name in names if source_log_file(name) is not None)
    return any(is_file_source_log(text.decode(errors="replace")) for text in texts)


def is_there(storage: Storage, uri: str) -> bool:
    """Say whether an input file is there; its name is as Spark writes it.

    Raises:
        OSError: its store cannot be read now.
        UsageError: its store is not supported.
    """
    parsed = urlparse(uri)
    name = unquote(parsed.path)
    if parsed.scheme in ("", "file"):
        return storage.place(name).exists()
    top = storage.place(f"{parsed.scheme}://{parsed.netloc}")  # a name may have letters that no location has
    found = top.fs.get_file_info(f"{top.path.rstrip('/')}/{name.lstrip('/')}")
    return bool(found.type is not fs.FileType.NotFound)


def logged_after(log: Place, until: int) -> Iterator[SourceEntry]:
    """Iterate what the log of a file source has for batches after `until`.

    Raises:
        DamageError: a line is not as Spark writes it.
    """
    for info in log.fs.get_file_info(fs.FileSelector(log.path, allow_not_found=True)):
        file = source_log_file(info.base_name)
        if file is None or file.number <= until:
            continue
        for entry in source_entries(log.read_text(info.base_name) or ""):
            if entry.batch > until:
                yield entry
