"""A setting's possible values in words, from its type (`whole number, 1 to 100`), and its default as in
TOML.
"""

import json
from functools import singledispatch
from typing import Any

from msgspec import NODEFAULT, Struct, inspect

UNITS = {
    "_dbm_hz": "dBm/Hz",
    "_interference_db": "dB",
    "_mbps": "Mbit/s",
    "_mhz": "MHz",
    "_dbm": "dBm",
    "_db": "dB",
    "_mb": "MB",
    "_celsius": "°C",
    "_minutes": "minutes",
    "_s": "seconds",
    "_m": "metres",
}


def unit(key: str) -> str:
    """Return the unit at the end of a key's name, or ""."""
    return next((word for ending, word in UNITS.items() if key.endswith(ending)), "")


@singledispatch
def value_words(kind: inspect.Type) -> str:
    """Return the possible values of a type in words. Raises TypeError for a type that no setting has yet."""
    raise TypeError(f"no words for {kind}: give it some in tools/docs/value_words.py")


@value_words.register
def _union(kind: inspect.UnionType) -> str:
    return ", or ".join(value_words(one) for one in kind.types if not isinstance(one, inspect.NoneType))


@value_words.register
def _literal(kind: inspect.LiteralType) -> str:
    return ", ".join(f"`{_toml(value)}`" for value in kind.values)


@value_words.register
def _bool(_: inspect.BoolType) -> str:
    return "`true`, `false`"


@value_words.register
def _text(kind: inspect.StrType) -> str:
    return f"text like `{kind.pattern}`" if kind.pattern else "text"


@value_words.register
def _whole_number(kind: inspect.IntType) -> str:
    return "whole number" + _range(kind.ge, kind.gt, kind.le, kind.lt)


@value_words.register
def _number(kind: inspect.FloatType) -> str:
    return "number" + _range(kind.ge, kind.gt, kind.le, kind.lt)


@value_words.register
def _fixed_list(kind: inspect.TupleType) -> str:
    words = [value_words(one) for one in kind.item_types]
    return f"{len(words)} of: {words[0]}" if len(set(words)) == 1 else f"[{'; '.join(words)}]"


@value_words.register
def _list(kind: inspect.VarTupleType) -> str:
    return (
        "list" + _range(kind.min_length, None, kind.max_length, None) + f" of: {value_words(kind.item_type)}"
    )


@value_words.register
def _table(kind: inspect.DictType) -> str:
    value = kind.value_type
    return "table" if isinstance(value, inspect.AnyType) else f"table of name = {value_words(value)}"


@value_words.register
def _section(_: inspect.StructType) -> str:
    return "section"


def _range(ge: float | None, gt: float | None, le: float | None, lt: float | None) -> str:
    """Return the bounds in words: `, 0 to below 1`."""
    low = "" if ge is None and gt is None else (f"above {_plain(gt)}" if ge is None else _plain(ge))
    high = "" if le is None and lt is None else (f"below {_plain(lt)}" if le is None else _plain(le))
    if low and high:
        return f", {low}{',' if gt is not None else ''} to {high}"
    return f", {low}{'' if gt is not None else ' or more'}" if low else f", at most {high}" if high else ""


def _plain(number: float | None) -> str:
    """Return a bound as text: from 2^31 on as a power of two, thousands with separators, others short."""
    if number is None:
        return ""
    if isinstance(number, int) and abs(number) >= 2**31 - 1:
        bits = abs(number).bit_length()
        return {2 ** (bits - 1): f"2^{bits - 1}", 2**bits - 1: f"2^{bits} - 1"}.get(
            number, f"-2^{bits - 1}" if number == -(2 ** (bits - 1)) else f"{number:,}"
        )
    if abs(number) >= 1e9 or 0 < abs(number) < 1e-3:
        return f"{number:g}".replace("e+", "e").replace("e-0", "e-")
    return f"{number:,g}" if float(number).is_integer() else f"{number:g}"


def default_words(field: inspect.Field) -> str:
    """Return the default in the form of run.toml; a key that may be missing has `left out`."""
    if field.required:
        return "**required**"
    value = field.default if field.default is not NODEFAULT else field.default_factory()
    if value is None or value in ((), {}):
        return "left out"
    return "" if isinstance(value, Struct) else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(_toml(one) for one in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(one)}' for key, one in value.items())} }}"
    if isinstance(value, bool | str):
        return json.dumps(value)
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:_}"
    return str(value)
