"""What readers of users' files make of changed ones: `python -m tests.fuzz.files [--files N] [--child N]`.

N files are read by our own readers in this process, others by the process that decodes files. Exits with 1
when one is neither read nor refused in one line by a named error, takes seconds, or grows the process.
"""

import argparse
import gzip
import io
import logging
import os
import random
import sys
import tempfile
import time
import wave
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.mutation import changed_bytes
from tests.fuzz.run import MOST_BYTES, MOST_SECONDS, resident

from fleetune.edge_agent.datasets.audio import class_names, read_sound
from fleetune.edge_agent.datasets.idx import read_idx
from fleetune.edge_agent.datasets.npy_arrays import read_npy
from fleetune.edge_agent.datasets.series_options import SeriesOptions
from fleetune.edge_agent.datasets.sources import load
from fleetune.edge_agent.stream.decoding.decoder_process import DecoderProcess
from fleetune.edge_agent.stream.intakes.sample_files import CsvLines, ReadOptions, read_image, read_shard
from fleetune.edge_agent.stream.sample import BadSample
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.input_files import input_limits
from fleetune.protocols.settings.run_toml import read_run

MEMORY_BYTES = 50_000_000  # what a file may announce: some changes make large numbers
RUN = """
[run]
name = "fuzzed"
seed = 3
[model]
name = "lenet5"
[method]
name = "fedspu"
[data]
source = "digits"
[training]
learning_rate = 0.05
[fleet]
devices = 4
"""
TABLE = "x,y,label,id\n" + "".join(f"{i},{i / 7},{i % 3},n{i}\n" for i in range(40))
WORDS = [
    *(b"[" * 60, b"{a=" * 60, b"9" * 50, b"a." * 40, b"1e999", b"nan", b"inf", b"-0", b"0x", b"16777217"),
    *(b"[[", b"]]", b'"', b'"""', b"\\u0000", b"\r", b"\n\n", b",,", b"\xef\xbb\xbf", b"\0", b"1979-05-27"),
]


@dataclass(frozen=True)
class Kind:
    """Files of one kind: an honest one, the end of its name, and what reads it."""

    suffix: str
    honest: bytes
    read: Callable[[Path], Any]


def own_kinds(decoder: DecoderProcess) -> list[Kind]:
    """Those that are read in the agent's own process, by readers of our own."""
    reading = ReadOptions(_check_line, decoder)
    series = SeriesOptions(columns="y", time="x", gap="2", window=3, missing="hold", group="label")
    windows = ReadOptions(_check_line, decoder, options=series)
    arrays = {"x": np.eye(6, dtype=np.float32), "y": np.arange(6), "group": np.array(list("aabbcc"))}
    idx = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (3, 4, 5)) + bytes(60)
    sounds = [Kind(".wav", _sound(width), lambda path: read_sound(path, 8000, 900)) for width in (1, 2, 3, 4)]
    return [
        *sounds,
        Kind(".idx", idx, read_idx),
        Kind(".gz", gzip.compress(idx), read_idx),
        Kind(".npy", _npy(arrays["x"]), read_npy),
        Kind(".npz", _npz(np.savez, arrays), lambda path: load(f"npz:{path}")),
        Kind(".npz", _npz(np.savez_compressed, arrays), lambda path: load(f"npz:{path}")),
        Kind(".csv", TABLE.encode(), lambda path: [*CsvLines(path, reading).samples(last=True)]),
        Kind(".csv", TABLE.encode(), lambda path: [*CsvLines(path, windows).samples(last=True)]),
        Kind(".csv", TABLE.encode(), lambda path: load(f"csv:{path}?label=label&columns=x,y")),
        Kind(".csv", TABLE.encode(), lambda path: load(f"csv:{path}?columns=y&time=x&gap=2&window=3")),
        Kind(".txt", b"cat\ndog\n\xc3\xa4\n", lambda path: class_names(_renamed(path, "classes.txt"))),
        Kind(".toml", RUN.encode(), read_run),
    ]


