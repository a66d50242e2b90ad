"""Makes a row of a JSON message: its cells are the values at JSON paths, so a topic is a table of messages.

A path is `temperature`, `$.AM2301.Temperature`, `accel[0]`, `params["switch:0"].apower`; `$` is the whole
message, such as 21.5. A path that leads nowhere is an empty cell, as `null` is. True counts as 1, false as 0.
"""

import re
from functools import cache
from typing import Any

import msgspec

from fleetune.edge_agent.stream.intakes.messages import check_lists
from fleetune.edge_agent.stream.sample import BadSample
from fleetune.protocols.errors import DataError
from fleetune.protocols.one_line import flat

_STEP = re.compile(r"""\.?([^.\[\]"']+)|\[([0-9]{1,6})\]|\["([^"]+)"\]|\['([^']+)'\]""")
_NUMBER = re.compile(rb"\s*[-+.0-9a-zA-Z]{1,40}\s*")
_MAX_CELL = 200
Steps = tuple[str | int, ...]


@cache
def path_steps(path: str) -> Steps:
    """Return the keys and indices of a JSON path. Raises DataError if it is not valid."""
    rest, steps = path.removeprefix("$"), []
    while rest:
        found = _STEP.match(rest)
        if found is None:
            raise DataError(f"{path[:100]!r} is no JSON path; write accel.x, $.temperature or values[0]")
        key, index, *quoted = found.groups()
        steps.append(int(index) if index else key or next(one for one in quoted if one))
        rest = rest[found.end() :]
    return tuple(steps)


def cells_of(content: bytes, paths: list[str]) -> list[str]:
    """Return the cell at each path of a message.

    Raises:
        BadSample: the message is not JSON, or has no value at any path, or a list or object at one.
    """
    check_lists(content, as_json=True)
    try:
        message = msgspec.json.decode(content)
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        if not _NUMBER.fullmatch(content):  # such as nan, or a bare word
            words = f"a message is not valid JSON ({flat(problem)[:100]}); docs/streams.md shows one"
            raise BadSample("message", words) from None
        message = content.decode("ascii").strip()
    cells = [_cell(path, _value(message, path_steps(path))) for path in paths]
    if not any(cells):
        found = flat(", ".join(message) if isinstance(message, dict) else message)[:100]
        raise BadSample("message", f"a message has no value at {', '.join(paths)[:200]}; it has {found}")
    return cells


def _value(message: Any, steps: Steps) -> Any:
    for step in steps:
        if isinstance(message, dict):
            message = message.get(str(step))
        elif isinstance(message, list) and str(step).isdecimal() and int(step) < len(message):
            message = message[int(step)]
        else:
            return None
    return message


def _cell(path: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int | float | str) and len(text := str(value)) <= _MAX_CELL:
        return text
    kind = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else "a long text"
    raise BadSample(
        "message", f"a message has {kind} at {path[:100]}; name a number in it, as in {path[:50]}[0]"
    )
