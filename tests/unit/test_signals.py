"""Signals while a script waits: processes of their own, without Spark."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake.exceptions import DeltaError

from spark_abs.errors import UsageError
from spark_abs.run.lifecycle import Termination
from spark_abs.run.run import Run

WAITS = """
import logging, os, signal, sys, threading, time
from spark_abs.logs import speak
from spark_abs.run.signals import SignalledStop

speak()
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever is started in the background ignores it
done = threading.Event()
stop = lambda: print("stop", flush=True) or {stops}
signals = SignalledStop("job", {timeout_ms}, stop)
{before}
threading.Timer(0.2, lambda: os.kill(os.getpid(), {first})).start()
{later}
print("done", signals.wait(done, {patience}), flush=True)
{after}
"""
AT_ONCE = "threading.Timer({s}, lambda: os.kill(os.getpid(), signal.SIGINT)).start()"


def run(
    stops: str = "done.set()",
    timeout_ms: int = 60_000,
    first: str = "signal.SIGTERM",
    before: str = "",
    later: str = "",
    patience: str = "None",
    after: str = "",
) -> subprocess.CompletedProcess[str]:
    code = WAITS.format(
        stops=stops,
        timeout_ms=timeout_ms,
        first=first,
        before=before,
        later=later,
        patience=patience,
        after=after,
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("first", ["signal.SIGTERM", "signal.SIGINT"])
def test_the_first_stops_in_order_and_the_script_goes_on(first: str) -> None:
    ended = run(first=first, after="print('after')")
    assert (ended.returncode, ended.stdout.split("\n")) == (0, ["stop", "done True", "after", ""])
    assert f"{first.removeprefix('signal.')}, stopping gracefully within 60 s" in ended.stderr


def test_the_second_ends_it_at_once() -> None:
    ended = run(stops="None", later=AT_ONCE.format(s=1.5))
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGINT, "stop\n")
    assert "SIGINT again: the process ends at once" in ended.stderr


def test_signals_that_come_by_two_ways_are_one() -> None:
    ended = run(stops="threading.Timer(2, done.set).start()", later=AT_ONCE.format(s=0.4))
    assert (ended.returncode, ended.stdout) == (0, "stop\ndone True\n")


def test_a_stop_that_takes_too_long_ends_at_once() -> None:
    ended = run(stops="None", timeout_ms=500)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "stop\n")
    assert "has not stopped in time" in ended.stderr


def test_a_stop_goes_on_over_waits_that_end_before_it() -> None:
    ended = run(
        stops="threading.Timer(1, done.set).start()", patience="0.5", after="signals.wait(done, None)"
    )
    assert (ended.returncode, ended.stdout) == (0, "stop\ndone False\n")


@pytest.mark.parametrize(
    "before",
    [
        "signal.signal(signal.SIGTERM, lambda *_: (print('theirs', flush=True), done.set()))",
        "sys.ps1 = '>'; signal.signal(signal.SIGTERM, lambda *_: (print('theirs', flush=True), done.set()))",
    ],
)
def test_handlers_of_others_are_left_alone(before: str) -> None:
    ended = run(before=before)
    assert (ended.returncode, ended.stdout) == (0, "theirs\ndone True\n")


def test_a_notebook_keeps_its_signals() -> None:
    ended = run(before="import builtins; builtins.__IPYTHON__ = True", first="signal.SIGINT")
    assert ended.returncode == -signal.SIGINT or "KeyboardInterrupt" in ended.stderr
    assert "stop" not in ended.stdout


@pytest.mark.parametrize(
    "error", [UsageError("taken"), OSError("no answer"), DeltaError("no log"), KeyError(1)]
)
def test_whatever_becomes_of_its_savepoint_the_stop_is_asked_for(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def check_name(_: str) -> None:
        raise error

    run: Any = Run.__new__(Run)
    settings = SimpleNamespace(stop_savepoint="last", stop_timeout_ms=1_000)
    run._ctx = SimpleNamespace(job="job", run=7, settings=settings)
    run._termination, run._coordination = Termination(), SimpleNamespace(check_name=check_name)
    with caplog.at_level(logging.WARNING, "spark_abs"):
        run._stop_for_signal()
    assert run._termination.requested
    assert caplog.messages == [f"job job stops without savepoint 'last-7': {error}"]
