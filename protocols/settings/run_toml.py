"""Read run.toml, or any other TOML file, into typed sections. Every mistake is one line that names the key.

`read_run(path)` returns `RunSettings` or raises SettingError. `settings_of` does the same for the values that
a Python program passes.
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
"""Changes on top of a file: texts `section.key=value` with TOML values (bare words are text), or values by
`section.key`.
"""

_MAX_SHOWN = 300  # characters of a file's content that an error message quotes at most
RENAMED = {
    "run.rehearsal": "run.final_evaluation",
    "encoding.brief": "encoding.compact",
    "round.max_strain": "round.norm_bound",
}
"""Renamed settings: the present name by the old one."""
REMOVED = {
    "round.deadline": 'set objective.minimise = "time" for deadlines that follow the devices\' predictions',
    "round.max_wait": "no device waits longer than three times the rounds in which all could take part once",
    "round.min_battery": "each owner limits its device with `edge-agent run --min-battery`",
    "schedule.at": 'set window and every, e.g. window = "02:00-05:00" and every = "24h"',
    "objective.normalise": "it made runs slower; updates count by their samples",
    "objective.within": "set run.rounds, or stop the run with `edge-coordinator stop`",
    "objective.price": 'set objective.minimise = "bytes" or "energy"',
}
"""Removed settings, each with what to do instead."""


def read_run(
    path: Path | str,
    changes: Changes = (),
    adapt: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> RunSettings:
    """Read a run.toml.

    Args:
        path: the file.
        changes: changes on top of the file, see `Changes`.
        adapt: converts the file's content before the changes are applied; it may raise SettingError.

    Raises:
        SettingError: the file cannot be read (see `read_toml`), or a key is unknown, given twice, of the
            wrong type or out of range.
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
    """Return the settings that a Python program passes, in any of their forms.

    Args:
        given: path of a run.toml, its content as a mapping, or settings that were read already.
        changes: changes on top of them, see `Changes`. NumPy numbers and arrays, paths and tuples are
            converted to their TOML types.

    Raises:
        SettingError: as for `read_run`.
    """
    if isinstance(given, Path | str):
        return read_run(given, changes)
    if isinstance(given, RunSettings) and not changes:
        return given
    content = plain(msgspec.to_builtins(given) if isinstance(given, RunSettings) else given)
    _change_all(content, changes)
    return parse_run(content)


def parse_run(content: dict[str, Any]) -> RunSettings:
    """Return the settings in the parsed content of a run.toml. Raises SettingError."""
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
    """Raise SettingError if a setting has its old name or was removed."""
    said = {old: f"{old} is called {new} now" for old, new in RENAMED.items()}
    said |= {old: f"{old} was removed; leave it out: {instead}" for old, instead in REMOVED.items()}
    for path, line in said.items():
        section, _, key = path.partition(".")
        if key in _section(content, section):
            raise SettingError(line)


def _change_all(content: dict[str, Any], changes: Changes) -> None:
    """Apply the changes to `content` in place. Raises SettingError if one is malformed, see `Changes`."""
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
    """Set one value. Raises SettingError with the text `said` if `path` is no section.key."""
    *sections, key = path.strip().split(".")
    if not sections:
        raise SettingError(said)
    for section in sections:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            raise SettingError(f"{said.partition(':')[0]}: {section} is no section")
    content[key] = value


def plain(value: Any) -> Any:
    """Return a copy of `value` in TOML's types."""
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
    """Convert `content` to the type `section`.

    Args:
        content: what a file or a program gave.
        section: the type.
        prefix: path of the section, for messages.

    Raises:
        SettingError: a key is unknown or its value does not fit; the message names the key and what it may
            be.
    """
    try:
        return msgspec.convert(content, section, strict=True)
    except msgspec.ValidationError as problem:
        raise SettingError(_explain(flat(problem), section, prefix)) from None


def _explain(problem: str, section: type, prefix: str) -> str:
    """Msgspec's message as `key: problem`. For an unknown key it suggests the nearest known one."""
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
    """Return the allowed words as the end of a message, if a word was not one of them; otherwise ""."""
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
