"""The deepest cause of an error. Spark wraps an error in several layers, of two languages.

When a batch fails in a Python worker, its traceback is nested in messages of the worker, the task, the job
and the query, each with its own stack. A reader needs one line of all that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from spark_abs.errors import AbsError

LONGEST_LINE, LONGEST_TEXT = 1000, 64_000

_OURS = "spark_abs.errors."
_CAPTURED = "pyspark.errors.exceptions.captured."
_WRAPPERS = ("py4j.", "pyspark.errors.")
_UNKNOWN = "UnknownException: "
"""PySpark's prefix before the name of a JVM error for which it has no class."""
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"[A-Za-z_][\w.]*(: .*)?")
_CAUSED = re.compile(r"Caused by: (?!\[CIRCULAR)(.+)")
"""Without indentation: the causes of a suppressed error are indented."""
_BELOW = re.compile(r": ((?:[a-z_][\w$]*\.)+[A-Z].*)")
"""As py4j writes it below `An error occurred while calling o52.save.`"""
_TASK = re.compile(r"Lost task \S+ in stage \S+ \(TID \d+\) \([^)]*\): (.+)")
_READ = "; while reading file "
_READING = re.compile(r"\[FAILED_READ_FILE\S*\] Encountered error while reading file (\S+?)\.(?:\s|$)")
_ENDS = re.compile(
    r"\s+at |\s+\.\.\. \d+ more|\s*Caused by: |\s*Suppressed: |=== |== SQL|: |Driver stacktrace:"
    r"|JVM stacktrace:|(?:[a-z_][\w$]*\.)+[A-Z][\w$]*(?:: |$)|.*Traceback \(most recent call last\):"
)
"""The line after the end of an exception's message."""
_TOO_SLOW = ("Python worker to connect back", "Python worker failed to connect back")
_CLASS = re.compile(r"^(?:[a-z_][\w$]*\.)+([A-Z][\w$]*)")


def cause_of(error: BaseException) -> str:
    """Return the deepest cause of an error in one line; an error of this package whole."""
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
    """Return the whole text of an error, with JVM stacks if it comes from the JVM."""
    text, stack = str(error), str(getattr(error, "_stackTrace", ""))
    whole = f"{type(error).__name__}: {text}" + ("" if stack in text else f"\n{stack}")
    # Spark's handle of a query gives the stack of what wraps the cause, and the cause beside it.
    cause = getattr(error, "_cause", None)
    if isinstance(cause, BaseException):
        whole += f"\nCaused by: {text_of(cause)}"
    return whole[:LONGEST_TEXT]


def is_slow_start(error: BaseException) -> bool:
    """Say whether a Python process did not start within Spark's ten seconds.

    The query is not at fault: the machine was busy. Spark has no setting for this timeout.
    """
    text = text_of(error)
    return any(said in text for said in _TOO_SLOW)


def chain_of(error: BaseException) -> str:
    """Return an error's message, with the whole text of its causes below it."""
    found, each = [str(error)], error.__cause__
    while each is not None:
        found.append(f"caused by {text_of(each)}")
        each = each.__cause__
    return "\n".join(found)[:LONGEST_TEXT]


def deepest(text: str) -> str:
    """Return the deepest cause that a message names, in one line, and the file that was being read.

    In this order: an error raised by this package in a Python worker; the first error raised in Python; the
    last `Caused by` of the JVM; the error of a task; the Java exception below py4j's first line; the first
    line. Of a Java exception, the lines up to its stack are part of its message.
    """
    lines = text.splitlines()
    raised = list(_raised(lines))
    python = [line for line in raised if not line.startswith(_WRAPPERS)]
    ours = [line for line in python if line.startswith(_OURS)]
    caused = [whole for at in range(len(lines)) if (whole := _java(lines, at, _CAUSED)) is not None]
    task = [match[1] for line in lines if (match := _TASK.search(line))]
    called = [whole for at in range(len(lines)) if (whole := _java(lines, at, _BELOW)) is not None]
    wrapped = [line.removeprefix(_CAPTURED) for line in raised if line.startswith(_CAPTURED)]
    first = [_message(lines, 0, lines[0])] if lines else []
    found = [*ours[-1:], *python[:1], *caused[-1:], *task[-1:], *called[-1:], *wrapped[:1], *first, ""]
    said = one_line(_CLASS.sub(r"\1", found[0].removeprefix(_UNKNOWN), count=1))
    reading = [match[1] for line in lines if (match := _READING.search(line))]
    if reading and not python and reading[-1] not in said:
        return f"{said}{_READ}{reading[-1]}"
    return said


def file_read(cause: str) -> str | None:
    """Return the file that was being read, by a cause that `deepest` returned; None if it names none."""
    file = cause.rpartition(_READ)[2] if _READ in cause else ""
    return None if not file or " " in file else file


def _java(lines: list[str], at: int, form: re.Pattern[str]) -> str | None:
    """Return the whole message of a Java exception if a line begins with this pattern."""
    found = form.match(lines[at])
    return None if found is None else _message(lines, at, found[1])


def _message(lines: list[str], at: int, first: str) -> str:
    """Join the lines of a message, up to a stack, a plan or the next exception."""
    said = [first.strip()]
    for line in lines[at + 1 :]:
        if said[-1].endswith(";") or _ENDS.match(line):
            break
        if line.strip():
            said.append(line.strip())
    return " ".join(said).removesuffix(";")


def _raised(lines: list[str]) -> Iterator[str]:
    """Iterate the last line of each traceback."""
    inside = False
    for line in lines:
        if line.rstrip().endswith(_TRACEBACK):
            inside = True
        elif inside and line and not line[0].isspace():
            inside = False
            if _RAISED.fullmatch(line):
                yield line


def one_line(text: str) -> str:
    """Return the first line of a text, cut if it is too long."""
    first = text.strip().partition("\n")[0].strip()
    return first if len(first) <= LONGEST_LINE else f"{first[:LONGEST_LINE]}…"


def _of_jvm(error: BaseException) -> bool:
    return hasattr(error, "_stackTrace") or hasattr(error, "java_exception")
