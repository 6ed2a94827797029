"""Aligned cuts: against all combinations of small pipelines, and the transactions of a table's log."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_abs.cuts.cut import (
    NEVER,
    NOTHING,
    Batch,
    NoAlignedCut,
    Pipeline,
    Read,
    Written,
    cuts,
    misfits,
    newest_cut,
)
from spark_abs.cuts.lineage import Attempted, batches_by_time, first_versions, writer_of, written_by


def simulated(seed: int, queries: int, steps: int) -> tuple[Pipeline, dict[str, list[dict[str, set[int]]]]]:
    """Run queries at random; return what they recorded, and for each query and batch what it had seen.

    That is: table to the versions that the query has read so far, `+table` to those that it has written.
    """
    chance = random.Random(seed)
    names = [f"q{n}" for n in range(queries)]
    target = {name: f"t{chance.randrange(queries)}" for name in names}
    inputs = {
        name: {f"t{chance.randrange(queries)}" for _ in range(chance.randrange(3))} - {target[name]}
        for name in names
    }
    versions: dict[str, int] = dict.fromkeys(target.values(), 0)
    until = {(name, table): 0 for name in names for table in inputs[name]}
    wrote: dict[str, set[int]] = {name: set() for name in names}
    batches: dict[str, list[Batch]] = {name: [] for name in names}
    seen: dict[str, list[dict[str, set[int]]]] = {name: [] for name in names}
    whole: dict[tuple[str, str], list[int | None]] = {at: [] for at in until}
    made: dict[str, list[int | None]] = {name: [] for name in names}
    for now in range(steps):
        name = chance.choice(names)
        for table in inputs[name]:
            there = versions.get(table, 0)
            until[name, table] = chance.randint(until[name, table], there)
            partly = chance.random() < 0.1 and until[name, table] < there
            whole[name, table].append(None if partly else until[name, table])
        version = None
        if chance.random() < 0.8:
            version = versions[target[name]]
            versions[target[name]] += 1
            wrote[name].add(version)
        made[name].append(version)
        batches[name].append(Batch(len(batches[name]), now))
        seen[name].append(
            {f"+{target[name]}": set(wrote[name]), **{t: set(range(until[name, t])) for t in inputs[name]}}
        )
    written = []
    for name in names:
        last, following = [], []
        for at in range(len(made[name])):
            last.append(max((v for v in made[name][: at + 1] if v is not None), default=NOTHING))
            following.append(min((v for v in made[name][at + 1 :] if v is not None), default=NEVER))
        written.append(Written(name, target[name], tuple(last), tuple(following)))
    read = [Read(name, table, tuple(found)) for (name, table), found in whole.items()]
    return Pipeline({n: tuple(b) for n, b in batches.items()}, tuple(written), tuple(read)), seen


def aligned(pipeline: Pipeline, seen: dict[str, list[dict[str, set[int]]]], cut: dict[str, int]) -> bool:
    """Say whether every reader has read exactly what the writers had written, and no hole is left."""
    tables = {w.table for w in pipeline.written}
    for table in tables:
        had = [seen[q][at].get(f"+{table}", set()) for q, at in cut.items()]
        all_written = {v for q in cut for v in (seen[q][-1].get(f"+{table}", set()))}
        inside = set().union(*had)
        outside = all_written - inside
        if inside and outside and max(inside) > min(outside):
            return False
        for read in (r for r in pipeline.read if r.table == table):
            at = cut[read.query]
            if read.until[at] is None or seen[read.query][at][table] & all_written != inside:
                return False
    return True


def every(pipeline: Pipeline) -> Iterator[dict[str, int]]:
    names = list(pipeline.batches)
    for places in itertools.product(*(range(len(pipeline.batches[n])) for n in names)):
        yield dict(zip(names, places, strict=True))


@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(1, 14))
def test_the_newest_cut_is_that_of_all_combinations(seed: int, queries: int, steps: int) -> None:
    pipeline, seen = simulated(seed, queries, steps)
    good = [cut for cut in every(pipeline) if aligned(pipeline, seen, cut)]
    try:
        found = newest_cut(pipeline, pipeline.newest())
    except NoAlignedCut:
        assert not good, seed
        return
    assert found in good, seed
    assert all(cut[name] <= found[name] for cut in good for name in cut), seed


@given(st.integers(0, 10**9), st.integers(1, 3), st.integers(1, 9))
def test_batches_that_are_no_cut_have_a_pair_that_does_not_fit(seed: int, queries: int, steps: int) -> None:
    pipeline, seen = simulated(seed, queries, steps)
    for places in every(pipeline):
        assert bool(misfits(pipeline, places)) != aligned(pipeline, seen, places), (seed, places)


@given(st.integers(0, 10**9))
def test_the_cuts_before_each_moment_are_listed(seed: int) -> None:
    pipeline, seen = simulated(seed, 3, 12)
    listed = list(cuts(pipeline, pipeline.newest()))
    good = [cut for cut in every(pipeline) if aligned(pipeline, seen, cut)]
    for moment in range(12):
        before = [cut for cut in good if pipeline.ended_ms(cut) <= moment]
        newest = {n: max(cut[n] for cut in before) for n in pipeline.batches} if before else None
        found = next((cut for cut in listed if pipeline.ended_ms(cut) <= moment), None)
        assert found == newest, (seed, moment)


def test_cuts_go_down_although_a_clock_was_set_back() -> None:
    """The last batch of the writer has an earlier end than the one before, which no other one outlasts."""
    batches = {
        "writes": tuple(itertools.starmap(Batch, enumerate([100, 1_000_200, 999_700]))),
        "reads": tuple(itertools.starmap(Batch, enumerate([110, 1_000_150]))),
    }
    written = Written("writes", "t", (0, 1, 2), (1, 2, NEVER))
    pipeline = Pipeline(batches, (written,), (Read("reads", "t", (1, 2)),))
    found = list(itertools.islice(cuts(pipeline, pipeline.newest()), 3))
    assert found == [{"writes": 1, "reads": 1}, {"writes": 0, "reads": 0}]


def test_ten_queries_with_a_thousand_batches_each_look_at_each_batch_once() -> None:
    """A chain in which each reader is half as far as its writer: nearly all batches are left."""
    looked = 0

    class Counted(tuple[int, ...]):
        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            nonlocal looked
            looked += 1
            return super().__getitem__(at)

    n, names = 1000, [f"q{i}" for i in range(10)]
    batches = {name: tuple(Batch(i, i) for i in range(n)) for name in names}
    written = tuple(
        Written(name, f"t{name}", Counted(range(n)), Counted([*range(1, n), NEVER])) for name in names
    )
    read = tuple(
        Read(name, f"t{before}", Counted(i // 2 + 1 for i in range(n)))
        for before, name in itertools.pairwise(names)
    )
    cut = newest_cut(Pipeline(batches, written, read), dict.fromkeys(names, n - 1))
    assert cut == {name: (n - 1) >> (9 - i) for i, name in enumerate(names)}
    assert looked < 10 * n * len(names)


def test_what_does_not_meet_is_named() -> None:
    batches = {"bronze": (Batch(3, 0), Batch(4, 1)), "silver": (Batch(7, 0),)}
    written = (Written("bronze", "/t/bronze", (5, 6), (6, NEVER)),)
    pipeline = Pipeline(batches, written, (Read("silver", "/t/bronze", (4,)),))
    with pytest.raises(NoAlignedCut) as said:
        newest_cut(pipeline, pipeline.newest())
    assert "silver' had read it up to version 3 with batch 7" in str(said.value)
    assert "bronze' had written it up to version 5 with batch 3" in str(said.value)
    (pair,) = misfits(pipeline, pipeline.newest())
    assert pair == (
        "table /t/bronze: query 'silver' had read it up to version 3 with batch 7, and query 'bronze' had "
        "written it up to version 6 with batch 4"
    )
    with pytest.raises(NoAlignedCut, match="'silver' has no batch that can be resumed so far back"):
        newest_cut(pipeline, pipeline.before(-1) | {"bronze": 0})


def test_a_transaction_that_was_set_back_abandons_the_batches_above() -> None:
    """Versions 3 and 4 are of abandoned batches; version 5 has the rows of batch 1 again."""
    commits = [(1, 0), (2, 1), (3, 2), (4, 3), (5, 1), (6, 2)]
    assert first_versions(commits) == {0: 1, 1: 2, 2: 6}
    written = written_by(commits, "q", "t", [Batch(b, 0) for b in range(3)])
    assert (written.last, written.next) == ((1, 2, 6), (2, 6, NEVER))


def test_a_commit_belongs_to_the_only_query_that_was_at_that_batch() -> None:
    queries = {
        "a": {1: Attempted(1000, 2000), 2: Attempted(3000, 4000)},
        "b": {1: Attempted(1500, 2500), 2: Attempted(9000, 9500)},
    }
    assert writer_of({1: 1700, 2: 3500}, queries, 0) == ("a",)
    assert writer_of({1: 1700}, queries, 0) == ("a", "b")
    assert writer_of({1: 1700, 2: 3500, 3: 1}, queries, 0) == ("a",)
    assert writer_of({1: 1700, 2: 5000}, queries, 900) == ()
    assert writer_of({8: 1700}, queries, 0) == ()


BATCHES = {
    "a": {1: Attempted(1000, 2000), 2: Attempted(3000, 4000), 3: Attempted(4001, 5000)},
    "b": {7: Attempted(20_000, 21_000), 8: Attempted(21_001, 2**62)},
}


def test_commits_without_a_number_belong_to_the_batch_in_which_they_were_made() -> None:
    """Where batches follow each other closely, the clock of the driver decides."""
    commits = {4: 1500, 5: 3001, 6: 3999, 7: 4000, 8: 4002, 9: 20_500, 11: 30_000}
    some = batches_by_time({4: 1500, 8: 4002}, BATCHES, 500)
    assert some == "some batches of 'a' would have made 0 commits, others 1"
    assert batches_by_time({4: 1500, 5: 3001, 8: 4002, 9: 20_500, 11: 30_000}, BATCHES, 500) == {
        4: ("a", 1),
        5: ("a", 2),
        8: ("a", 3),
        9: ("b", 7),
        11: ("b", 8),
    }
    said = batches_by_time({9: 20_500, 11: 30_000, 12: 30_001}, BATCHES, 500)
    assert said == "some batches of 'b' would have made 1 commits, others 2"
    said = batches_by_time(commits, BATCHES, 500)
    assert said == "some batches of 'a' would have made 1 commits, others 3"


@pytest.mark.parametrize(
    ("commits", "said"),
    [
        ({4: 100}, "the time of version 4 is near that of none"),
        ({4: 999}, "version 4 was made just when a batch of 'a' began"),
        ({4: 3000}, "version 4 was made just when a batch of 'a' began"),
        ({4: 9000}, "the time of version 4 is near that of none"),
        ({4: 20_999, 5: 21_001}, "version 5 was made just when a batch of 'b' began"),
        ({4: 2600}, "version 4 was made when 'a' had ended batch 1"),
    ],
)
def test_what_a_time_leaves_open_is_not_concluded(commits: dict[int, int], said: str) -> None:
    assert batches_by_time(commits, BATCHES, 500) == said


def test_batches_of_two_queries_that_are_near_leave_it_open() -> None:
    queries = {"a": {1: Attempted(1000, 2000)}, "b": {1: Attempted(2400, 3000)}}
    assert batches_by_time({4: 1500}, queries, 500) == {4: ("a", 1)}
    assert batches_by_time({4: 1950}, queries, 500) == "the time of version 4 is near those of 'a' and 'b'"


@given(st.integers(0, 10**9))
def test_what_is_concluded_from_times_is_so(seed: int) -> None:
    """Queries run at random, one makes commits, clocks of files differ: right, or left open."""
    chance = random.Random(seed)
    queries: dict[str, dict[int, Attempted]] = {}
    commits: dict[int, int] = {}
    truth: dict[int, tuple[str, int]] = {}
    for query in ("a", "b")[: chance.randint(1, 2)]:
        now, queries[query], skew = chance.randrange(3000), {}, chance.randint(-400, 400)
        for batch in range(chance.randint(1, 6)):
            begun = now
            ended = begun + chance.randint(20, 3000)
            for _ in range(1 if chance.random() < 0.9 else chance.randint(0, 2)):
                version = len(commits)
                commits[version] = chance.randint(begun + 1, ended)
                truth[version] = query, batch
            queries[query][batch] = Attempted(begun, ended + skew)
            now = ended + chance.choice([1, 5000])
    concluded = batches_by_time(commits, queries, 500)
    assert isinstance(concluded, str) or concluded == truth, (seed, concluded)
