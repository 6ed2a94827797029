"""A pipeline in plain PySpark that keeps six batches, and the way back to what a watcher has kept."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.crash.test_rewind_on_spark import CONF, Input, environment, expected, finished, program

RETAINED = {
    "spark.sql.streaming.minBatchesToRetain": "6",
    "spark.sql.streaming.stateStore.maintenanceInterval": "1s",
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "3",
}


@contextmanager
def running(base: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as said:
        process = subprocess.Popen(
            program("medallion", "run", base),
            stdout=said,
            stderr=said,
            env={**environment(), "PLAIN_CONF": json.dumps({**CONF, **RETAINED})},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def command(verb: str, base: Path, *arguments: str) -> str:
    given = [sys.executable, "-m", "spark_abs", *verb.split(), *arguments]
    given += ["--checkpoints", f"{base}/c/*", "--tables", f"{base}/t/*"]
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.returncode in (0, 1), (done.stdout, done.stderr)
    return done.stdout


def asked_of(root: str, verb: str) -> str:
    given = [sys.executable, "-m", "spark_abs", verb, root, "--output", "json"]
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.returncode in (0, 1), (done.stdout, done.stderr)
    return done.stdout


@pytest.mark.long
def test_every_table_is_whole_after_a_rewind_to_a_cut_that_spark_has_no_more(tmp_path: Path) -> None:
    base, root, fed = tmp_path / "live", str(tmp_path / "kept"), Input(tmp_path / "in1", 0, 1)
    kept = list[dict[str, Any]]()
    with running(base, tmp_path / "log") as process:
        deadline = time.monotonic() + 1200
        taken = 0
        for _ in range(3):
            fed.write()
        while not kept:
            assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-4000:]
            if not (base / "c" / "big" / "commits").exists():
                time.sleep(0.5)
                continue
            said = command(f"watch {root} --once --output json", base)
            taken += bool(said) and json.loads(said)["kept"] is not None
            fed.write()
            if taken > 1:
                listed = command(f"rewind --root {root} --list --output json", base)
                kept = [row for row in json.loads(listed or "[]") if row["kept"]]
        told = json.loads(asked_of(root, "status"))["next_cut"]
        assert not any(said.startswith("cannot be seen") for said in told), told
        wrong = {one["kind"] for one in json.loads(asked_of(root, "doctor"))}
        assert wrong <= {"watcher-away", "deleted-before-kept"}, "Spark keeps six batches"
    fed.write()
    copy, oldest = tmp_path / "copy", kept[-1]
    shutil.copytree(base, copy)
    asked = [f"--at={query}={batch}" for query, batch in oldest["batches"].items()]
    said = command(f"rewind --root {root} --yes --wait 0s --output json", copy, *asked)
    assert json.loads(said)["plan"]["kept"] is not None
    assert finished("medallion", [copy]) == [expected("medallion", fed.rows)]
