"""docs/private-methods.md: the methods and encodings that [privacy] allows, and why it refuses the others."""

from collections.abc import Iterator

from fleetune.coordinator.extensions.privacy.checks import leak_of
from fleetune.protocols.methods import REGISTRY, method_class
from fleetune.protocols.update import encodings

_HEAD = """# Methods and encodings under [privacy]

[Differential privacy](differential-privacy.md) bounds what a device's *step* reveals. It cannot bound what a
method reveals by other means, such as the choice of the entries that a device sends. Such methods and
encodings are refused. `python -m fleetune.tools.docs` makes this page from what each method and encoding
states about itself (`leak`). A method of your own must state it too.
"""
_TABLE = "| {kind} | allowed | why not |\n|---|---|---|"


def private_methods() -> str:
    """Return the text of the page."""
    methods = ((name, method_class(name)) for name in REGISTRY)
    ups = ((name, type(encodings.find(name))) for name in encodings.REGISTRY)
    more = "`fedspu` is refused with `early_stopping`, because a device then leaves by its own loss."
    parts = [
        _HEAD,
        _TABLE.format(kind="method"),
        *_rows(methods),
        f"\n{more}\n",
        _TABLE.format(kind="encoding of updates"),
        *_rows(ups),
        "\nTasks may have any encoding: they depend on the models only, which are protected already.",
    ]
    return "\n".join(parts) + "\n"


def _rows(kinds: Iterator[tuple[str, type]]) -> Iterator[str]:
    for name, kind in kinds:
        leak = leak_of(kind)
        yield f"| `{name}` | {'yes' if leak is None else 'no'} | {leak or ''} |"
