"""Plain queries under load, killed, rewound to any moment, killed while they are, and run to their end."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from spark_abs.cuts.cut import NoAlignedCut
from spark_abs.errors import Refused
from spark_abs.rewind.apply import finish
from spark_abs.store.storage import DEFAULTS
from tests.plain_queries import SHAPES, World


class Killed(BaseException):
    """The rewind is killed."""


def killed_at(number: int) -> Callable[[str], None]:
    """Return a failpoint that kills at the n-th point."""
    left = iter(range(number, -1, -1))

    def failpoint(point: str) -> None:
        if next(left) == 0:
            raise Killed(point)

    return failpoint


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 10))])
def test_every_row_is_there_once_after_rewinds_to_any_batch(tmp_path: Path, shape: str, seed: int) -> None:
    world = World(tmp_path, shape, seed)
    for _ in range(3):
        world.run(25)
        try:
            world.rewind(world.any_batch())
        except NoAlignedCut:
            continue
    world.is_whole(seed)


@pytest.mark.parametrize("shape", ["fan-in", pytest.param("chain", marks=pytest.mark.long)])
def test_a_rewind_that_is_killed_at_any_point_is_finished(tmp_path: Path, shape: str) -> None:
    first = World(tmp_path / "first", shape, seed=7, files=8)
    first.run(20)
    at = first.any_batch()
    reached = 0
    for number in itertools.count():
        base = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", base)
        world = World.__new__(World)
        world.__dict__ |= {**first.__dict__, "base": base, "chance": random.Random(number)}
        try:
            world.rewind(at, killed_at(number))
        except Killed:
            reached += 1
        else:
            break
        fenced = [
            q for q in world.queries() if (q.checkpoint / "metadata").read_text().startswith("A rewind")
        ]
        if fenced:
            with pytest.raises(Refused, match="begun and is not finished"):
                world.prepare()
            place = DEFAULTS.place(str(fenced[0].checkpoint))
            with suppress(Killed):
                finish([place], at=killed_at(number % 5))
        world.finish()
        world.is_whole(number)
    assert reached > 10
