"""The command against small real roots, in process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from spark_abs.cli.main import main
from spark_abs.cli.root_command import Context
from tests.root_support import SmallJob


@pytest.fixture
def job(tmp_path: Path) -> SmallJob:
    return SmallJob(tmp_path)


def _never(_: float) -> None:
    raise AssertionError("nothing was to be waited for")


@dataclass
class Cli:
    """Calls the command for one root."""

    root: str
    pause: Callable[[float], None] = field(default=_never)
    now_ms: Callable[[], int] = field(default=lambda: 1_000_000)

    def __call__(self, command: str, *arguments: str, exits: int = 0) -> Result:
        """Run a command, and require its exit code."""
        context = Context(now_ms=self.now_ms, pause=self.pause)
        result = CliRunner().invoke(main, [command, self.root, *arguments], obj=context)
        assert result.exit_code == exits, (result.output, result.exception)
        return result

    def json(self, command: str, *arguments: str, exits: int = 0) -> Any:
        """Run a command and return what it prints as JSON."""
        return json.loads(self(command, *arguments, "--output", "json", exits=exits).stdout)


@pytest.fixture
def cli(job: SmallJob) -> Cli:
    return Cli(job.root.uri)
