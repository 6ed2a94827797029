"""Settings as keyword arguments: what a type checker and an editor know about them.

Written from `settings.py` by `python -m tests.settings_keywords`; a test compares the two. A setting
that is None was not given.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class StorageSettings(TypedDict, total=False):
    """How an object store is reached."""

    endpoint: str | None
    """URL of an S3-compatible store other than Amazon's."""
    region: str | None
    """Region of the buckets."""
    access_key_id: str | None
    """Access key; set it in the environment."""
    secret_access_key: str | None
    """Secret of the access key; set it in the environment."""
    session_token: str | None
    """Token of a temporary access key; set it in the environment."""
    azure_account_key: str | None
    """Key of the Azure storage account."""
    azure_sas_token: str | None
    """SAS token for Azure, instead of the key."""
    azure_tenant_id: str | None
    """Tenant of a service principal of Azure."""
    azure_client_id: str | None
    """Id of the service principal."""
    azure_client_secret: str | None
    """Secret of the service principal."""
    azure_endpoint: str | None
    """URL of an emulator of Azure's blob storage."""
    google_endpoint: str | None
    """URL of an emulator of Google's storage."""
    allow_http: bool | None
    """Endpoints may be `http`; by default false."""


class LiveSettings(TypedDict, total=False):
    """What can be changed while a job runs."""

    interval: str | None
    """Time between the starts of two periodic checkpoints; by default 10s."""
    min_pause: str | None
    """Least time from the end of a checkpoint to the start of the next; wins over the interval; by default
    0s."""
    timeout: str | None
    """Age at which a checkpoint is aborted; by default 10m."""
    max_concurrent: int | None
    """Checkpoints that may be open at once; a savepoint never waits for another; by default 1."""
    mode: Literal["aligned", "unaligned", "at_least_once"] | None
    """How barriers pass a stage with several inputs or a backlog: `aligned`, `unaligned` or `at_least_once`;
    by default aligned."""
    aligned_timeout: str | None
    """Age at which an aligned checkpoint becomes unaligned, such as `30s`; by default off."""
    skip_unchanged: bool | None
    """A periodic checkpoint is skipped if the job has done nothing since the last completed one; by default
    true."""


class JobSettings(StorageSettings, LiveSettings, total=False):
    """All settings of a job."""

    alignment_limit: str | None
    """Uncompressed bytes that may queue up behind barriers, such as `64mb`; beyond it the checkpoint is
    aborted and processing continues; by default unlimited."""
    synchronous: bool | None
    """Processing waits until state is copied; only for comparisons; by default false."""
    tolerable_failures: int | Literal["unlimited"] | None
    """Checkpoints that may fail in a row before the job fails; savepoints do not count; by default
    unlimited."""
    keep: int | str | None
    """How many of the newest checkpoints to keep, and how close together older ones up to an age, such as `3
    24h:all 7d:1h`; savepoints do not count; by default 3 1h:10m."""
    max_bytes_per_batch: str | None
    """Uncompressed bytes that a batch reads from a channel; at least one entry is read; by default 512mb."""
    max_entries_per_batch: int | None
    """Entries that a batch reads from a channel; by default 100."""
    partition_bytes: str | None
    """Uncompressed bytes of a channel that one task reads; at least one file is read; by default 64mb."""
    poll_interval: str | None
    """Least time between two polls of a channel; auto: 10ms on a disk, 500ms in an object store; by default
    auto."""
    capacity_bytes: str | None
    """Unread bytes in a channel, uncompressed, at which its producer waits; unlimited: it never waits; by
    default 2gb."""
    capacity_entries: int | Literal["unlimited"] | None
    """Unread entries with rows at which the producer waits; unlimited: it never waits; by default 1000."""
    lease_timeout: str | None
    """Silence after which a run on another machine, or in another container, counts as dead; by default
    30s."""
    require_root: bool | None
    """A start refuses to create a new root, so that an unmounted disk is noticed; by default false."""
    stop_timeout: str | None
    """Longest time of a stop by a signal, after which the process ends at once; also how long the end of a
    run waits for an unreachable sink outside; by default 25s."""
    stop_savepoint: str | None
    """Savepoint that a stop by a signal takes: this name, a hyphen and the number of the run; empty:
    none."""
    watermark_check: Literal["error", "warn", "off"] | None
    """Reaction to a watermark delay that is certainly too short for the stage before: `error`, `warn` or
    `off`; by default error."""
    restart_strategy: Literal["none", "fixed-delay", "exponential-delay", "failure-rate"] | None
    """Which failed stages are restarted alone: `none`, `fixed-delay`, `exponential-delay` or `failure-rate`,
    as in Flink; failures are counted over all stages of the job, within a run; by default none."""
    restart_delay: str | None
    """Time from a failure to the restart; for `exponential-delay` the first delay; by default 1s."""
    restart_attempts: int | Literal["unlimited"] | None
    """Restarts before the job fails, not for `failure-rate`; with every strategy also the restarts of one
    stage at the same batch; unlimited: any number; by default 10."""
    restart_max_delay: str | None
    """`exponential-delay`: the longest delay; by default 1m."""
    restart_multiplier: float | None
    """`exponential-delay`: factor from each delay to the next; by default 1.5."""
    restart_jitter: float | None
    """`exponential-delay`: fraction by which a delay is made longer or shorter at random; by default 0.1."""
    restart_reset_after: str | None
    """`exponential-delay`: time without a failure after which the delay starts at `restartDelay` again; by
    default 1h."""
    restart_failures: int | None
    """`failure-rate`: failures that are allowed within `restartInterval`; by default 1."""
    restart_interval: str | None
    """`failure-rate`: the time within which failures are counted; by default 1m."""
    copy_threads: int | None
    """Threads of the job that copy state files; by default 4."""
    max_group_bytes: str | None
    """Largest state of a Python function in one key group; beyond it the batch fails; by default 256mb."""
    cache_bytes: str | None
    """Memory of a Python worker for state of Python functions; by default 256mb."""
    native_root: str | None
    """Directory for Spark's own checkpoints, on a disk that driver and executors share; empty: below the
    root."""
