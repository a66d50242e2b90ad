"""How the values of a patch are written, by name: one file each, one line here.

An encoding is an `Encoding` (encoding.py). A payload says by name which one wrote a patch; only the names
here are ever looked for, whatever a peer says, and a file is read when its encoding is first used.
"""

import difflib
from importlib import import_module

from fleetune.protocols.errors import SettingError
from fleetune.protocols.update.encodings.encoding import Encoding

RAW = "raw"

REGISTRY = {
    RAW: "fleetune.protocols.update.encodings.raw:Raw",
    "lossless": "fleetune.protocols.update.encodings.lossless:Lossless",
    "fp16": "fleetune.protocols.update.encodings.fp16:Float16",
    "int8": "fleetune.protocols.update.encodings.int8:Int8",
    "int4": "fleetune.protocols.update.encodings.int4:Int4",
}


def find(name: str) -> Encoding:
    """The encoding of this name. Raises SettingError: there is none."""
    if name not in REGISTRY:
        near = difflib.get_close_matches(name, REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(REGISTRY)}"
        raise SettingError(f"no encoding {name!r}; {hint}")
    module, _, kind = REGISTRY[name].partition(":")
    encoding: Encoding = getattr(import_module(module), kind)()
    return encoding
