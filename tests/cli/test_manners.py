"""Help with examples, completion in shells, no colour where none is wanted, and times of one's own zone."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner

from spark_abs.bisection.moments import Found
from spark_abs.cli.examples import EXAMPLES
from spark_abs.cli.main import main
from spark_abs.cli.observe import Shown
from spark_abs.cli.output import TIMES, Output
from spark_abs.cli.root_command import to_moment
from spark_abs.observe.listing import CheckpointRow
from spark_abs.observe.status import JobStatus
from spark_abs.protocol.control import Command
from spark_abs.quantities import time_ms, time_said
from spark_abs.store.history import HistoryRow
from tests.cli.conftest import Cli
from tests.root_support import SmallJob

CALLS = [call for calls in EXAMPLES.values() for call in calls]


@pytest.mark.parametrize("call", CALLS)
def test_an_example_is_a_call_that_can_be_made(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").touch()
    monkeypatch.chdir(tmp_path)
    name, *arguments = shlex.split(call)
    main.commands[name].make_context(name, arguments, parent=click.Context(main))


def test_examples_are_below_the_help_of_their_command() -> None:
    for name, calls in EXAMPLES.items():
        shown = CliRunner().invoke(main, [name, "--help"]).output
        assert all(f"spark-abs {call}" in shown for call in calls), shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell: str) -> None:
    found = get_completion_class(shell)
    assert found is not None
    completion = found(main, {}, "spark-abs", "_SPARK_ABS_COMPLETE")
    assert [item.value for item in completion.get_completions([], "rest")] == ["restart", "restore"]
    assert "--dry-run" in [item.value for item in completion.get_completions(["restore", "/root"], "--d")]
    assert "_SPARK_ABS_COMPLETE" in completion.source()
    assert f"{shell}_source" in CliRunner().invoke(main, ["--help"]).output


def test_no_color_means_no_color(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    Output().line("a line", "red")
    assert "\x1b[31m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    Output().line("a line", "red")
    assert "\x1b[31m" not in capsys.readouterr().out


WINTER, SUMMER = 1_769_890_503_250, 1_785_528_903_004
"""Milliseconds of 2026-01-31 20:15:03.25 and 2026-07-31 20:15:03.004 in UTC."""


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("berlin")
def test_a_time_has_the_offset_of_its_day_and_is_read_as_it_is_printed() -> None:
    assert time_said(WINTER) == "2026-01-31 21:15:03.250+01:00"
    assert time_said(SUMMER, "T") == "2026-07-31T22:15:03.004+02:00"
    assert time_said(10**18) == "1000000000000000000 ms"
    context, option = click.Context(main), click.Option(["--before"])
    for given in ("2026-01-31 21:15:03.250+01:00", "2026-01-31T21:15:03.25", "2026-01-31T20:15:03.250Z"):
        read = to_moment(context, option, given)
        assert read is not None
        assert time_ms(read) == WINTER
    assert time_ms(datetime(1969, 12, 31, 23, tzinfo=timezone(timedelta(hours=-1)))) == 0


@pytest.mark.usefixtures("berlin")
def test_commands_show_times_of_the_zone_and_json_has_them_in_both_forms(job: SmallJob, cli: Cli) -> None:
    job.checkpoint(1)
    (row,) = cli.json("list")
    assert row["completed_at"] == time_said(row["completed_ms"], "T")
    assert row["completed_at"].startswith("1970-01-01T01:00:10.")
    assert "1970-01-01 01:00:10." in cli("list").stdout
    assert {event["at"][-6:] for event in cli.json("history")} == {"+01:00"}
    assert "age_at" not in row


LENGTHS = {
    *("age_ms", "alignment_ms", "async_ms", "backpressured_ms", "duration_ms", "end_to_end_ms", "heard_ms"),
    *("last_ms", "last_completed_age_ms", "oldest_age_ms", "slowest_ms", "start_delay_ms", "sync_ms"),
    *("last_waited_ms", "told_ms", "ttl_ms", "unchanged_ms", "waited_ms"),
}


def of_time(kind: Any) -> set[str]:
    """Return the fields in milliseconds of a class and of those in it."""
    if not is_dataclass(kind):
        return set().union(*map(of_time, get_args(kind)))
    hints = get_type_hints(kind)
    own = {field.name for field in fields(kind) if field.name.endswith("_ms")}
    return own.union(*(of_time(hints[field.name]) for field in fields(kind)))


def test_each_field_of_a_result_in_milliseconds_is_a_time_or_a_length() -> None:
    found = set().union(*map(of_time, (JobStatus, CheckpointRow, Shown, HistoryRow, Found, Command)))
    assert found - TIMES == LENGTHS
