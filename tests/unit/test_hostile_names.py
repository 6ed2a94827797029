"""Whatever text is given as a name is a name or is refused: it is never a path, a pattern or a statement."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import PurePosixPath

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spark_abs.codec import from_json, to_json
from spark_abs.errors import DamageError, SinkFailed, UsageError
from spark_abs.model import AttemptId, CheckpointId, RunId, Version, checked_name, checked_relative
from spark_abs.protocol.outside import Epoch, Mark, Owner
from spark_abs.sinks.iceberg.mark import property_of, tag_of
from spark_abs.sinks.iceberg.sink import Iceberg
from spark_abs.sinks.kafka.config import Kafka
from spark_abs.sinks.kafka.marks import name_of
from spark_abs.sinks.kafka.rows import by_topic
from spark_abs.sinks.postgres.sink import Postgres

PIECES = [
    "'",
    '"',
    "`",
    ";",
    "--",
    "\n",
    "\r",
    "\t",
    "\0",
    "\\",
    "/",
    "..",
    ".",
    "*",
    "?",
    "[a]",
    "{0}",
    "%s",
]
PIECES += ["$1", "$(x)", " ", "é", "\u202e", "\ud800", "a", "Z", "0", "_", "-", "x" * 70]
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=6).map("".join) | st.text(max_size=12)
SAFE = frozenset(string.ascii_letters + string.digits + "_-.")
ROOT = "0123456789abcdef0123456789abcdef"


def taken(make: Callable[[], object]) -> bool:
    """Say whether a name is taken; one that is not is refused in one way only."""
    try:
        make()
    except UsageError:
        return False
    return True


@given(HOSTILE)
@example("..")
@example("a\n")
def test_names_of_topics_tables_branches_and_sinks_have_safe_letters_only(name: str) -> None:
    makes: list[Callable[[], object]] = [
        lambda: checked_name(name, "sink"),
        lambda: Kafka(name),
        lambda: Kafka("orders", marker=name),
        lambda: Iceberg(name),
        lambda: Iceberg(f"shop.{name}"),
        lambda: Iceberg("shop.orders", branch=name),
        lambda: Iceberg("shop.orders", catalog=name),
    ]
    found = [taken(make) for make in makes]
    if any(found):
        assert set(name) <= SAFE
        assert name not in ("", ".", "..")


@given(HOSTILE.filter(lambda text: "\ud800" not in text))
@example("..")
@example("a\0b")
def test_a_topic_that_a_row_names_is_asked_for_only_if_it_can_be_one(name: str) -> None:
    rows = pa.RecordBatch.from_pydict({"topic": [name], "value": ["a"]})
    if 0 < len(name) < 250 and set(name) <= SAFE and name not in (".", ".."):
        ((topic, some),) = by_topic(rows, None)
        assert (topic, some.num_rows) == (name, 1)
        return
    with pytest.raises(SinkFailed, match=r"column 'topic' is .* in a row, which is not the name of a topic"):
        list(by_topic(rows, None))


@given(HOSTILE)
def test_a_variable_of_the_environment_is_named_and_nothing_more(name: str) -> None:
    makes: list[Callable[[], object]] = [
        lambda: Kafka("orders", bootstrap_env=name),
        lambda: Kafka("orders", client_env=name),
        lambda: Postgres("orders", dsn_env=name),
        lambda: Postgres("orders", password_env=name),
        lambda: Iceberg("shop.orders", catalog_env=name),
    ]
    found = [taken(make) for make in makes]
    if any(found):
        assert name.replace("_", "a").isalnum()


@given(HOSTILE, HOSTILE, HOSTILE)
def test_names_of_postgresql_are_any_text_that_it_can_have_and_are_kept_as_they_are(
    table: str, schema: str, column: str
) -> None:
    found: list[Postgres] = []

    def make() -> None:
        found.append(Postgres(table, schema=schema, key=(column,), mode="upsert"))

    if taken(make):
        assert all(0 < len(name.encode()) < 64 and "\0" not in name for name in (table, schema, column))
        assert from_json(Postgres, to_json(found[0])) == found[0]


@given(HOSTILE)
@example("a/../../b")
def test_no_path_that_is_stored_leads_out_of_its_directory(path: str) -> None:
    try:
        checked_relative(path)
    except DamageError:
        return
    parts = PurePosixPath(path).parts
    assert parts
    assert ".." not in parts
    assert not PurePosixPath(path).is_absolute()


@given(HOSTILE, HOSTILE)
def test_what_is_made_of_a_name_that_is_taken_is_a_name(sink: str, savepoint: str) -> None:
    if not (
        taken(lambda: checked_name(sink, "sink")) and taken(lambda: checked_name(savepoint, "savepoint"))
    ):
        return
    owner = Owner(ROOT, "job", sink, RunId(1))
    mark = Mark(AttemptId(1), CheckpointId(1), Version(1))
    made = [name_of("spark_abs_marker", owner), property_of(owner)]
    made.append(tag_of(Epoch(owner, mark, mark, savepoint=savepoint)))
    assert all(set(name) <= SAFE and len(name) < 250 for name in made)


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "x" * 64, "é" * 32])
def test_what_postgresql_cannot_name_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a table: 1 to 63 bytes of UTF-8"):
        Postgres(name)
    with pytest.raises(UsageError, match="is not the name of a schema: 1 to 63 bytes of UTF-8"):
        Postgres("orders", schema=name)
