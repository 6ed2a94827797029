"""Captures, outcomes, retirement, sweeps, kills and restarts in any order, beside a plain model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spark_abs.manifest import Manifest, StoredFile
from spark_abs.model import CheckpointId, RunId
from spark_abs.snapshots.packs import resolve
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.snapshots.sweep import sweep
from spark_abs.snapshots.verify import verify_state
from spark_abs.store.root import Root
from tests.snapshot_support import manifest_of, packs_in, store


class Keeping(RuleBasedStateMachine):
    """The model is a dictionary of manifests, one of open captures, one of what aborted ones have left."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.root = Root(str(self.directory / "root"))
        self.run, self.last = 1, 0
        self.manifests: dict[int, Manifest] = {}
        self.open: dict[int, tuple[str, tuple[StoredFile, ...]]] = {}
        self.left: dict[str, dict[str, StoredFile]] = {}
        self.lost, self.unseen, self.damaged = set[str](), set[str](), set[int]()
        self.kept = StateStorage.open(self.root, "job", RunId(1))

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    @rule(
        stage=st.sampled_from(("one", "two")),
        letters=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True),
    )
    def capture(self, stage: str, letters: list[str]) -> None:
        """State that shares much with that of other checkpoints: sizes differ, so that packs thin out.

        What an aborted capture of the stage had copied is not copied again.
        """
        self.last += 1
        contents = {letter: letter.encode() * 10 * (1 + ord(letter) - ord("a")) for letter in letters}
        found = store(self.kept, CheckpointId(self.last), self.directory / stage, **contents)
        left = self.left.pop(stage, {})
        if not self.lost:
            assert found.size_new <= sum(len(data) for name, data in contents.items() if name not in left)
        self.open[self.last] = stage, found.files
        if self.unseen:
            self.damaged |= self.found_damaged()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """The manifest is committed only if its handles are there, as they must be unless a pack was lost."""
        checkpoint = data.draw(st.sampled_from(sorted(self.open)))
        missing = self.kept.missing(self.open[checkpoint][1])
        self.unseen.clear()
        assert bool(missing) == (checkpoint in self.damaged)
        if missing:
            self.end_aborted(checkpoint)
            return
        _, files = self.open.pop(checkpoint)
        self.manifests[checkpoint] = manifest_of(checkpoint, files)
        self.kept.unpin(CheckpointId(checkpoint), completed=True)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end_aborted(data.draw(st.sampled_from(sorted(self.open))))

    def end_aborted(self, checkpoint: int) -> None:
        stage, files = self.open.pop(checkpoint)
        self.left.setdefault(stage, {}).update({file.path: file for file in files})
        self.kept.unpin(CheckpointId(checkpoint), completed=False)

    @precondition(lambda self: self.manifests)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        del self.manifests[data.draw(st.sampled_from(sorted(self.manifests)))]

    @rule()
    def sweep(self) -> None:
        """Afterwards no pack is there that nothing needs, but for lost ones that may hold what is sought."""
        sweep(self.kept, lambda: list(self.manifests.values()))
        self.unseen.clear()
        needed = [*(f for m in self.manifests.values() for f in m.stages[0].files)]
        needed += [f for _, files in self.open.values() for f in files]
        needed += [f for files in self.left.values() for f in files.values()]
        active = self.kept.active()
        used = {at.pack for at in resolve(self.kept, active, needed).values()}
        assert sorted(active.keys() - self.lost) == packs_in(self.root)
        assert used <= active.keys() <= used | self.lost

    @rule()
    def restart(self) -> None:
        """The process was killed: what was open is aborted, a new run begins."""
        self.run += 1
        self.open.clear()
        self.left.clear()
        self.unseen.clear()
        self.kept = StateStorage.open(self.root, "job", RunId(self.run), list(self.manifests.values()))

    @invariant()
    def everything_named_is_readable(self) -> None:
        """What has lost a pack is not, and no other: a capture reuses no pack that is known to be lost."""
        assert self.found_damaged() == self.damaged & (self.manifests.keys() | self.open.keys())

    def found_damaged(self) -> set[int]:
        open_captures = {n: manifest_of(n, files) for n, (_, files) in self.open.items()}
        named = {**self.manifests, **open_captures}
        if not verify_state(self.root, named.values()):
            return set()
        return {n for n, manifest in named.items() if verify_state(self.root, [manifest])}


class Losing(Keeping):
    """Packs vanish, too: a checkpoint that needs none of them is as well as ever."""

    @precondition(lambda self: bool(packs_in(self.root)))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        pack = data.draw(st.sampled_from(packs_in(self.root)))
        Path(self.root.uri, "state", pack).unlink()
        self.lost.add(pack)
        self.unseen.add(pack)
        self.damaged |= self.found_damaged()


TestKeeping = Keeping.TestCase
TestLosing = Losing.TestCase
TestKeeping.settings = TestLosing.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