def child_kinds(decoder: DecoderProcess) -> list[Kind]:
    """Those that are decoded in a process of its own; of what is installed here."""
    reading = ReadOptions(_check_line, decoder)
    arrays = {"x": np.eye(6, dtype=np.float32), "y": np.arange(6), "id": np.array(list("abcdef"))}
    npz = [
        Kind(".npz", _npz(save, arrays), lambda path: [*read_shard(path, reading)])
        for save in (np.savez, np.savez_compressed)
    ]
    return [*npz, *_images(reading)]


def fuzz(kinds: list[Kind], seed: int, count: int) -> Counter[str]:
    """Verdicts on `count` changed files by kind and name. Raises AssertionError, or whatever escapes."""
    rng, verdicts = random.Random(seed), Counter[str]()
    logging.disable(logging.CRITICAL)
    with (
        tempfile.TemporaryDirectory() as folder,
        np.errstate(all="ignore"),
        input_limits(memory_bytes=MEMORY_BYTES),
    ):
        for kind in kinds:
            assert _verdict(kind, Path(folder), kind.honest) == "read", kind.suffix
        before = resident()
        for _ in range(count):
            kind = rng.choice(kinds)
            data = kind.honest
            if rng.random() < 0.3:
                at = rng.randrange(len(data) + 1)
                data = data[:at] + rng.choice(WORDS) + data[at:]
            verdicts[f"{kind.suffix} {_verdict(kind, Path(folder), changed_bytes(rng, data))}"] += 1
    logging.disable(logging.NOTSET)
    grown = resident() - before
    assert grown <= MOST_BYTES, f"the process grew by {grown} bytes"
    return verdicts


def _verdict(kind: Kind, folder: Path, data: bytes) -> str:
    path, began = folder / f"a{kind.suffix}", time.thread_time()
    path.write_bytes(data)
    try:
        kind.read(path)
        verdict = "read"
    except (FleetuneError, BadSample) as problem:
        _check_line(problem)
        verdict = type(problem).__name__
    except Exception as fault:
        raise AssertionError(f"{kind.suffix}: {fault!r:.300} of {data!r:.3000}") from fault
    assert time.thread_time() - began <= MOST_SECONDS, f"{kind.suffix}: too long: {data!r:.3000}"
    return verdict


def _check_line(problem: Exception) -> None:
    assert "\n" not in str(problem), f"several lines: {problem!s:.500}"
    assert len(str(problem)) < 3000, f"a long line: {problem!s:.500}"


def _renamed(path: Path, name: str) -> Path:
    """The folder, where the file has this name now."""
    path.replace(path.with_name(name))
    return path.parent


def _sound(width: int) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((2, width, 8000, 0, "NONE", ""))
        file.writeframes(bytes(range(240)) * width)
    return made.getvalue()


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def _npz(save: Callable[..., None], arrays: dict[str, Any]) -> bytes:
    made = io.BytesIO()
    save(made, **arrays)
    return made.getvalue()


def _images(reading: ReadOptions) -> Iterator[Kind]:
    try:
        from PIL import Image
    except ImportError:
        return
    image = Image.fromarray(np.arange(20 * 20 * 3, dtype=np.uint8).reshape(20, 20, 3))
    for form in ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"):
        made = io.BytesIO()
        image.save(made, form)
        yield Kind(".png", made.getvalue(), lambda path: read_image(path, reading))


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.files", description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--child", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    os.nice(10)
    with closing(DecoderProcess(4 * MEMORY_BYTES)) as decoder:
        for kinds, count in ((own_kinds(decoder), chosen.files), (child_kinds(decoder), chosen.child)):
            began = time.perf_counter()
            try:
                verdicts = fuzz(kinds, chosen.seed, count)
            except AssertionError as problem:
                print(problem)
                return 1
            print(
                f"{count:,} files in {time.perf_counter() - began:.0f} s; {resident() >> 20} MiB at the end"
            )
            print(dict(sorted(verdicts.items())), flush=True)
        print(f"{decoder.num_started} processes were started")
    return 0


if __name__ == "__main__":
    sys.exit(main())
