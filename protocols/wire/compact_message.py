"""Control messages as MessagePack arrays: the number of the message, then the values of its fields in order.

Runs with `[encoding] compact` use this form (docs/wire.md). msgspec reads the arrays as tagged structs
without field names.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import is_dataclass
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Any, ClassVar, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, UNSET, Struct, UnsetType

M = TypeVar("M")


def is_compact(data: bytes) -> bool:
    """True if this message is in the compact form, False if it is JSON."""
    return data[:1] >= b"\x80"  # first bytes of MessagePack arrays; JSON begins with an ASCII character


class CompactForm:
    """Encodes and decodes messages. The number of a message is the index of its class in `kinds`."""

    def __init__(self, kinds: Sequence[type[Struct]]) -> None:
        self._kinds = tuple(kinds)

    def write(self, message: Struct) -> bytes:
        """Encode a message. Raises ValueError if its class has no compact form."""
        return msgspec.msgpack.encode([self._kinds.index(type(message)), *_values(message)])

    def reader(self, kinds: Collection[Any]) -> "CompactReader[Any]":
        """Return a reader for those of these message classes that have a compact form."""
        found = {kind: number for number, kind in enumerate(self._kinds) if kind in kinds}
        return CompactReader(_one_of(_row_type(kind, number) for kind, number in found.items()))


class CompactReader(Generic[M]):
    """Reads the messages that one side may send."""

    def __init__(self, rows: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[_Row] = msgspec.msgpack.Decoder(rows)

    def read(self, data: bytes) -> M:
        """Decode a message. Raises msgspec.DecodeError if it is damaged, or not a message of that side."""
        found: M = _original(self._decoder.decode(data))
        return found


class _Row(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of the structs without field names. Each subclass stands for one original class."""

    of: ClassVar[Any]


@cache
def _row_type(kind: Any, tag: int | None = None) -> Any:
    """Return a struct with the same fields but without names; a None in it means the field's default."""
    hints = get_type_hints(kind, include_extras=True)
    fields: list[tuple[Any, ...]] = []
    for field in _fields(kind):
        hint = _row_hint(hints[field.name])
        fields.append((field.name, hint) if field.required else (field.name, hint | None, None))
    return msgspec.defstruct(
        f"{kind.__name__}Row", fields, bases=(_Row,), tag=tag, namespace={"of": kind}, module=__name__
    )


def _row_hint(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        return _one_of(None if one is UnsetType else _row_hint(one) for one in get_args(hint))
    return _row_type(hint) if _has_names(hint) else hint


def _one_of(hints: Iterable[Any]) -> Any:
    return reduce(or_, hints)


def _has_names(kind: Any) -> bool:
    """True if JSON carries the field names of this class."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return not kind.__struct_config__.array_like
    return isinstance(kind, type) and is_dataclass(kind)


@cache
def _fields(kind: Any) -> Sequence[Any]:
    return msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined, no-any-return]


def _values(message: Any) -> list[Any]:
    """Return the field values up to the last one that differs from its default; None replaces a default."""
    values: list[Any] = []
    kind: Any = type(message)
    for field in _fields(kind):
        value = getattr(message, field.name)
        default = field.default if field.default is not NODEFAULT else field.default_factory
        if value is UNSET or (not field.required and value == (default() if callable(default) else default)):
            values.append(None)
        else:
            values.append(_values(value) if _has_names(type(value)) else value)
    while values and values[-1] is None:
        values.pop()
    return values


def _original(row: Any) -> Any:
    """Return the message or value that a row encodes."""
    if not isinstance(row, _Row):
        return row
    values = {name: _original(getattr(row, name)) for name in row.__struct_fields__}
    return row.of(**{name: value for name, value in values.items() if value is not None})
