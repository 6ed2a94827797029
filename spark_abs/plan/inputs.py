"""The inputs of a stage: checked when it is declared; static tables are pinned to their present version."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, cast, get_args

from spark_abs.errors import GraphError, UsageError
from spark_abs.model import MAIN_OUTPUT, PROVIDERS, checked_name
from spark_abs.plan.specs import (
    Feedback,
    Given,
    Input,
    Lookup,
    NamedJob,
    Output,
    TrackedSource,
    is_stream,
    listed_inputs,
)
from spark_abs.protocol.changes import Begin
from spark_abs.quantities import duration_ms
from spark_abs.spark.plans import PinnedTable, pin_version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def given_inputs(
    job: NamedJob, stage: str, inputs: Sequence[Given]
) -> tuple[tuple[Input, ...], tuple[PinnedTable, ...]]:
    """Check the inputs of a stage; returns them with static tables pinned, and the pinned tables.

    Raises:
        GraphError: an input is not valid or belongs to another job, or a lookup is beside more than one
            stream.
    """
    checked: list[Input] = []
    pinned = []
    for given in listed_inputs(stage, inputs):
        if isinstance(given, (Output, Feedback, Lookup)):
            if given.job is not job:
                said = given.channel if isinstance(given, Output) else given.name
                raise GraphError(
                    f"stage {stage!r} reads {said!r} of another job: a stage can only read channels of its "
                    "own job"
                )
            checked.append(given)
        elif hasattr(given, "isStreaming"):
            frame, table = cast("DataFrame", given), None
            if not frame.isStreaming:
                frame, table = pin_version(frame)
            checked.append(frame)
            pinned += [table] if table is not None else []
        elif callable(given):
            checked.append(TrackedSource(given))
        else:
            raise GraphError(f"stage {stage!r}: input {given!r} is neither a stage nor a DataFrame")
    _check_lookups(stage, checked)
    return tuple(checked), tuple(pinned)


def _check_lookups(stage: str, inputs: Sequence[Input]) -> None:
    names = [i.name for i in inputs if isinstance(i, Lookup)]
    for name in names:
        if names.count(name) > 1:
            raise GraphError(f"stage {stage!r} reads lookup {name!r} twice: alias it in the function")
    streams = [i for i in inputs if is_stream(i)]
    if names and len(streams) != 1:
        raise GraphError(
            f"stage {stage!r} reads lookup {names[0]!r} beside {len(streams)} streams: its function is "
            "applied to each batch of one stream; join or union the streams in a stage before it"
        )


def declared_lookup(job: NamedJob, name: str, table: str, refresh: str) -> Lookup:
    """Return the lookup of a table, as it is declared.

    Raises:
        UsageError: `refresh` is neither `batch` nor `never` nor a duration.
    """
    known = {"batch": 0, "never": None}
    try:
        age = known[refresh] if refresh in known else duration_ms(refresh)
    except ValueError:
        raise UsageError(
            f"lookup {name!r}: refresh must be 'batch', 'never' or a duration such as '30s', found "
            f"{refresh!r}"
        ) from None
    return Lookup(job, checked_name(name, "lookup"), table, age)


def refuse_options(
    stage: str,
    outputs: Collection[str],
    state_provider: object,
    shuffle_partitions: int | None,
    begin: object,
) -> None:
    """Refuse invalid options of a stage.

    Raises:
        GraphError: the message names the option.
    """
    if MAIN_OUTPUT in outputs:
        raise GraphError(
            f"stage {stage!r}: output {MAIN_OUTPUT!r} is the name of the stage's main output, choose a "
            "different name"
        )
    if state_provider is not None and state_provider not in PROVIDERS:
        raise GraphError(
            f"stage {stage!r}: state_provider {state_provider!r} is not one of {', '.join(PROVIDERS)}"
        )
    if shuffle_partitions is not None and shuffle_partitions < 1:
        raise GraphError(f"stage {stage!r}: shuffle_partitions must be at least 1")
    if begin not in get_args(Begin):
        raise GraphError(f"stage {stage!r}: begin={begin!r} is not one of {get_args(Begin)}")
