"""The driver's JVM as a process: its log, its signals, its threads and their pools.

It uses private parts of Spark as of Spark 4.2.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from py4j.clientserver import ClientServer  # type: ignore[import-untyped]
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.java_gateway import ensure_callback_server_started

from spark_abs.errors import StageStopped
from spark_abs.spark.versions import MICRO_BATCHES, STATE_SERVER, WRITE_RULE, has_method

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HALT_S, _DRAIN_MS = 2.0, 2000
_INTERRUPTED = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling sleep: java.lang.InterruptedException"
)
"""The text that Spark looks for in the error of a batch function (`StreamExecution.PROXY_ERROR`).

It must be short: if the real error followed, Spark's pattern would overflow its stack.
"""

_NOISE: Mapping[str, str] = {
    # What `StreamingQuery.stop` says of a query that is idle, twice for each.
    "org.apache.spark.scheduler.DAGScheduler": "(?s)Failed to cancel job group.*",
    # Said of every streaming query, and of every one with state.
    **dict.fromkeys(WRITE_RULE, "(?s).*adaptive.*"),
    **dict.fromkeys(MICRO_BATCHES, "(?s)Disabling AQE.*"),
    # A key group that has no state yet.
    **dict.fromkeys(STATE_SERVER, "(?s)Value state .* doesn't contain a value.*"),
}
"""Warnings of Spark, by logger, that jobs cause in normal operation."""


def hush(spark: SparkSession) -> None:
    """Keep `_NOISE` out of the driver's log, and py4j's reports of calls out of Python's. Repeatable.

    A logger that already has a filter keeps it.
    """
    calls, py4j = logging.getLogger("py4j.clientserver"), logging.getLogger("py4j")
    calls.addFilter(_is_no_refusal)
    if py4j.level == logging.NOTSET:
        py4j.setLevel(logging.WARNING)
    jvm: Any = spark._jvm
    with suppress(Py4JError, TypeError):  # another logging library than Spark's own
        context = jvm.org.apache.logging.log4j.LogManager.getContext(False)
        configuration, core = context.getConfiguration(), jvm.org.apache.logging.log4j.core
        result = core.Filter.Result
        for name, pattern in _NOISE.items():
            logger = configuration.getLoggerConfig(name)
            if str(logger.getName()) != name:
                logger = core.config.LoggerConfig(name, None, True)
                configuration.addLogger(name, logger)
            if logger.getFilter() is None:
                new = core.filter.RegexFilter.createFilter(pattern, None, False, result.DENY, result.NEUTRAL)
                logger.addFilter(new)
        context.updateLoggers()


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """Say whether a log record of py4j is anything other than the report of a batch refused during a stop."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, StageStopped) and not isinstance(error and error.__context__, StageStopped)


def make_pool(spark: SparkSession, name: str) -> None:
    """Create a missing scheduler pool if pools share fairly. Spark would do so with a warning."""
    context: Any = spark.sparkContext._jsc
    context, jvm = context.sc(), cast("Any", spark._jvm)
    if str(context.getSchedulingMode().toString()) != "FAIR" or not context.getPoolForName(name).isEmpty():
        return
    scheduler = jvm.org.apache.spark.scheduler
    context.taskScheduler().rootPool().addSchedulable(
        scheduler.Pool(name, scheduler.SchedulingMode.FIFO(), 0, 1)
    )


def sleep_until_stopped(spark: SparkSession) -> None:
    """Sleep in the calling thread of the JVM until Spark interrupts it.

    Spark stops a query by an interrupt. Returns at once if Python's threads are not bound to JVM threads: the
    interrupt would not arrive.

    Raises:
        StageStopped: the query was stopped. Spark recognises the message and does not count it as a failure.
    """
    jvm: Any = spark._jvm
    if isinstance(spark.sparkContext._gateway, ClientServer):
        with suppress(Py4JError):
            jvm.java.lang.Thread.sleep(2**40)
        raise StageStopped(_INTERRUPTED)


@contextmanager
def hearing_signals(context: SparkContext, hear: Callable[[int], None]) -> Iterator[None]:
    """While this lasts, SIGTERM does not end the JVM, and signals that the JVM gets are passed to Python.

    A JVM that this process has started ends with it. Under spark-submit the JVM is the parent of this process
    and gets the signals of a terminal, systemd or Kubernetes.
    """
    jvm, gateway = cast("Any", context._jvm), cast("Any", context._gateway)
    is_child = getattr(gateway, "proc", None) is not None
    is_parent = not is_child and int(jvm.java.lang.ProcessHandle.current().pid()) == os.getppid()
    before = []
    if is_child or is_parent:
        handler: Any = jvm.sun.misc.SignalHandler.SIG_IGN
        if is_parent:
            ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
            handler = _Heard(hear)
        for name in ("TERM",) if is_child else ("TERM", "INT"):
            with suppress(Py4JError):  # the JVM was told to leave signals alone
                number = jvm.sun.misc.Signal(name)
                before.append((number, jvm.sun.misc.Signal.handle(number, handler)))
    try:
        yield
    finally:
        for number, old in before:
            with suppress(Py4JError, OSError):
                jvm.sun.misc.Signal.handle(number, old)


class _Heard:
    """A signal handler in Python. The JVM calls it in a callback thread."""

    def __init__(self, hear: Callable[[int], None]) -> None:
        self._hear = hear

    def handle(self, number: Any) -> None:
        """Pass a signal on."""
        self._hear(int(number.getNumber()))

    class Java:
        """The Java interface, for py4j."""

        implements = ("sun.misc.SignalHandler",)


def drain_events(spark: SparkSession) -> None:
    """Wait a moment until Spark has delivered all events, late ones to removed listeners too."""
    context: Any = spark.sparkContext._jsc
    with suppress(Py4JError):
        context.sc().listenerBus().waitUntilEmpty(_DRAIN_MS)


def end_session() -> None:
    """Stop the session, then close all state stores, if this process owns the JVM and it is alive."""
    gateway: Any = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if process is None or process.poll() is not None:
        return
    with suppress(Py4JError, OSError):
        if SparkContext._active_spark_context is not None:
            SparkContext._active_spark_context.stop()
        close_state_stores(gateway.jvm)


def close_state_stores(jvm: Any) -> None:
    """Close the open state stores of a JVM after their maintenance has ended.

    `StateStore.stop` alone waits for maintenance while it holds a lock that maintenance needs: it would block
    for `spark.sql.streaming.stateStore.maintenanceShutdownTimeout`, five minutes, and one more. Spark 4.0 has
    no method that waits without the lock: its two workers, which are private, are stopped one by one.
    """
    stores = getattr(getattr(jvm.org.apache.spark.sql.execution.streaming.state, "StateStore$"), "MODULE$")
    if has_method(stores, "stopMaintenanceTaskWithoutLock"):
        stores.stopMaintenanceTaskWithoutLock()
    else:
        for name in ("maintenanceTask", "maintenanceThreadPool"):
            field = stores.getClass().getDeclaredField(name)
            field.setAccessible(True)
            worker = field.get(stores)
            if worker is not None:
                worker.stop()
    stores.stop()


def halt_jvm(code: int) -> None:
    """End the JVM at once, without shutdown hooks, if it is this process's child or parent."""
    gateway: Any = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if process is not None:
        process.kill()
    elif gateway is not None and int(os.environ.get("PYSPARK_GATEWAY_PORT", "0")):
        halting = threading.Thread(
            target=lambda: gateway.jvm.java.lang.Runtime.getRuntime().halt(code), daemon=True
        )
        halting.start()
        halting.join(_HALT_S)
