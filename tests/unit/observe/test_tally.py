"""Status and metrics read `history/` once, and from then on only what was added."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from spark_abs.errors import DamageError
from spark_abs.model import AttemptId, BatchId, CheckpointId, RunId, StageId
from spark_abs.observe.metrics import read_metrics
from spark_abs.observe.tally import Tally
from spark_abs.store.history import History, HistoryEvent, HistoryRow, RunEvents
from spark_abs.store.root import Root
from spark_abs.store.table import Table
from tests.root_support import SmallJob

E = HistoryEvent
TIMES = count(1)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(str(tmp_path))


def record(
    root: Root, *events: HistoryEvent, run: int = 1, checkpoint: int = 1, reason: str = "expired"
) -> None:
    """Append events one by one, each as a commit of its own."""
    history = History(root)
    for event in events:
        attempt, stage, batch = AttemptId(1), StageId("a"), BatchId(4)
        row = HistoryRow(next(TIMES), event, attempt, RunId(run), CheckpointId(checkpoint))
        history.append([replace(row, stage=stage, reason=reason, detail="why", batch=batch)])


def data_files(root: Root) -> list[Path]:
    return sorted(Path(root.path("history")).glob("*.parquet"))


def commits(root: Root) -> list[Path]:
    return sorted(Path(root.path("history/_delta_log")).glob("*.json"))


def lose(root: Root) -> int:
    """Delete all files of rows, and of the log all but the newest; return how many files of rows."""
    lost = data_files(root)
    for file in (*lost, *commits(root)[:-1]):
        file.unlink()
    return len(lost)


def test_a_second_scrape_reads_only_what_was_added(tmp_path: Path) -> None:
    """What the first one has read is gone, data and log: the second one could not read it again."""
    job = SmallJob(tmp_path)
    job.come_alive()
    for value in (1, 2, 3):
        job.checkpoint(value)
    tally = Tally(job.root)
    assert 'completed_checkpoints_total{job_name="job"} 3\n' in read_metrics(job.root, 99_000, tally)
    history = History(job.root)
    assert lose(job.root) == 3
    history.append([HistoryRow(5, E.COMPLETED, job.attempt, job.run, CheckpointId(4))])
    history.append([HistoryRow(6, E.ABORTED, job.attempt, job.run, CheckpointId(5), reason="expired")])
    found = read_metrics(job.root, 99_000, tally)
    assert 'completed_checkpoints_total{job_name="job"} 4\n' in found
    assert 'failed_checkpoints_in_row{job_name="job"} 1\n' in found
    with pytest.raises(DamageError):
        read_metrics(job.root, 99_000)


def looked(tally: Tally, run: int) -> tuple[RunEvents, dict[str, int]]:
    return tally.of_run(RunId(run)), dict(tally.counts())


def test_who_follows_finds_what_one_finds_who_looks_once(root: Root) -> None:
    """Over an empty root, merged files, and a new run whose first events came before it is asked for."""
    tally = Tally(root)

    def same(run: int) -> None:
        once = History(root).of_run(RunId(run)) if data_files(root) else RunEvents()
        assert looked(tally, run) == looked(Tally(root), run)
        assert tally.of_run(RunId(run)) == once

    same(1)
    record(root, E.RUN_STARTED, E.STAGE_WAITING, E.STAGE_RESTARTED)
    same(1)
    record(root, E.ABORTED, checkpoint=2)
    record(root, E.ABORTED, checkpoint=3, reason="subsumed")
    same(1)
    History(root)._table.delta.optimize.compact()
    same(1)
    record(root, E.COMPLETED, checkpoint=4)
    record(root, E.RUN_STARTED, run=2)
    same(1)
    record(root, E.STAGE_RESTARTED, run=2)
    same(2)
    same(1)


@pytest.mark.parametrize("gone", ["log", "rows", "nothing"])
def test_what_cannot_be_followed_is_made_up_for_by_reading_all(
    root: Root, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = Tally(root)
    record(root, E.COMPLETED)
    assert tally.counts() == {"completed": 1}
    record(root, E.COMPLETED, E.RESTORED)
    if gone == "log":
        Table.open(root.place("history")).delta.create_checkpoint()
        for file in commits(root)[:3]:
            file.unlink()
    elif gone == "rows":
        before = data_files(root)
        History(root)._table.delta.optimize.compact()
        for file in before:
            file.unlink()
    else:
        monkeypatch.setattr("spark_abs.store.history_follower.MOST_COMMITS", 1)
    assert tally.counts() == {"completed": 2, "restored": 1}
    record(root, E.ABORTED)
    assert tally.counts() == {"completed": 2, "restored": 1, "aborted": 1}


def test_rows_that_were_not_taken_for_an_error_are_taken_once(root: Root) -> None:
    tally = Tally(root)
    record(root, E.COMPLETED)
    assert tally.counts() == {"completed": 1}
    record(root, E.COMPLETED, E.COMPLETED)
    newest = max(data_files(root), key=lambda file: file.stat().st_mtime_ns)
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-20])
    for _ in range(2):
        with pytest.raises(DamageError, match=newest.name):
            tally.counts()
    newest.write_bytes(whole)
    assert tally.counts() == {"completed": 3}


def test_a_root_that_was_made_anew_is_read_anew(root: Root) -> None:
    tally = Tally(root)
    record(root, E.RUN_STARTED, run=7)
    assert tally.of_run(RunId(7)).settings == [""]
    shutil.rmtree(root.path("history"))
    record(root, E.RUN_STARTED, E.STAGE_RESTARTED, run=1)
    assert tally.of_run(RunId(1)) == History(root).of_run(RunId(1))


def test_pages_and_probes_may_ask_at_the_same_time(root: Root) -> None:
    tally = Tally(root)
    record(root, E.COMPLETED, E.STAGE_RESTARTED)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: tally.counts() if n % 2 else tally.of_run(RunId(1)), range(8)))
    assert found == [RunEvents([(StageId("a"), BatchId(4), "why")]), {"completed": 1}] * 4


def test_of_a_checkpoint_with_an_outcome_nobody_is_waited_for(root: Root) -> None:
    """So that a server of a job whose checkpoints fail for days needs no more memory."""
    tally = Tally(root)
    record(root, E.STAGE_WAITING, checkpoint=1)
    record(root, E.STAGE_WAITING, checkpoint=2)
    assert [late[0] for late in tally.of_run(RunId(1)).late] == [1, 2]
    record(root, E.ABORTED, checkpoint=1)
    assert [late[0] for late in tally.of_run(RunId(1)).late] == [2]
