"""Bytes, error, speed and memory of every encoding on updates of real training.

    python -m benchmarks.encodings --out encodings.json

Models are trained on Fashion-MNIST (a folder `fashion-mnist`, here or in $FLEETUNE_DATA) with the product's
trainer and methods, see `recorded_updates.py`. Every encoding of the registry, and XOR with the reference for
comparison, encodes and decodes the same values.

Columns:
- bytes of the payload after zstd, relative to raw float32;
- distance of the decoded values to the values, relative to the distance of the reference (0: equal bits);
- megabytes of float32 per second of processor time, medians;
- peak memory of decoding, with the returned values, relative to these values. Input bytes and zstd's context
  (at most 1 MB) are not counted.
"""

import json
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import typer
import zstandard
from rich.console import Console
from rich.table import Table

from benchmarks.recorded_updates import Fleet, Sent, updates_of
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec, encodings
from fleetune.protocols.update.arrays import shuffled, unshuffled
from fleetune.protocols.update.encodings.encoding import Encoded, Encoding, EncodingCost, Known

RATIOS = {"fedspu": 0.4}  # ratios of devices; 1.0 for methods that are not listed
_TAKEN = 4  # number of patches of a method, evenly spaced, without round 1
_TIMES = 3  # repetitions of each measurement
_BITS = np.dtype("<u4")


class Xor(Encoding):
    """XOR of the bits with those of the reference, in byte planes; for comparison."""

    name = "xor planes"
    cost = EncodingCost(bytes_per_value=4 * 0.5, encode_ns=5, decode_ns=5)
    lossless = True

    def encode(
        self,
        values: FlatArray,
        known: Known,
        residual: FlatArray | None,  # noqa: ARG002 - there is none here
        key: Key,  # noqa: ARG002 - nothing is drawn
    ) -> Encoded:
        return Encoded(shuffled(values.view(_BITS) ^ self._base(known, values.size)))

    def decode(self, data: bytes, count: int, known: Known) -> FlatArray:
        if len(data) != count * _BITS.itemsize:
            raise PacketCorrupt(f"{count} values with {len(data)} bytes")
        bits = unshuffled(data, _BITS)
        bits ^= self._base(known, count)
        return bits.view(np.float32)

    def _base(self, known: Known, count: int) -> Any:
        return np.zeros(count, _BITS) if known.reference is None else known.reference.view(_BITS)


def measured(encoding: Encoding, patches: Sequence[Sent]) -> dict[str, float]:
    """Measure one encoding on all these patches."""
    figures: dict[str, list[float]] = defaultdict(list)
    raw_bytes, packed_bytes = 0, 0
    for sent in patches:
        megabytes = sent.values.nbytes / 1e6
        for _ in range(_TIMES):
            began = time.process_time()
            data = encoding.encode(sent.values, sent.known, None, Key(1)).data
            figures["encode_mb_per_s"].append(megabytes / _since(began))
            began = time.process_time()
            back = encoding.decode(data, sent.values.size, sent.known)
            figures["decode_mb_per_s"].append(megabytes / _since(began))
        began = time.process_time()
        packed = zstandard.ZstdCompressor(level=codec.ZSTD_LEVEL).compress(data)
        figures["payload_zstd_mb_per_s"].append(megabytes / _since(began))
        figures["error"].append(_relative_error(back, sent))
        figures["decode_peak"].append(_peak_of_decoding(encoding, data, sent))
        raw_bytes += sent.values.nbytes
        packed_bytes += len(packed)
    speeds = {name: median(values) for name, values in figures.items() if name.endswith("per_s")}
    return {
        "share_of_raw": packed_bytes / raw_bytes,
        "relative_error": mean(figures["error"]),
        "decode_peak_over_values": median(figures["decode_peak"]),
        **speeds,
    }


def _since(began: float) -> float:
    return max(time.process_time() - began, 1e-9)


