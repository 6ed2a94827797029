"""The settings of a run that may change while it runs."""

from __future__ import annotations

from collections.abc import Mapping

from spark_abs.protocol.trigger import TriggerSettings
from spark_abs.settings import Settings


class DynamicSettings:
    """The settings as they are now. Changed from the coordinator's thread, read from any.

    Nothing of it outlives the run: the next start reads the job's own configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self.now = settings

    def times(self) -> TriggerSettings:
        """Return what the coordinator decides by."""
        now = self.now
        return TriggerSettings(
            now.interval_ms,
            now.min_pause_ms,
            now.timeout_ms,
            now.tolerable_failures,
            now.max_concurrent,
            now.mode,
            now.aligned_timeout_ms,
        )

    def change(self, given: Mapping[str, object]) -> str:
        """Change some and say what was changed; empty if nothing was.

        Raises:
            ConfigError: one cannot be set, or not to this.
        """
        before, self.now = self.now, self.now.changed(given)
        return before.differences(self.now)
