"""A job whose root, channels, state and sinks are in an object store: killed, restarted, rolled back."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

from spark_abs.cli.main import main
from spark_abs.manifest import Manifest
from spark_abs.manifests.manifest_table import Checkpoints
from spark_abs.store.root import Root
from spark_abs.store.storage import Place
from tests.crash.expected import Event, Pair, Total, events_of, pairs_of, totals_of, write_file
from tests.stores.server import Server

pytestmark = pytest.mark.timeout(3600)

HERE = Path(__file__).parents[2]
PATIENCE_S = 900.0
FILES = 6


class Driver:
    """A process that runs jobs; killing its group takes the JVM along."""

    def __init__(self, scratch: Path, server: Server) -> None:
        scratch.mkdir()
        self.log = scratch / "driver.log"
        self._pipe, theirs = os.pipe()
        conf = json.dumps(server.conf)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.stores.driver", server.top, str(theirs), str(scratch), conf],
                cwd=HERE,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                start_new_session=True,
                env={**os.environ, **server.environment, "PYSPARK_PYTHON": sys.executable},
            )
        os.close(theirs)

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._pipe)

    def start(self, job: Small, interval: str = "1s", **start: object) -> None:
        given = {
            "out": job.out.uri,
            "input": str(job.base / "input"),
            "interval": interval,
            "native_root": job.native_root,
            "start": start,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given).encode() + b"\n")
        self._process.stdin.flush()

    def ended(self, within_s: float) -> str | None:
        """Return how the job ended, empty for well; None while it runs."""
        if not select.select([self._pipe], [], [], within_s)[0]:
            return None
        data = os.read(self._pipe, 65536)
        assert data, self._tail()
        error: str = json.loads(data)["error"]
        return error

    def finish(self, job: Small, restart: str = "native") -> None:
        """Run a job to the end of its input."""
        self.start(job, available_now=True, restart=restart)
        ended = self.ended(PATIENCE_S)
        assert ended == "", f"{ended}\n{self._tail()}"

    def run_until(self, reached: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            ended = self.ended(0.2)
            assert ended is None, f"before {what}: {ended}\n{self._tail()}"
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}\n{self._tail()}"

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


@dataclass(frozen=True)
class Small:
    """One job: its input here, what it writes at `out`."""

    base: Path
    out: Place
    native_root: str | None = None

    @property
    def root(self) -> Root:
        return Root(f"{self.out}/root", self.out.storage)

    def feed(self, first: int, last: int) -> None:
        for file in range(first, last):
            write_file(self.base, file)

    def completed(self) -> tuple[Manifest, ...]:
        if not self.root.place("checkpoints").exists():
            return ()
        return Checkpoints.open(self.root, "small").load_all()

    def table(self, sink: str, version: int | None = None) -> list[dict[str, object]]:
        place = self.out.below(sink)
        if not place.below("_delta_log/00000000000000000000.json").exists():
            return []
        table = DeltaTable(place.uri, version=version, storage_options=place.options)
        rows: list[dict[str, object]] = table.to_pyarrow_table().to_pylist()
        return rows

    def rows(self, manifest: Manifest | None = None) -> dict[str, Counter[tuple[object, ...]]]:
        """Return the rows of all sinks, now or at a checkpoint."""
        at = {o.output: o.version for s in manifest.stages for o in s.outputs} if manifest else {}
        return {
            sink: Counter(tuple(row.values()) for row in self.table(sink, at.get(sink)))
            for sink in ("arrivals", "pairs", "totals")
        }

    def check_complete(self, files: int) -> None:
        """Compare the sinks with what the files must give; `totals` is updated: its last rows count."""
        events = [event for file in range(files) for event in events_of(file)]
        assert Counter(Event(**row) for row in self.table("arrivals")) == Counter(events)  # type: ignore[arg-type]
        pairs = pairs_of(events)
        assert Counter(Pair(**row) for row in self.table("pairs")) == pairs  # type: ignore[arg-type]
        last: dict[object, Total] = {}
        for total in sorted(Total(**row) for row in self.table("totals")):  # type: ignore[arg-type]
            last[total.key] = total
        assert Counter(last.values()) == totals_of(pairs.elements())


@pytest.fixture(scope="module")
def driver(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A driver that nobody kills before the end."""
    with Driver(tmp_path_factory.mktemp("steady") / "driver", server) as running:
        yield running


