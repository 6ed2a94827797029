"""Aborted and unaligned barriers, which gates read from the log of `control/`."""

from __future__ import annotations

from dataclasses import dataclass

from spark_abs.channels.follow import Clock, LogTail
from spark_abs.codec import from_json, require_format
from spark_abs.errors import DamageError
from spark_abs.model import FORMAT, CheckpointId, CheckpointMode, Version
from spark_abs.store.log import LogCommit
from spark_abs.store.root import Root


@dataclass(frozen=True, slots=True)
class _ControlNote:
    """The part of a `control/` commit's metadata that gates look at."""

    v: int
    aborted: tuple[CheckpointId, ...] | None = None
    overtaken: tuple[CheckpointId, ...] | None = None


class Aborts:
    """The ids that `control/` has declared aborted, or unaligned, since the run began.

    Looked for only while an input is blocked.

    The log of `control/` is trimmed far behind its newest commit. After such a long pause the table is read
    once.
    """

    def __init__(self, root: Root, after: Version, poll_ms: int, clock: Clock) -> None:
        self._root, self._poll_ms, self._clock = root, poll_ms, clock
        self._tail = LogTail(root.fs, root.path("control"), after, poll_ms, clock)
        self.ids: frozenset[CheckpointId] = frozenset()
        """The ids known as aborted."""
        self.overtaken: frozenset[CheckpointId] = frozenset()
        """The ids known as unaligned."""

    def poll(self) -> bool:
        """Read new commits; say whether they aborted a barrier or made one unaligned.

        Raises:
            DamageError: `control/` cannot be read.
        """
        before = self.ids, self.overtaken
        while (commit := self._next()) is not None:
            if commit.token is None or commit.metadata is None:
                continue
            note = from_json(_ControlNote, commit.metadata)
            require_format(note.v, FORMAT, "control/")
            self.ids |= frozenset(note.aborted or ())
            self.overtaken |= frozenset(note.overtaken or ())
        return (self.ids, self.overtaken) != before

    def _next(self) -> LogCommit | None:
        try:
            return self._tail.next()
        except DamageError:
            # Here, since a gate that never needs it need not load deltalake.
            from spark_abs.store.control import Control

            control = Control.open(self._root)
            at = control.version
            self.ids |= {aborted.id for aborted in control.state.aborted}
            barriers = [claim.barrier for claim in control.state.claims]
            self.overtaken |= {b.id for b in barriers if b.mode is CheckpointMode.UNALIGNED}
            self._tail = LogTail(self._root.fs, self._root.path("control"), at, self._poll_ms, self._clock)
            return self._tail.next()
