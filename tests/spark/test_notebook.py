"""The tour is executed in a kernel of its own; what it shows and what it wrote is judged by plain Python."""

from __future__ import annotations

import base64
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import matplotlib.image
import nbformat
import pytest
from deltalake import DeltaTable
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.jvm import java_options

TOUR = Path(__file__).resolve().parents[2] / "notebooks" / "tour.ipynb"
MINUTE = timedelta(minutes=1)
AT_SAVEPOINT = range(6)
"""The minutes whose files had been read when the tour asked for its savepoint."""

FIRST_RELEASE = range(8)
"""Those that had been read when the first release was stopped."""

Event = dict[str, Any]
Row = tuple[object, ...]


@dataclass(frozen=True)
class Tour:
    """An executed notebook, and the directory that it worked in."""

    cells: Mapping[str, Any]
    base: Path

    def outputs(self, cell: str) -> list[Any]:
        return list(self.cells[cell].outputs)

    def text(self, cell: str) -> str:
        return "".join(o.text for o in self.outputs(cell) if o.get("name") == "stdout")

    def checkpoints(self) -> dict[str, Event]:
        """Return the manifests of the savepoints by name."""
        rows = DeltaTable(str(self.base / "root/checkpoints")).to_pyarrow_table().to_pylist()
        return {row["name"]: json.loads(row["body"]) for row in rows if row["name"]}

    def history(self, event: str) -> list[Event]:
        rows: list[Event] = DeltaTable(str(self.base / "root/history")).to_pyarrow_table().to_pylist()
        return [row for row in rows if row["event"] == event]

    def newest_manifest(self) -> Event:
        rows = DeltaTable(str(self.base / "root/checkpoints")).to_pyarrow_table().to_pylist()
        newest: Event = json.loads(max(rows, key=lambda row: row["id"])["body"])
        return newest

    def restored_at(self, table: str) -> list[int]:
        """Return the versions with which a restore brought a table back."""
        commits = sorted((self.base / table / "_delta_log").glob("*.json"))
        return [int(commit.stem) for commit in commits if '"RESTORE"' in commit.read_text()]

    def minutes(self) -> range:
        """Return the minutes that there are files of."""
        return range(len(list((self.base / "orders").glob("*.json"))))

    def lines(self, cell: str) -> list[str]:
        """Return the rows of a frame as it was shown."""
        (shown,) = [o.data["text/plain"] for o in self.outputs(cell) if "data" in o]
        return str(shown).splitlines()[1:]

    def rows(self, table: str, columns: Iterable[str], version: int | None = None) -> Counter[Row]:
        """Return a table's rows; times in UTC."""
        found = DeltaTable(str(self.base / table), version=version).to_pyarrow_table().to_pylist()
        return Counter(tuple(row[column] for column in columns) for row in found)

    def events(self, kind: str, minutes: Iterable[int]) -> Iterator[Event]:
        for minute in minutes:
            lines = (self.base / kind / f"{minute:03}.json").read_text().splitlines()
            yield from map(json.loads, lines)

    def sales(self, minutes: Iterable[int]) -> Counter[Row]:
        """Say what `sales` must hold once the files of these minutes were read."""
        orders = {order["id"]: order for order in self.events("orders", minutes)}
        return Counter(
            (paid["order_id"], orders[paid["order_id"]]["product"], when(paid["paid"]), paid["cents"])
            for paid in self.events("payments", minutes)
            if when(paid["paid"]) - when(orders[paid["order_id"]]["ordered"]) <= MINUTE
        )

    def revenue(self, minutes: Iterable[int], watermark_ms: int) -> Counter[Row]:
        """Say what `revenue` must hold by then: the windows that end at or before the watermark."""
        counts: Counter[tuple[datetime, object]] = Counter()
        cents: Counter[tuple[datetime, object]] = Counter()
        for _, product, paid, amount in self.sales(minutes):
            assert isinstance(paid, datetime)
            assert isinstance(amount, int)
            key = (paid.replace(second=0), product)
            counts[key] += 1
            cents[key] += amount
        final = datetime.fromtimestamp(watermark_ms / 1000, UTC)
        return Counter((*key, counts[key], cents[key]) for key in counts if key[0] + MINUTE <= final)


BARS = {"a checkpoint": (76, 120, 168), "a savepoint": (245, 133, 24), "a copy": (84, 162, 75)}
SALES = ("id", "product", "paid", "cents")
REVENUE = ("minute", "product", "sales", "cents")


def when(text: str) -> datetime:
    return datetime.fromisoformat(text)


def as_committed() -> Any:
    return nbformat.read(TOUR, as_version=4)  # type: ignore[no-untyped-call] # nbformat types only a part


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> Tour:
    """Execute the tour once, in a kernel of this interpreter that no installed kernel can stand in for."""
    scratch: Path = tmp_path_factory.mktemp("tour")
    kernel = AsyncKernelManager(
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        transport="ipc",
        connection_file=str(scratch / "kernel.json"),
    )
    surroundings = {
        "TMPDIR": str(scratch),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SUBMIT_OPTS": java_options(),
    }
    notebook = as_committed()
    client = NotebookClient(notebook, km=kernel, timeout=300, resources={"metadata": {"path": str(scratch)}})
    client.execute(env={**os.environ, **surroundings}, cleanup_kc=True)
    (base,) = scratch.glob("spark-abs-tour-*")
    return Tour({cell.id: cell for cell in notebook.cells}, base)


