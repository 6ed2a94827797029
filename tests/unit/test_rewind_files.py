"""Which files of a checkpoint directory a rewind takes away, and the log of a file source it completes."""

from __future__ import annotations

import json

import pytest

from spark_abs.errors import DamageError, Refused
from spark_abs.rewind.files import (
    advanced_source_log,
    cut_source_log,
    holds_schema_log,
    later_schemas,
    newer,
)
from spark_abs.snapshots.delta_offsets import jumped
from spark_abs.snapshots.layout import parse_offsets

LOGS = {"0": 3}

NEWER = [
    *("offsets/8", "offsets/.8.crc", "offsets/.8.0f.tmp", "commits/8", "commits/.9.crc", "commits/.7.0f.tmp"),
    *("sources/0/4", "sources/0/.4.crc", "sources/0/9.compact"),
    *("state/0/0/9.delta", "state/0/1/9.snapshot", "state/0/0/9.zip", "state/0/0/9.changelog"),
    *(
        "state/0/0/.9.zip.crc",
        "state/0/0/9.delta.crc",
        "state/0/0/9_3f2a-11.changelog",
        "state/0/3/right-keyToNumValues/10.delta",
    ),
    *("state/0/_metadata/v2/8", "state/0/_stateSchema/default/8_ab"),
]
STAYS = [
    *("metadata", "offsets/7", "offsets/.7.crc", "offsets/0", "commits/7"),
    *("sources/0/3", "sources/0/0", "sources/1/0", "sources/1/9"),
    *("state/0/0/8.delta", "state/0/0/8.zip", "state/0/0/8_3f2a-11.changelog", "state/0/0/SSTs/000009.sst"),
    *("state/0/0/_metadata/schema", "state/0/_metadata/metadata", "state/0/_metadata/v2/0"),
    *("state/0/_stateSchema/default/7_ab", "state/0/3/right-keyToNumValues/8.delta"),
    *("notes/9.delta", "_rewind/x/files/offsets/9"),
]


@pytest.mark.parametrize(("path", "goes"), [*((p, True) for p in NEWER), *((p, False) for p in STAYS)])
def test_what_is_newer_than_batch_7(path: str, goes: bool) -> None:
    assert newer(path, 7, LOGS) is goes


def entries(*numbers: int) -> str:
    return "\n".join(["v1", *(json.dumps({"path": f"f{n}", "timestamp": 0, "batchId": n}) for n in numbers)])


@pytest.mark.parametrize(
    ("files", "until", "made"),
    [
        (["0", "1", "2", "3"], 2, {}),
        (["9.compact", "10", "11"], 11, {}),
        (["9.compact", "8", "9"], 7, {str(n): entries(n) for n in range(8)}),
        (
            ["19.compact"],
            12,
            {"9.compact": entries(*range(10)), **{str(n): entries(n) for n in (10, 11, 12)}},
        ),
        (["9.compact", "19.compact", "12"], 12, {str(n): entries(n) for n in (10, 11)}),
        (["2.compact", "5.compact"], 4, {"3": entries(3), "4": entries(4)}),
        (["5.compact"], 2, {"0": entries(0), "1": entries(1), "2": entries(2)}),
    ],
)
def test_a_compact_file_gives_back_what_was_deleted(
    files: list[str], until: int, made: dict[str, str]
) -> None:
    found = cut_source_log(files, until, lambda name: entries(*range(int(name.partition(".")[0]) + 1)))
    assert found == made


def test_a_log_without_its_entries_is_damage() -> None:
    with pytest.raises(DamageError, match="file 0 of 0 to 2 is missing"):
        cut_source_log(["1", "2"], 2, lambda name: "")
    with pytest.raises(DamageError, match="has the line"):
        cut_source_log(["9.compact"], 2, lambda name: "v1\nnothing")


def test_offsets_jump_behind_a_restore() -> None:
    old = '{"sourceVersion":1,"reservoirId":"r","reservoirVersion":4,"index":-1,"isStartingVersion":false}'
    new = '{"sourceVersion":3,"reservoirId":"s","reservoirVersion":4,"index":7,"isStartingVersion":true}'
    text = f'v1\n{{"batchWatermarkMs":5}}\n{old}\n{new}\n-'
    head, metadata, first, second, third = jumped(text, {"1": 12}).split("\n")
    assert (head, metadata, first, third) == ("v1", '{"batchWatermarkMs":5}', old, "-")
    assert json.loads(second) == {
        "sourceVersion": 3,
        "reservoirId": "s",
        "reservoirVersion": 12,
        "index": -100,
        "isStartingVersion": False,
    }
    assert json.loads(jumped(text, {"0": 9}).split("\n")[2])["index"] == -1
    named = f"v2\n{{}}\nin:{old}"
    assert json.loads(jumped(named, {"in": 9}).split("\n")[2].removeprefix("in:"))["reservoirVersion"] == 9


