"""docs/run-toml.md: every key of run.toml, methods' settings included, from the types and docstrings."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct, inspect
from msgspec.structs import replace

from fleetune.coordinator.run.changed_settings import CHANGEABLE
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.protocols.method.method import Method
from fleetune.protocols.methods import REGISTRY
from fleetune.protocols.settings.run_settings import RunSettings, simulated_keys
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.docs.docstrings import attributes
from fleetune.tools.docs.value_words import default_words, unit, value_words

_HEAD = """# Reference of run.toml

This page lists every section and key. `python -m fleetune.tools.docs` generates it from the settings' types
and docstrings; a test checks that it matches the code. A misspelt key, a value out of range, or a model
that does not fit the data is reported in one line with the key's name. `--set section.key=value`
(`edge-sim`) changes one key for one run.

The column *who* names the program that uses a key. The **devices** receive the key when they are enrolled.
The **coordinator** plans the rounds: `edge-coordinator serve`, or `edge-sim` in its place. The
**simulation** is `edge-sim` only; `serve` lists such keys in a warning and ignores them. A key with a star
may change during a run: start `serve` again with the new value.
"""
_METHODS = """## [method]: settings of each method

`[method] name` is one of these, or `package.module:Class` of [your own](add-a-method.md). The other keys of
the section are the method's settings; [methods.md](methods.md) explains their meaning in its paper. These
methods have no settings: {plain}.
"""
_POLICY = """## [fleet.policy]

These are the keys of the file for `edge-agent run --policy`; see [ratios.md](ratios.md)."""
_WIDE = ("| key | value | default | who | meaning |", "|---|---|---|---|---|")
_SLIM = ("| key | value | default | meaning |", "|---|---|---|---|")


class UndescribedError(Exception):
    """The docstring of a section lacks one of its keys."""


def run_toml_reference() -> str:
    """Return the text of the page. Raises UndescribedError."""
    compare = f"## [compare.LABEL]\n\n{described(RunSettings, 'compare')}"
    parts = [_HEAD, *_sections(RunSettings, ""), *_policy(), compare, *_methods()]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _sections(kind: type[Struct], path: str) -> Iterator[str]:
    """Yield a section, then its subsections; for the whole file only the sections."""
    fields = _info(kind).fields
    inner = [(field, found) for field in fields if (found := _section_of(field.type))]
    if path:
        keys = [field for field in fields if field.name not in {one.name for one, _ in inner}]
        yield "\n".join([_title(kind, path), "", *_WIDE, *(_row(kind, field, path) for field in keys)])
    for field, section in inner:
        yield from _sections(section, ".".join(filter(None, [path, field.encode_name])))


def _title(kind: type[Struct], path: str) -> str:
    first = (kind.__doc__ or "").split("\n\n", maxsplit=1)[0]
    _, _, said = " ".join(first.split()).rpartition("] ")
    return f"## [{path}]" + (f"\n\n{said[:1].upper()}{said[1:]}" if said and not said.endswith("]") else "")


def _row(kind: type[Struct], field: inspect.Field, path: str) -> str:
    key = field.name
    star = r" \*" if f"{path}.{key}" in CHANGEABLE else ""
    value = ", ".join(filter(None, [value_words(field.type), unit(key)]))
    return _line(
        f"`{key}`{star}", value, default_words(field), _who(path, key), described(kind, field.name, key)
    )


def described(kind: type, *names: str) -> str:
    """Return the description of an attribute by one of its names. Raises UndescribedError."""
    texts = attributes(kind)
    for name in names:
        if name in texts:
            return texts[name].replace("None: ", "left out: ")  # TOML has no None
    raise UndescribedError(f"{kind.__module__}.{kind.__qualname__}: its docstring says nothing of {names[0]}")


def _who(path: str, key: str) -> str:
    if _only_simulated(path, key):
        return "simulation"
    sent = {field.name for field in dataclasses.fields(Enrolment)} - {"run", "weights"}
    return "devices" if key in sent or path in sent or path == "model" else "coordinator"


def _only_simulated(path: str, key: str) -> bool:
    """True if `serve` reports the key as one for simulations only."""
    if path.startswith("data.arrivals") or path in ("data.partition", "fleet.wireless"):
        return True
    if path != "fleet":
        return path == "paper"
    bare = msgspec.convert({"run": {"name": "r"}, "model": {"name": "m"}, "method": {}}, RunSettings)
    return bool(simulated_keys(replace(bare, fleet=replace(bare.fleet, **{key: object()}))))


def _policy() -> Iterator[str]:
    """Yield the settings of a device's owner, also of a simulated owner."""
    yield _POLICY
    fields = _info(Policy).fields
    yield "\n".join([*_SLIM, *(_slim(Policy, field) for field in fields)])


def _methods() -> Iterator[str]:
    kinds = {name: _method(target) for name, target in REGISTRY.items()}
    keys = {name: list(_method_fields(kind)) for name, kind in kinds.items()}
    yield _METHODS.format(plain=", ".join(f"`{name}`" for name, found in keys.items() if not found))
    for name, found in keys.items():
        if found:
            rows = [_slim(kinds[name], field, _default_in_runs(kinds[name], field)) for field in found]
            yield "\n".join([f"### {name}", "", *_SLIM, *rows])


def _method(target: str) -> type[Method[Any, Any, Any, Any]]:
    module, _, attribute = target.partition(":")
    found: type[Method[Any, Any, Any, Any]] = getattr(import_module(module), attribute)
    return found


def _method_fields(kind: Any) -> Iterator[inspect.Field]:
    """Yield a method's settings as fields of msgspec."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if field.name != "spec":
            default = field.default
            yield inspect.Field(field.name, field.name, inspect.type_info(hints[field.name]), False, default)


def _default_in_runs(kind: type[Method[Any, Any, Any, Any]], field: inspect.Field) -> str:
    """Return the default of a method's setting in a new run."""
    short, long = (kind.defaults_of_run(rounds).get(field.name) for rounds in (1, 1000))
    usual = default_words(field) if short is None else f"`{json.dumps(short)}`"
    usual = "from `run.rounds`" if short != long else usual
    hurried = kind.defaults_of_objective().get(field.name)
    return (
        usual if hurried is None else f"{usual}; where time or energy is minimised, `{json.dumps(hurried)}`"
    )


def _slim(kind: type, field: inspect.Field, default: str | None = None) -> str:
    value = ", ".join(filter(None, [value_words(field.type), unit(field.name)]))
    return _line(f"`{field.name}`", value, default or default_words(field), described(kind, field.name))


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _info(kind: type[Struct]) -> inspect.StructType:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return found


def _section_of(kind: inspect.Type) -> type[Struct] | None:
    """Return the section that a key holds, even if a plain value is allowed too; None if it holds none."""
    types: Iterable[inspect.Type] = kind.types if isinstance(kind, inspect.UnionType) else [kind]
    return next((one.cls for one in types if isinstance(one, inspect.StructType)), None)
