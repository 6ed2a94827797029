"""The example of the guide's quick start, as a script that a test starts: its other names are here.

    python -m tests.newcomer BASE [logging]     # with `logging`, it configures logging before the start

While BASE/hold is there, its alerts wait.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

PAGE = Path(__file__).parents[1] / "spark_abs/guide/quick-start.md"
CLICKS = "click_time timestamp, click_user string, campaign string"
ORDERS = "order_time timestamp, user string, amount_cents long"


def example(base: Path) -> str:
    """Return the code of the section "Your own job", on files below a directory."""
    found = re.search(r"## Your own job\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    code = found[1].replace('"/data/', f'"{base}/')
    assert code.count(str(base)) == 4
    # A second start: savepoints are never replaced.
    return code.replace('"before-release"', 'f"before-release-{run.id}"')


def write_input(base: Path, name_of_file: str = "a") -> None:
    rows: dict[str, list[dict[str, object]]] = {
        "clicks": [{"click_time": _at(n, 0), "click_user": f"u{n % 3}", "campaign": "c"} for n in range(10)],
        "orders": [{"order_time": _at(n, 30), "user": f"u{n % 3}", "amount_cents": n} for n in range(10)],
    }
    for name, lines in rows.items():
        (base / name).mkdir(parents=True, exist_ok=True)
        (base / name / f"{name_of_file}.json").write_text("\n".join(map(json.dumps, lines)))


def _at(minute: int, second: int) -> str:
    return f"2026-01-01T00:{minute:02d}:{second:02d}Z"


def join_within_a_minute(clicks: DataFrame, orders: DataFrame) -> DataFrame:
    near = "user = click_user AND click_time <= order_time AND click_time >= order_time - INTERVAL 1 MINUTE"
    clicks = clicks.withWatermark("click_time", "10 seconds")
    return orders.withWatermark("order_time", "10 seconds").join(clicks, F.expr(near)).drop("click_user")


def main(base: Path, mode: str) -> None:
    def send_alerts(batch: DataFrame, _: int) -> None:
        batch.collect()
        while (base / "hold").exists():
            (base / "held").touch()
            time.sleep(0.05)

    if mode == "logging":
        logging.basicConfig(level=logging.INFO, format="theirs %(message)s")
    names = {"CLICKS": CLICKS, "ORDERS": ORDERS, "join_within_a_minute": join_within_a_minute}
    exec(compile(example(base), str(PAGE), "exec"), {**names, "send_alerts": send_alerts})


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(sys.argv[2:] or [""]))
