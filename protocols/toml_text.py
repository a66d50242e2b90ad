"""Reads TOML that a user wrote, with limits on size, depth and numbers; each mistake is one line."""

import re
import tomllib
from pathlib import Path
from typing import Any

from fleetune.protocols.errors import SettingError
from fleetune.protocols.input_files import MAX_SETTINGS_BYTES, read_text_input
from fleetune.protocols.one_line import flat

MAX_DEPTH = 32  # levels of nested tables and arrays
_WHOLE = range(-(2**63), 2**63)  # the range of integers in TOML
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')\s*+"""
_DEEP_KEY = re.compile(rf"(?<![\w-]){_PART}(?:\.\s*+{_PART}){{{MAX_DEPTH},}}")
_DEEP_LINE = f"tables or arrays are nested deeper than {MAX_DEPTH}; nest them less"


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        SettingError: it is missing, not regular, larger than `MAX_SETTINGS_BYTES`, or wrong as for
            `parse_toml`; the line begins with its path.
    """
    text = read_text_input(path, MAX_SETTINGS_BYTES, error=SettingError)
    try:
        return parse_toml(text)
    except SettingError as problem:
        raise SettingError(f"{path}: {problem}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the content of a TOML text.

    Raises:
        SettingError: it is not TOML, is nested deeper than `MAX_DEPTH`, or has an integer beyond 64 bits.
    """
    if _DEEP_KEY.search(text):  # tomllib needs time quadratic in the parts of a key
        raise SettingError(_DEEP_LINE)
    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise SettingError(_DEEP_LINE) from None
    except tomllib.TOMLDecodeError as problem:
        raise SettingError(flat(problem)[:300]) from None
    except ValueError:  # Python converts at most 4,300 digits
        raise SettingError("an integer of too many digits; TOML has integers of 64 bits") from None
    _check(content)
    return content


def parse_value(text: str) -> Any:
    """Return one TOML value, for options of commands; other text is returned unchanged.

    Raises:
        SettingError: as `parse_toml`, for values that are nested too deep or too large.
    """
    try:
        content = tomllib.loads(f"value = {text}")
    except ValueError:
        return text.strip()
    except RecursionError:
        raise SettingError(_DEEP_LINE) from None
    _check(content)
    return content["value"]


def _check(content: dict[str, Any]) -> None:
    """Raise SettingError if `content` is nested too deep, or an integer is too large."""
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise SettingError(_DEEP_LINE)
        if isinstance(value, dict):
            below = ".{}" if name else "{}"
            waiting += ((name + below.format(key), one, depth + 1) for key, one in value.items())
        elif isinstance(value, list):
            waiting += ((name, one, depth + 1) for one in value)
        elif isinstance(value, int) and value not in _WHOLE:
            raise SettingError(f"{name[:100]}: an integer beyond 64 bits; write a smaller one")
