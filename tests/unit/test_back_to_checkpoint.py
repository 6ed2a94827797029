"""What a start with restart='checkpoint' does where there is no checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.run import start
from spark_abs.store.control import Control
from spark_abs.store.root import Root


def test_without_a_checkpoint_it_says_that_it_goes_on_and_that_nothing_was_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The start then looks at the job and its tables as any other."""
    root = Root(str(tmp_path / "root"))
    Control.create(root, "down", now_ms=0)
    job: Any = SimpleNamespace(name="down", root=root)
    drafted: Any = None
    with caplog.at_level(logging.WARNING, "spark_abs"):
        assert not start._back_to_checkpoint(job, drafted, takeover=False, leave=False)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("job down: restart='checkpoint' found no checkpoint at ")
    assert said.endswith(": the stages resume after their last batches")
