"""The line of an error that a person looks for, out of all that Spark says around it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_abs.errors import StageFailed, StateFunctionFailed, StoreFailed
from spark_abs.model import AttemptId, BatchId, RunId, StageId
from spark_abs.protocol import control as ledger
from spark_abs.run.recovery import StageEnd
from spark_abs.run.registration import end
from spark_abs.spark.causes import cause_of, deepest, is_slow_start
from spark_abs.store.control import Control
from spark_abs.store.history import History
from spark_abs.store.root import Root

SAMPLE_FILES = Path(__file__).parent / "causes"
STACK = "\tat org.apache.spark.api.python.PythonWorkerFactory.create(PythonWorkerFactory.scala:230)\n" * 20
WORKER = """[STREAM_FAILED] Query [id = 4f] terminated: Job aborted due to stage failure: Task 0 \
in stage 5.0 failed 1 times, most recent failure: Lost task 0.0 in stage 5.0 (TID 7) (here executor driver): \
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "pyspark/worker.py", line 3000, in main
    process()
  File "job.py", line 7, in see
    return 1 / row.v
           ~~^~~~~~~
{raised}

"""
PROXY = """py4j.Py4JException: An exception was raised by the Python Proxy. Return Message: \
Traceback (most recent call last):
  File "py4j/clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
py4j.protocol.Py4JJavaError: An error occurred while calling o52.collect.
: org.apache.spark.SparkException: """
AGAIN = """

{how}:

Traceback (most recent call last):
  File "x.py", line 1
"""
DIRECT = AGAIN.format(how="The above exception was the direct cause of the following exception")
DURING = AGAIN.format(how="During handling of the above exception, another exception occurred")
TIMEOUT = "Timed out while waiting for the Python worker to connect back"


class FromJvm(Exception):
    """An error as PySpark makes it of one of the JVM's."""

    def __init__(self, text: str, stack: str = "", cause: Exception | None = None) -> None:
        super().__init__(text)
        self._stackTrace, self._cause = stack, cause


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (WORKER.format(raised="ZeroDivisionError: poison") + STACK, "ZeroDivisionError: poison"),
        (PROXY + WORKER.format(raised="KeyError: 'k'") + STACK, "KeyError: 'k'"),
        (
            WORKER.format(raised=f"KeyError: 'k'{DIRECT}spark_abs.errors.StateFunctionFailed: key (3,): 'k'"),
            "StateFunctionFailed: key (3,): 'k'",
        ),
        (WORKER.format(raised=f"OSError: no route{DURING}RuntimeError: not read"), "OSError: no route"),
        (
            f"org.apache.spark.SparkException: Python worker failed to connect back.\n{STACK}"
            f"Caused by: org.apache.spark.SparkException: worker\n{STACK}"
            f"Caused by: java.net.SocketTimeoutException: {TIMEOUT}\n{STACK}\t... 30 more\n",
            f"SocketTimeoutException: {TIMEOUT}",
        ),
        ("[STREAM_FAILED] no state directory\nand more", "[STREAM_FAILED] no state directory and more"),
        (
            "SparkException: Job aborted due to stage failure: Task 0 in stage 5.0 failed 4 times, most "
            "recent failure: Lost task 0.3 in stage 5.0 (TID 7) (10.0.0.7 executor 3): java.io.IOException: "
            "full\n"
            f"{STACK}\nDriver stacktrace:\n",
            "IOException: full",
        ),
        (
            f"Py4JJavaError: An error occurred while calling o5.save.\n: a.b.OutException: [WRITE] no\n"
            f"{STACK}\tSuppressed: a.b.CloseException: closed\n\t{STACK}\tCaused by: a.b.Other: of that\n",
            "OutException: [WRITE] no",
        ),
        (
            "StreamingQueryException: [FOREACH_BATCH] error\npy4j.Py4JException: An exception was raised by "
            "the Python Proxy. Return Message: Traceback (most recent call last):\n  File 'x.py', line 1\n"
            "pyspark.errors.exceptions.captured.AnalysisException: [NO_COLUMN] none\n",
            "AnalysisException: [NO_COLUMN] none",
        ),
        ("", ""),
    ],
)
def test_the_deepest_cause_is_one_line(text: str, said: str) -> None:
    assert deepest(text) == said


SAMPLES: dict[str, str] = json.loads((SAMPLE_FILES / "causes.json").read_text())
"""How the cause begins of what Spark 4.2 and Delta 4.4 raised, as `text_of` gave it, stacks cut short."""


def test_every_sample_has_its_line() -> None:
    assert {path.stem for path in SAMPLE_FILES.glob("*.txt")} == SAMPLES.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_the_deepest_cause_of_what_spark_and_delta_raise(name: str) -> None:
    said = deepest((SAMPLE_FILES / f"{name}.txt").read_text())
    assert said.startswith(SAMPLES[name])
    assert "\n" not in said


def test_what_the_jvm_says_beside_its_message_counts_too() -> None:
    hidden = FromJvm("Python worker failed to connect back", f"{STACK}Caused by: java.io.IOException: full\n")
    assert cause_of(hidden) == "IOException: full"
    assert cause_of(ValueError("one\ntwo")) == "ValueError: one"
    beside = FromJvm("Python worker failed to connect back.\n=== Streaming Query ===", STACK, hidden)
    assert cause_of(beside) == "IOException: full"
    unknown = type("UnknownException", (FromJvm,), {})(f"java.net.SocketTimeoutException: {TIMEOUT}")
    assert cause_of(FromJvm("no worker", STACK, unknown)) == f"SocketTimeoutException: {TIMEOUT}"
    chained = ValueError("not read")
    chained.__cause__ = OSError("no route")
    assert cause_of(chained) == "ValueError: not read; caused by OSError: no route"
    assert cause_of(StoreFailed("refused:\n  both forms")) == "StoreFailed: refused:\n  both forms"


def test_an_end_is_one_row_of_history_with_all_that_was_said(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    control = Control.create(root, "job", 0)
    control.update(lambda s: ledger.begin_run(s, "host", 1, 0))
    ctx: Any = SimpleNamespace(root=root, run=RunId(1), attempt=AttemptId(1))
    cause = FromJvm(WORKER.format(raised="KeyError: 'k'"), STACK)
    told = StageEnd(StageId("a"), BatchId(3), cause)
    failed = StageFailed(f"stage 'a' failed in batch 3: {told.cause}")
    failed.__cause__ = cause
    end(ctx, failed)
    end(ctx, StateFunctionFailed("something else"))
    assert control.state.runs[-1].ended == "failed: stage 'a' failed in batch 3: KeyError: 'k'"
    (row,) = History(root).read().to_pylist()
    first, *rest = row["detail"].splitlines()
    assert first == "failed: stage 'a' failed in batch 3: KeyError: 'k'"
    assert sum("PythonWorkerFactory.create" in line for line in rest) == 20
    assert sum("in see" in line for line in rest) == 1


def test_a_process_that_came_up_too_slowly_is_known_by_what_lies_deepest() -> None:
    error = StageFailed("batch 0 failed")
    assert not is_slow_start(error)
    timed_out = (
        "java.net.SocketTimeoutException: Timed out while waiting for the Python worker to connect back"
    )
    error._stackTrace = f"org.apache.spark.SparkException: no worker\n{STACK}Caused by: {timed_out}"  # type: ignore[attr-defined]
    assert is_slow_start(error)
