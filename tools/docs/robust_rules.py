"""docs/robust-rules.md: which method can have which rule of `round.robust`, and why not."""

from collections.abc import Iterator

from fleetune.coordinator.combine.rules import RULES, refusal
from fleetune.protocols.methods import REGISTRY, create
from fleetune.protocols.model.spec import ModelSpec, TensorSpec

_HEAD = """# Which method can have which rule

The rules of [`round.robust`](robust.md), for each method with its default settings. Made by `make docs` from
the methods. A run with another combination is refused before it starts.

"""
_LAYERS = tuple(TensorSpec(f"{layer}.weight", (2, 2), "weight", layer, ()) for layer in "abc")
_SPEC = ModelSpec("any", _LAYERS, (), (2,), 2)


def robust_rules() -> str:
    """Return the text of the page."""
    titles = " | ".join(f"`{rule}`" for rule in RULES)
    lines = [f"| method | {titles} | why not |", "|---|" + "---|" * (len(RULES) + 1), *_rows()]
    return _HEAD + "\n".join(lines) + "\n"


def _rows() -> Iterator[str]:
    for name in sorted(REGISTRY):
        method = create(name, _SPEC, {})
        reasons = [refusal(rule, method) for rule in RULES]
        why = dict.fromkeys(one for one in reasons if one is not None)
        cells = ["yes" if one is None else "no" for one in reasons]
        yield f"| `{name}` | {' | '.join(cells)} | {'; '.join(why)} |"
