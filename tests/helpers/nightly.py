"""Marks that leave most of many similar cases to `make nightly`."""

import hashlib
import io
import json
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.places import ROOT

from fleetune.protocols.methods import REGISTRY

OF_PAPERS = ("fedspu", "srp-pfed", "kapc", "kapc-bls", "fedpurin", "dc-pfl")
REPRESENTATIVES = ("fedavg", *OF_PAPERS)
PASSED = ROOT / "tests" / "data" / "methods_of_nightly.json"
_BLANK = {tokenize.COMMENT, tokenize.NL}
_LAYOUT = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def sooner(cases: Iterable[Any], kept: Iterable[Any] | int = REPRESENTATIVES) -> list[Any]:
    """Cases for `parametrize`; all but those in `kept` wait for `make nightly`.

    A case is a value or a tuple of values. "method NAME" counts as NAME.

    Args:
        kept: cases, or their number: so many, spread evenly.
    """
    cases = list(cases)
    if isinstance(kept, int):
        there = {round(index * (len(cases) - 1) / max(kept - 1, 1)) for index in range(kept)}
    else:
        names = {word for name in kept for word in (name, f"method {name}")}
        there = {index for index, case in enumerate(cases) if case in names}
    return [
        case if index in there else pytest.param(*_values(case), marks=pytest.mark.nightly)
        for index, case in enumerate(cases)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def of_methods(cases: Iterable[Any], *, as_one: bool = False) -> list[Any]:
    """Cases over methods, each a name or a tuple (name, settings, ...); most wait for `make nightly`.

    `make test` runs the default settings of representative methods, and every case of a method whose code
    changed since `make nightly` passed.

    Args:
        as_one: a tuple is one parameter, as a fixture needs it.
    """
    made = []
    for case in cases:
        name, *rest = _values(case)
        waits = name not in changed_methods() and (name not in REPRESENTATIVES or any(rest))
        marks = (pytest.mark.nightly,) if waits else ()
        made.append(pytest.param(*((case,) if as_one else _values(case)), marks=marks))
    return made


@cache
def changed_methods() -> frozenset[str]:
    """Methods whose code differs from what `make nightly` last passed with."""
    passed = json.loads(PASSED.read_text()) if PASSED.exists() else {}
    return frozenset(name for name, digest in digests().items() if passed.get(name) != digest)


def digests() -> dict[str, str]:
    """The digest of each method's code, without docstrings and comments."""
    return {name: _digest(_source_of(target)) for name, target in REGISTRY.items()}


def _source_of(target: str) -> list[Path]:
    module = ROOT / "protocols" / "methods" / target.split(":", maxsplit=1)[0].split(".")[3]
    return sorted(module.rglob("*.py")) if module.is_dir() else [module.with_suffix(".py")]


def _digest(paths: Iterable[Path]) -> str:
    made = hashlib.sha256()
    for path in paths:
        before = tokenize.NEWLINE
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type in _BLANK:
                continue
            is_docstring = token.type == tokenize.STRING and before in _LAYOUT
            if token.type not in _LAYOUT and not is_docstring:
                made.update(token.string.encode() + b"\0")
            before = token.type
    return made.hexdigest()[:16]


if __name__ == "__main__":
    PASSED.write_text(json.dumps(digests(), indent=1) + "\n")
