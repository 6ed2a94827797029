"""What is kept and what goes: the plans, and sweeping by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from spark_abs.errors import DamageError, Fenced
from spark_abs.keep import keep_words
from spark_abs.manifest import Location, Manifest, StoredFile
from spark_abs.model import ChannelId, CheckpointId, CheckpointKind, RunId, Version
from spark_abs.snapshots import sweep as module
from spark_abs.snapshots.packs import Packed, PackReader, resolve
from spark_abs.snapshots.retention import (
    Needed,
    channel_floors,
    needed_of_channels,
    newest_since,
    plan_sweep,
    retired,
)
from spark_abs.snapshots.state_storage import StateStorage
from spark_abs.snapshots.sweep import Swept, sweep
from spark_abs.snapshots.verify import verify_state
from spark_abs.store.root import Root
from tests.snapshot_support import manifest_of, packs_in, store

SAVEPOINT = CheckpointKind.SAVEPOINT
A, B = ChannelId("a.main"), ChannelId("b.main")


def everything(_: object) -> bool:
    return True


def gone(
    completed: Sequence[Manifest],
    keep: str,
    on_path: Callable[[Manifest], bool] = everything,
    needed: Sequence[CheckpointId] = (),
    now_ms: int = 10**9,
) -> tuple[int, ...]:
    return retired(completed, keep_words(keep), now_ms, on_path=on_path, needed=needed)


def test_the_newest_of_the_path_stay_and_savepoints_do() -> None:
    completed = [manifest_of(i, kind=SAVEPOINT if i == 2 else CheckpointKind.CHECKPOINT) for i in range(1, 8)]
    assert gone(completed, "3") == (1, 3, 4)
    assert gone(completed, "3", needed=[CheckpointId(3)]) == (1, 4)
    assert gone(completed, "6") == ()
    assert gone(completed[:1], "1") == ()


def test_what_a_roll_back_abandoned_stays_until_the_new_path_has_as_many() -> None:
    """Restored to 5: 6 to 9 are off the path, and going back to 9 stays possible for a while."""
    old = [manifest_of(i) for i in range(1, 10)]
    new = [manifest_of(i, attempt=2) for i in range(10, 16)]

    def on_path(m: Manifest) -> bool:
        return m.id <= 5 or m.attempt == 2

    assert gone([*old, *new[:1]], "3", on_path) == (1, 2, 3)
    assert gone([*old, *new[:2]], "3", on_path) == (1, 2, 3, 4)
    assert gone([*old, *new[:3]], "3", on_path) == tuple(range(1, 10))


def test_words_keep_older_ones_of_the_path_and_of_what_was_abandoned() -> None:
    """One a minute, restored to 60 at 120: an hour later the last of each half hour is left of both."""
    minute = 60_000
    made = [replace(manifest_of(i), acked_ms=i * minute) for i in range(1, 121)]
    made += [replace(manifest_of(i, attempt=2), acked_ms=i * minute) for i in range(121, 181)]

    def on_path(m: Manifest) -> bool:
        return m.id <= 60 or m.attempt == 2

    went = gone(made, "2 10m:all 3h:30m", on_path, now_ms=180 * minute)
    assert [m.id for m in made if m.id not in went] == [29, 59, 60, 89, 119, 120, 149, *range(170, 181)]


def test_the_checkpoint_at_which_a_job_stood_still_outlasts_those_after_it() -> None:
    """A night without rows, then one a minute: a bad release in the morning can still be undone."""
    minute = 60_000
    made = [replace(manifest_of(i), acked_ms=i * minute) for i in (1, 2, *range(601, 621))]
    assert 2 not in gone(made, "3 1h:10m", now_ms=620 * minute)
    assert 2 in gone(
        [*made, replace(manifest_of(661), acked_ms=661 * minute)], "3 1h:10m", now_ms=661 * minute
    )


def test_a_job_that_stood_still_for_long_keeps_the_newest() -> None:
    completed = [manifest_of(i) for i in range(1, 8)]
    assert gone(completed, "24h:all 7d:1h", now_ms=10**12) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("manifests", "readers", "floors"),
    [
        # The slowest reader of any retained cut, or of now.
        ([manifest_of(1, reads={A: 4}), manifest_of(2, reads={A: 9})], {A: [Version(12)]}, {A: 4}),
        ([manifest_of(2, reads={A: 9})], {A: [Version(12), Version(7)]}, {A: 7}),
        # Nobody has read it: the producer's place at the cut.
        ([manifest_of(1, writes={A: 5}), manifest_of(2, writes={A: 8})], {A: []}, {A: 5}),
        ([manifest_of(2, reads={A: 9}, writes={B: 3})], {A: [Version(9)], B: [Version(6)]}, {A: 9, B: 3}),
        # Unaligned: what lies between a consumer's position and the barrier is part of the checkpoint (P16).
        ([manifest_of(2, reads={A: 3}, writes={A: 9})], {A: [Version(12)]}, {A: 3}),
        # A reader that has read nothing yet, now or at a cut, may still want everything.
        ([manifest_of(2, reads={A: 9})], {A: [Version(9), None]}, {}),
        ([manifest_of(1, reads={A: None}), manifest_of(2, reads={A: 9})], {A: [Version(9)]}, {}),
        # Without a checkpoint, and for channels that the job has no more, nothing is known.
        ([], {A: [Version(9)]}, {}),
        ([manifest_of(2, reads={A: 9})], {}, {}),
    ],
)
def test_channels_are_trimmed_behind_every_cut_and_reader(
    manifests: Sequence[Manifest],
    readers: dict[ChannelId, list[Version | None]],
    floors: dict[ChannelId, Version],
) -> None:
    assert channel_floors(manifests, readers) == floors


def test_an_old_cut_holds_its_rows_in_flight_and_no_later_ones() -> None:
    """Of three checkpoints the newest holds all rows since; the log stays for all of them."""
    manifests = [
        manifest_of(1, reads={A: 3, B: 5}, writes={A: 9, B: 5}),  # unaligned
        manifest_of(2, reads={A: 12, B: 8}, writes={A: 12, B: 8}),
        manifest_of(3, reads={A: 20, B: 14}, writes={A: 25, B: 14}),
    ]
    readers = {A: [Version(30)], B: [Version(16), Version(13)]}

    def needed(since: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
        found = needed_of_channels(manifests, readers, CheckpointId(since))
        return [(found[c].floor, found[c].rows, list(found[c].in_flight)) for c in (A, B)]

    assert needed(0) == needed(1) == [(3, 3, []), (5, 5, [])]
    assert needed(3) == [(3, 20, [(3, 9)]), (5, 13, [])]


def test_a_cut_whose_channel_is_not_recorded_or_read_holds_all_of_its_rows() -> None:
    old = manifest_of(1, reads={A: 3})
    newer = manifest_of(2, reads={A: 9}, writes={A: 9})
    found = needed_of_channels([old, newer], {A: [Version(9)]}, CheckpointId(2))
    assert found == {A: Needed(Version(3), Version(9), ((Version(3), Version(9)),))}
    unread = manifest_of(1, reads={A: None}, writes={A: 3})
    assert needed_of_channels([unread, newer], {A: [Version(9)]}, CheckpointId(2)) == {}


def test_the_newest_begin_where_there_are_as_many_as_are_kept() -> None:
    made = [*map(manifest_of, range(1, 6)), manifest_of(6, kind=SAVEPOINT)]
    since = partial(newest_since, made, on_path=lambda m: m.id != 4)
    assert [since(keep=keep_words(words)) for words in ("1", "2 1h:all", "4", "5")] == [5, 3, 1, 0]


def test_the_sweep_plan() -> None:
    """Nothing live: dead. Less than half: its live part moves. Half: it stays."""

    def inside(pack: str, **sizes: int) -> dict[str, Packed]:
        return {sha: Packed(size, Location(pack, row, 1)) for row, (sha, size) in enumerate(sizes.items())}

    packs = {
        "dead": inside("dead", a=10),
        "half": inside("half", b=10, c=10),
        "less": inside("less", d=9, e=10),
        "empty": inside("empty", f=0),
    }
    # Bytes named in another pack do not keep this one.
    live = {("a", "half"), ("b", "half"), ("d", "less"), ("f", "empty")}
    plan = plan_sweep(packs, live)
    assert (plan.dead, plan.rewrite, plan.moved) == (("dead",), ("less",), {"d": packs["less"]["d"]})


def taken(kept: StateStorage, tmp_path: Path, checkpoint: int, **contents: bytes) -> tuple[StoredFile, ...]:
    files = store(kept, CheckpointId(checkpoint), tmp_path / f"native{checkpoint}", **contents).files
    kept.unpin(CheckpointId(checkpoint), completed=True)
    return files


def test_dead_packs_go_and_thin_ones_are_rewritten(root: Root, kept: StateStorage, tmp_path: Path) -> None:
    """The manifests are not touched: what they name is found where it moved to, now and after more moves."""
    one = taken(kept, tmp_path, 1, big=b"x" * 900, keep=b"y" * 90)
    two = taken(kept, tmp_path, 2, keep2=b"y" * 90, gone=b"z" * 50)
    three = taken(kept, tmp_path, 3, keep3=b"y" * 90, more=b"m" * 500, some=b"s" * 300)
    assert two[0].at.pack == one[0].at.pack
    retained = [manifest_of(3, three)]
    swept = sweep(kept, lambda: retained)
    assert (swept.packs, swept.rewritten, swept.leftovers) == (2, 1, 0)
    assert len(packs_in(root)) == 2
    assert kept.missing(three) == ()
    assert verify_state(root, retained) == ()
    # The merged pack is known: neither are its bytes written again, nor are they lost to another sweep.
    four = taken(kept, tmp_path, 4, keep4=b"y" * 90)
    assert four[0].at.pack.startswith("merged-")
    assert sweep(kept, lambda: [*retained, manifest_of(4, four)]) == Swept()
    # The same after a restart that has but the manifests.
    later = StateStorage.open(root, "job", RunId(2), retained)
    assert store(later, CheckpointId(5), tmp_path / "native5", keep5=b"y" * 90).size_new == 0
    later.unpin(CheckpointId(5), completed=True)
    assert sweep(later, list).packs == 2
    assert packs_in(root) == []


def test_an_open_capture_is_never_swept(root: Root, kept: StateStorage, tmp_path: Path) -> None:
    """Between its copy and its manifest nothing names it but its pin: also what it only reused."""
    one = taken(kept, tmp_path, 1, x=b"x" * 100, y=b"y" * 500)
    two = store(kept, CheckpointId(2), tmp_path / "native2", x=b"x" * 100, new=b"n").files
    assert two[0].at == one[0].at
    assert sweep(kept, list).rewritten == 1
    assert kept.missing(two) == ()
    assert verify_state(root, [manifest_of(2, two)]) == ()
    kept.unpin(CheckpointId(2), completed=True)
    sweep(kept, lambda: [manifest_of(2, two)])
    assert verify_state(root, [manifest_of(2, two)]) == ()
    sweep(kept, list)
    assert kept.missing(two) == two


class Killed(Exception):
    """The process ends here."""


@pytest.mark.parametrize("point", ["merged", "committed", "deleted"])
def test_a_sweep_may_die_anywhere(
    root: Root, kept: StateStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Every retained byte stays readable, and the next run's sweep ends with as much as a whole one."""
    one = taken(kept, tmp_path, 1, big=b"x" * 900, keep=b"y" * 90)
    taken(kept, tmp_path, 2, dead=b"z" * 50)
    retained = [manifest_of(1, one[1:])]

    def dies(after: Callable[..., object] | None) -> Callable[..., object]:
        def die(*args: object) -> object:
            if after is not None:
                after(*args)
            raise Killed

        return die

    match point:
        case "merged":
            monkeypatch.setattr(kept, "replace", dies(None))
        case "committed":
            monkeypatch.setattr(kept, "leftovers", dies(None))
        case _:
            monkeypatch.setattr(module, "_delete", dies(module._delete))
    with pytest.raises(Killed):
        sweep(kept, lambda: retained)
    monkeypatch.undo()
    assert verify_state(root, retained) == ()
    later = StateStorage.open(root, "job", RunId(2), retained)
    sweep(later, lambda: retained)
    assert verify_state(root, retained) == ()
    assert len(packs_in(root)) == 1


