"""The decoding process: requests by standard input, frames by standard output; it ends with the agent.

`python -P -m fleetune.edge_agent.stream.decoding.child_main`, see `decoder_process`.
"""

import math
import os
import queue
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from fleetune.edge_agent.stream.decoding.decoders import decode_file
from fleetune.edge_agent.stream.decoding.frames import LENGTH_BYTES, DecodeRequest, encode, read_request

MAX_PROCESSOR_S = 600  # for one file


def main() -> None:
    """Read files until standard input ends."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no frame
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # rather than the agent
    asked: queue.SimpleQueue[DecodeRequest] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, asked), daemon=True).start()
    while True:
        request = asked.get()
        limit_processor_time(MAX_PROCESSOR_S)
        for frame in decode_file(request):
            _write(out, encode(frame))


def limit_processor_time(seconds: int) -> None:
    """End this process when it takes so much more: a decoder in a loop may keep all threads from running."""
    try:
        import resource
    except ImportError:  # no such system
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    until = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    soft = until if hard == resource.RLIM_INFINITY else min(until, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _listen(requests: BinaryIO, asked: "queue.SimpleQueue[DecodeRequest]") -> None:
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
