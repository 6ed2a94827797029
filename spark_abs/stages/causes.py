"""What an error says at the bottom of it. Spark wraps what has gone wrong in layers, in two languages.

A batch that fails in a Python worker comes back as a traceback within a message of the worker's, of the
task's, of the job's and of the query's, each with its own stack; a person looks for one line of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from spark_abs.errors import AbsError

LONGEST_LINE, LONGEST_TEXT = 1000, 64_000

_OURS = "spark_abs.errors."
_WRAPPERS = ("py4j.", "pyspark.errors.")
_UNKNOWN = "UnknownException: "
"""What PySpark puts before the name of an error of the JVM's that it has no class for."""
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"[A-Za-z_][\w.]*(: .*)?")
_CAUSED = re.compile(r"\s*Caused by: (.+)")
_TOO_SLOW = ("Python worker to connect back", "Python worker failed to connect back")
_CLASS = re.compile(r"^(?:[a-z_][\w$]*\.)+([A-Z][\w$]*)")


def cause_of(error: BaseException) -> str:
    """Return the deepest cause of an error, in one line; all of it for an error of ours."""
    if isinstance(error, AbsError):
        return f"{type(error).__name__}: {error}"
    if _of_jvm(error):
        return deepest(text_of(error))
    root = error
    while root.__cause__ is not None and root.__cause__ is not error:
        root = root.__cause__
    said = one_line(f"{type(error).__name__}: {error}")
    return said if root is error else f"{said}; caused by {cause_of(root)}"


def text_of(error: BaseException) -> str:
    """Return all that an error says, with the JVM's stacks if it comes from there."""
    text, stack = str(error), str(getattr(error, "_stackTrace", ""))
    whole = f"{type(error).__name__}: {text}" + ("" if stack in text else f"\n{stack}")
    # Spark's handle of a query gives the stack of what wraps the cause, and the cause beside it.
    cause = getattr(error, "_cause", None)
    if isinstance(cause, BaseException):
        whole += f"\nCaused by: {text_of(cause)}"
    return whole[:LONGEST_TEXT]


def is_slow_start(error: BaseException) -> bool:
    """Say whether a Python process had not come up in the ten seconds that Spark gives it.

    Nothing is wrong with the query: the machine was busy. Spark has no setting for the time.
    """
    text = text_of(error)
    return any(said in text for said in _TOO_SLOW)


def chain_of(error: BaseException) -> str:
    """Return an error's message, and below it all that the errors say from which it comes."""
    found, each = [str(error)], error.__cause__
    while each is not None:
        found.append(f"caused by {text_of(each)}")
        each = each.__cause__
    return "\n".join(found)[:LONGEST_TEXT]


def deepest(text: str) -> str:
    """Return the line of a message that names the deepest cause.

    That is what our own code in a Python worker has raised; else what was raised first in Python; else the
    last `Caused by` of the JVM; else the first line.
    """
    lines = text.splitlines()
    raised = [line for line in _raised(lines) if not line.startswith(_WRAPPERS)]
    ours = [line for line in raised if line.startswith(_OURS)]
    caused = [match[1] for line in lines if (match := _CAUSED.match(line))]
    found = [*ours[-1:], *raised[:1], *caused[-1:], *lines[:1], ""]
    return one_line(_CLASS.sub(r"\1", found[0].removeprefix(_UNKNOWN), count=1))


def _raised(lines: list[str]) -> Iterator[str]:
    """Iterate what each traceback ends with."""
    inside = False
    for line in lines:
        if line.rstrip().endswith(_TRACEBACK):
            inside = True
        elif inside and line and not line[0].isspace():
            inside = False
            if _RAISED.fullmatch(line):
                yield line


def one_line(text: str) -> str:
    """Return the first line of a text, cut where it is too long."""
    first = text.strip().partition("\n")[0].strip()
    return first if len(first) <= LONGEST_LINE else f"{first[:LONGEST_LINE]}…"


def _of_jvm(error: BaseException) -> bool:
    return hasattr(error, "_stackTrace") or hasattr(error, "java_exception")