def test_a_replaced_run_sweeps_nothing(root: Root, kept: StateStorage, tmp_path: Path) -> None:
    """It may read old manifests: the commit that comes first is refused, and no file is touched."""
    taken(kept, tmp_path, 1, x=b"x")
    newer = StateStorage.open(root, "job", RunId(2))
    files = taken(newer, tmp_path, 2, y=b"y")
    with pytest.raises(Fenced):
        sweep(kept, list)
    assert verify_state(root, [manifest_of(2, files)]) == ()
    assert len(packs_in(root)) == 2


def test_nothing_is_removed_on_a_guess(root: Root, kept: StateStorage, tmp_path: Path) -> None:
    """A manifest that cannot be read might name anything."""
    taken(kept, tmp_path, 1, x=b"x")

    def unreadable() -> Sequence[Manifest]:
        raise DamageError("torn")

    with pytest.raises(DamageError):
        sweep(kept, unreadable)
    assert len(packs_in(root)) == 1


def test_bytes_moved_for_one_manifest_stay_for_it(root: Root, kept: StateStorage, tmp_path: Path) -> None:
    """The same bytes in a pack that another manifest names do not stand in for those that moved."""
    one = taken(kept, tmp_path, 1, big=b"x" * 900, keep=b"y" * 90)
    sweep(kept, lambda: [manifest_of(1, one[1:])])
    forgetful = StateStorage.open(root, "job", RunId(2))
    two = taken(forgetful, tmp_path, 2, keep=b"y" * 90)
    both = [manifest_of(1, one[1:]), manifest_of(2, two)]
    assert sweep(forgetful, lambda: both) == Swept()
    sweep(forgetful, lambda: both[:1])
    with PackReader(root) as reader:
        assert len(resolve(reader, forgetful.active(), one[1:])) == 1
    assert verify_state(root, both[:1]) == ()


