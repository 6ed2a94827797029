"""Which outputs of a batch are evaluated, copied and completed."""

from __future__ import annotations

import pytest

from spark_abs.protocol.evaluation import Consumer, Missing, Staged, Write, files_of, missing, writes

CHANNEL = Consumer("keyed", "channels/a.keyed")
PLAIN = Consumer("keyed", "/lake/plain")
PARTED = Consumer("keyed", "/lake/parted", plain=False)
OTHER = Consumer("other", "/lake/other")
MAIN = Consumer("main", "channels/a.main")


def test_an_output_with_one_consumer_is_written_where_it_is_committed() -> None:
    assert writes([PLAIN], (), ()) == (Write("keyed", PLAIN),)
    assert writes([PARTED], (), ()) == (Write("keyed", PARTED),)


def test_an_output_is_written_once_for_a_table_that_takes_files() -> None:
    """Others get copies; Delta's own writer, and functions, read what is there."""
    assert writes([CHANNEL, PLAIN, PARTED], ["keyed"], ()) == (Write("keyed", CHANNEL),)
    assert writes([PARTED, PLAIN], (), ()) == (Write("keyed", PLAIN),)


def test_what_only_functions_take_is_written_if_it_could_have_other_rows_the_next_time() -> None:
    assert writes([PLAIN], ["other"], ["other"]) == (Write("keyed", PLAIN), Write("other", None))
    assert writes([PLAIN], ["other"], ()) == (Write("keyed", PLAIN),)


def test_without_a_commit_nothing_could_decide_and_nothing_is_written() -> None:
    assert writes([], ["keyed", "other"], ["keyed", "main"]) == ()


def test_a_main_frame_that_is_random_is_written_first_for_all_that_is_made_of_it() -> None:
    assert writes([PLAIN, OTHER], (), ["main"]) == (
        Write("main", None),
        Write("keyed", PLAIN),
        Write("other", OTHER),
    )
    assert writes([PLAIN, MAIN], (), ["main"]) == (Write("main", MAIN), Write("keyed", PLAIN))
    assert writes([PLAIN], ["other"], ["main"]) == (Write("main", None), Write("keyed", PLAIN))
    assert writes([PLAIN], ["keyed"], ["main"]) == (Write("keyed", PLAIN),)


NAMED = (
    Staged("keyed", "channels/a.keyed", "data/1-1-4-aa", 1, 3, 500),
    Staged("keyed", "/lake/plain", "data/1-1-4-bb", 1, 3, 500),
    Staged("keyed", "/lake/parted", rows=3),
    Staged("other", "/lake/other"),
)


def test_what_lacks_a_batch_gets_the_files_that_the_first_commit_names() -> None:
    """Its own if it has some; one that Delta writes reads those of another, one without rows gets none."""
    assert missing([PLAIN, PARTED, OTHER], NAMED) == Missing(
        own={"/lake/plain": NAMED[1], "/lake/other": NAMED[3]}, lent={"/lake/parted": NAMED[0]}
    )


def test_a_consumer_that_has_come_since_gets_the_rows_of_its_output() -> None:
    new = Consumer("keyed", "/lake/new")
    assert missing([new], NAMED) == Missing(lent={"/lake/new": NAMED[0]})


def test_a_table_that_takes_another_output_since_does_not_get_the_rows_of_the_one_before() -> None:
    assert missing([Consumer("main", "/lake/plain")], NAMED) == Missing(
        anew=(Consumer("main", "/lake/plain"),)
    )


@pytest.mark.parametrize("named", [(), NAMED[3:]])
def test_an_output_that_is_not_named_is_evaluated_again(named: tuple[Staged, ...]) -> None:
    assert missing([CHANNEL, PLAIN], named) == Missing(anew=(CHANNEL, PLAIN))


def test_the_files_of_an_output_are_found_wherever_they_lie() -> None:
    assert files_of(NAMED) == {"keyed": NAMED[0], "other": NAMED[3]}
    assert files_of(NAMED[2:3]) == {}
