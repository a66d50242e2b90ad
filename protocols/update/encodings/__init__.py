"""Registry of encodings, which write the values of a patch as bytes. Each has one file and one line here.

An encoding is an `Encoding` (encoding.py). A payload names the encoding of each patch. Only the names listed
here are looked up, whatever name a peer sends. A module is imported when its encoding is first used.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import msgspec

from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import flat, suggestion
from fleetune.protocols.update.encodings.encoding import Encoding

RAW = "raw"

REGISTRY = {
    RAW: "fleetune.protocols.update.encodings.raw:Raw",
    "lossless": "fleetune.protocols.update.encodings.lossless:Lossless",
    "int8": "fleetune.protocols.update.encodings.int8:Int8",
    "int4": "fleetune.protocols.update.encodings.int4:Int4",
    "sparse": "fleetune.protocols.update.encodings.sparse:Sparse",
    "sketch": "fleetune.protocols.update.encodings.sketch:Sketch",
    "peaks": "fleetune.protocols.update.encodings.peaks:Peaks",
    "lowrank": "fleetune.protocols.update.encodings.lowrank:LowRank",
}


def find(name: str) -> Encoding:
    """Return the encoding of this name with default settings. Raises SettingError if the name is unknown."""
    encoding: Encoding = _kind(name)()
    return encoding


def chosen(choice: str | Mapping[str, Any]) -> Encoding:
    """Return the encoding that run.toml chooses, by its name or by a table of its name and settings.

    Raises:
        SettingError: the name or one of the settings is unknown.
    """
    section = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = section.pop("name", None)
    if not isinstance(name, str):
        raise SettingError(f"an encoding needs a name, one of {', '.join(REGISTRY)}")
    kind = _kind(name)
    known = [one.name for one in fields(kind)] if is_dataclass(kind) else []
    for key in section:
        if key not in known:
            raise SettingError(
                f"encoding {name} has no setting {key!r}; its settings: {', '.join(known) or 'none'}"
            )
    try:
        encoding: Encoding = msgspec.convert(section, kind) if known else kind()
    except msgspec.ValidationError as problem:
        text, _, where = flat(problem).partition(" - at `$.")
        raise SettingError(f"encoding {name}: {where.rstrip('`')}: {text}") from None
    return encoding


def in_words(choice: str | Mapping[str, Any]) -> str:
    """Return a readable form of the encoding that run.toml chooses."""
    if isinstance(choice, str):
        return choice
    own = ", ".join(f"{key} {value}" for key, value in choice.items() if key != "name")
    return f"{choice['name']} ({own})" if own else str(choice["name"])


def _kind(name: str) -> Any:
    if name not in REGISTRY:
        raise SettingError(f"no encoding {name!r}; {suggestion(name, REGISTRY)}")
    module, _, kind = REGISTRY[name].partition(":")
    return getattr(import_module(module), kind)
