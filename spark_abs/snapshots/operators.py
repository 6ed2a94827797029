"""The stateful operators of a stage at a checkpoint, and the readable parts of their state. No JVM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spark_abs.codec import decoded
from spark_abs.errors import DamageError
from spark_abs.manifest import StageSnapshot, StoredFile
from spark_abs.snapshots.layout import parse_operator
from spark_abs.snapshots.packs import PackReader
from spark_abs.snapshots.state_storage import locate
from spark_abs.store.root import Root

JOIN = "symmetricHashJoin"
TRANSFORM = frozenset(
    ("transformWithStateExec", "transformWithStateInPandasExec", "transformWithStateInPySparkExec")
)
HEADS, SEGMENTS = "heads", "segments"
"""The state variables of a stateful function of this package."""
_METADATA = re.compile(r"state/(\d+)/_metadata/(?:metadata|v2/(\d+)(?:_.*)?)")
_INTERNAL, _TIMERS = "$", ("$procTimers", "$eventTimers")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an operator's state that Spark's state reader returns as one frame."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    """Options for the reader."""
    identity: tuple[str, ...] = ("key",)
    """The columns that identify a row; empty if rows may repeat."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A stateful operator."""

    id: int
    name: str
    parts: tuple[Part, ...]
    ours: bool = False
    """Whether it runs a stateful function of this package: its state is then read as rows of keys, not as
    parts."""
    function: str = ""
    """The uid of that function; empty if its state was removed or the uid is not recorded."""


def operators_of(root: Root, snapshot: StageSnapshot) -> tuple[Operator, ...]:
    """Read the operators of a stage's snapshot, by id.

    Raises:
        DamageError: bytes are missing from `state/`, are altered, or do not have Spark's format.
        Refused: operator metadata of a version that is not known.
    """
    newest: dict[int, tuple[int, StoredFile]] = {}
    for file in snapshot.files:
        if match := _METADATA.fullmatch(file.path):
            number, batch = int(match[1]), int(match[2] or 0)
            newest[number] = max(newest.get(number, (-1, file)), (batch, file), key=lambda found: found[0])
    texts = stored_texts(root, [file for _, file in newest.values()])
    found = (_operator(texts[file.path]) for _, (_, file) in sorted(newest.items()))
    functions = {o.operator_id: o.function for o in snapshot.operators}
    return tuple(replace(o, function=functions.get(o.id, "")) for o in found)


def stored_texts(root: Root, files: Sequence[StoredFile]) -> dict[str, str]:
    """Read small files of a manifest from `state/`, verified, by their paths.

    Raises:
        DamageError: bytes are missing or altered.
    """
    found = {}
    with PackReader(root) as reader:
        where = locate(root, reader, files)
        for file in files:
            chunks = reader.pieces(where[file.sha256, file.at.pack], file.sha256, file.size)
            found[file.path] = decoded(b"".join(chunks), file.path)
    return found


def _operator(text: str) -> Operator:
    metadata = parse_operator(text)
    if metadata.name == JOIN:
        sides = (Part(side, {"joinSide": side}, ()) for side in ("left", "right"))
        return Operator(metadata.operator_id, metadata.name, tuple(sides))
    if metadata.name not in TRANSFORM:
        stores = [store.name for store in metadata.stores]
        parts = (Part(s, {} if s == "default" else {"storeName": s}) for s in stores)
        return Operator(metadata.operator_id, metadata.name, tuple(parts))
    properties = _properties(text)
    variables = {str(v["stateName"]): str(v["stateVariableType"]) for v in properties["stateVariables"]}
    named = {name: kind for name, kind in variables.items() if not name.startswith(_INTERNAL)}
    found = [Part(name, {"stateVarName": name}, _IDENTITY.get(kind, ())) for name, kind in named.items()]
    if any(name.startswith(_TIMERS) for name in variables):
        found.append(Part("timers", {"readRegisteredTimers": "true"}, ()))
    ours = named == {HEADS: _VALUE, SEGMENTS: _MAP}
    return Operator(metadata.operator_id, metadata.name, tuple(found), ours)


_VALUE, _MAP = "ValueState", "MapState"
_IDENTITY = {_VALUE: ("key",), _MAP: ("key", "user_map_key")}


def _properties(text: str) -> dict[str, Any]:
    try:
        plain = json.loads(json.loads(text.partition("\n")[2])["operatorPropertiesJson"])
        for variable in plain["stateVariables"]:
            _ = variable["stateName"], variable["stateVariableType"]
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(f"operator metadata: field {error} is missing or has the wrong type") from error
    return dict(plain)
