"""The options of a PostgreSQL sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING

from spark_abs.errors import UsageError
from spark_abs.protocol.change_data import LAST_WINS, ChangeOptions, change_options, listed
from spark_abs.quantities import duration_ms
from spark_abs.sinks.environment import check_variables
from spark_abs.sinks.postgres.schema import NAME, is_name

HISTORY = "_spark_abs_history"
"""Suffix of the table with the rows that were replaced."""
DELETED = "_spark_abs_deleted"
"""Suffix of the table of tombstones; as long as the other suffix."""

if TYPE_CHECKING:
    Columns = Sequence[str] | str
else:  # what is stored, and what it is once it is made
    Columns = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Postgres:
    """A table of PostgreSQL that gets the rows of an output once, after each checkpoint or with each batch.

    The class has names only, never a secret.

    Where the server is comes from libpq's own environment (`PGHOST`, `PGDATABASE`, `PGUSER`, `PGPASSWORD`,
    `PGPASSFILE`, …), a service of `pg_service.conf`, or a connection string in a variable of the environment.
    """

    table: str
    key: Columns = ()
    """Columns that identify a row; they need a unique index."""
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
    service: str | None = None
    """A service of `pg_service.conf`."""
    dsn_env: str | None = None
    """The name of an environment variable with the connection string."""
    password_env: str | None = None
    """The name of an environment variable with the password."""
    sequence_by: Columns | None = None
    """Columns of the table whose values order the changes of a key: the newest wins, one that comes late is
    dropped. Of upserts, as all that follows up to `tombstones_for`; without, the last that arrives wins."""
    apply_as_deletes: str | None = None
    """A predicate in Spark's SQL over the columns of the rows: those that meet it delete their key."""
    ignore_null_updates: bool = False
    """Whether a null keeps the value that is there."""
    except_columns: Columns = ()
    """Columns of the rows that the table does not have: those that only `apply_as_deletes` reads."""
    tombstones_for: str = "2d"
    """For how long a deleted key is remembered at least, in `<table>_spark_abs_deleted`, so that a change
    from before its delete is dropped, too."""
    scd_type: InitVar[int] = 1
    """1: a row for each key. Histories of keys, 2, are kept by Delta tables only."""

    def __post_init__(self, scd_type: int) -> None:
        if scd_type != 1:
            raise UsageError(
                f"table {self.table!r}: scd_type={scd_type!r} is for Delta tables: in PostgreSQL there is "
                "a row for each key, scd_type=1"
            )
        object.__setattr__(self, "key", listed(self.key))
        object.__setattr__(self, "except_columns", listed(self.except_columns))
        if self.sequence_by is not None:
            object.__setattr__(self, "sequence_by", listed(self.sequence_by))
        if self.mode not in ("append", "upsert"):
            raise UsageError(f"mode={self.mode!r} is neither 'append' nor 'upsert'")
        if self.visible not in ("checkpoint", "batch"):
            raise UsageError(f"visible={self.visible!r} is neither 'checkpoint' nor 'batch'")
        if not self.key and (self.mode == "upsert" or self.history):
            raise UsageError(
                f"table {self.table!r}: {'history=True' if self.history else 'upsert'} needs key=[…], the "
                "columns that tell rows apart"
            )
        check_variables(self.dsn_env, self.password_env)
        self._check_changes()
        named = (
            (self.table, "table"),
            (self.schema, "schema"),
            *((k, "column") for k in (*self.key, *self.changes.sequence_by)),
        )
        for name, what in named:
            if not is_name(name):
                raise UsageError(
                    f"{name!r} is not the name of a {what}: 1 to {NAME} bytes of UTF-8, none of them NUL"
                )
        if (self.history or self.changes.keeps_tombstones) and len(self.table.encode()) > NAME - len(HISTORY):
            raise UsageError(f"table {self.table!r}: its name is too long for one with {HISTORY!r} after it")

    def _check_changes(self) -> None:
        if self.changes == LAST_WINS or self.mode == "upsert":
            change_options(f"table {self.table!r}", self.key, self.changes)
        else:
            raise UsageError(
                f"table {self.table!r}: sequence_by, apply_as_deletes and the other words for changes say "
                "how rows are merged by key: they go with mode='upsert'"
            )

    @property
    def changes(self) -> ChangeOptions:
        """How the rows of a key are applied."""
        try:
            tombstones_ms = duration_ms(self.tombstones_for)
        except ValueError as error:
            raise UsageError(
                f"table {self.table!r}: tombstones_for={self.tombstones_for!r}: {error}"
            ) from None
        return ChangeOptions(
            listed(self.sequence_by),
            (self.apply_as_deletes or "").strip(),
            self.ignore_null_updates,
            except_columns=listed(self.except_columns),
            tombstones_ms=tombstones_ms,
        )

    @property
    def folds(self) -> bool:
        """Whether changes of a key are applied by more than the order of their arrival."""
        changes = self.changes
        return bool(changes.sequence_by or changes.apply_as_deletes or changes.ignore_null_updates)

    @property
    def target(self) -> str:
        """The table as messages name it."""
        return f"{self.schema}.{self.table}"
