"""Inputs that were read since a checkpoint: a restore reads them again.

After a restore Spark lists a directory anew, and would silently skip a file that was deleted since. The log
of the file source, in the native checkpoint, has the files that were read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from spark_abs.errors import SinkFailed, SinkUnreachable, UsageError
from spark_abs.manifest import Manifest, SourceShape, StageShape, StageSnapshot
from spark_abs.model import StageId, is_number
from spark_abs.protocol.attempt import Attempt
from spark_abs.protocol.control import ControlState
from spark_abs.protocol.sources import match
from spark_abs.restore.delta_inputs import DeltaInputs, delta_inputs
from spark_abs.snapshots.file_sources import is_there, logged_after
from spark_abs.snapshots.kafka_offsets import KAFKA, Available, Partition, kafka_offsets, missing
from spark_abs.snapshots.layout import file_source_offset, parse_offsets
from spark_abs.store.root import Root

BOOTSTRAP_ENV, CLIENT_ENV = "KAFKA_BOOTSTRAP_SERVERS", "KAFKA_CLIENT_SETTINGS"
"""Names the brokers if the root does not: settings of librdkafka as JSON, as for `Kafka`."""


@dataclass(frozen=True, slots=True)
class KafkaInputs:
    """Whether Kafka has the records that a restore reads again."""

    lost: tuple[str, ...] = ()
    """Partitions that lack records, each with the offsets."""
    unknown: tuple[str, ...] = ()
    """Stages whose brokers could not be asked, each with the reason."""


@dataclass(frozen=True, slots=True)
class InputsSince:
    """The files that were read since a checkpoint."""

    files: Mapping[StageId, int] = field(default_factory=dict)
    """How many files each stage reads again."""
    lost: tuple[str, ...] = ()
    """The files that are gone, each once."""
    left: tuple[str, ...] = ()
    """Sources that stages no longer read, each once: it is not known which files were read since."""
    kafka: KafkaInputs = field(default_factory=KafkaInputs)
    """The records that are read again from Kafka."""
    delta: DeltaInputs = field(default_factory=DeltaInputs)
    """The rows that are read again from Delta tables."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A file source of a stage at the checkpoint."""

    stage: StageId
    place: int
    """The index of the source at the checkpoint."""
    name: str
    until: int
    """The newest batch of its own log that the checkpoint covers."""


def inputs_since(
    root: Root, manifest: Manifest, state: ControlState, known: Sequence[Manifest], *, ask_kafka: bool
) -> InputsSince:
    """Return the inputs that a restore to `manifest` reads again.

    These are the files that the attempt of the checkpoint has read since, and if the checkpoint lies on the
    current path, the current attempt. Files that the stage skips are left out. Lost native checkpoints tell
    no files, and files on a store that needs further options are not looked for.

    Args:
        root: the job's root.
        manifest: the checkpoint to go back to.
        state: the content of `control/`.
        known: every manifest that can be read, for the inputs that stages of older attempts had.
        ask_kafka: whether to ask the brokers.
    """
    wanted = {manifest.cut.attempt}
    if state.on_path(manifest.cut.attempt, manifest.cut.checkpoint):
        wanted.add(state.attempt.id)
    attempts = [attempt for attempt in state.attempts if attempt.id in wanted]
    read: dict[StageId, set[str]] = {stage.stage: set() for stage in manifest.stages}
    left: set[str] = set()
    for attempt in attempts:
        shapes = attempt.shapes or _newest_shapes(attempt, known)
        for source in (s for stage in manifest.stages for s in _file_sources(manifest, stage)):
            place = _place_now(source, _sources_of(manifest.graph, source.stage), shapes)
            if place is None:
                left.add(source.name)
                continue
            native = root.native(attempt.natives, attempt.id, attempt.directory(source.stage))
            logged = logged_after(native.below(f"sources/{place}"), source.until)
            read[source.stage] |= {entry.path for entry in logged}
    for skipped in state.skipped:
        read.get(skipped.stage, set()).discard(skipped.file)
    lost = sorted(path for path in set().union(*read.values()) if _is_gone(root, path))
    files = {stage: len(paths) for stage, paths in read.items() if paths}
    kafka = kafka_inputs(manifest) if ask_kafka else KafkaInputs()
    return InputsSince(files, tuple(lost), tuple(sorted(left)), kafka, delta_inputs(root, manifest))


