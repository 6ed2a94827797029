"""Open gates: Spark's streaming frame of a channel, and its registration in a session."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from pyspark import SparkFiles

from spark_abs.channels.gate import FORMAT_NAME, SPEC, Gate, GateSpec
from spark_abs.codec import to_json
from spark_abs.spark.worker_start import forked_start, quick_start
from spark_abs.store.storage import DEFAULTS, Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_registering = threading.Lock()
_registered: WeakKeyDictionary[SparkSession, Storage] = WeakKeyDictionary()
"""The fields of the class that a session has registered: Spark warns if a class is registered again."""
_SET_BY_READERS = {
    "SPARK_LOCAL_DIRS": "",
    "SPARK_AUTH_SOCKET_TIMEOUT": "",
    "SPARK_BUFFER_SIZE": "",
    "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
}
"""Every variable that a streaming reader sets; it replaces the empty ones before it starts a process.

All gates of a session share the map of the JVM that is made from their environment. Spark 4.2 sets those
variables in it (`PythonStreamingSourceRunner.init`) while other gates do so, and tasks are serialized with
it: a new key could break the map for good, a new value of an old key cannot.
"""


def open_gate(spark: SparkSession, spec: GateSpec, storage: Storage = DEFAULTS) -> DataFrame:
    """Return the streaming frame of one input. Two calls with one channel are two inputs.

    Plans and the UI show the options of a source, so the storage, which may hold a secret, is part of the
    class.
    """
    _show_shipped_code()
    with _registering:  # a frame keeps the class that was registered when it was made
        if _registered.get(spark) != storage:
            context = spark.sparkContext
            with quick_start(context, {**_SET_BY_READERS, **forked_start(context)}):
                spark.dataSource.register(type("StorageGate", (Gate,), {"storage": storage}))
            _registered[spark] = storage
        return spark.readStream.format(FORMAT_NAME).option(SPEC, to_json(spec)).load()


def _show_shipped_code() -> None:
    """Let the planning process import the modules of `--py-files`, perhaps this package.

    Spark 4.2 sends it to a folder `streaming_job` below that of the shipped files and puts nothing there.
    """
    shipped = Path(SparkFiles.getRootDirectory())
    with suppress(FileExistsError):
        (shipped / "streaming_job").symlink_to(shipped, target_is_directory=True)
