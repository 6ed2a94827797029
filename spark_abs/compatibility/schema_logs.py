"""Copies of schema logs for drafts: Delta writes to the log even when a frame is only analysed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyarrow import fs

from spark_abs.model import StageId
from spark_abs.plan.specs import JobSpec, TrackedSource
from spark_abs.snapshots.schema_log import SCHEMA_LOGS
from spark_abs.stages.native import native_of
from spark_abs.store.control import PATH as CONTROL
from spark_abs.store.control import Control


def tracks_schemas(job: JobSpec) -> bool:
    """Say whether a stage of a job has sources whose schemas Delta tracks."""
    return any(isinstance(given, TrackedSource) for spec in job.stages.values() for given in spec.inputs)


@contextmanager
def copied_logs(job: JobSpec) -> Iterator[Callable[[StageId], str]]:
    """Copy the schema logs of all stages to a temporary place for drafts, removed after the block."""
    if not tracks_schemas(job):
        yield lambda _: ""
        return
    with tempfile.TemporaryDirectory(prefix="spark-abs-draft-") as directory:
        if job.root.place(CONTROL).exists():
            state = Control.open(job.root).state
            for stage in job.stages:
                logs = native_of(job.root, state, stage).below(SCHEMA_LOGS)
                if logs.exists():
                    target = f"{directory}/{stage}"
                    fs.copy_files(logs.path, target, source_filesystem=logs.fs, destination_filesystem=_LOCAL)
        yield lambda stage: f"file:{directory}/{stage}"


_LOCAL = fs.LocalFileSystem()
