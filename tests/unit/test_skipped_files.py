"""Which files a stage goes past, and what is said to somebody who names another one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from spark_abs.errors import Refused, UsageError
from spark_abs.manifest import StageShape
from spark_abs.model import BatchId, RunId, StageId
from spark_abs.observe.skipping import find_skips, refuse_read, skip_files
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import Command, CommandKind, SkippedFile
from spark_abs.protocol.skipped_files import UnfinishedBatch, choose_files, find_files
from spark_abs.snapshots.file_sources import FileSources
from spark_abs.store.control import Control
from spark_abs.store.history import History
from spark_abs.store.root import Root
from tests.root_support import SmallJob

A, B = StageId("a"), StageId("b")
ONE, SPACED, FAR = "file:///in/1.json", "file:///in/a%20%25b.json", "s3a://lake/in/2.json"
BATCH = UnfinishedBatch(A, BatchId(7), frozenset((ONE, SPACED, FAR)))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (ONE, ONE),
        ("/in/1.json", ONE),
        ("file:/in/1.json", ONE),
        (SPACED, SPACED),
        ("/in/a %b.json", SPACED),
        ("file:///in/a %b.json", SPACED),
        (FAR, FAR),
    ],
)
def test_a_file_is_named_as_an_error_names_it_or_by_its_path(name: str, file: str) -> None:
    assert choose_files([name, name], BATCH, ()) == (file,)


def test_a_path_is_taken_as_it_is_and_a_uri_is_decoded() -> None:
    literal, decoded = "file:///in/a%2520b", "file:///in/a%20b"
    both = [literal, decoded]
    assert find_files(["/in/a%20b", "file:///in/a%20b", "/in/c"], both) == {
        "/in/a%20b": (literal,),
        "file:///in/a%20b": (decoded,),
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/in/0.json", "has read /in/0.json in a batch that has ended: skipping it would have no effect"),
        ("/in/*.json", "/in/*.json is a pattern, and files are skipped by their names alone"),
        ("/in/x/../1.json", "/in/x/../1.json has '..' in it: give the path as the error of the batch has it"),
        ("1.json", "1.json is not a whole path; the batch is to read file:///in/1.json"),
        ("/out/1.json", "/out/1.json is no file of batch 7 of stage 'a'; the batch is to read file:///in/1"),
        ("", " is not a whole path"),
    ],
)
def test_a_name_of_another_file_is_refused_with_the_files_of_the_batch(name: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        choose_files([ONE, name], BATCH, ["file:///in/0.json"])
    assert said in str(refused.value)


def test_only_some_of_many_files_are_named() -> None:
    many = replace(BATCH, files=frozenset(f"file:///in/{n:02}" for n in range(12)))
    with pytest.raises(UsageError, match="file:///in/04 and 7 more"):
        choose_files(["/x"], many, ())


def test_a_batch_that_an_output_holds_keeps_its_rows() -> None:
    held = replace(BATCH, held_by=("channel 'a.main'",))
    with pytest.raises(UsageError, match=r"channel 'a.main' already has the rows of batch 7 .*restart='ch"):
        choose_files([ONE], held, ())


def test_a_stage_without_a_batch_of_files_is_said() -> None:
    with pytest.raises(UsageError, match="stage 'a' has no unfinished batch that reads files"):
        choose_files([ONE], replace(BATCH, files=frozenset()), ())


class Broken:
    """The small job; batch 0 of `a` has read 0.json and 1.json, and batch 1 fails, with 2.json and 3.json."""

    def __init__(self, path: Path) -> None:
        self.job = SmallJob(path)
        self.root: Root = self.job.root
        self.native = self.root.native("native", self.job.attempt, A)
        for batch in (0, 1):
            self.native.write(f"offsets/{batch}", self._offsets(batch))
            files = [f"file:///in/{n}.json" for n in (2 * batch, 2 * batch + 1)]
            entries = [json.dumps({"path": f, "timestamp": 1, "batchId": batch}) for f in files]
            self.native.write(f"sources/0/{batch}", "\n".join(("v1", *entries)).encode())
        self.native.write("sources/1/0", b'v1\n{"t":{"0":5}}')
        self.native.write("commits/0", b"v1\n{}")
        shapes = (
            StageShape(A, (), {"main": "{}"}, {"main": ""}, {}),
            StageShape(B, ("a.main",), {"main": "{}"}, {}, {"totals": "main"}, tables={"totals": "/none"}),
        )
        Control.open(self.root).update(
            lambda s: replace(s, attempts=(*s.attempts[:-1], replace(s.attempt, shapes=shapes)))
        )

    def _offsets(self, batch: int) -> bytes:
        return f'v1\n{{"batchWatermarkMs":0}}\n{{"logOffset":{batch}}}\n{{"t":{{"0":5}}}}'.encode()

    @property
    def skipped(self) -> Sequence[SkippedFile]:
        return self.job.state.skipped

    def skip(self, stage: str, *files: str) -> str:
        return skip_files(self.root, stage, files, lambda: 20_000, lambda _: None).message


@pytest.fixture
def broken(tmp_path: Path) -> Broken:
    return Broken(tmp_path)


def test_the_files_of_a_batch_are_found_in_the_log_of_the_source(broken: Broken) -> None:
    sources = FileSources(broken.native)
    assert sources.unfinished == 1
    assert sources.planned() == {"file:///in/2.json", "file:///in/3.json"}
    assert sources.read() == {"file:///in/0.json", "file:///in/1.json"}
    for log in ("offsets/0", "offsets/1", "commits/0"):
        broken.native.fs.delete_file(f"{broken.native.path}/{log}")
    first = FileSources(broken.native)
    assert (first.unfinished, len(first.planned()), first.read()) == (0, 4, frozenset())
    assert FileSources(broken.root.place("nowhere")).planned() == frozenset()


def test_a_file_is_skipped_while_no_run_is_alive_and_the_next_run_is_the_first_without_it(
    broken: Broken,
) -> None:
    said = broken.skip("a", "/in/2.json")
    assert said == "stage 'a' skips file:///in/2.json; no run is alive"
    (one,) = broken.skipped
    assert (one.stage, one.file, one.at_ms, one.since) == ("a", "file:///in/2.json", 20_000, 2)
    again = broken.skip("a", "/in/3.json", "file:///in/2.json")
    assert again == (
        f"stage 'a' skips file:///in/3.json; file:///in/2.json, which {one.by} had skipped before; "
        "no run is alive"
    )
    assert [(each.file, each.at_ms) for each in broken.skipped] == [
        ("file:///in/2.json", 20_000),
        ("file:///in/3.json", 20_000),
    ]
    rows = History(broken.root).read().to_pylist()
    assert {(row["kind"], row["stage"], row["reason"], row["detail"], row["by"]) for row in rows} == {
        ("skip-file", "a", "done", said, one.by),
        ("skip-file", "a", "done", again, one.by),
    }


@pytest.mark.parametrize(
    ("stage", "file", "said"),
    [
        ("c", "/in/2.json", "no stage 'c': the job has a, b"),
        ("b", "/in/2.json", "stage 'b' has no unfinished batch that reads files"),
        ("a", "/in/1.json", "has read /in/1.json in a batch that has ended"),
        ("a", "/in/9.json", "no file of batch 1 of stage 'a'"),
    ],
)
def test_nothing_is_recorded_of_a_refused_request(broken: Broken, stage: str, file: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        broken.skip(stage, "/in/2.json", file)
    assert broken.skipped == ()


def test_no_file_is_skipped_before_a_run_has_declared_its_stages(tmp_path: Path) -> None:
    job = SmallJob(tmp_path)
    with pytest.raises(UsageError, match=r"attempt 1 of job '.*' has declared no stage yet"):
        skip_files(job.root, "a", ["/in/2.json"], lambda: 0, lambda _: None)


def test_a_run_that_begins_meanwhile_is_asked_itself(broken: Broken) -> None:
    """It has read which files are skipped."""
    now = iter([20_000, 20_000])

    def now_ms() -> int:
        if (at := next(now, None)) is not None:
            return at
        broken.job.start()
        return 20_000

    with pytest.raises(Refused, match=r"a run began meanwhile at .*: run the command again"):
        skip_files(broken.root, "a", ["/in/2.json"], now_ms, lambda _: None)
    assert broken.skipped == ()


def test_a_batch_in_a_channel_is_not_changed(broken: Broken) -> None:
    broken.job.step(1)
    broken.job.step(2)
    with pytest.raises(UsageError, match=r"channel 'a\.main' already has the rows of batch 1 of stage 'a'"):
        broken.skip("a", "/in/2.json")


def test_a_driver_that_wakes_up_and_commits_the_file_ends_the_next_start(broken: Broken) -> None:
    """What the first run without the file has committed is repeated without it."""
    broken.job.step(1)
    broken.skip("a", "/in/2.json")
    refuse_read(broken.root, broken.job.state)
    broken.job.step(2)
    with pytest.raises(Refused, match=r"run 1 counted as dead and committed batch 1 .*/2.json, which was"):
        refuse_read(broken.root, broken.job.state)
    Control.open(broken.root).update(
        lambda s: replace(s, skipped=tuple(replace(one, since=RunId(1)) for one in s.skipped))
    )
    refuse_read(broken.root, broken.job.state)


def test_a_request_to_a_run_names_that_run(broken: Broken) -> None:
    command = Command("one", CommandKind.SKIP_FILE, None, 0, stages=(A,), files=("/in/3.json",), by="ann")
    found = find_skips(broken.root, broken.job.state, command, RunId(1), 5)
    assert found.new == (SkippedFile(A, "file:///in/3.json", "ann", 5, RunId(1)),)
    state = ledger.skip(broken.job.state, found.new)
    assert find_skips(broken.root, state, command, RunId(1), 9).new == ()
    assert ledger.skip(state, [replace(found.new[0], at_ms=9)]) == state
