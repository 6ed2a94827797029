"""The thread that feeds the coordinator."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from spark_abs.checkpointing.coordination import Coordination
from spark_abs.errors import StoreFailed
from spark_abs.model import StageId
from spark_abs.protocol import messages as protocol
from spark_abs.protocol.control import Command, CommandKind
from spark_abs.protocol.trigger import RunStatus
from spark_abs.store.clock import steady_ms


def bare(handle: Callable[[protocol.Event], None]) -> Any:
    """Return a coordination of no stages, of which only the thread's function can be called."""
    coordination: Any = object.__new__(Coordination)
    coordination._events, coordination._stages, coordination._barriers = queue.SimpleQueue(), {}, {}
    coordination._commands_ms = coordination._beat_ms = steady_ms() + 3_600_000
    coordination._ctx, coordination._handle = SimpleNamespace(), handle
    coordination._coordinator = SimpleNamespace(pending=())
    return coordination


def test_what_is_put_before_is_handled_when_it_is_said_to_be() -> None:
    """A checkpoint can be read from the store before the sinks hear of it: the end waits for that."""
    completing, may = threading.Event(), threading.Event()
    heard: list[protocol.Event] = []

    def handle(event: protocol.Event) -> None:
        completing.set()
        assert may.wait(60)
        heard.append(event)

    coordination = bare(handle)
    thread = threading.Thread(target=coordination._run, daemon=True)
    thread.start()
    stopping = protocol.StatusChanged(steady_ms(), RunStatus.STOPPING)
    coordination.put(protocol.Tick(steady_ms()))
    assert completing.wait(60)
    coordination.put(stopping)
    handled = coordination.handled()
    assert not handled.is_set()
    may.set()
    assert handled.wait(60)
    assert stopping in heard
    coordination._events.put(None)
    thread.join(60)


def read_commands(coordination: Any) -> None:
    coordination._commands_ms = 0
    coordination.handled()


@pytest.mark.parametrize(
    ("asks", "tried"),
    [
        (read_commands, "read or answer the commands in control/"),
        (lambda c: c.ask(Command("one", CommandKind.RESUME, None, 0)), "carry out the command resume"),
        (lambda c: c.answer(protocol.Answer("one", None, True, "done")), "answer a command in control/"),
        (lambda c: c.change({"interval": "1s"}), "change settings"),
        (lambda c: c.join(SimpleNamespace(name="clicks")), "add stage clicks"),
        (lambda c: c.leave(StageId("clicks")), "take stage clicks out"),
    ],
)
def test_a_store_that_fails_ends_the_run_with_what_was_tried(
    asks: Callable[[Any], object], tried: str
) -> None:
    """Whoever asked for it: the owner of the run sees this error alone."""

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    failures: list[Exception] = []
    coordination = bare(fail)
    coordination._on_failure = failures.append
    coordination._commands = SimpleNamespace(read=fail, ask=fail, answer=fail)
    coordination._live = SimpleNamespace(change=fail)
    asks(coordination)
    coordination._run()
    (failure,) = failures
    assert isinstance(failure, StoreFailed)
    assert str(failure).startswith(f"could not {tried}: [Errno {errno.ESTALE}] Stale file handle; ")
