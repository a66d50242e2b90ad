"""Measures a link: rate of TCP payload in both directions, and round trips of small datagrams.

    python -m fleetune.tools.links.measure_link serve HOST                 prints its port
    python -m fleetune.tools.links.measure_link ask HOST PORT SECONDS      prints the measurement as JSON

A rate is the rate at which bytes arrive. The first quarter does not count: a connection starts slowly, and
the link's buffers take the first bytes at once. A lost packet delays later packets, so bytes arrive in
groups.
The count starts and ends after a group.
"""

import contextlib
import json
import socket
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass

PAYLOAD = bytes(64 << 10)
# fractions of the transfer's time at which the count starts and ends
BEGINNING, ENDING = (0.25, 0.5), (0.75, 1.0)
PINGS, PING_EVERY_S, PATIENCE_S = 200, 0.01, 2.0


@dataclass(frozen=True)
class Flow:
    """Number of bytes that arrived between two times of the monotonic clock."""

    num_bytes: int
    started_s: float
    ended_s: float

    @property
    def bps(self) -> float:
        return self.num_bytes * 8 / max(self.ended_s - self.started_s, 1e-9)


@dataclass(frozen=True)
class Measured:
    """Measured values of one agent's link.

    Attributes:
        up, down: payload that arrived in each direction.
        pings: number of datagrams sent.
        lost: number of datagrams without an answer.
        round_trip_s: median; None if no datagram was answered.
    """

    up: Flow
    down: Flow
    pings: int
    lost: int
    round_trip_s: float | None


def serve(host: str) -> socket.socket:
    """Start a server that answers `measure` on every connection until the returned listener is closed."""
    listener = socket.create_server((host, 0))
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind((host, listener.getsockname()[1]))
    threading.Thread(target=_accept, args=(listener, echo), daemon=True).start()
    threading.Thread(target=_echo, args=(echo,), daemon=True).start()
    return listener


def measure(host: str, port: int, seconds: float) -> Measured:
    """Measure the link to a server started by `serve`, up and down for `seconds` each.

    Raises:
        OSError: the server cannot be reached.
    """
    round_trips = ping(host, port)
    with socket.create_connection((host, port), timeout=seconds + 60) as up:
        up.sendall(b"u")
        _send(up, seconds)
        up.shutdown(socket.SHUT_WR)
        arrived = Flow(**json.loads(up.makefile().readline()))
    with socket.create_connection((host, port), timeout=seconds + 60) as down:
        down.sendall(b"d" + f"{seconds:.3f}\n".encode())
        came = _receive(down)
    return Measured(
        arrived,
        came,
        PINGS,
        PINGS - len(round_trips),
        statistics.median(round_trips) if round_trips else None,
    )


def ping(host: str, port: int) -> list[float]:
    """Send datagrams, and return the round trip times, in seconds, of the answered ones."""
    round_trips: list[float] = []
    sent_at: list[float] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        wire.connect((host, port))
        began_at = time.monotonic()
        give_up_at = began_at + PINGS * PING_EVERY_S + PATIENCE_S
        while len(round_trips) < PINGS and (now := time.monotonic()) < give_up_at:
            next_at = began_at + len(sent_at) * PING_EVERY_S if len(sent_at) < PINGS else give_up_at
            if next_at <= now:
                wire.send(len(sent_at).to_bytes(4, "little"))
                sent_at.append(time.monotonic())
                continue
            wire.settimeout(next_at - now)
            with contextlib.suppress(TimeoutError):
                number = int.from_bytes(wire.recv(64), "little")
                round_trips.append(time.monotonic() - sent_at[number])
    return round_trips


def _accept(listener: socket.socket, echo: socket.socket) -> None:
    with echo, contextlib.suppress(OSError):
        while True:
            asker = listener.accept()[0]
            threading.Thread(target=_answer, args=(asker,), daemon=True).start()


def _answer(asker: socket.socket) -> None:
    with asker, contextlib.suppress(OSError, ValueError):
        if asker.recv(1) == b"u":
            asker.sendall(json.dumps(asdict(_receive(asker))).encode() + b"\n")
        else:
            _send(asker, float(asker.makefile().readline()))


def _echo(echo: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            datagram, asker = echo.recvfrom(64)
            echo.sendto(datagram, asker)


def _send(wire: socket.socket, seconds: float) -> None:
    until = time.monotonic() + seconds
    wire.settimeout(seconds)
    with contextlib.suppress(TimeoutError):
        while time.monotonic() < until:
            wire.send(PAYLOAD)
    wire.settimeout(seconds + 60)


def _receive(wire: socket.socket) -> Flow:
    """Receive data until the other side ends the transfer; return the steady part."""
    arrivals = [(time.monotonic(), 0)]
    while data := wire.recv(1 << 18):
        arrivals.append((time.monotonic(), arrivals[-1][1] + len(data)))
    return flow_of(arrivals)


def flow_of(arrivals: list[tuple[float, int]]) -> Flow:
    """Return the steady part of a transfer, without its start and incomplete groups.

    Args:
        arrivals: (time, total number of bytes so far) for each arrival.
    """
    (first_s, _), (last_s, total) = arrivals[0], arrivals[-1]
    seconds = max(last_s - first_s, 1e-9)

    def edge(low: float, high: float, otherwise: tuple[float, int]) -> tuple[float, int]:
        within = [one for one in arrivals if low <= (one[0] - first_s) / seconds <= high]
        return max(within, key=lambda one: one[1] - total / seconds * one[0], default=otherwise)

    begin, end = edge(*BEGINNING, arrivals[0]), edge(*ENDING, arrivals[-1])
    return Flow(end[1] - begin[1], begin[0], end[0])


def main() -> None:
    if sys.argv[1] == "serve":
        with serve(sys.argv[2]) as listener:
            print(listener.getsockname()[1], flush=True)
            sys.stdin.read()  # runs until the process that started it ends
    else:
        print(json.dumps(asdict(measure(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))))


if __name__ == "__main__":
    main()
