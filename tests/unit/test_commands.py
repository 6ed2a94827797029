"""What becomes of a command when it is answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.checkpointing.commands import Abilities, Commands
from spark_abs.model import CheckpointId
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import Command, CommandKind
from spark_abs.protocol.messages import Answer


@pytest.mark.parametrize(("drain", "ends"), [(False, ["stop"]), (True, [])])
def test_a_stop_ends_the_run_with_its_savepoint_and_a_drain_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch, drain: bool, ends: list[str]
) -> None:
    """A drained run still has to wait for its sinks outside."""
    asked: list[str] = []
    command = Command("one", CommandKind.STOP, "last", 0, drain=drain)
    monkeypatch.setattr(ledger, "require_current", lambda *_: None)
    control: Any = SimpleNamespace(state=SimpleNamespace(commands=(command,)), update=lambda _: None)
    can = Abilities(
        stop=lambda: asked.append("stop"),
        drain=lambda *_: None,
        forget=lambda _: "",
    )
    ctx: Any = SimpleNamespace(run=1)
    commands = Commands(
        ctx, control, can, change=lambda _: "", check_name=lambda _: None, request=lambda _: None
    )
    commands.read()
    commands.answer(Answer("one", CheckpointId(4), True, "taken"))
    assert asked == ends
