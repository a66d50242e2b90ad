"""Renaming and moving code changes no result: random draws and final weights of three runs equal stored ones.

`python -m tests.project.test_unchanged_results` stores new ones, after a change that is meant to change them.
"""

import platform
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.helpers.places import ROOT

import fleetune
from fleetune.protocols.randomness import Key

STORED = ROOT / "tests" / "data" / "unchanged"
DRAWS = 100

COMMON = {
    "run": {"seed": 7, "rounds": 4},
    "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
    "data": {
        "source": "digits",
        "mean": 0.3,
        "std": 0.4,
        "partition": {"kind": "dirichlet", "alpha": 0.5, "samples": 120, "test_fraction": 0.3},
    },
    "training": {"epochs": 1, "batch_size": 10, "learning_rate": 0.1},
    "round": {"participants": 4},
    "fleet": {"devices": 6, "ratios": [0.4, 0.6, 1.0]},
}
RUNS = {
    "fedspu": {"method": {"name": "fedspu"}, "encoding": {"up": "int8"}},
    "kapc": {"method": {"name": "kapc"}},
    "srp-pfed": {"method": {"name": "srp-pfed"}, "encoding": {"up": "sketch"}},
}


def processor() -> str:
    """The processor's name: another one may round sums of float32 otherwise."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def played(name, folder, monkeypatch):
    """The shared model at the end of the run, and the first draw of every key that was drawn from."""
    drawn = set()
    bits = Key.bits

    def noted(key, count, first=0):
        drawn.add(int(bits(key, 1)[0]))
        return bits(key, count, first)

    monkeypatch.setattr(Key, "bits", noted)
    settings = {**COMMON, **RUNS[name], "run": {**COMMON["run"], "name": name}}
    result = fleetune.simulate(settings, folder, report=False)
    tensors = load_file(result.folder / "models" / "shared.safetensors")
    return np.concatenate([tensors[tensor].ravel() for tensor in sorted(tensors)]), drawn


@pytest.mark.parametrize("name", RUNS)
def test_a_run_draws_and_ends_as_stored(name, tmp_path, monkeypatch):
    weights, drawn = played(name, tmp_path, monkeypatch)
    with np.load(STORED / f"{name}.npz") as file:
        stored = dict(file)
    draws = msgspec.json.decode((STORED / "draws.json").read_bytes(), type=dict[str, list[int]])
    assert len(draws[name]) >= DRAWS // len(RUNS)
    assert drawn >= set(draws[name])
    if str(stored["processor"]) != processor():
        pytest.skip(
            f"the weights were stored on another processor ({stored['processor']}), which rounds otherwise"
        )
    np.testing.assert_array_equal(weights, stored["weights"])


def store() -> None:
    """Write what the runs draw and end with now."""
    import tempfile

    draws = {}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            weights, drawn = played(name, Path(folder), patch)
        np.savez_compressed(STORED / f"{name}.npz", weights=weights, processor=processor())
        ordered = sorted(drawn)
        draws[name] = ordered[:: max(1, len(ordered) // 40)][:40]
    (STORED / "draws.json").write_bytes(msgspec.json.format(msgspec.json.encode(draws)))


if __name__ == "__main__":
    store()
