"""Who hears what the package says: nobody configured logging, somebody did before, somebody did later."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

SAY = "logging.getLogger('spark_abs.run.run').info('said'); "


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("speak(); speak(); SAY", ["INFO spark_abs.run.run: said"]),
        ("logging.basicConfig(level='INFO', format='theirs %(message)s'); speak(); SAY", ["theirs said"]),
        (
            "speak(); logging.basicConfig(level='INFO', format='theirs %(message)s'); SAY SAY",
            ["theirs said"] * 2,
        ),
        ("speak(); logging.basicConfig(level='WARNING'); SAY SAY", []),
        (
            "speak(); logging.basicConfig(format='theirs %(message)s'); "
            "logging.getLogger('spark_abs').setLevel('INFO'); SAY SAY",
            ["theirs said"] * 2,
        ),
        ("import builtins; builtins.__IPYTHON__ = True; speak(); SAY", []),
        ("logging.getLogger('spark_abs').setLevel('ERROR'); speak(); SAY", []),
        (
            "speak(); logging.getLogger('spark_abs').addHandler(logging.StreamHandler()); "
            "logging.getLogger('spark_abs').setLevel('INFO'); SAY SAY",
            ["said"] * 2,
        ),
    ],
)
def test_it_is_heard_once_and_as_configured(script: str, expected: list[str]) -> None:
    code = "import logging; from spark_abs.logs import speak; " + script.replace("SAY", SAY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    own = [line for line in lines if "INFO" in line]
    assert [
        line for line in own if not re.match(r"\d{4}-\d\d-\d\d [\d:]{8}\.\d{3}[+-]\d\d:\d\d INFO ", line)
    ] == []
    assert [line[-len(end) :] for line, end in zip(lines, expected, strict=True)] == expected
