"""The decoder process: it reads requests from standard input and writes frames to standard output.

It is started as `python -P -m fleetune.edge_agent.stream.decoding.child_main`, see `decoder_process`. It ends
when the agent ends.

A file that announces too much content is refused before that content is read. Pillow is imported only when an
image is read.
"""

import math
import os
import queue
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.npy_arrays import NpzFile, open_npz
from fleetune.edge_agent.stream.decoding.frames import (
    LENGTH_BYTES,
    ArrayData,
    Block,
    DecodeRequest,
    Done,
    Frame,
    Refused,
    encode,
    read_request,
)
from fleetune.edge_agent.stream.sample import MAX_SAMPLE_BYTES
from fleetune.protocols.errors import DataError
from fleetune.protocols.input_files import input_limits, open_input
from fleetune.protocols.one_line import flat

MAX_PROCESSOR_S = 600  # processor time for one file
# without EPS, for which Pillow starts Ghostscript
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MARKS = frozenset({"test", "validation", "x_train", "x_test", "x_validation"})
_WHAT = {"image": "image", "npz": ".npz file"}
_PIXELS = MAX_SAMPLE_BYTES // 12
_BLOCK_BYTES = 2**20
_BLOCK_ROWS = 256
_NAMED, _NAME = 6, 60  # most array names in a message, and their longest length


def decode_file(request: DecodeRequest) -> Iterator[Frame]:
    """Yield a file's samples as frames. The last frame is `Done` or `Refused`; no error is raised."""
    path = Path(request.path)
    try:
        with input_limits(memory_bytes=request.max_bytes), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if request.kind == "image":
                yield Block(ArrayData.of(_image(path, request.max_bytes)[None]))
            else:
                yield from _shard(path, request.max_bytes)
        yield Done()
    except DataError as problem:
        yield Refused(str(problem)[:2000])
    except Exception as problem:  # noqa: BLE001 - what decodes files raises nearly anything
        words = f"not a readable {_WHAT[request.kind]} ({flat(problem)[:200] or type(problem).__name__})"
        yield Refused(f"{path}: {words}"[:2000])


def _image(path: Path, max_bytes: int) -> NDArray[np.uint8]:
    """Decode an image to shape (height, width) if it is grey, else (height, width, 3)."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # our own limit, below, depends on the memory
    with open_input(path, max_bytes) as file, Image.open(file, formats=IMAGE_FORMATS) as image:
        if image.width * image.height > min(_PIXELS, max_bytes // 12):
            raise DataError(f"{path}: an image of {image.width} x {image.height} is too large; scale it down")
        grey = image.mode in ("1", "L", "LA", "I;16")
        return np.asarray(image.convert("L" if grey else "RGB"), np.uint8)


def _shard(path: Path, max_bytes: int) -> Iterator[Frame]:
    """Read the samples of an .npz file with `x`, and optionally `y` and `id`."""
    with open_npz(path, {"x", "y", "id"}, max_bytes) as file:
        if "x" not in file.headers or MARKS & set(file.names):
            marks = (
                "marks samples for testing or validation, but in a stream their content"
                " decides: write only x and y"
            )
            names = ", ".join(name[:_NAME] for name in file.names[:_NAMED]) + ", ..." * (
                len(file.names) > _NAMED
            )
            lacks = (
                f"there is no array x in it; it holds {names or 'nothing'}: save x, and optionally y and id"
            )
            raise DataError(f"{path}: {marks if MARKS & set(file.names) else lacks}")
        x = file.headers["x"]
        if any(one.shape[:1] != x.shape[:1] or not one.shape for one in file.headers.values()):
            raise DataError(f"{path}: x, y and id have different numbers of rows; they must have the same")
        widest = max(one.row_bytes for one in file.headers.values())
        if 4 * x.row_bytes // x.dtype.itemsize > MAX_SAMPLE_BYTES or widest > 2 * MAX_SAMPLE_BYTES:
            raise DataError(
                f"{path}: a row of x has shape {x.shape[1:]}; at most {MAX_SAMPLE_BYTES // 4}"
                " numbers are allowed"
            )
        yield from _blocks(path, file, max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // max(1, widest))))


def _blocks(path: Path, file: NpzFile, count: int) -> Iterator[Block]:
    """Read `count` rows at a time."""
    ys = file.rows("y", count) if "y" in file.headers else None
    ids = file.rows("id", count) if "id" in file.headers else None
    for x in file.rows("x", count):
        y = None if ys is None else _numbers(path, "y", next(ys), wide=True)
        yield Block(_numbers(path, "x", x), y, None if ids is None else _names(path, next(ids)))
    for rest in (ys, ids):
        for _ in rest or ():  # the checksum of an array is tested at its end only
            pass


def _numbers(path: Path, name: str, array: NDArray[Any], *, wide: bool = False) -> ArrayData:
    """Convert an array to a type that frames have: uint8 or float32, or with `wide` int64 or float64."""
    if array.dtype.kind not in "buif":
        raise DataError(f"{path}: {name} holds {array.dtype}; it must hold numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        if wide:
            return ArrayData.of(array.astype("<f8" if array.dtype.kind == "f" else "<i8"))
        return ArrayData.of(array if array.dtype == np.uint8 else array.astype("<f4"))


def _names(path: Path, array: NDArray[Any]) -> list[str | int]:
    if array.ndim != 1 or array.dtype.kind not in "Uiu":
        raise DataError(f"{path}: id holds {array.dtype}, shape {array.shape}; it must be texts or integers")
    names: list[str | int] = array.tolist()
    return names


def main() -> None:
    """Decode files until standard input ends."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    # libraries print to standard output, which would damage a frame
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with suppress(OSError):
        # out of memory, the kernel shall kill this process and not the agent
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    requests_waiting: queue.SimpleQueue[DecodeRequest] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, requests_waiting), daemon=True).start()
    while True:
        request = requests_waiting.get()
        limit_processor_time(MAX_PROCESSOR_S)
        for frame in decode_file(request):
            _write(out, encode(frame))


def limit_processor_time(seconds: int) -> None:
    """Let the kernel end this process after `seconds` more processor time.

    A decoder in an endless loop may hold the interpreter's lock, so that no other thread of this process
    could end it.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    until = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    soft = until if hard == resource.RLIM_INFINITY else min(until, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _listen(requests: BinaryIO, requests_waiting: "queue.SimpleQueue[DecodeRequest]") -> None:
    """Queue the requests; when standard input ends, end the process, even in the middle of a file.

    Standard input ends when the agent ends.
    """
    with suppress(Exception):
        while len(head := requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
            requests_waiting.put(read_request(requests.read(int.from_bytes(head, "big"))))
    os._exit(0)


def _write(out: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[out.write(view) :]
        except OSError:  # the agent is gone
            os._exit(0)


if __name__ == "__main__":
    main()
