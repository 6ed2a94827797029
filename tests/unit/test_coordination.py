"""The thread that feeds the coordinator."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

from spark_abs.checkpointing.coordination import Coordination
from spark_abs.protocol import messages as protocol
from spark_abs.protocol.trigger import RunStatus
from spark_abs.store.clock import steady_ms


def test_what_is_put_before_is_handled_when_it_is_said_to_be() -> None:
    """A checkpoint can be read from the store before the sinks hear of it: the end waits for that."""
    completing, may = threading.Event(), threading.Event()
    heard: list[protocol.Event] = []

    def handle(event: protocol.Event) -> None:
        completing.set()
        assert may.wait(60)
        heard.append(event)

    coordination: Any = object.__new__(Coordination)
    coordination._events, coordination._stages = queue.SimpleQueue(), {}
    coordination._commands_ms = coordination._beat_ms = steady_ms() + 3_600_000
    coordination._ctx, coordination._handle = SimpleNamespace(), handle
    coordination._coordinator = SimpleNamespace(pending=())
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
