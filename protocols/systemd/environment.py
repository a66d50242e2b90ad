"""A service's settings in /etc/fleetune, in a form that systemd, shells and Fleetune all read."""

import shlex

from fleetune.protocols.errors import SettingError

_FORBIDDEN = "'\\\n\r"  # systemd and shells treat these characters differently


def read(text: str, file: str) -> dict[str, str]:
    """Read the variables of an environment file, by name.

    Raises:
        SettingError: a line is not `NAME=value`; the message names `file`.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith(("#", ";")):
            continue
        name, separator, value = line.partition("=")
        try:
            words = shlex.split(value)
        except ValueError:
            words = ["", ""]
        if not separator or not name.strip().isidentifier() or len(words) > 1:
            raise SettingError(f"{file}, line {number}: expected NAME='value'")
        found[name.strip()] = words[0] if words else ""
    return found


def changed(text: str, values: dict[str, str], file: str) -> str:
    """Return `text` with these variables set; all other lines stay unchanged. "" removes a variable.

    Raises:
        SettingError: a value cannot be written, or `text` cannot be read.
    """
    before = read(text, file)
    lines = text.splitlines()
    for name, value in values.items():
        if any(mark in value for mark in _FORBIDDEN):
            raise SettingError(
                f"{name}: it must hold no single quote, backslash or line break; write it as %27"
            )
        if before.get(name, "") == value:
            continue
        lines = [line for line in lines if line.partition("=")[0].strip() != name]
        if value:
            lines.append(f"{name}='{value}'")
    return "\n".join(lines) + "\n"
