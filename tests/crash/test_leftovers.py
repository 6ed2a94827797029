"""What a kill leaves in places that are not ours."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

from spark_abs.cli.main import main
from spark_abs.diagnosis.diagnoses import LIMITS, Diagnosis, diagnoses
from spark_abs.diagnosis.gather import gather
from spark_abs.snapshots.layout import state_file
from spark_abs.store.clock import now_ms
from tests.crash.expected import write_file
from tests.crash.facts import check_complete, native_of
from tests.crash.jobs import Small
from tests.crash.process import DriverProcess
from tests.crash.small_job import STAGES

pytestmark = pytest.mark.timeout(900)


def test_spark_killed_while_it_plans_the_first_batch_begins_again(
    first: DriverProcess, tmp_path: Path
) -> None:
    """Half of a plan is under a temporary name; Spark refuses a first batch where it finds any file."""
    job = Small(tmp_path)
    for stage in STAGES:
        offsets = tmp_path / "root" / "native" / "1" / stage / "offsets"
        offsets.mkdir(parents=True)
        (offsets / ".0.585ca8a4-f99e-4fac-8e18-c61e3b11bf16.tmp").write_text("v1\n")
    write_file(tmp_path, 0)
    job.files = 1
    job.finish(first)
    check_complete(tmp_path, job.files)


def test_whatever_a_kill_leaves_of_a_batch_is_in_nobodys_way(first: DriverProcess, tmp_path: Path) -> None:
    """Each file was on its way: not begun, half written, whole, renamed beside the checksum of another one.

    Two runs come after it: one repeats the batch, the other loads what that has written.
    """
    job = Small(tmp_path)
    for number in range(3):
        write_file(tmp_path, number)
        job.files += 1
        job.finish(first)
        if number == 0:
            leave_half_a_batch(tmp_path)
    check_complete(tmp_path, job.files)
    verified = CliRunner().invoke(main, ["verify", job.root.uri])
    assert verified.exit_code == 0, verified.output


def test_state_that_was_copied_and_never_committed_is_named_until_it_is_deleted(tmp_path: Path) -> None:
    job = Small(tmp_path / "job")
    job.feed()

    def named() -> dict[str, Diagnosis]:
        """Say what is wrong now, for a file of any size and any age."""
        facts = gather(job.root, now_ms(), 30_000)
        return {one.kind: one for one in diagnoses(facts, replace(LIMITS, orphaned_ms=0, orphaned_size=0))}

    with DriverProcess(tmp_path / "killed") as doomed:
        doomed.wait_ready()
        doomed.start({"base": str(job.base), "points": ["capture.pack.commit.before"]}, then="kill")
        doomed.wait_for_end("the kill", job.feed)
    state = Path(job.root.uri, "state")
    packs = set(state.glob("*.parquet")) - {Path(uri) for uri in DeltaTable(str(state)).file_uris()}
    assert packs
    found = named()
    assert found.keys() == {"not-running", "orphaned-files"}
    said = re.match(
        r"(\d+) files? in state/, ([\d.]+) kB together, the oldest written .+ ago, are in no checkpoint: a "
        r"run was killed",
        found["orphaned-files"].said,
    )
    assert said is not None, found
    assert int(said[1]) == len(packs)
    assert float(said[2]) == pytest.approx(sum(pack.stat().st_size for pack in packs) / 1024, abs=0.1)
    assert found["orphaned-files"].then.endswith("deletes them: start the job")
    with DriverProcess(tmp_path / "next") as driver:
        driver.wait_ready()
        job.finish(driver)
    assert named() == {}
    assert [pack for pack in packs if pack.exists()] == []


def leave_half_a_batch(base: Path) -> None:
    """Let a batch of every stage have been killed between any two steps of writing its files."""
    for native in (native_of(base, stage) for stage in STAGES):
        for log in ("offsets", "commits"):
            newest = max((p for p in (native / log).iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
            spoil_checksum(newest)
            data, following = newest.read_bytes(), int(newest.name) + 1
            for size in (0, len(data) // 2, len(data)):
                (newest.parent / f".{following}.{size}.tmp").write_bytes(data[:size])
        for directory in {p.parent for p in native.glob("state/**/*") if state_file(p.name)}:
            files = [f for p in directory.iterdir() if (f := state_file(p.name)) is not None]
            last = max(files, key=lambda file: file.version)
            following_state = directory / last.name.replace(str(last.version), str(last.version + 1), 1)
            following_state.write_bytes(b"of a batch that was killed")
            spoil_checksum(following_state)
            (directory / f".{following_state.name}.TID7.tmp").write_bytes(b"of")


def spoil_checksum(path: Path) -> None:
    (path.parent / f".{path.name}.crc").write_bytes(b"crc\0" + struct.pack(">iI", 512, 0))
