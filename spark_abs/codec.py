"""Frozen dataclasses to JSON and back. Decoding is strict, since stored bytes are not trusted."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar, Union, get_args, get_origin

from spark_abs.errors import DamageError

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Turn a dataclass, with all nested values, into plain values for `json.dumps`."""
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


def decoded(data: bytes, where: str) -> str:
    """Decode a text from storage.

    Args:
        data: its bytes, UTF-8.
        where: the file, for the message.

    Raises:
        DamageError: they are not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DamageError(f"{where} is not text: {error}") from error


def parsed(text: str | bytes, kind: type[T], what: str) -> T:
    """Parse JSON text from storage: an object or a list.

    Args:
        text: the text.
        kind: `dict` or `list`.
        what: the name of the value in messages.

    Raises:
        DamageError: the text is not JSON, or not of this kind.
    """
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise DamageError(f"{what}: not JSON: {error}") from error
    if not isinstance(plain, kind):
        raise DamageError(f"{what}: expected {'a list' if kind is list else 'an object'}")
    return plain


def require_format(version: int, known: int, what: str) -> None:
    """Refuse a stored value of a newer format than this version of the package knows.

    Raises:
        DamageError: the format is newer; the message has `what` and both numbers.
    """
    if version > known:
        raise DamageError(f"{what} has format {version}, the newest known is {known}: upgrade spark_abs")


def from_json(cls: type[T], text: str | bytes) -> T:
    """Decode JSON text into `cls`.

    Raises:
        DamageError: the text is not JSON, or a field is missing or has the wrong type.
    """
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise DamageError(f"not JSON where a {cls.__name__} should be: {error}") from error
    return from_plain(cls, plain)


def from_plain(cls: type[T], plain: Any) -> T:
    """Decode parsed JSON into `cls`. Unknown fields are ignored, types are checked."""
    try:
        return typing.cast(T, _decoder(typing.cast(Any, cls))(plain))
    except _Misfit as misfit:
        raise DamageError(f"{cls.__name__}{misfit.where}: {misfit}") from None


Decoder = Callable[[Any], Any]


class _Misfit(Exception):
    """A value does not have its declared type. `where` is the path to it."""

    where = ""

    def inside(self, step: str) -> _Misfit:
        self.where = f"{step}{self.where}"
        return self


@cache
def _decoder(kind: Any) -> Decoder:
    """Return the decoder of a type, made once: a gate decodes an entry for each commit."""
    kind = getattr(kind, "__supertype__", kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass_decoder(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if len(args) == 2 and args[1] is str:
            return partial(_decode_open_enum, args[0])
        (inner,) = [arg for arg in args if arg is not type(None)]
        some = _decoder(inner)
        return some if len(args) == 1 else lambda plain: None if plain is None else some(plain)
    if origin is tuple:
        return partial(_decode_tuple, _decoder(args[0]), kind)
    if origin in (dict, Mapping):
        return partial(_decode_mapping, _decoder(args[1]), kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return partial(_decode_enum, kind)
    return partial(_decode_scalar, kind)


def _decode_tuple(item: Decoder, kind: Any, plain: Any) -> Any:
    if not isinstance(plain, list):
        raise _mistyped(kind, plain)
    found: list[Any] = []
    for one in plain:
        try:
            found.append(item(one))
        except _Misfit as misfit:
            raise misfit.inside(f"[{len(found)}]") from None
    return tuple(found)


def _decode_mapping(item: Decoder, kind: Any, plain: Any) -> Any:
    if not isinstance(plain, dict):
        raise _mistyped(kind, plain)
    found = {}
    for key, one in plain.items():
        try:
            found[key] = item(one)
        except _Misfit as misfit:
            raise misfit.inside(f".{key}") from None
    return found


def _decode_enum(kind: type[Enum], plain: Any) -> Any:
    try:
        return kind(plain)
    except ValueError:
        raise _Misfit(f"{plain!r} is not one of {[m.value for m in kind]}") from None


def _decode_open_enum(kind: type[Enum], plain: Any) -> Any:
    """Decode `Kind | str`: the name of a kind that only a later version knows stays a text."""
    if type(plain) is not str:
        raise _mistyped(kind, plain)
    return kind(plain) if plain in {member.value for member in kind} else plain


def _decode_scalar(kind: Any, plain: Any) -> Any:
    if kind is Any or type(plain) is kind:
        return plain
    if kind is float and type(plain) is int:
        return float(plain)
    raise _mistyped(kind, plain)


def _mistyped(kind: Any, plain: Any) -> _Misfit:
    return _Misfit(f"expected {kind}, found {type(plain).__name__}")


def _dataclass_decoder(cls: type) -> Decoder:
    hints = typing.get_type_hints(cls)
    fields = [
        (
            field.name,
            _decoder(hints[field.name]),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    ]

    def decode(plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise _Misfit(f"expected an object, found {type(plain).__name__}")
        values = {}
        for name, of_field, required in fields:
            if name in plain:
                try:
                    values[name] = of_field(plain[name])
                except _Misfit as misfit:
                    raise misfit.inside(f".{name}") from None
            elif required:
                raise _Misfit(f"field {name!r} is missing")
        return cls(**values)

    return decode
