"""The run that is alive at a root, by its lease."""

from __future__ import annotations

import os
from dataclasses import dataclass

from spark_abs.model import RunId
from spark_abs.settings import Settings
from spark_abs.store.lease import read_lease
from spark_abs.store.root import Root


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that is at work."""

    run: RunId
    host: str
    pid: int
    heard_ms: int
    """Since it last renewed its lease."""


def lease_timeout_ms() -> int:
    """Return the silence after which a run on another host counts as dead, where no job says it itself.

    Raises:
        ConfigError: a variable of the environment is no setting or cannot be read.
    """
    return Settings.resolve(None, os.environ, {}, {}).lease_timeout_ms


def live_run(root: Root, now_ms: int, timeout_ms: int) -> LiveRun | None:
    """Return the run whose lease holds, None if there is none.

    Args:
        root: the root of the job.
        now_ms: the wall clock.
        timeout_ms: silence after which a run on another host counts as dead (`spark.abs.run.leaseTimeout`).
    """
    lease = read_lease(root)
    if lease is None or not lease.alive(now_ms, timeout_ms):
        return None
    return LiveRun(lease.run, lease.host, lease.pid, max(0, now_ms - lease.beat_ms))
