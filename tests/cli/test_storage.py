"""Storage that does not answer, and roots that no store can hold: one line each, and the right exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from spark_abs.cli.main import main
from spark_abs.store.control import Control
from tests.cli.conftest import Cli
from tests.root_support import SmallJob


def test_storage_that_does_not_answer_is_said_in_one_line(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    log = Path(job.root.path("channels/a.main/_delta_log"), f"{1:020}.json")
    log.unlink()
    log.symlink_to(log)
    said = cli("verify", "1", exits=1).stderr.splitlines()[-1]
    assert said.startswith("spark-abs: storage cannot be read or written now, try again: ")
    said = cli("restore", "--to", "1", "--fallback", "--yes", exits=1).stderr.splitlines()[-1]
    assert said.startswith("spark-abs: nothing was changed, try again: storage failed while the restore was")
    error = json.loads(cli("verify", "1", "--output", "json", exits=1).stderr)
    assert (error["error"], error["exit_code"]) == ("StoreFailed", 1)


@pytest.mark.parametrize("command", [["status"], ["restore", "--to", "1"]], ids=lambda c: str(c[0]))
def test_an_object_store_that_does_not_answer_may_not_know_who_asks(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError("Kernel error -> Operation not supported")

    monkeypatch.setattr(Control, "open", refused)
    said = CliRunner().invoke(main, [command[0], "s3://bucket/root", *command[1:]]).stderr
    assert "try again, or check credentials, region and endpoint (spark.abs.storage.*, AWS_...): " in said
    assert said.count("Kernel error") == 1
    said = CliRunner().invoke(main, [command[0], "/a/root", *command[1:]]).stderr
    assert "try again: " in said


def test_who_closes_the_pipe_is_not_storage(cli: Cli, job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_abs.cli.output import Output

    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Output, "result", closed)
    assert "storage" not in CliRunner().invoke(main, ["list", job.root.uri]).output


@pytest.mark.parametrize("root", ["dta:x", "hdfs://name/x", "https://who:SeCrEt@host/x"])
@pytest.mark.parametrize(
    "command", [["list"], ["restore", "--to", "1"], ["check", __file__, "--root"]], ids=lambda c: str(c[0])
)
def test_a_root_that_no_store_can_hold_is_a_wrong_call(root: str, command: list[str]) -> None:
    """The schemes that there are, are said."""
    result = CliRunner().invoke(main, [*command, root])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"a root cannot be in {root.partition(':')[0]}: give a path" in result.stderr
    assert "file:///PATH, s3://BUCKET/PATH, abfss://" in result.stderr
    assert "SeCrEt" not in result.stderr
