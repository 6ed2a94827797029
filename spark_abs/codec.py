"""Frozen dataclasses to JSON and back, strictly: what storage holds is not trusted."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin

from spark_abs.errors import DamageError

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Turn a dataclass, and what it holds, into what `json.dumps` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    return value


def to_json(value: Any) -> str:
    """Encode a dataclass as compact JSON."""
    return json.dumps(to_plain(value), separators=(",", ":"))


def from_json(cls: type[T], text: str | bytes) -> T:
    """Decode JSON text into `cls`.

    Raises:
        DamageError: the text is not JSON, or a field is missing or of another type.
    """
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise DamageError(f"not JSON where a {cls.__name__} should be: {error}") from error
    return from_plain(cls, plain)


def from_plain(cls: type[T], plain: Any) -> T:
    """Decode parsed JSON into `cls`. Fields it does not know are ignored, types are checked."""
    return typing.cast(T, _decode(cls, plain, cls.__name__))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(kind: Any, plain: Any, where: str) -> Any:
    kind = getattr(kind, "__supertype__", kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, plain, where)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if plain is None and type(None) in args:
            return None
        (inner,) = [arg for arg in args if arg is not type(None)]
        return _decode(inner, plain, where)
    if origin is tuple and isinstance(plain, list):
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(plain))
    if origin in (dict, Mapping) and isinstance(plain, dict):
        return {key: _decode(args[1], item, f"{where}.{key}") for key, item in plain.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(plain)
        except ValueError:
            raise DamageError(f"{where}: {plain!r} is not one of {[m.value for m in kind]}") from None
    if kind is Any or type(plain) is kind:
        return plain
    if kind is float and type(plain) is int:
        return float(plain)
    raise DamageError(f"{where}: expected {kind}, found {type(plain).__name__}")


def _decode_dataclass(cls: type, plain: Any, where: str) -> Any:
    if not isinstance(plain, dict):
        raise DamageError(f"{where}: expected an object, found {type(plain).__name__}")
    hints, values = _hints(cls), {}
    for field in dataclasses.fields(cls):
        if field.name in plain:
            values[field.name] = _decode(hints[field.name], plain[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DamageError(f"{where}: field {field.name!r} is missing")
    return cls(**values)
