"""NNCodec (ISO/IEC 15938-17) on the same steps as our encodings, in its own environment.

It is used for comparison only, as its licence allows, and is no dependency. `qp` sets the quantisation step,
2^(qp / 4). Dependent (trellis-coded) quantisation and skipping of zero rows are its defaults for updates.
Vectors are quantised 10 finer than weights; by default they would take up to two thirds of the bytes.
`rate-distortion optimised` lets the encoder trade error for bits (lambda 8). `scalar` is without dependent
quantisation. Contexts of earlier rounds (TCA) are not used, because a single step has none.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.recorded_updates import Sent
from benchmarks.rival_environments import NotInstalled, python_in
from fleetune.protocols.model.spec import FlatArray

_SCRIPT = Path(__file__).parent / "code_with_nnc.py"
_BUILT_WITH = ("numpy<2", "setuptools", "wheel", "pybind11")
_PACKAGE = ("--no-deps", "nncodec==2.1.3")
_QPS = (-60, -52, -46, -42, -38, -34, -30)
_FINER = 10  # vectors
_MANNERS: dict[str, dict[str, Any]] = {
    "": {"use_dq": True},
    ", rate-distortion optimised": {"use_dq": True, "lambda_scale": 8},
    ", scalar": {"use_dq": False},
}


def settings() -> dict[str, dict[str, Any]]:
    """Measured settings of NNCodec, by name in the table."""
    return {
        f"nnc {qp}{manner}": {"qp": qp, "nonweight_qp": qp - _FINER, "row_skipping": True, **more}
        for manner, more in _MANNERS.items()
        for qp in _QPS
    }


def measured(patches: Sequence[Sent], folder: Path) -> list[dict[str, dict[str, float]]]:
    """Return `num_bytes`, `squared_error`, `encode_s` and `decode_s` for each patch and setting.

    Args:
        patches: values to encode, each with the reference that both sides know.
        folder: folder of the environment.

    Raises:
        NotInstalled: pip cannot install it, or it does not run.
    """
    python = python_in(folder / "nncodec", _BUILT_WITH, _PACKAGE)
    return [_coded(python, tensors_of(sent)) for sent in patches]


def tensors_of(sent: Sent) -> dict[str, FlatArray]:
    """Change of each tensor; tensors of several axes become matrices of their rows."""
    step = sent.values if sent.known.reference is None else sent.values - sent.known.reference
    found = {}
    for number in np.unique(sent.known.tensors).tolist():
        here, row_size = step[sent.known.tensors == number], sent.known.row_sizes[number]
        found[f"tensor{number}"] = here.reshape(-1, row_size) if row_size > 1 else here
    return found


def _coded(python: Path, tensors: dict[str, FlatArray]) -> dict[str, dict[str, float]]:
    asked = settings()
    with TemporaryDirectory() as name:
        data, wanted = Path(name) / "tensors.npz", Path(name) / "settings.json"
        np.savez(data, **tensors)  # type: ignore[arg-type]
        wanted.write_text(json.dumps(list(asked.values())))
        done = subprocess.run([python, _SCRIPT, data, wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotInstalled((done.stderr.strip().splitlines() or ["NNCodec printed no reason"])[-1])
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(asked, lines, strict=True))
