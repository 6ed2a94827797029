"""Python runs this at its start: pyspark is imported from its directory, and gates' processes are forked.

Spark puts `pyspark.zip` first on the module path of each Python process that it starts. Python compiles the
modules in it anew each time, which is two thirds of the time of such a start. If pyspark was installed by
pip, the same modules are in the directory around the zip file, already compiled; the path has this directory
too, further behind. This module then removes the zip file from the path; it changes nothing else.

If there is a fork server (`fork_server`), it forks the driver's processes of a gate.
"""

import importlib
import os
import sys

_ZIP = os.path.join("pyspark", "python", "lib", "pyspark.zip")
_FORKED = (
    ["pyspark.sql.streaming.python_streaming_source_runner"],
    ["pyspark.daemon", "pyspark.sql.worker.create_data_source"],
    ["pyspark.daemon", "pyspark.sql.worker.plan_data_source_read"],
)
_PATIENCE_S = 2.0  # of the ten seconds that Spark gives it; importing takes less than one


def _leave_out_zip() -> None:
    for entry in [entry for entry in sys.path if entry.endswith(os.sep + _ZIP)]:
        around = entry[: -len(os.sep + _ZIP)]
        first = next((place for place in sys.path if os.path.isdir(os.path.join(place, "pyspark"))), None)
        if first is not None and os.path.isdir(around) and os.path.samefile(first, around):
            sys.path.remove(entry)
            sys.path_importer_cache.pop(entry, None)


def _run_next() -> bool:
    """Run the `sitecustomize` that Python would have run without this one; say whether it is a user's."""
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(__file__)]
    this = sys.modules.pop("sitecustomize")
    try:
        found = importlib.import_module("sitecustomize")  # this one is off the path
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        return False
    finally:
        sys.modules.setdefault("sitecustomize", this)  # the import that is under way looks for it
    # Debian has one beside the standard library, which every process runs.
    return os.path.dirname(found.__file__ or "") != os.path.dirname(os.__file__)


def _be_forked() -> None:
    """Let the fork server run this process's module, wait for its end, and exit; return if it refuses."""
    address = os.environ.get("SPARK_ABS_FORK_SERVER")
    if not address or sys.orig_argv[1:2] != ["-m"] or sys.orig_argv[2:] not in _FORKED:
        return
    import json
    import signal
    import socket
    import struct

    with socket.socket(socket.AF_UNIX) as server:
        try:
            said = {
                "path": sys.path,
                "arguments": sys.orig_argv[2:],
                "executable": sys.executable,
                "flags": list(sys.flags),
                "directory": os.getcwd(),
                "environment": dict(os.environ),
            }
            text = json.dumps(said).encode()
            server.settimeout(_PATIENCE_S)
            server.connect(address)
            peer = server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", peer)[1] != os.getuid():
                return  # whoever found the place empty
            socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2])
            server.sendall(text)
            if not server.recv(1):
                return
            server.sendall(b"+")
        except OSError:
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the planning half itself
        server.settimeout(None)
        try:
            server.recv(1)
        finally:
            os._exit(0)


_leave_out_zip()
if not _run_next():
    _be_forked()  # what a `sitecustomize` has changed in this process would be lost
