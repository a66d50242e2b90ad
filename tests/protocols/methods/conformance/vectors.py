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
    seed: int | None = None

    def __str__(self) -> str:
        return f"{self.function}-{self.name}".replace(" ", "_")


def cases(folder: Path = FOLDER) -> Iterator[Case]:
    """All cases of all files, in the order of files."""
    for path in sorted(folder.glob("*.json")):
        file = json.loads(path.read_text())
        for case in file["cases"]:
            inputs, expected = _plain(case["inputs"]), _plain(case["expected"])
            yield Case(
                file["function"],
                case["name"],
                inputs,
                expected,
                file["atol"],
                file["rtol"],
                case.get("seed"),
            )


def agree(ours: Any, expected: Any, *, atol: float, rtol: float, where: str = "result") -> None:
    """What was computed is what a case expects, as near as it says; AssertionError says where not."""
    if expected is None or isinstance(expected, str):
        assert ours == expected, where
    elif isinstance(expected, dict):
        assert set(map(str, ours)) == set(expected), where
        for key, value in {str(k): v for k, v in ours.items()}.items():
            agree(value, expected[key], atol=atol, rtol=rtol, where=f"{where}.{key}")
    elif isinstance(expected, list) and any(isinstance(e, list | dict | np.ndarray | str) for e in expected):
        assert len(ours) == len(expected), where
        for index, (one, other) in enumerate(zip(ours, expected, strict=True)):
            agree(one, other, atol=atol, rtol=rtol, where=f"{where}[{index}]")
    else:
        wanted = np.asarray(expected)
        assert np.shape(ours) == wanted.shape, where
        np.testing.assert_allclose(
            np.asarray(ours, dtype=float), wanted.astype(float), atol=atol, rtol=rtol, err_msg=where
        )


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