def test_every_cell_ran_and_none_failed(tour: Tour) -> None:
    code = [cell for cell in tour.cells.values() if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert {o.output_type for cell in code for o in cell.outputs} <= {
        "stream",
        "execute_result",
        "display_data",
    }


def test_the_run_is_shown_below_its_cell_as_it_came_to_be(tour: Tour) -> None:
    """It was shown before anything was finished, and followed while the cell was at work."""
    (shown,) = [o.data for o in tour.outputs("run") if o.output_type == "display_data"]
    assert shown["text/plain"].startswith("Run(1 of job 'shop', attempt 1, ")
    assert "checkpoints at " in shown["text/html"]
    assert "No checkpoint is complete." not in shown["text/html"]


def test_what_the_savepoint_holds_is_what_had_been_read(tour: Tour) -> None:
    manifest = tour.checkpoints()["before-release"]
    outputs = {
        o["output"]: o["version"] for s in manifest["stages"] for o in s["outputs"] if o["kind"] == "delta"
    }
    (watermark,) = [s["watermark_ms"] for s in manifest["stages"] if s["stage"] == "revenue"]
    assert tour.rows("sales", SALES, outputs["sales"]) == tour.sales(AT_SAVEPOINT)
    assert tour.rows("revenue", REVENUE, outputs["revenue"]) == tour.revenue(AT_SAVEPOINT, watermark)
    assert outputs.keys() == {"sales", "revenue"}


def test_the_restore_brought_both_tables_back_to_the_savepoint(tour: Tour) -> None:
    manifest = tour.checkpoints()["before-release"]
    (watermark,) = [s["watermark_ms"] for s in manifest["stages"] if s["stage"] == "revenue"]
    (sales,), (revenue,) = map(tour.restored_at, ("sales", "revenue"))
    assert tour.rows("sales", SALES, sales) == tour.sales(AT_SAVEPOINT)
    assert tour.rows("revenue", REVENUE, revenue) == tour.revenue(AT_SAVEPOINT, watermark)


def test_the_tour_ends_with_every_sale_once_and_right(tour: Tour) -> None:
    minutes = tour.minutes()
    assert len(minutes) > len(AT_SAVEPOINT)
    assert tour.rows("sales", SALES) == tour.sales(minutes)
    newest = tour.newest_manifest()
    (watermark,) = [s["watermark_ms"] for s in newest["stages"] if s["stage"] == "revenue"]
    assert tour.rows("revenue", REVENUE) == tour.revenue(minutes, watermark)


def test_what_it_says_of_wrong_and_missing_sales_is_true(tour: Tour) -> None:
    before, minutes = tour.sales(AT_SAVEPOINT).total(), tour.minutes()
    first, second = tour.sales(FIRST_RELEASE).total(), tour.sales(minutes).total()
    assert before < first < second
    assert tour.text("wrong").splitlines() == [
        f"first-release: 0 of {first} sales are wrong",
        f"second-release: {second - first} of {second} sales are wrong",
    ]
    assert tour.text("restored") == f"0 of {before} sales are wrong\n"
    assert tour.text("proof").splitlines() == [
        f"{second} sales, of which",
        "0 are missing",
        "0 are wrong or there twice",
    ]


def test_the_frames_show_what_the_root_holds(tour: Tour) -> None:
    completed = tour.history("completed")
    kinds = [row["kind"] for row in completed]
    assert (kinds.count("savepoint"), kinds.count("sync_savepoint")) == (1, 2)
    assert kinds.count("checkpoint") >= 1, "the periodic ones"
    (savepoint,) = [row for row in completed if row["name"] == "before-release"]
    shown = tour.lines("checkpoints")
    assert [line for line in shown if "before-release" in line and str(savepoint["duration_ms"]) in line]
    assert {line.split()[1] for line in tour.lines("stages")} == {"orders", "payments", "sales", "revenue"}
    assert {line.split()[1] for line in tour.lines("history")} == {"orders", "payments", "sales", "revenue"}
    (restored,) = tour.history("restored")
    assert tour.text("restore").startswith(f"back at checkpoint {savepoint['checkpoint']}, now in attempt 2")
    assert {row["attempt"] for row in completed if row["run"] < restored["run"]} == {1}
    assert {row["attempt"] for row in completed if row["run"] > restored["run"]} == {2}


def test_the_plot_shows_a_bar_for_each_checkpoint_and_the_parts_of_each_stage(tour: Tour) -> None:
    (image,) = [o.data["image/png"] for o in tour.outputs("plot") if "image/png" in o.get("data", {})]
    pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(image)))[:, :, :3]
    colours = Counter(map(tuple, (pixels.reshape(-1, 3) * 255).round().astype(int).tolist()))
    legend = 400
    for name, colour in BARS.items():
        assert colours[colour] > legend, f"no bar of {name}, only its place in the legend"


def test_it_is_committed_without_outputs() -> None:
    """Durations of another machine would mislead, and what is shown would grow old."""
    code = [cell for cell in as_committed().cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count is not None] == []
