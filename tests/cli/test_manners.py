"""Help with examples, completion in shells, and no colour where none is wanted."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner

from spark_abs.cli.examples import EXAMPLES
from spark_abs.cli.main import main
from spark_abs.cli.output import Output

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
    assert [item.value for item in completion.get_completions([], "rest")] == ["restore"]
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
