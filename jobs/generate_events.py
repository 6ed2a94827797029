"""Write clicks and orders as a sequence of files; equal seeds give equal files.

Event time is cut into slices, one file per slice and kind. A late event arrives up to `--late` seconds after
its time and so is in a later file. Some events belong to one hot user. Every file is written under a hidden
name and renamed, so a reader sees the whole file or nothing. Existing files are not changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import click
import pyarrow as pa
import pyarrow.parquet as pq

START = datetime(2026, 1, 1, tzinfo=UTC)
KINDS = ("clicks", "orders")
CAMPAIGNS = tuple(f"campaign-{n}" for n in range(8))
HOT_USER = "user-0"
STRANGER_SHARE = 0.1
"""Orders of users who never click."""
WRONG_FACTOR = 100
"""A wrong order has its amount in the wrong unit."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The parameters of the events; all times are event time, in seconds."""

    seed: int = 7
    slice_seconds: int = 5
    clicks_per_slice: int = 100
    orders_per_slice: int = 20
    users: int = 1000
    hot_share: float = 0.03
    late_share: float = 0.1
    late_seconds: int = 8

    def file(self, kind: str, number: int, wrong: bool = False) -> list[dict[str, object]]:
        """Return the events that arrive in slice `number`, in order of arrival."""
        behind = -(-self.late_seconds // self.slice_seconds)
        arriving: list[tuple[float, dict[str, object]]] = []
        for born in range(max(0, number - behind), number + 1):
            arriving += [
                (arrival, event)
                for arrival, event in self._slice(kind, born, wrong)
                if int(arrival // self.slice_seconds) == number
            ]
        return [event for _, event in sorted(arriving, key=lambda pair: pair[0])]

    def _slice(self, kind: str, number: int, wrong: bool) -> Iterator[tuple[float, dict[str, object]]]:
        """Yield (arrival, event) for the events whose time lies in a slice."""
        random = Random(f"{self.seed}/{kind}/{number}")
        count = self.clicks_per_slice if kind == "clicks" else self.orders_per_slice
        for index in range(count):
            at = number * self.slice_seconds + random.randrange(self.slice_seconds * 1000) / 1000
            late = random.random() < self.late_share
            arrival = at + (random.random() * self.late_seconds if late else 0.0)
            user = HOT_USER if random.random() < self.hot_share else f"user-{random.randrange(1, self.users)}"
            when = START + timedelta(seconds=at)
            if kind == "clicks":
                yield (
                    arrival,
                    {
                        "click_id": f"c{number:06d}-{index:04d}",
                        "user": user,
                        "campaign": random.choice(CAMPAIGNS),
                        "click_time": when,
                    },
                )
            else:
                cents = random.randrange(100, 50_000)
                yield (
                    arrival,
                    {
                        "order_id": f"o{number:06d}-{index:04d}",
                        "user": f"stranger-{user}" if random.random() < STRANGER_SHARE else user,
                        "amount_cents": cents * WRONG_FACTOR if wrong else cents,
                        "order_time": when,
                    },
                )


USUAL = Traffic()


def write_file(directory: Path, kind: str, number: int, form: str, events: list[dict[str, object]]) -> bool:
    """Write one file into `directory/kind`, whole or not at all; False if it was there already."""
    target = directory / kind / f"{kind}-{number:06d}.{form}"
    if target.exists():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = target.with_name(f".{target.name}.{os.getpid()}")
    table = pa.Table.from_pylist(events)
    if form == "parquet":
        pq.write_table(table, hidden)
    else:
        hidden.write_text(table.to_pandas().to_json(orient="records", lines=True, date_format="iso"))
    hidden.rename(target)
    return True


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--first", default=0, show_default=True, help="Number of the first file.")
@click.option("--files", default=60, show_default=True, help="How many files of each kind, then stop.")
@click.option("--per-second", default=0.0, help="Files of each kind per second; 0: as fast as it goes.")
@click.option("--format", "form", type=click.Choice(["json", "parquet"]), default="json", show_default=True)
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, default=KINDS, show_default=True)
@click.option("--wrong", is_flag=True, help=f"Write orders with amounts {WRONG_FACTOR} times too large.")
@click.option("--seed", default=USUAL.seed, show_default=True)
@click.option("--late", default=USUAL.late_seconds, show_default=True, help="Bound of lateness, seconds.")
@click.option("--hot", default=USUAL.hot_share, show_default=True, help="Share of the hot user.")
def main(
    directory: Path,
    first: int,
    files: int,
    per_second: float,
    form: str,
    kinds: tuple[str, ...],
    wrong: bool,
    seed: int,
    late: int,
    hot: float,
) -> None:
    """Write clicks and orders below DIRECTORY."""
    traffic = Traffic(seed=seed, late_seconds=late, hot_share=hot)
    began = time.monotonic()
    for index in range(files):
        if per_second:
            time.sleep(max(0.0, began + index / per_second - time.monotonic()))
        for kind in kinds:
            write_file(directory, kind, first + index, form, traffic.file(kind, first + index, wrong))


if __name__ == "__main__":
    main()
