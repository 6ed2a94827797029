"""What a type checker says about calls of the public names: right ones pass, wrong ones are named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from mypy import api

import spark_abs.errors

HERE = Path(__file__).resolve().parents[2]
ACCEPTED, REJECTED = "tests/unit/typed/accepted.py", "tests/unit/typed/rejected.py"


def test_right_calls_are_accepted_and_each_wrong_one_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    said, failed, _ = api.run(["--strict", "--no-error-summary", "--no-pretty", ACCEPTED, REJECTED])
    assert not failed, failed
    errors = re.findall(r"^(\S+?):(\d+): error: .*\[([a-z-]+)\]$", said, re.MULTILINE)
    wanted = [
        (REJECTED, str(number), code)
        for number, line in enumerate((HERE / REJECTED).read_text().splitlines(), 1)
        for code in re.findall(r"# E: ([a-z-]+)$", line)
    ]
    assert len(wanted) > 20
    assert errors == wanted, said


def test_every_public_name_is_in_a_right_call() -> None:
    """Of errors, those that somebody would catch are enough: they are all alike."""
    tree = ast.parse((HERE / ACCEPTED).read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "spark_abs"
    }
    errors = {name for name in spark_abs.__all__ if hasattr(spark_abs.errors, name)}
    assert set(spark_abs.__all__) - errors - used == set()
