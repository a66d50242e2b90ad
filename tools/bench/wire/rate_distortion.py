"""What encodings and rivals cost and lose on real steps: share of raw float32, error, speed of encoding."""

import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from fleetune.protocols.randomness import Key
from fleetune.protocols.update import encodings
from fleetune.tools.bench.trained_differences import Sent
from fleetune.tools.bench.wire.rivals import Compressor, eden, qsgd, stc

_DENSITIES = (0.3, 0.1, 0.05, 0.02, 0.01, 0.005)
OURS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("lossless", "fp16", "int8", "int4")},
    **{f"sparse {density:g}": {"name": "sparse", "density": density} for density in _DENSITIES},
    **{
        f"sparse {density:g}, 16 levels of all": {
            "name": "sparse",
            "density": density,
            "levels": 16,
            "span": "all",
        }
        for density in _DENSITIES
    },
    **{f"lowrank {step:g}": {"name": "lowrank", "step": step} for step in (0.5, 1, 2, 3, 4, 6)},
}
RIVALS: dict[str, Compressor] = {
    "eden 1 bit": eden,
    "qsgd 1": qsgd(1),
    "qsgd 4": qsgd(4),
    "qsgd 16": qsgd(16),
    "stc 1/50": stc(1 / 50),
    "stc 1/200": stc(1 / 200),
}


def measured(patches: Sequence[Sent]) -> dict[str, dict[str, float]]:
    """Of each encoding and rival, on all these patches: `share` of raw float32, `error` (distance to the step
    over its norm), `mb_per_s` of float32 encoded in a second of one core's time. A rival's time is that of
    both ways, and its share what its paper counts.
    """
    found: dict[str, dict[str, float]] = {}
    for name, choice in OURS.items():
        encoding, figures = encodings.chosen(choice), list[tuple[float, float, float]]()
        for sent in patches:
            began = time.process_time()
            data = encoding.encode(sent.values, sent.known, None, Key(1)).data
            seconds = time.process_time() - began
            read = encoding.decode(data, sent.values.size, sent.known)
            base = 0 if sent.known.base is None else sent.known.base
            figures.append(_figures(sent, read - base, len(data), seconds))
        found[name] = _summary(figures)
    for name, compress in RIVALS.items():
        figures = []
        for sent in patches:
            began = time.process_time()
            read, num_bytes = compress(_step(sent), Key(1))
            figures.append(_figures(sent, read, num_bytes, time.process_time() - began))
        found[name] = _summary(figures)
    return found


def _step(sent: Sent) -> Any:
    return sent.values if sent.known.base is None else sent.values - sent.known.base


def _figures(sent: Sent, read: Any, num_bytes: float, seconds: float) -> tuple[float, float, float]:
    step = _step(sent).astype(np.float64)
    error = float(np.linalg.norm(read - step) / np.linalg.norm(step))
    return num_bytes / sent.values.nbytes, error, sent.values.nbytes / 1e6 / max(seconds, 1e-9)


def _summary(figures: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    shares, errors, speeds = zip(*figures, strict=True)
    return {"share": mean(shares), "error": mean(errors), "mb_per_s": median(speeds)}


def markdown(found: dict[str, dict[str, float]]) -> str:
    """The table, the largest first."""
    lines = ["| | share of raw | error | MB/s |", "|---|--:|--:|--:|"]
    for name, row in sorted(found.items(), key=lambda item: -item[1]["share"]):
        lines.append(f"| {name} | {row['share']:.4f} | {row['error']:.3f} | {row['mb_per_s']:.0f} |")
    return "\n".join(lines) + "\n"
