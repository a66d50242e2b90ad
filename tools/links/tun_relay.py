"""Emulates delay and loss without netem: this process relays packets between two TUN devices.

    python -m fleetune.tools.links.tun_relay ALIVE NAMESPACE_A NAME_A NAMESPACE_B NAME_B DELAY_S LOSS

creates the two devices, moves them to their namespaces, and detaches (`tools.links.helper_process`). A packet
that leaves one device enters the other after `DELAY_S`, or is lost. This takes about 35 us of processor time
a packet. The module imports only the standard library, because each link has its own relay.
"""

import contextlib
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from fleetune.tools.links import helper_process

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PACKET_BYTES = 65_536
_BATCH = 64  # packets read from one end before the relay reads the other
Queue = deque[tuple[float, bytes]]


def open_tun(name: str) -> int:
    """Create a TUN device of that name; it exists until the returned file descriptor is closed."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def relay(ends: tuple[int, int], delay_s: float, loss: float, network: int) -> None:
    """Relay packets until one of the devices, or the network (see `helper_process`), no longer exists."""
    in_flight: tuple[Queue, Queue] = (deque(), deque())
    draw = random.Random().random  # noqa: S311 - real loss repeats no pattern either
    look_at = 0.0
    while True:
        now = time.monotonic()
        if now >= look_at:
            if not helper_process.is_wanted(network):
                return
            look_at = now + helper_process.WATCH_S
        due = min((queue[0][0] for queue in in_flight if queue), default=look_at)
        ready = select.select(ends, (), (), max(min(due, look_at) - now, 0))[0]
        for source, queue in zip(ends, in_flight, strict=True):
            if source in ready and not _take_in(source, queue, delay_s, loss, draw):
                return
        _let_out(ends, in_flight)


def _take_in(source: int, queue: Queue, delay_s: float, loss: float, draw: Callable[[], float]) -> bool:
    """Read packets from one end into the queue; False if the device no longer exists."""
    due = time.monotonic() + delay_s
    try:
        for _ in range(_BATCH):
            packet = os.read(source, _PACKET_BYTES)
            if not loss or draw() >= loss:
                queue.append((due, packet))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True


def _let_out(ends: tuple[int, int], in_flight: tuple[Queue, Queue]) -> None:
    now = time.monotonic()
    for sink, queue in zip(reversed(ends), in_flight, strict=True):
        while queue and queue[0][0] <= now:
            with contextlib.suppress(OSError):  # a device that is not up refuses the packet: it is lost
                os.write(sink, queue.popleft()[1])


def main() -> None:
    alive, *places = sys.argv[1:6]
    ends = []
    for number, (namespace, name) in enumerate(zip(places[::2], places[1::2], strict=True)):
        passing = f"ft{os.getpid()}{'ab'[number]}"
        ends.append(open_tun(passing))
        subprocess.run(["ip", "link", "set", passing, "netns", namespace, "name", name], check=True)
    network = helper_process.detach(Path(alive))
    with contextlib.suppress(OSError):  # a packet is late when its relay waits for a processor
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    relay((ends[0], ends[1]), float(sys.argv[6]), float(sys.argv[7]), network)


if __name__ == "__main__":
    main()
