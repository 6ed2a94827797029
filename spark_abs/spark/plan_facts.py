"""The facts that a job needs from the analysed plan of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_abs.manifest import OperatorShape, SourceShape
from spark_abs.model import ChannelId
from spark_abs.spark.kafka_source import KafkaSource

_FUNCTION = "stateful function "


def function_name(uid: str) -> str:
    """Return the name of the plan node that packs the rows of a stateful function."""
    return f"{_FUNCTION}{uid}"


def function_in(name: str) -> str | None:
    """Return the uid of the stateful function of this package below a plan node; None without one."""
    return name.removeprefix(_FUNCTION) if name.startswith(_FUNCTION) else None


@dataclass(frozen=True, slots=True)
class Watermark:
    """A `withWatermark` in a stage's plan, and the channels whose rows pass it."""

    column: str
    delay_ms: int
    channels: tuple[ChannelId, ...]


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """The facts in Spark's analysed plan of a stage."""

    sources: tuple[str, ...]
    """Names of its native streaming sources."""
    channels: tuple[ChannelId, ...]
    """Channels that it reads, with repeats."""
    watermarks: tuple[Watermark, ...]
    holds_rows: bool
    """Whether an operator emits rows only after the watermark has passed them."""
    streaming: bool
    static_tables: Mapping[str, int]
    """Delta tables read as static frames, and their versions."""
    moving_tables: tuple[str, ...] = ()
    """The static tables that Spark would read anew in every batch."""
    lookup_tables: tuple[str, ...] = ()
    """The Delta tables of its lookups."""
    keeps_state: bool = False
    """Whether any operator has state."""
    functions: tuple[str, ...] = ()
    """The uid of the stateful function in each `transformWithState`, in Spark's numbering; empty if it is not
    a function of this package."""
    streamed_tables: tuple[str, ...] = ()
    """Delta tables read as streams."""
    streams: tuple[SourceShape, ...] = ()
    """The streams that it reads, in the order of Spark's offset files."""
    operators: tuple[OperatorShape, ...] = ()
    """Its stateful operators, from the root of the plan downwards."""
    by_place: tuple[tuple[str, ...], ...] | None = None
    """See `StageShape.by_place`."""
    columns: Mapping[ChannelId, frozenset[int]] | None = None
    """The positions of the columns that it uses of each channel; None if it reads whole rows."""
    kafka: tuple[KafkaSource, ...] = ()
    """Its Kafka sources."""
    repeatable: bool = True
    """Whether the same input always gives the same rows: nothing in it is random or reads changing data."""
    row_by_row: bool = False
    """Whether a batch that reads no rows has none: no operator keeps any, or sees more than single rows."""