def test_a_pack_with_altered_bytes_is_left_and_the_others_are_swept(
    root: Root, kept: StateStorage, tmp_path: Path
) -> None:
    """No later checkpoint takes bytes over from it, and it goes once nothing names it."""
    one = taken(kept, tmp_path, 1, big=b"x" * 900, keep=b"y" * 90)
    two = taken(kept, tmp_path, 2, large=b"u" * 900, small=b"v" * 90)
    taken(kept, tmp_path, 3, dead=b"z" * 50)
    pack = Path(root.uri, "state", one[1].at.pack)
    whole = pack.read_bytes()
    at = whole.index(b"y" * 90)
    pack.write_bytes(whole[:at] + b"?" + whole[at + 1 :])
    retained = [manifest_of(1, one[1:]), manifest_of(2, two[1:])]
    assert verify_state(root, retained[1:]) == ()
    swept = sweep(kept, lambda: retained)
    assert (swept.packs, swept.rewritten, swept.leftovers) == (2, 1, 0)
    assert [f.checkpoint for f in verify_state(root, retained)] == [1]
    assert sweep(kept, lambda: retained) == Swept()
    again = taken(kept, tmp_path, 4, keep=b"y" * 90)
    assert again[0].at.pack != pack.name
    assert sweep(kept, lambda: [*retained[1:], manifest_of(4, again)]).packs == 1
    assert not pack.exists()
