"""Costs and errors of encodings and rivals on real steps: share of raw float32, error, speed of encoding."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.recorded_updates import Sent
from benchmarks.wire import nnc
from benchmarks.wire.rivals import Compressor, eden, qsgd, stc
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import encodings

_TIMES = 3  # repetitions of each; the fastest counts
_DENSITIES = (0.3, 0.1, 0.05, 0.02, 0.01, 0.005)
_STEPS = (0.0625, 0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 10, 12)
OURS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("lossless", "int8", "int4")},
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
    **{f"lowrank {step:g}": {"name": "lowrank", "step": step} for step in _STEPS},
}
RIVALS: dict[str, Compressor] = {
    "eden 1 bit": eden,
    "qsgd 1": qsgd(1),
    "qsgd 4": qsgd(4),
    "qsgd 16": qsgd(16),
    "stc 1/50": stc(1 / 50),
    "stc 1/200": stc(1 / 200),
}

Table = dict[str, dict[str, float]]


def measured(patches: Sequence[Sent]) -> Table:
    """Means over these patches for each encoding and rival.

    `share` is relative to raw float32. `error` is the distance to the step over its norm. `encode` and
    `decode` are MB of float32 in a second of one core's time, the fastest of three. A rival's time covers
    both directions, and its share is counted as in its paper.
    """
    found = {name: _mean([_ours(sent, choice) for sent in patches]) for name, choice in OURS.items()}
    for name, compress in RIVALS.items():
        found[name] = _mean([_rival(sent, compress) for sent in patches])
    return found


def measured_nnc(patches: Sequence[Sent], folder: Path) -> Table:
    """The same for NNCodec, whose environment is in `folder`. Raises NotInstalled."""
    coded = nnc.measured(patches, folder)
    found: Table = {}
    for name in nnc.settings():
        rows = []
        for sent, of_patch in zip(patches, coded, strict=True):
            one = of_patch[name]
            error = float(np.sqrt(one["squared_error"]) / np.linalg.norm(_step(sent)))
            rows.append(_figures(sent, error, one["num_bytes"], one["encode_s"], one["decode_s"]))
        found[name] = _mean(rows)
    return found


def _ours(sent: Sent, choice: dict[str, Any]) -> dict[str, float]:
    encoding, spent = encodings.chosen(choice), list[tuple[float, float]]()
    for _ in range(_TIMES):
        began = time.process_time()
        data = encoding.encode(sent.values, sent.known, None, Key(1)).data
        written = time.process_time()
        read = encoding.decode(data, sent.values.size, sent.known)
        spent.append((written - began, time.process_time() - written))
    apart = read - (0 if sent.known.reference is None else sent.known.reference)
    return _figures(sent, _error(sent, apart), len(data), *map(min, zip(*spent, strict=True)))


def _rival(sent: Sent, compress: Compressor) -> dict[str, float]:
    step, spent = _step(sent), []
    for _ in range(_TIMES):
        began = time.process_time()
        read, num_bytes = compress(step, Key(1))
        spent.append(time.process_time() - began)
    return _figures(sent, _error(sent, read), num_bytes, min(spent), min(spent))


def _step(sent: Sent) -> Any:
    return sent.values if sent.known.reference is None else sent.values - sent.known.reference


def _error(sent: Sent, read: Any) -> float:
    step = _step(sent).astype(np.float64)
    return float(np.linalg.norm(read - step) / np.linalg.norm(step))


def _figures(
    sent: Sent, error: float, num_bytes: float, encode_s: float, decode_s: float
) -> dict[str, float]:
    megabytes = sent.values.nbytes / 1e6
    return {
        "share": num_bytes / sent.values.nbytes,
        "error": error,
        "encode": megabytes / max(encode_s, 1e-9),
        "decode": megabytes / max(decode_s, 1e-9),
    }


def _mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: mean(row[key] for row in rows) for key in rows[0]}


def markdown(tables: dict[str, Table]) -> str:
    """Markdown table of all kinds of steps, sorted by the share in the first kind."""
    sorts = list(tables)
    head = [f"{sort}: share of raw | error | encode, MB/s | decode, MB/s" for sort in sorts]
    lines = [f"| | {' | '.join(head)} |", "|---|" + "--:|" * (4 * len(sorts))]
    for name, _ in sorted(tables[sorts[0]].items(), key=lambda item: -item[1]["share"]):
        lines.append(f"| {name} | {' | '.join(_cells(tables[sort][name]) for sort in sorts)} |")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, float]) -> str:
    return f"{row['share']:.4f} | {row['error']:.4f} | {row['encode']:.0f} | {row['decode']:.0f}"
