"""The vectors of whole rounds: each case's inputs and what its reference makes of them, as JSON.

`python -m tests.protocols.methods.rounds.vectors` writes them anew into tests/data/rounds.
"""

import json
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
from tests.helpers.places import ROOT
from tests.protocols.methods.rounds import dcpfl, fedpurin, fedspu, kapc, srp_pfed
from tests.protocols.methods.rounds.all_cases import CASES
from tests.protocols.methods.rounds.conventions import PAPERS, convention
from tests.protocols.methods.rounds.product import drawn

FOLDER = ROOT / "tests" / "data" / "rounds"
ATOL, RTOL, DECIMALS = 1e-4, 1e-5, 4
REFERENCES = {
    "fedspu": fedspu.rounds,
    "srp-pfed": srp_pfed.rounds,
    "kapc": kapc.rounds,
    "kapc-bls": kapc.rounds,
    "fedpurin": fedpurin.rounds,
    "dc-pfl": dcpfl.rounds,
}


def worked(case):
    """A case's inputs, what is drawn at random read off the product, and what is expected."""
    inputs = case.inputs()
    inputs["rounds"] = drawn(case.method, inputs, case.seed)
    return inputs, REFERENCES[case.method](**inputs)


def plain(value):
    """As JSON has it: vectors are lists; what has more axes says its shape."""
    if isinstance(value, np.ndarray):
        numbers = [round(number, DECIMALS) + 0 for number in value.ravel().tolist()]
        if value.ndim == 1:
            return numbers
        return {"__array__": True, "shape": list(value.shape), "dtype": str(value.dtype), "data": numbers}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return round(float(value), 6) if isinstance(value, float) else value


def file_of(method, cases):
    """One file's text, a line a case."""
    head = {
        "method": method,
        "step": "rounds",
        "function": f"{method}:rounds",
        "paper_ref": PAPERS[method],
        "convention": convention(method),
        "atol": ATOL,
        "rtol": RTOL,
    }
    lines = []
    for case in cases:
        inputs, expected = (plain(part) for part in worked(case))
        named = {"name": case.name, "seed": case.seed, "inputs": inputs, "expected": expected}
        lines.append(json.dumps({**named, "note": case.note}, separators=(",", ":")))
    text = json.dumps(head, indent=1)[:-2]
    return f'{text},\n "cases": [\n' + ",\n".join(lines) + "\n ]\n}\n"


def files():
    """Every file's name and text."""
    for method, cases in groupby(CASES, key=lambda case: case.method):
        yield f"{method.replace('-', '_')}_rounds.json", file_of(method, list(cases))


def main(folder=FOLDER):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, text in files():
        Path(folder, name).write_text(text)
        print(f"{Path(folder, name)}: {len(text):,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
