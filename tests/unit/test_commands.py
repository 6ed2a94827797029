"""What becomes of a command: it is carried out once, answered, and recorded with who asked."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.checkpointing.commands import Abilities, Commands
from spark_abs.errors import Fenced, UsageError
from spark_abs.model import CheckpointId, RunId, StageId
from spark_abs.protocol import control as ledger
from spark_abs.protocol.control import Command, CommandKind
from spark_abs.protocol.messages import Answer
from spark_abs.protocol.trigger import Request
from spark_abs.store.control import Control
from spark_abs.store.failpoint import no_failpoint
from spark_abs.store.history import History
from spark_abs.store.root import Root

CLICKS, ORDERS = StageId("clicks"), StageId("orders")


class Running:
    """The commands of a run on a real root; what they ask of it is written down."""

    def __init__(self, path: Path) -> None:
        self.root = Root(str(path))
        self.control = Control.create(self.root, "job", 0)
        self.asked: list[object] = []
        self.held: list[set[str]] = []
        self.begin()

    def begin(self) -> None:
        """Begin a run, as a start does."""
        state = self.control.update(lambda s: ledger.begin_run(s, "here", 1, 0))
        run = state.runs[-1].id
        ctx: Any = SimpleNamespace(root=self.root, run=run, attempt=state.attempt.id, failpoint=no_failpoint)
        can = Abilities(
            stop=lambda: self.asked.append("stop"),
            drain=lambda *_: None,
            forget=lambda _: "",
            sources=self._sources,
            hold=lambda paused: self.held.append(set(paused)),
            restart=lambda stage, request: self.asked.append((stage, request)),
            skip=self._skip,
        )
        self.commands = Commands(
            ctx,
            Control.open(self.root),
            can,
            change=lambda _: "interval 1s -> 2s",
            check_name=lambda _: None,
            request=self.asked.append,
            cancel=lambda command: self.asked.append(("cancel", command.name, command.by)),
        )

    def _sources(self, stages: Sequence[StageId]) -> tuple[StageId, ...]:
        if "totals" in stages:
            raise UsageError("'totals' is no source of the job")
        return tuple(stages) or (CLICKS, ORDERS)

    def _skip(self, command: Command) -> str | None:
        if not command.files:
            raise UsageError("no file is named")
        self.asked.append(("skip", command.files))
        return "skipped before" if "/in/1" in command.files else None

    def send(self, command: Command) -> None:
        self.control.update(lambda s: ledger.ask(s, command))

    def answered(self, command: Command) -> tuple[bool, str]:
        """Let the run read its commands; return the answer to one."""
        self.send(command)
        self.commands.read()
        (found,) = [c for c in self.control.state.commands if c.id == command.id]
        assert found.answered
        return found.ok, found.message

    def history(self) -> list[tuple[object, ...]]:
        rows = History(self.root).read().to_pylist()
        return [(row["kind"], row["reason"], row["detail"], row["by"]) for row in rows]


@pytest.fixture
def running(tmp_path: Path) -> Running:
    return Running(tmp_path)


@pytest.mark.parametrize(("drain", "ends"), [(False, ["stop"]), (True, [])])
def test_a_stop_ends_the_run_with_its_savepoint_and_a_drain_ends_by_itself(
    running: Running, drain: bool, ends: list[str]
) -> None:
    """A drained run still has to wait for its sinks outside."""
    running.send(Command("one", CommandKind.STOP, "last", 0, drain=drain))
    running.commands.read()
    running.asked.clear()
    running.commands.answer(Answer("one", CheckpointId(4), True, "taken"))
    assert running.asked == ends


def by(kind: CommandKind, *stages: StageId, who: str = "ann@desk", name: str | None = None) -> Command:
    return Command(f"{who} {kind} {stages}", kind, name, 0, stages=stages, by=who)


def test_a_pause_is_recorded_with_its_answer_and_holds_the_sources(running: Running) -> None:
    assert running.answered(by(CommandKind.PAUSE, CLICKS)) == (True, "paused: clicks")
    said = "paused: clicks, which ann@desk had paused before; orders"
    assert running.answered(by(CommandKind.PAUSE, who="bob@desk")) == (True, said)
    assert [(one.stage, one.by) for one in running.control.state.paused] == [
        ("clicks", "ann@desk"),
        ("orders", "bob@desk"),
    ]
    assert running.answered(by(CommandKind.RESUME, CLICKS)) == (True, "resumed: clicks")
    ok, said = running.answered(by(CommandKind.RESUME, CLICKS, who="bob@desk"))
    assert (ok, said) == (False, "source 'clicks' is not paused; paused are: orders")
    assert running.answered(by(CommandKind.RESUME)) == (True, "resumed: orders")
    assert running.answered(by(CommandKind.RESUME, who="bob@desk")) == (True, "no source was paused")
    assert running.held == [{"clicks"}, {"clicks", "orders"}, {"orders"}, set(), set()]
    assert running.history()[:2] == [
        ("pause", "done", "paused: clicks", "ann@desk"),
        ("pause", "done", "paused: clicks, which ann@desk had paused before; orders", "bob@desk"),
    ]


def test_what_cannot_be_paused_changes_nothing_and_is_recorded(running: Running) -> None:
    said = "'totals' is no source of the job"
    assert running.answered(by(CommandKind.PAUSE, StageId("totals"))) == (False, said)
    assert (running.control.state.paused, running.held) == ((), [])
    assert running.history() == [("pause", "refused", said, "ann@desk")]


def test_a_run_that_was_replaced_pauses_nothing(running: Running) -> None:
    """The newer run has refused the request; the older one read it before."""
    running.send(by(CommandKind.PAUSE))
    old = running.commands
    running.begin()
    with pytest.raises(Fenced):
        old.ask(by(CommandKind.PAUSE), queue.SimpleQueue())
    with pytest.raises(Fenced):
        old.read()
    assert (running.control.state.paused, running.held) == ((), [])
    (command,) = running.control.state.commands
    assert (command.ok, "repeat the request" in command.message) == (False, True)


def test_skipped_files_are_answered_at_once_or_when_the_stage_runs_again(running: Running) -> None:
    command = replace(by(CommandKind.SKIP_FILE, CLICKS), files=("/in/2",))
    running.send(command)
    running.commands.read()
    assert (running.asked, running.history()) == ([("skip", ("/in/2",))], [])
    running.commands.answer(Answer(command.id, None, True, "it runs again"))
    assert running.answered(replace(command, id="two", files=("/in/1",))) == (True, "skipped before")
    assert running.answered(replace(command, id="three", files=())) == (False, "no file is named")
    assert {(row[1], row[2]) for row in running.history()} == {
        ("done", "it runs again"),
        ("done", "skipped before"),
        ("refused", "no file is named"),
    }


def test_a_command_of_a_later_version_is_refused_and_the_run_goes_on(running: Running) -> None:
    command = Command("one", "explode", None, 0, by="ann@desk")
    said = (
        "this run has a version of spark_abs that does not know the command 'explode': start the job again "
        "with the version that sent it"
    )
    assert running.answered(command) == (False, said)
    assert running.control.state.commands[0].kind == "explode"
    assert running.history() == [("explode", "refused", said, "ann@desk")]
    assert running.answered(by(CommandKind.PAUSE, CLICKS)) == (True, "paused: clicks")


def test_a_checkpoint_and_a_cancel_are_answered_by_the_outcome(running: Running) -> None:
    running.send(by(CommandKind.CHECKPOINT))
    running.send(by(CommandKind.CANCEL, name="12"))
    running.commands.read()
    running.commands.read()  # each is begun once
    (request, cancelled) = running.asked
    assert isinstance(request, Request)
    assert cancelled == ("cancel", "12", "ann@desk")
    assert [c.answered for c in running.control.state.commands] == [False, False]
    running.commands.answer(Answer(request.id, CheckpointId(13), True, "completed"))
    running.commands.answer(Answer(request.id, CheckpointId(14), True, "a second time"))
    assert [c.checkpoint for c in running.control.state.commands] == [13, None]
    assert running.history() == [("checkpoint", "done", "completed", "ann@desk")]


def test_a_restart_is_answered_by_the_thread_that_does_it(running: Running) -> None:
    command = by(CommandKind.RESTART, ORDERS)
    running.send(command)
    running.commands.read()
    assert running.asked == [(ORDERS, command.id)]
    assert running.history() == []
    running.commands.answer(Answer(command.id, None, True, "stage 'orders' runs again"))
    assert running.history() == [("restart", "done", "stage 'orders' runs again", "ann@desk")]


def test_a_command_of_the_own_process_needs_no_record_in_control(running: Running) -> None:
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    before = running.control.version
    running.commands.ask(by(CommandKind.CHECKPOINT), answers)
    running.commands.answer(Answer(by(CommandKind.CHECKPOINT).id, CheckpointId(1), True, "completed"))
    assert (answers.get_nowait().id, running.control.version) == (1, before)
    running.commands.ask(by(CommandKind.PAUSE, ORDERS), answers)
    assert answers.get_nowait().message == "paused: orders"
    assert [one.stage for one in running.control.state.paused] == ["orders"]
    assert [row[0] for row in running.history()] == ["checkpoint", "pause"]
    assert running.control.state.runs[-1].id == RunId(1)
