"""Input files that were read since a checkpoint: a restore reads them again.

Spark lists a directory anew after the positions that it goes back to: a file that was deleted since would
be passed over in silence. What was read is in the file source's own log, below the native checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlparse

import pyarrow as pa
from pyarrow import fs

from spark_abs.errors import UsageError
from spark_abs.manifest import Manifest, StageSnapshot
from spark_abs.model import StageId
from spark_abs.protocol.attempt import Attempt
from spark_abs.protocol.control import ControlState
from spark_abs.restore.kafka_inputs import KafkaInputs, kafka_inputs
from spark_abs.snapshots.layout import file_source_offset, parse_offsets, source_log_file
from spark_abs.store.root import Root
from spark_abs.store.storage import Place


@dataclass(frozen=True, slots=True)
class InputsSince:
    """The files that were read since a checkpoint."""

    files: Mapping[StageId, int] = field(default_factory=dict)
    """How many files each stage reads again."""
    lost: tuple[str, ...] = ()
    """Those that are not there any more, each once."""
    kafka: KafkaInputs = field(default_factory=KafkaInputs)
    """What is read again from Kafka."""


def inputs_since(root: Root, manifest: Manifest, state: ControlState, *, ask_kafka: bool) -> InputsSince:
    """Return what a restore to `manifest` has to read again.

    Known are those that the checkpoint's own attempt has read, and if it lies on the current path, the
    current attempt. Native checkpoints that are gone say nothing, nor do files on a store that cannot be
    asked without further options.
    """
    wanted = {manifest.cut.attempt}
    if state.on_path(manifest.cut.attempt, manifest.cut.checkpoint):
        wanted.add(state.attempt.id)
    attempts = [attempt for attempt in state.attempts if attempt.id in wanted]
    read = {
        stage.stage: {path for attempt in attempts for path in _read_since(root, stage, attempt)}
        for stage in manifest.stages
    }
    lost = sorted(path for path in set().union(*read.values()) if _is_gone(root, path))
    files = {stage: len(paths) for stage, paths in read.items() if paths}
    return InputsSince(files, tuple(lost), kafka_inputs(manifest) if ask_kafka else KafkaInputs())


def _read_since(root: Root, stage: StageSnapshot, attempt: Attempt) -> Iterator[str]:
    native = root.native(attempt.natives, attempt.id, attempt.directory(stage.stage))
    for source, offset in parse_offsets(stage.offsets).offsets.items() if stage.offsets else ():
        until = file_source_offset(offset)
        if until is not None and source.isdigit():
            yield from _logged_after(native.below(f"sources/{source}"), until)


def _logged_after(log: Place, until: int) -> Iterator[str]:
    """Iterate the files that a file source's log gives to batches of it after `until`."""
    for info in log.fs.get_file_info(fs.FileSelector(log.path, allow_not_found=True)):
        file = source_log_file(info.base_name)
        if file is None or file.number <= until:
            continue
        for line in (log.read(info.base_name) or b"").decode().splitlines()[1:]:
            entry = json.loads(line)
            if int(entry["batchId"]) > until:
                yield str(entry["path"])


def _is_gone(root: Root, uri: str) -> bool:
    """Say whether a file, named as Spark does, is known not to be there."""
    parsed = urlparse(uri)
    location = unquote(parsed.path if parsed.scheme == "file" else uri)
    try:
        return not root.storage.place(location).exists()
    except (pa.ArrowException, OSError, UsageError):
        return False
