"""Which input files a file source has read between two positions, from the log of the source. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import unquote

from spark_abs.snapshots.layout import source_entries, source_log_file


def files_between(
    names: Iterable[str], after: int, until: int, read: Callable[[str], str]
) -> tuple[str, ...]:
    """Return the files of the batches of a file source in (after, until].

    Batches that Spark has merged into a compact file are read from it; batches of which no file is left are
    left out.

    Args:
        names: the files of `sources/<source>/`.
        after: the offset of the source at the earlier position, -1 if there was none.
        until: the offset at the later position.
        read: file to its text.

    Raises:
        DamageError: a file is not as Spark writes it.
    """
    logs = [(log, name) for name in names if (log := source_log_file(name)) is not None]
    plain = {log.number: name for log, name in logs if not log.compact}
    compact = dict(sorted((log.number, name) for log, name in logs if log.compact))
    numbers = range(after + 1, until + 1)
    wanted = [plain[number] for number in numbers if number in plain]
    merged = [number for number in numbers if number not in plain]
    # Each has all batches up to its number.
    holders = [at for at in compact if merged and at >= merged[0]]
    if holders:
        wanted.append(compact[next((at for at in holders if at >= merged[-1]), holders[-1])])
    found = {(e.batch, unquote(e.path)) for name in wanted for e in source_entries(read(name))}
    return tuple(path for batch, path in sorted(found) if after < batch <= until)
