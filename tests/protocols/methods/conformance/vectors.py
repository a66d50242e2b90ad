"""Reading worked cases: `<method>_<step>.json`, arrays as {"__array__": true, "data", "shape", "dtype"}."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.helpers.places import ROOT

FOLDER = Path(os.environ.get("FLEETUNE_VECTORS", ROOT.parent / "shared" / "vectors"))


@dataclass(frozen=True)
class Case:
    function: str
    name: str
    inputs: dict[str, Any]
    expected: Any
    atol: float
    rtol: float

    def __str__(self) -> str:
        return f"{self.function}-{self.name}".replace(" ", "_")


def cases() -> Iterator[Case]:
    """All cases of all files, in the order of files."""
    for path in sorted(FOLDER.glob("*.json")):
        file = json.loads(path.read_text())
        for case in file["cases"]:
            inputs, expected = _plain(case["inputs"]), _plain(case["expected"])
            yield Case(file["function"], case["name"], inputs, expected, file["atol"], file["rtol"])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if value.get("__array__"):
            data = [_plain(entry) for entry in value["data"]]
            return np.array(data, dtype=value["dtype"]).reshape(value["shape"])
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if value in ("inf", "-inf", "nan"):
        return float(value)
    return value
