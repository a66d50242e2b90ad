"""Reading run.toml, and any other TOML into typed sections: one line that names the key for every mistake.

`read_run(path)` gives a `RunSettings` or a `SettingError`; `settings_of` does so with whatever a caller from
Python has.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Struct

from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import flat
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.toml_text import parse_value, read_toml

Section = TypeVar("Section", bound=Struct)
Changes = Sequence[str] | Mapping[str, Any]
"""`section.key=value` each, the value as in TOML, bare words are text; or values by `section.key`."""

_MAX_SHOWN = 300  # characters of what stands in a file
RENAMED = {
    "run.rehearsal": "run.final_evaluation",
    "encoding.brief": "encoding.compact",
    "round.max_strain": "round.norm_bound",
}
"""Settings by their old names, with the names they have now."""


def read_run(
    path: Path | str,
    changes: Changes = (),
    adapt: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> RunSettings:
    """Read a run.toml.

    Args:
        path: the file.
        changes: on top of the file, see `Changes`.
        adapt: makes of the file's content what the changes go on top of; it may raise SettingError.

    Raises:
        SettingError: the file cannot be read (see `read_toml`), or a key is unknown, given twice, of the
            wrong type or range.
    """
    path = Path(path)
    content = read_toml(path)
    content = adapt(content) if adapt else content
    _change_all(content, changes)
    try:
        return parse_run(content)
    except SettingError as problem:
        raise SettingError(f"{path}: {problem}") from None


def settings_of(given: RunSettings | Mapping[str, Any] | Path | str, changes: Changes = ()) -> RunSettings:
    """The settings that a caller from Python means.

    Args:
        given: the path of a run.toml, what would stand in one, or settings that were read already.
        changes: on top of them, see `Changes`. Numbers and arrays of NumPy, paths and tuples stand for what
            TOML has in their place.

    Raises:
        SettingError: as `read_run`.
    """
    if isinstance(given, Path | str):
        return read_run(given, changes)
    if isinstance(given, RunSettings) and not changes:
        return given
    content = plain(msgspec.to_builtins(given) if isinstance(given, RunSettings) else given)
    _change_all(content, changes)
    return parse_run(content)


def parse_run(content: dict[str, Any]) -> RunSettings:
    """The settings in an already parsed run.toml. Raises SettingError."""
    _check_names(content)
    by_group = _section(_section(content, "data"), "partition").get("kind") == "group"
    if by_group and "devices" not in _section(content, "fleet"):
        content = {**content, "fleet": {**content.get("fleet", {}), "devices": 0}}
    settings = convert(content, RunSettings)
    if not settings.fleet.devices and not by_group:
        raise SettingError("fleet.devices: expected `int` >= 1")
    if not isinstance(settings.method.get("name"), str):
        raise SettingError('method.name is missing, e.g. [method] name = "fedspu"')
    return settings


def _section(content: dict[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name)
    return section if isinstance(section, dict) else {}


def _check_names(content: dict[str, Any]) -> None:
    """Raises SettingError: a setting has its old name."""
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        if key in _section(content, section):
            raise SettingError(f"{old} is called {new} now")


def _change_all(content: dict[str, Any], changes: Changes) -> None:
    """Raises SettingError when one of them is not as `Changes` says."""
    if isinstance(changes, Mapping):
        for path, value in changes.items():
            _put(content, path, plain(value), f"set {path!r}: use section.key, e.g. 'training.epochs'")
        return
    for change in changes:
        path, separator, text = change.partition("=")
        said = f"--set {change}: use section.key=value, e.g. training.epochs=2"
        if not separator:
            raise SettingError(said)
        _put(content, path, parse_value(text), said)


def _put(content: dict[str, Any], path: str, value: Any, said: str) -> None:
    """Raises SettingError: `path` is no section.key; `said` is what a user is told then."""
    *sections, key = path.strip().split(".")
    if not sections:
        raise SettingError(said)
    for section in sections:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            raise SettingError(f"{said.partition(':')[0]}: {section} is no section")
    content[key] = value


def plain(value: Any) -> Any:
    """As TOML has it, all of it new."""
    match value:
        case np.generic() | np.ndarray():
            return value.tolist()
        case PurePath():
            return str(value)
        case Mapping():
            return {str(key): plain(one) for key, one in value.items()}
        case list() | tuple() | range():
            return [plain(one) for one in value]
    return value


def convert(content: dict[str, Any], section: type[Section], prefix: str = "") -> Section:
    """`content` as `section`, or a SettingError that names the key below `prefix` and what it may be."""
    try:
        return msgspec.convert(content, section, strict=True)
    except msgspec.ValidationError as problem:
        raise SettingError(_explain(flat(problem), section, prefix)) from None


def _explain(problem: str, section: type, prefix: str) -> str:
    """Msgspec's message as `key: what is wrong`, with the nearest known key for a misspelt one."""
    text, _, where = problem.partition(" - at `$")
    path = [part for part in where.rstrip("`").replace("[...]", "").split(".") if part]
    unknown = re.search(r"unknown field `(.+)`", text)
    if not unknown:
        at = ".".join(filter(None, [prefix, *path])) or "top level"
        return f"{at}: {text[0].lower()}{text[1:_MAX_SHOWN]}{_choices(text, section, path)}"
    known, given = _keys(section, path), unknown.group(1)[:_MAX_SHOWN]
    near = difflib.get_close_matches(given, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(known)}"
    return f"{'.'.join(filter(None, [prefix, *path, given]))}: unknown key; {hint}"


def _choices(text: str, section: type, path: list[str]) -> str:
    """What stands for a word that is none of those allowed."""
    if not text.startswith("Invalid enum value") or not path or "[" in path[-1]:
        return ""
    hint = get_type_hints(_section_at(section, path[:-1]))[path[-1]]
    words = [word for word in get_args(hint) if isinstance(word, str)]
    return f"; one of {', '.join(words)}" if words else ""


def _keys(section: Any, path: list[str]) -> list[str]:
    return list(_section_at(section, path).__struct_fields__)


def _section_at(section: Any, path: list[str]) -> Any:
    for part in path:
        hint = get_type_hints(section)[part]
        section = next((t for t in get_args(hint) if isinstance(t, type)), hint) if get_origin(hint) else hint
    return section
