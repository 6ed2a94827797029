"""A face that follows what it shows, in a real kernel of IPython and where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parents[2]

BEGIN = """
import threading
from pathlib import Path
from spark_abs.markup import paragraph
from spark_abs.report import following
from spark_abs.report.face import root_face
from spark_abs.report.following import Face, follow
from tests.root_support import SmallJob

following.EVERY_S = 0.01
job, over, looks = SmallJob(Path("job")), threading.Event(), threading.Semaphore(0)

def face():
    shown = root_face(job.root, 1_000_000)
    looks.release()
    return Face("as text", shown)

def looked_twice():
    "The first may have begun before what was done last."
    assert looks.acquire(timeout=60) and looks.acquire(timeout=60)

print(follow(face, over))
"""
NEXT = """
while looks.acquire(blocking=False): pass
job.checkpoint(1, name="before-upgrade")
looked_twice()
looked_twice()
"""
END = """
job.checkpoint(2, name="last-of-all")
over.set()
for thread in threading.enumerate():
    if thread.name == "spark-abs-face":
        thread.join(60)
print(sum(thread.name == "spark-abs-face" for thread in threading.enumerate()))
"""
CANNOT = """
import IPython.display
IPython.display.display = lambda shown: print("shown")
over = threading.Event()
print(follow(face, over), sum(thread.name == "spark-abs-face" for thread in threading.enumerate()))
"""
FOLLOWS = """
import threading
from spark_abs.report.following import Face, follow
print(follow(lambda: Face("as text", "<p>"), threading.Event()))
"""
IN_TERMINAL = f"""
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance().run_cell({FOLLOWS!r})
"""


def executed(scratch: Path, *cells: str) -> list[Any]:
    """Execute cells in a kernel of this interpreter, and return them."""
    kernel = AsyncKernelManager(
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        transport="ipc",
        connection_file=str(scratch / "kernel.json"),
    )
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])  # type: ignore[no-untyped-call]
    client = NotebookClient(made, km=kernel, timeout=120, resources={"metadata": {"path": str(scratch)}})
    client.execute(env={**os.environ, "PYTHONPATH": str(HERE)}, cleanup_kc=True)
    return list(made.cells)


def said(cell: Any) -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


def faces(cell: Any) -> list[Any]:
    return [out.data for out in cell.outputs if out.output_type == "display_data"]


def test_what_a_cell_has_shown_changes_while_later_cells_run(tmp_path: Path) -> None:
    first, _, end, later = executed(tmp_path, BEGIN, NEXT, END, CANNOT)
    assert said(first) == "True\n"
    (shown,) = faces(first)
    assert shown["text/plain"] == "as text"
    assert ["before-upgrade" in shown["text/html"], "last-of-all" in shown["text/html"]] == [True, True]
    assert said(end) == "0\n", "the thread has ended with what it shows"
    assert said(later) == "False 0\n", "a notebook whose display knows no ids is left alone"
    assert faces(later) == []


def test_it_is_changed_before_the_end(tmp_path: Path) -> None:
    (shown,) = faces(executed(tmp_path, BEGIN, NEXT)[0])
    assert "before-upgrade" in shown["text/html"]


def test_elsewhere_nothing_is_shown() -> None:
    for program in (FOLLOWS, IN_TERMINAL):
        done = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True)
        assert done.stdout == "False\n", done.stderr
