"""Retire checkpoints, and keep the tables of a root small."""

from __future__ import annotations

from contextlib import suppress

from spark_abs.errors import CommitConflict
from spark_abs.keep import Keep
from spark_abs.manifests import manifest_table as manifests
from spark_abs.manifests.manifest_table import Checkpoints, Summary
from spark_abs.model import RunId
from spark_abs.protocol.control import ControlState
from spark_abs.snapshots import packs
from spark_abs.snapshots.retention import retired
from spark_abs.store import control, history
from spark_abs.store.clock import now_ms
from spark_abs.store.history import History, HistoryEvent, HistoryRow, unless_refused
from spark_abs.store.root import Root
from spark_abs.store.table import Table

KEPT_COMMITS = 200
"""How far behind a reader of a log may be."""
KEPT_HOURS, MOST_DEAD, KEPT_VERSIONS = 1, 20, 10
"""How long a data file that left a table stays for those who still read an older version; unless there are
more of them than so many: then those of so many versions stay."""
FORGOTTEN_HOURS, MOST_REMOVALS = 2, 10_000
"""A log with more removed files than so many forgets them after so many hours, when they are deleted."""


def retire(root: Root, checkpoints: Checkpoints, state: ControlState, *, run: RunId, keep: Keep) -> None:
    """Remove the manifests that need not be kept, and record it. Sweep the bytes of state afterwards.

    If another commit comes first, it is decided anew, at once: where checkpoints follow one another closely
    the next call would be late, too.

    Raises:
        Fenced: a newer run owns the root.
    """
    summaries: tuple[Summary, ...] = ()
    while True:
        summaries = checkpoints.summaries_since(summaries)
        gone = retired(summaries, keep, now_ms(), on_path=lambda s: state.on_path(s.attempt, s.id))
        if not gone:
            return
        if checkpoints.retire(gone, run):
            break
    rows = [HistoryRow(now_ms(), HistoryEvent.RETIRED, state.attempt.id, run, i) for i in gone]
    with unless_refused():
        History(root).append(rows)


def trim_tables(root: Root) -> None:
    """Trim the logs of the tables of a root, and delete what left these tables some time ago."""
    History(root).compact()
    for path in (control.PATH, manifests.PATH, history.PATH):
        Table.open(root.place(path)).sweep(KEPT_HOURS, MOST_DEAD, KEPT_VERSIONS)
    for path in (control.PATH, manifests.PATH, history.PATH, packs.PATH):
        table = Table.open(root.place(path))
        with suppress(CommitConflict):
            table.forget_removals(FORGOTTEN_HOURS, MOST_REMOVALS)
        table.trim_log(KEPT_COMMITS)
