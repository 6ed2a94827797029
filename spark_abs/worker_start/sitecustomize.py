"""Run by Python when a process starts: takes pyspark from its directory instead of its zip file.

Spark puts `pyspark.zip` at the head of the path of every Python process that it starts. Modules in it are
compiled anew each time, which is two thirds of such a process's start. Where pyspark was installed by pip,
the same modules lie in the directory around the zip file, compiled once; that is on the path, too, further
behind. Anything else is left as it is.
"""

import importlib
import os
import sys

_ZIP = os.path.join("pyspark", "python", "lib", "pyspark.zip")


def _leave_out_zip() -> None:
    for entry in [entry for entry in sys.path if entry.endswith(os.sep + _ZIP)]:
        around = entry[: -len(os.sep + _ZIP)]
        first = next((place for place in sys.path if os.path.isdir(os.path.join(place, "pyspark"))), None)
        if first is not None and os.path.isdir(around) and os.path.samefile(first, around):
            sys.path.remove(entry)
            sys.path_importer_cache.pop(entry, None)


def _run_next() -> None:
    """Run the `sitecustomize` that would have been run without this one."""
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(__file__)]
    this = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")  # this one is off the path
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)  # the import that is under way looks for it


_leave_out_zip()
_run_next()