def _file_sources(manifest: Manifest, stage: StageSnapshot) -> Iterator[_Source]:
    shapes = _sources_of(manifest.graph, stage.stage)
    for key, offset in parse_offsets(stage.offsets).offsets.items() if stage.offsets else ():
        until = file_source_offset(offset)
        if until is not None and is_number(key):
            place = int(key)
            name = str(shapes[place]) if place < len(shapes) else "a file source"
            yield _Source(stage.stage, place, f"{name} of stage {stage.stage!r}", until)


def _newest_shapes(attempt: Attempt, known: Sequence[Manifest]) -> tuple[StageShape, ...]:
    """Return the stages of an older attempt, from its newest checkpoint."""
    newest = max((m for m in known if m.attempt == attempt.id), key=lambda m: m.id, default=None)
    return newest.graph if newest is not None else ()


def _sources_of(shapes: Sequence[StageShape], stage: StageId) -> tuple[SourceShape, ...]:
    return next((shape.sources for shape in shapes if shape.stage == stage), ())


def _place_now(source: _Source, then: Sequence[SourceShape], shapes: Sequence[StageShape]) -> int | None:
    """Return the index of a source in the stage's native checkpoint now, None if it is no longer read.

    A start with other inputs changes the indices. Earlier versions did not record the inputs of a stage: then
    the index is the old one.
    """
    now = _sources_of(shapes, source.stage)
    if not now or source.place >= len(then):
        return source.place
    return match(now, then)[source.place]


def _is_gone(root: Root, uri: str) -> bool:
    """Say whether a file is surely gone; its name is as Spark writes it."""
    try:
        return not is_there(root.storage, uri)
    except (pa.ArrowException, OSError, UsageError):
        return False


def kafka_inputs(manifest: Manifest) -> KafkaInputs:
    """Ask the brokers of all Kafka sources whether they have the records after a checkpoint."""
    lost: list[str] = []
    unknown: list[str] = []
    for stage, source, wanted in _kafka_sources(manifest):
        try:
            lost += missing(wanted, _available(source.at, wanted))
        except (UsageError, SinkFailed, SinkUnreachable) as error:
            partitions = ", ".join(
                f"{topic}[{number}] {at}" for (topic, number), at in sorted(wanted.items())
            )
            unknown.append(
                f"stage {stage!r} reads Kafka again from {partitions}; whether the records are there is not "
                f"known: {error}"
            )
    return KafkaInputs(tuple(lost), tuple(unknown))


def _kafka_sources(manifest: Manifest) -> Iterator[tuple[StageId, SourceShape, Mapping[Partition, int]]]:
    """Iterate the Kafka sources of stages, with the offsets from which each is read again."""
    shapes = {shape.stage: shape.sources for shape in manifest.graph}
    for stage in manifest.stages:
        declared = shapes.get(stage.stage, ())
        for place, offset in parse_offsets(stage.offsets).offsets.items() if stage.offsets else ():
            if is_number(place) and int(place) < len(declared):
                source = declared[int(place)]
                if source.kind == KAFKA and (wanted := kafka_offsets(offset)):
                    yield stage.stage, source, wanted


def _available(at: str, wanted: Mapping[Partition, int]) -> Mapping[Partition, Available]:
    try:
        from spark_abs.sinks.kafka.client import connection
    except ImportError:
        raise UsageError("it needs confluent-kafka: pip install 'spark-abs[kafka]'") from None
    client_env = CLIENT_ENV if CLIENT_ENV in os.environ else None
    return connection(at or None, BOOTSTRAP_ENV, client_env).available(wanted)
