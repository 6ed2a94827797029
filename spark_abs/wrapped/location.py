"""The checkpoint location and the settings of a wrapped query."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Unpack

from spark_abs.compatibility.inspection import refuse_wrapped
from spark_abs.errors import AttemptNotReady, UsageError
from spark_abs.model import CheckpointMode, StageId, checked_name
from spark_abs.protocol.control import WRAPPED_JOB
from spark_abs.settings import Settings
from spark_abs.settings_keywords import StorageSettings
from spark_abs.snapshots.adopt import adopt_native
from spark_abs.stages.native import clear_unplanned
from spark_abs.store.clock import now_ms
from spark_abs.store.control import Control
from spark_abs.store.lease import read_lease
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage


def checkpoint_location(
    root: str, stage: str, *, adopt: str | None = None, **storage: Unpack[StorageSettings]
) -> str:
    """Return the checkpoint location of a wrapped query in the current attempt of its root.

    Call this at every start of the query: after a restore the location is another directory.

    Args:
        root: the directory or URI for checkpoints; created if it does not exist.
        stage: the query's uid.
        adopt: the checkpoint location that the query has used so far. The first call copies it and does not
            change it; the query resumes where it was. The query must have stopped.
        storage: options of an object store that the environment does not have.

    Raises:
        AttemptNotReady: a restore was begun and not finished.
        Refused: the root belongs to a job.
        DamageError: the location to adopt is not a checkpoint that a query can start from.
        UsageError: `spark-abs check` runs this script.
    """
    refuse_wrapped()
    at, name = Root(root, Storage.given(arguments=storage)), StageId(checked_name(stage, "stage"))
    settings = wrapped_settings({}, {})
    attempt = Control.create(at, WRAPPED_JOB, now_ms(), settings.require_root).state.attempt
    if not attempt.ready:
        raise AttemptNotReady(
            f"a restore to checkpoint {attempt.checkpoint} is not finished: run `{attempt.command}` again"
        )
    native = at.native(attempt.natives, attempt.id, attempt.directory(name))
    if adopt is not None:
        adopt_native(at.storage.place(adopt), native)
    lease = read_lease(at)
    if lease is None or not lease.alive(now_ms(), settings.lease_timeout_ms):
        clear_unplanned(native)
    return native.uri


def wrapped_settings(spark_conf: Mapping[str, str], settings: Mapping[str, object]) -> Settings:
    """Return the settings of wrapped queries; the later place wins, as for jobs.

    Raises:
        ConfigError: a name is unknown, or a value cannot be read.
        UsageError: a setting is for jobs only.
    """
    resolved = Settings.resolve(None, os.environ, spark_conf, settings)
    if resolved.native_root:
        raise UsageError("native_root is for jobs: give the query spark_abs.checkpoint_location(root, stage)")
    if resolved.mode is not CheckpointMode.ALIGNED or resolved.aligned_timeout_ms is not None:
        raise UsageError(
            "mode and aligned_timeout are for jobs: wrapped queries have no channels between them, so no "
            "barrier waits and no data is in flight; leave them out"
        )
    return resolved
