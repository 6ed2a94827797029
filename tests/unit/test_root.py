"""A root is found, made and said."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from spark_abs.errors import RootNotFound, UsageError
from spark_abs.plan.tables import refuse_around_root
from spark_abs.store.control import Control
from spark_abs.store.root import Root
from spark_abs.store.storage import DEFAULTS
from spark_abs.store.table import Table


def test_a_new_root_is_said_and_made_only_where_it_may_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A root on a disk that is not mounted looks as one that never was."""
    root = Root(str(tmp_path / "disk" / "jobs" / "root"))
    disk = re.escape(f"{tmp_path}/disk is missing")
    with pytest.raises(RootNotFound, match=disk):
        Control.open(root)
    with pytest.raises(RootNotFound, match=disk):
        Control.create(root, "job", 5, required=True)
    assert not (tmp_path / "disk").exists()
    with caplog.at_level(logging.INFO, "spark_abs"):
        Control.create(root, "job", 5)
        Control.create(root, "job", 6)
        Control.create(root, "job", 6, required=True)
    (said,) = caplog.messages
    assert re.search(f"job job begins with a new root, .*: {disk}; .*require_root=True", said)


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("a file")
    with pytest.raises(
        RootNotFound, match=rf"{tmp_path}/disk/root cannot be created: .*disk/root is missing"
    ):
        Control.create(Root(str(tmp_path / "disk" / "root")), "job", 5)


def test_a_root_whose_store_does_not_answer_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root(str(tmp_path / "root"))
    Control.create(root, "job", 0)

    def away(_: object) -> Table:
        raise OSError("connection timed out")

    monkeypatch.setattr(Table, "open", away)
    with pytest.raises(OSError, match="connection timed out"):
        Control.create(root, "job", 0)


@pytest.mark.parametrize("table", ["root", "root/channels/b.out", "root/state", "root/native", "", "link"])
def test_a_table_neither_holds_a_root_nor_is_among_its_files(tmp_path: Path, table: str) -> None:
    root = Root(str(tmp_path / "jobs" / "root"))
    (tmp_path / "jobs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "jobs")
    given = tmp_path / table if table == "link" else tmp_path / "jobs" / table
    with pytest.raises(UsageError, match=f"(the root .*, whose VACUUM|table {given} is among the files)"):
        refuse_around_root([str(given)], root)
    refuse_around_root(
        [str(tmp_path / "jobs" / "out"), str(tmp_path / "jobs/root-2"), f"{root.uri}/out"], root
    )


def test_in_a_store_a_place_holds_those_below_it() -> None:
    place = DEFAULTS.place("s3://bucket/a")
    assert place.holds(place)
    assert place.holds(place.below("b"))
    assert not place.holds(DEFAULTS.place("s3://bucket/ab"))
    assert not place.below("b").holds(place)
