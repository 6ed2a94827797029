"""What the module `kind` in the folder of a kind of sinks says to the rest of the package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from spark_abs.errors import UsageError
from spark_abs.model import RunId, Version
from spark_abs.protocol.outside import Mark, Owner
from spark_abs.sinks.two_phase import TwoPhaseSink
from spark_abs.store.root import Root
from spark_abs.store.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Session = Callable[[], "SparkSession"]
"""Returns a Spark session; called only where Spark is needed."""
Config = TypeVar("Config")


def no_session() -> SparkSession:
    """Stand for a session where none is needed, because nothing is changed."""
    raise UsageError("this sink needs a Spark session, and none was given")


class SinkTable(ABC):
    """A Delta table that gets its rows after checkpoints, as a command reads it; needs no Spark.

    Its methods raise `FileNotFoundError` if there is no table, `Fenced` if another root has taken it over,
    and `DamageError` if its log does not go back far enough.
    """

    path: str
    """Where the table is."""
    name: str
    """Its name in a catalog; empty if it was declared by its path."""

    @abstractmethod
    def version_at(self, owner: Owner, cut: Mark, ahead: bool) -> Version | None:
        """Return the version with exactly the rows that a checkpoint covers, None if there is none.

        Args:
            owner: whose sink.
            cut: of the checkpoint in the sink's channel.
            ahead: whether the sink is still to come to cuts after its mark, as on the current path.
        """

    @abstractmethod
    def had_left(self, owner: Owner, run: RunId) -> bool:
        """Say whether the sink had left the job when a run began."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[Config]):
    """A kind of sinks. Its module needs no extra of the package: `sink` imports the modules that do."""

    title: str
    """The system as people call it."""
    config: type[Config]
    """A frozen dataclass that can be made from a name alone. `control/` keeps it as JSON."""
    sink: Callable[[Config, Root, Session], TwoPhaseSink]
    """Makes a sink; an `ImportError` names the extra of the package that is not installed."""
    require_supported: Callable[[str], None] | None = None
    """Refuses, by a `UsageError` with the way on, JSON of an earlier version that this version cannot use.
    None: there is none."""
    table: Callable[[Config, Storage], SinkTable] | None = None
    """Returns the Delta table that a sink writes; None: it writes none."""