def spark_abs_command(server: Server, *words: str) -> str:
    done = CliRunner().invoke(main, words, env=server.environment)
    assert done.exit_code == 0, done.output
    return done.output


def assert_nothing_tells_the_secret(server: Server, job: Small, *logs: Path) -> None:
    """Look at every object below the job, and at what its processes have said."""
    from pyarrow import fs

    texts = [log.read_bytes() for log in logs]
    for info in job.out.fs.get_file_info(fs.FileSelector(job.out.path, recursive=True)):
        if info.type is fs.FileType.File:
            with job.out.fs.open_input_stream(info.path) as stream:
                texts.append(stream.read())
    assert len(texts) > 20
    assert not [text for text in texts if server.secret.encode() in text]


def test_everything_in_the_store_killed_rolled_back_and_equal_to_the_local_run(
    server: Server, driver: Driver, tmp_path: Path
) -> None:
    job = Small(tmp_path, server.storage.place(f"{server.top}/whole"))
    job.feed(0, FILES - 2)
    with Driver(tmp_path / "first", server) as first:
        first.start(job)
        first.run_until(lambda: len(job.completed()) >= 3 and job.table("totals"), "three checkpoints")
    job.feed(FILES - 2, FILES)
    driver.finish(job)
    job.check_complete(FILES)

    early = next(m for m in job.completed() if job.rows(m) != job.rows())
    spark_abs_command(server, "verify", job.root.uri)
    spark_abs_command(server, "restore", job.root.uri, "--to", str(early.id), "--yes")
    assert job.rows() == job.rows(early)
    driver.finish(job)
    job.check_complete(FILES)

    local = Small(tmp_path, Place(str(tmp_path / "local")))
    driver.finish(local)
    local.check_complete(FILES)
    for sink in ("arrivals", "pairs"):
        assert job.rows()[sink] == local.rows()[sink]
    assert_nothing_tells_the_secret(server, job, first.log, driver.log)


def test_native_checkpoints_on_a_local_disk_cost_the_store_nothing_and_may_be_lost(
    server: Server, driver: Driver, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    job = Small(tmp_path, server.storage.place(f"{server.top}/fast"), str(disk))
    prefix = job.root.path("")[:-1].partition("/")[2]
    job.feed(0, 2)
    with Driver(tmp_path / "first", server) as first:
        first.start(job, interval="1h")
        first.run_until(lambda: len(job.table("pairs")) == 2, "the first files")
        mark = server.mark()
        job.feed(2, 4)
        first.run_until(lambda: len(job.table("pairs")) == 6, "the next files")
        counted = server.requests(mark, prefix)
        spark_abs_command(server, "savepoint", job.root.uri, "one")
        job.feed(4, FILES)
        first.run_until(lambda: len(job.table("arrivals")) > 16, "rows after the savepoint")
    (natives,) = disk.iterdir()
    assert (natives / "1" / "tail" / "offsets").is_dir()
    assert {name.split()[1] for name in counted} <= {"channels", "control"}, counted
    assert counted["PUT channels"] > 0

    shutil.rmtree(disk)
    driver.start(job)
    assert "restart='checkpoint'" in (driver.ended(PATIENCE_S) or "")
    driver.finish(job, restart="checkpoint")
    job.check_complete(FILES)
    assert [p.name for p in natives.iterdir()] == ["2"]
    assert not job.root.place("native").exists()
    assert_nothing_tells_the_secret(server, job, first.log, driver.log)
