"""What a job says of a table of PostgreSQL that takes rows."""

from __future__ import annotations

from dataclasses import dataclass

from spark_abs.errors import UsageError
from spark_abs.sinks.postgres_schema import NAME, is_name

HISTORY = "_spark_abs_history"
"""After the table's name: the table of what its rows replaced."""


@dataclass(frozen=True, slots=True)
class Postgres:
    """A table of PostgreSQL that takes the rows of an output; names only, never a secret.

    Where the server is comes from libpq's own environment (`PGHOST`, `PGDATABASE`, `PGUSER`, `PGPASSWORD`,
    `PGPASSFILE`, …), a service of `pg_service.conf`, or a connection string in a variable of the environment.
    """

    table: str
    key: tuple[str, ...] = ()
    """Columns that tell rows apart; a unique index must be on them."""
    mode: str = "append"
    """`append` adds each row. `upsert` replaces the row of the same key; the last of an epoch counts."""
    schema: str = "public"
    """Of the table, and of the table of marks, `spark_abs_marker`."""
    history: bool = False
    """Keep what each epoch changed, in `<table>_spark_abs_history`, so that a restore takes it back: for as
    long as there is a checkpoint before it. Needs a key."""
    visible: str = "checkpoint"
    """When rows are seen: `checkpoint` sends them after each completed one, `batch` with each micro-batch of
    their stage. A restore then finds more of them after its checkpoint; with `history` it undoes them."""
    prepared: bool = False
    """Prepare each epoch with `PREPARE TRANSACTION` before the mark says that it counts, then commit it: the
    mark is not locked while the rows are written. Needs `max_prepared_transactions` of the server."""
    service: str | None = None
    """A service of `pg_service.conf`."""
    dsn_env: str | None = None
    """The name of an environment variable with the connection string."""
    password_env: str | None = None
    """The name of an environment variable with the password."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", tuple(self.key))
        if self.mode not in ("append", "upsert"):
            raise UsageError(f"mode={self.mode!r} is neither 'append' nor 'upsert'")
        if self.visible not in ("checkpoint", "batch"):
            raise UsageError(f"visible={self.visible!r} is neither 'checkpoint' nor 'batch'")
        if not self.key and (self.mode == "upsert" or self.history):
            raise UsageError(
                f"table {self.table!r}: {'history=True' if self.history else 'upsert'} needs key=[…], the "
                "columns that tell rows apart"
            )
        for variable in (self.dsn_env, self.password_env):
            if variable is not None and not variable.replace("_", "a").isalnum():
                raise UsageError(f"{variable!r} is not the name of an environment variable")
        named = ((self.table, "table"), (self.schema, "schema"), *((k, "column") for k in self.key))
        for name, what in named:
            if not is_name(name):
                raise UsageError(
                    f"{name!r} is not the name of a {what}: 1 to {NAME} bytes of UTF-8, none of them NUL"
                )
        if self.history and len(self.table.encode()) > NAME - len(HISTORY):
            raise UsageError(f"table {self.table!r}: its name is too long for one with {HISTORY!r} after it")

    @property
    def target(self) -> str:
        """The table as messages name it."""
        return f"{self.schema}.{self.table}"