def told(names: list[str], texts: dict[str, str]) -> list[int]:
    """Return the numbers of the entries that Spark reads, as `CompactibleFileStreamLog.allFiles` does."""
    files = {**dict.fromkeys(names, ""), **texts}
    numbers = {int(name.partition(".")[0]): name for name in files}
    compact = sorted(n for n, name in numbers.items() if name.endswith(".compact"))
    interval = compact[-1] - compact[-2] if len(compact) > 1 else 10
    newest = max(numbers)
    assert all((n + 1) % interval == 0 for n in compact), compact
    base = (newest + 1) // interval * interval - 1
    wanted = [*([f"{base}.compact"] if base >= 0 else []), *map(str, range(base + 1, newest + 1))]
    assert all(name in files for name in wanted), (wanted, files)
    lines = [line for name in wanted for line in (files[name] or whole(name)).split("\n")[1:]]
    return sorted(json.loads(line)["batchId"] for line in lines)


def whole(name: str) -> str:
    """Return the text of a log file into which an entry was written at each number."""
    number = int(name.partition(".")[0])
    return entries(*range(number + 1)) if name.endswith("compact") else entries(number)


@pytest.mark.parametrize("newest", [0, 3, 8, 9, 10, 18, 19, 25, 38, 45])
@pytest.mark.parametrize("back", [0, 1, 5, 12, 50])
@pytest.mark.parametrize("deleted", [False, True])
def test_a_log_holds_at_a_higher_number_what_it_held_at_an_offset(
    newest: int, back: int, deleted: bool
) -> None:
    """Whatever Spark has deleted behind its compact files, and wherever the next compact file is due."""
    until, last = max(newest - back, -1), (newest + 1) // 10 * 10 - 1
    there = [f"{n}.compact" if (n + 1) % 10 == 0 else str(n) for n in range(newest + 1)]
    if deleted:
        there = [name for name in there if int(name.partition(".")[0]) >= last]
    made = advanced_source_log(there, until, newest + 1, whole)
    kept = [name for name in there if int(name.partition(".")[0]) <= until and name not in made]
    assert told(kept, made) == list(range(until + 1))
    assert {name.partition(".")[0] for name in made} >= {str(newest + 1)}
    # Killed on the way and begun anew, with what was there and what was made: the same.
    again = advanced_source_log(
        [*there, *made], until, newest + 1, lambda name: made[name] if name in made else whole(name)
    )
    assert told(kept, {**made, **again}) == list(range(until + 1))


@pytest.mark.parametrize("number", range(40, 62))
def test_files_of_a_kept_cut_do_not_change_the_interval_of_compact_files(number: int) -> None:
    """Spark has deleted those between the compact file of the cut and its own newest one."""
    newest = (number + 1) // 10 * 10 - 1
    there = ["9.compact", "10", f"{newest}.compact", *map(str, range(newest + 1, number))]
    made = advanced_source_log(there, 10, number, whole)
    assert told(["9.compact", "10"], made) == list(range(11))


def test_schemas_that_were_tracked_after_a_batch_go() -> None:
    """Delta reads with the newest one: rows of before a rename would come under the new name."""
    line = json.dumps({"reservoirId": "t", "reservoirVersion": 5, "index": -100, "isStartingVersion": False})
    offsets = parse_offsets(f'v1\n{{"batchWatermarkMs":0}}\n{line}')
    paths = [f"schemas/_schema_log_t/{n}" for n in range(3)] + [
        "_schema_log_t_2/0",
        "_schema_log_t_2/.0.crc",
        "a/1",
    ]
    since = {**dict(zip(paths, (0, 5, 9), strict=False)), "_schema_log_t_2/0": 4}

    def read(path: str) -> str:
        entry = {"deltaCommitVersion": since[path], "sourceMetadataPath": "file:/c/sources/0"}
        return f"v1\n{json.dumps(entry)}"

    assert later_schemas(paths, offsets, read) == paths[1:3]
    with pytest.raises(Refused, match="schema tracking log"):
        later_schemas(paths, offsets, lambda _: "v2\n{}")


@pytest.mark.parametrize(
    ("path", "holds"), [("_schema_log_t", True), ("schemas/_schema_log_t", True), ("a", False)]
)
def test_a_log_of_schemas_is_known_by_the_name_that_delta_gives_it(path: str, holds: bool) -> None:
    assert holds_schema_log(path) is holds
