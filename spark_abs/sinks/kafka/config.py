"""The options of a Kafka sink."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spark_abs.errors import UsageError
from spark_abs.sinks.environment import check_variables

_LONGEST = 249
"""The most letters that a topic's name may have."""


@dataclass(frozen=True, slots=True)
class Kafka:
    """A topic of Kafka that gets a record for each row of an output, after each checkpoint.

    Readers with `isolation.level=read_committed` see each record once. The class has names only, never a
    secret.

    Columns are those of Spark's own sink: `value`, and if wanted `key`, `topic`, `partition`, `headers`.
    """

    topic: str | None = None
    """The topic of all rows; None: each row names its topic in a column `topic`."""
    bootstrap: str | None = None
    """Brokers to ask first, as `host:9092,host:9092`. The root stores it, so it must hold no secret."""
    bootstrap_env: str = "KAFKA_BOOTSTRAP_SERVERS"
    """The name of an environment variable with these brokers, read if `bootstrap` is not given."""
    client_env: str | None = None
    """The name of an environment variable with librdkafka's settings as JSON: passwords, certificates.

    `bootstrap.servers` in it wins over `bootstrap_env`.
    """
    marker: str = "spark_abs_marker"
    """The beginning of the name of the compacted topic of marks; the names of sink and root follow."""
    transaction_rows: int = 500_000
    """The most rows of a transaction; an epoch with more rows takes several."""

    def __post_init__(self) -> None:
        check_variables(self.bootstrap_env, self.client_env)
        if self.transaction_rows < 1:
            raise UsageError("transaction_rows must be at least 1")
        for name, most in ((self.topic, _LONGEST), (self.marker, 150)):
            if name is not None and not is_topic(name, most):
                raise UsageError(f"{name!r} is not the name of a topic: letters, digits, '.', '_' and '-'")

    @property
    def target(self) -> str:
        """The topic as messages name it."""
        return self.topic or "of each row"


def is_topic(name: str, most: int = _LONGEST) -> bool:
    """Say whether a name is valid for a topic."""
    return bool(re.fullmatch(rf"[A-Za-z0-9._-]{{1,{most}}}", name)) and name not in (".", "..")
