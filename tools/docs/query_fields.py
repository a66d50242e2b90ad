"""docs/query-fields.md: the fields of the objects that queries return, from the classes' docstrings."""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import get_args

from msgspec import Struct

from fleetune.coordinator.fleet.invitations import InvitationStatus
from fleetune.coordinator.forgetting.receipt import Receipt
from fleetune.coordinator.queries.fleet_devices import FleetDevices
from fleetune.coordinator.queries.queries import MetricValue, ModelVersion
from fleetune.coordinator.queries.run_status import DeviceStatus, RunStatus
from fleetune.tools.docs.docstrings import attributes

_HEAD = """# Fields of queries

The fields of the objects that [queries](queries.md) return and that commands with `--json` print.
`python -m fleetune.tools.docs` makes this page from the classes. Types are those of Python; `None` is `null`
in JSON.
"""
_MODULES = re.compile(r"(?:[a-z_]+\.)+(?=[A-Z])")
_KINDS: dict[type[Struct], str] = {
    RunStatus: "the object of `edge-coordinator status --json`",
    DeviceStatus: "one device of `edge-coordinator devices --json`",
    FleetDevices: "the result of the query `fleet_devices`",
    InvitationStatus: "one invitation of `edge-coordinator invites --json`",
    Receipt: "the object of `edge-coordinator forget --json`, and of the file of a receipt",
    MetricValue: "one result of the query `metrics`",
    ModelVersion: "one result of the query `models`",
}


def query_fields() -> str:
    """Return the text of the page."""
    return "\n".join([_HEAD, *(line for kind, what in _KINDS.items() for line in _section(kind, what))])


def _section(kind: type[Struct], what: str) -> Iterator[str]:
    texts = attributes(kind)
    yield f"## {kind.__name__}\n\n{what[0].upper()}{what[1:]}.\n"
    yield "| field | type | meaning |\n|---|---|---|"
    for text, group in groupby(kind.__struct_fields__, texts.__getitem__):
        names = list(group)
        types = dict.fromkeys(_type(kind.__annotations__[name]) for name in names)
        yield f"| {', '.join(f'`{name}`' for name in names)} | {', '.join(types)} | {text} |"
    yield ""


def _type(shown: object) -> str:
    """Return a type without the modules of its names, for a cell of a table."""
    text = shown.__name__ if isinstance(shown, type) and not get_args(shown) else str(shown)
    return _MODULES.sub("", text).replace("|", "\\|")
