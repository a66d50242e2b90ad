"""The decoder process: it reads requests from standard input and writes frames to standard output.

It is started as `python -P -m fleetune.edge_agent.stream.decoding.child_main`, see `decoder_process`. It ends
when the agent ends.
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

MAX_PROCESSOR_S = 600  # processor time for one file


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
    """Let the kernel end this process after so much more processor time.

    A decoder in an endless loop may hold the interpreter's lock, so that no thread of ours could end it.
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
    """Queue the requests. When standard input ends, the agent is gone: end the process, even within a
    file.
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
