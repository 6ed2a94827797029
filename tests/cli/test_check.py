"""The script that `spark-abs check` runs: as Python runs it, and what is said if it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spark_abs.cli.main import main


def check(script: Path, *arguments: str, output: str = "text", exits: int = 2) -> Result:
    command = ["check", str(script), "--root", str(script.parent / "root"), "--output", output]
    result = CliRunner().invoke(main, [*command, "--", *arguments])
    assert result.exit_code == exits, (result.output, result.exception)
    return result


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "job.py"


def test_a_script_finds_what_lies_beside_it(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also through a link, from another directory, and only while it runs."""
    (tmp_path / "beside_the_script.py").write_text("def said(): return 'read from beside'")
    script.write_text("import sys, beside_the_script\nsys.exit(f'{beside_the_script.said()} {sys.argv[1:]}')")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "linked.py").symlink_to(script)
    monkeypatch.chdir(elsewhere)
    before = sys.argv, list(sys.path)
    for path in (script, Path("linked.py")):
        said = check(path, "--a", "b").stderr
        assert "no job was started" in said
        assert "read from beside ['--a', 'b']" in said
    assert (sys.argv, sys.path) == before


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\nimport not_there_at_all", "line 2: ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("def f():\n    1 / 0\n\nf()", "line 2: ZeroDivisionError: division by zero"),
        ("x = 1\nint('one')\n", "line 2: ValueError: invalid literal for int() with base 10: 'one'"),
        ("raise ValueError('\\nseveral\\nlines')", "line 1: ValueError: several"),
        ("assert False", "line 1: AssertionError"),
        ("open('/nowhere/at/all')", "line 1: FileNotFoundError: [Errno 2] No such file or directory"),
        ("x = 1\nif x\n", "line 2: SyntaxError: expected ':'"),
    ],
)
def test_an_error_of_the_script_is_a_wrong_call_with_its_line(script: Path, text: str, line: str) -> None:
    """Its own traceback stands before it, without what runs it; for a program JSON is the last line."""
    script.write_text(text)
    said = check(script).stderr
    assert said.splitlines()[-1].startswith(f"spark-abs: {script}, {line}")
    assert f'File "{script}", line' in said
    assert "runpy" not in said
    said = check(script, output="json").stderr
    assert f'File "{script}", line' in said
    error = json.loads(said.splitlines()[-1])
    assert (error["error"], error["exit_code"]) == ("UsageError", 2)
    assert error["message"].startswith(f"{script}, {line}")


def test_an_error_in_what_a_script_imports_names_the_line_that_has_led_to_it(
    script: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken_beside.py").write_text("\n\ndef run():\n    raise KeyError('gone')\n")
    script.write_text("import broken_beside\n\nbroken_beside.run()")
    said = check(script).stderr
    assert said.splitlines()[-1] == f"spark-abs: {script}, line 3: KeyError: 'gone'"
    assert f'File "{tmp_path}/broken_beside.py", line 4, in run' in said


@pytest.mark.parametrize("code", ["0", "1", "3"])
def test_a_script_that_ends_by_itself_has_not_been_refused(script: Path, code: str) -> None:
    """Its exit code would be taken for the answer."""
    script.write_text(f"import sys\nsys.exit({code})")
    assert f"{script} ended with sys.exit({code}) and no job was started" in check(script).stderr


@pytest.mark.parametrize(
    "call",
    [
        "checkpoint_location(ROOT, 'query')",
        "foreach_batch(lambda rows, batch: None, root=ROOT, stage='query')",
    ],
)
def test_a_wrapped_query_is_refused_before_anything_of_it_is_made(
    script: Path, tmp_path: Path, call: str
) -> None:
    """Nothing would hold its start back."""
    wrapped = tmp_path / "wrapped"
    script.write_text(f"import spark_abs\nROOT = {str(wrapped)!r}\nspark_abs.{call}\nprint('went on')")
    result = check(script)
    assert "`check` cannot check a wrapped query" in result.stderr
    assert "went on" not in result.output
    assert not wrapped.exists()


def test_a_graph_that_cannot_run_is_refused_and_the_answer_stands_alone(script: Path) -> None:
    """Its script is in order. What that prints is not part of the answer."""
    script.write_text(
        "from spark_abs.compatibility.inspection import Checked, instead_of_start\n"
        "from spark_abs.errors import GraphError\n"
        "class Job:\n"
        "    def graph(self): raise GraphError('a stage reads itself')\n"
        "print('said by the script')\n"
        "raise Checked(instead_of_start.get()(Job(), False))\n"
    )
    result = check(script, output="json", exits=1)
    assert "said by the script" in result.stderr
    found = json.loads(result.stdout)
    assert (found["ok"], found["stages"], found["obstacles"]) == (False, [], ["a stage reads itself"])
    result = check(script, exits=1)
    assert "said by the script" not in result.stdout
    assert "refused: a stage reads itself" in result.stdout


def test_what_a_call_of_ours_refuses_keeps_its_own_words(script: Path) -> None:
    script.write_text("from spark_abs import UsageError\nraise UsageError('not so')")
    assert check(script).stderr == "spark-abs: not so\n"