def _relative_error(back: FlatArray, sent: Sent) -> float:
    if back.tobytes() == sent.values.tobytes():
        return 0.0
    values, reference = sent.values.astype(np.float64), sent.known.reference
    step = values if reference is None else values - reference
    return float(np.linalg.norm(back - values)) / max(float(np.linalg.norm(step)), 1e-300)


def _peak_of_decoding(encoding: Encoding, data: bytes, sent: Sent) -> float:
    tracemalloc.start()
    try:
        encoding.decode(data, sent.values.size, sent.known)
        return tracemalloc.get_traced_memory()[1] / max(1, sent.values.nbytes)
    finally:
        tracemalloc.stop()


def chosen(patches: Sequence[Sent]) -> list[Sent]:
    """Choose `_TAKEN` patches, evenly spaced, none from round 1, where nothing is trained yet."""
    later = [sent for sent in patches if sent.round > 1 and sent.values.size]
    return [later[index * len(later) // _TAKEN] for index in range(min(_TAKEN, len(later)))]


def keep(sent: Sent, every: int, path: Path) -> None:
    """Write a smaller patch for tests: the first of `every` equal parts of each tensor."""
    tensors, counts = np.unique(sent.known.tensors, return_counts=True)
    starts = np.cumsum(counts) - counts
    rows = np.concatenate(
        [np.arange(start, start + -(-n // every)) for start, n in zip(starts, counts, strict=True)]
    )
    assert sent.known.reference is not None
    assert tensors.size
    np.savez_compressed(
        path, reference=sent.known.reference[rows], values=sent.values[rows], tensors=sent.known.tensors[rows]
    )


def _table(title: str, found: dict[str, dict[str, float]]) -> Table:
    table = Table(title=title)
    for head in ("encoding", "share of raw", "error", "encode MB/s", "decode MB/s", "payload's zstd", "peak"):
        table.add_column(head, justify="left" if head == "encoding" else "right")
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['share_of_raw']:.4f}",
            f"{row['relative_error']:.4f}",
            f"{row['encode_mb_per_s']:.0f}",
            f"{row['decode_mb_per_s']:.0f}",
            f"{row['payload_zstd_mb_per_s']:.0f}",
            f"{row['decode_peak_over_values']:.2f}",
        )
    return table


def main(
    models: Annotated[str, typer.Option(help="comma-separated")] = "lenet5,cnn-kapc",
    methods: Annotated[str, typer.Option(help="comma-separated")] = "fedavg,fedspu,srp-pfed,fedpurin",
    devices: Annotated[int, typer.Option(help="that take part in every round")] = 4,
    samples: Annotated[int, typer.Option(help="of each device")] = 500,
    epochs: Annotated[int, typer.Option(help="of local training")] = 1,
    rounds: Annotated[int, typer.Option(help="of each run")] = 6,
    seed: Annotated[int, typer.Option(help="of each run")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for all figures")] = None,
    fixture: Annotated[Path | None, typer.Option(help="npz file for a sixth of the last patch")] = None,
) -> None:
    """Compare all encodings of values."""
    console, found = Console(), dict[str, Any]()
    with one_line_errors("bench_encodings"):
        for model in models.split(","):
            for method in methods.split(","):
                ratio = RATIOS.get(method, 1.0)
                fleet = Fleet(model, devices, samples, epochs, rounds, ratio, seed)
                patches = chosen(list(updates_of(method, fleet)))
                rivals = [*map(encodings.find, encodings.REGISTRY), Xor()]
                rows = {encoding.name: measured(encoding, patches) for encoding in rivals}
                found[f"{model} {method}"] = rows
                print(f"{model} {method}: done", file=sys.stderr)
                title = f"{model}, {method} at ratio {ratio:g}: updates of {fleet.rounds} rounds"
                console.print(_table(title, rows))
                if fixture is not None:
                    keep(patches[-1], 6, fixture)
    if out is not None:
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
