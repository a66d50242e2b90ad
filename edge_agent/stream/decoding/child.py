"""The decoding process: requests by standard input, frames by standard output; it ends with the agent.

`python -P -m fleetune.edge_agent.stream.decoding.child`, see `decoding_child`.
"""

import os
import queue
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from fleetune.edge_agent.stream.decoding.decoders import decoded
from fleetune.edge_agent.stream.decoding.frames import LENGTH_BYTES, Decode, encode, read_request


def main() -> None:
    """Read files until standard input ends."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no frame
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # rather than the agent
    asked: queue.SimpleQueue[Decode] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, asked), daemon=True).start()
    while True:
        for frame in decoded(asked.get()):
            _write(out, encode(frame))


def _listen(requests: BinaryIO, asked: "queue.SimpleQueue[Decode]") -> None:
    """End the process with its input, though a file is being read: the agent has ended, or was killed."""
    with suppress(Exception):
        while len(head := requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
            asked.put(read_request(requests.read(int.from_bytes(head, "big"))))
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
