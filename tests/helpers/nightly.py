"""Marks that leave most of many similar cases to `make nightly`."""

from collections.abc import Iterable
from typing import Any

import pytest

OF_PAPERS = ("fedspu", "srp-pfed", "kapc", "kapc-bls", "fedpurin", "dc-pfl")


def sooner(names: Iterable[Any], kept: Iterable[Any] = ("fedavg", *OF_PAPERS)) -> list[Any]:
    """Cases for `parametrize`; all but those in `kept` wait for `make nightly`. "method NAME" counts as
    NAME.
    """
    there = {word for name in kept for word in (name, f"method {name}")}
    return [name if name in there else pytest.param(name, marks=pytest.mark.nightly) for name in names]
