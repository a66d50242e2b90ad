"""Measures NNCodec (ISO/IEC 15938-17) on tensors; a script for NNCodec's own environment.

    python code_with_nnc.py TENSORS.npz SETTINGS.json

It prints a line for each of the settings: bytes, squared error, processor seconds to encode and decode.
"""

import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

_TIMES = 3  # repetitions of each; the fastest counts


def main() -> None:
    tensors = {name: array for name, array in np.load(sys.argv[1]).items() if array.size}
    nnc = _coder()
    for settings in json.loads(Path(sys.argv[2]).read_text()):
        tries = [_coded(nnc, tensors, settings) for _ in range(_TIMES)]
        fastest = {key: min(one[key] for one in tries) for key in tries[0]}
        print(json.dumps(fastest), flush=True)


def _coded(nnc: Any, tensors: dict[str, Any], settings: dict[str, Any]) -> dict[str, float]:
    began = time.process_time()
    data = nnc.compress(dict(tensors), bitstream_path=None, return_bitstream=True, **settings)
    written = time.process_time()
    found = nnc.decompress(data)
    read = time.process_time()
    apart = [np.square(found[name] - tensor.astype(np.float64)).sum() for name, tensor in tensors.items()]
    return {
        "num_bytes": len(data),
        "squared_error": float(sum(apart)),
        "encode_s": written - began,
        "decode_s": read - written,
    }


def _coder() -> Any:
    """Import NNCodec's coder without its readers of models, which need torch, torchvision and OpenCV."""
    frameworks = types.ModuleType("nncodec.framework")
    for name in ("tensorflow_model", "pytorch_model", "use_case_init"):
        sys.modules[f"nncodec.framework.{name}"] = types.ModuleType(name)
        setattr(frameworks, name, sys.modules[f"nncodec.framework.{name}"])
    sys.modules["nncodec.framework"] = frameworks
    from nncodec import nnc  # type: ignore[import-not-found]

    return nnc


if __name__ == "__main__":
    main()
