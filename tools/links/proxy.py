"""Slow links without root: a TCP proxy on this machine for each agent, in front of the broker.

The emulation is approximate, because a proxy paces bytes instead of packets. Packet loss only lowers the rate
(`tools.links.link.tcp_bps`), and an outage delays all bytes.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence

from fleetune.protocols.errors import TransportError
from fleetune.tools.links.link import Direction, Link

_BLOCK_BYTES = 4096
_QUEUE_S = 0.05  # seconds of data read but not sent yet, like the buffer of a real link
_SOCKET_BYTES = 16 << 10  # bytes that the kernel buffers in addition


async def run_proxies(
    links: Sequence[Link], broker: tuple[str, int], on_ready: Callable[[list[int]], None]
) -> None:
    """Serve until cancelled; `on_ready` receives the local port of each link.

    Raises:
        TransportError: no port can be opened.
    """
    async with contextlib.AsyncExitStack() as stack:
        ports = []
        for link in links:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
            try:
                listener.bind(("127.0.0.1", 0))
                server = await asyncio.start_server(
                    _Proxy(link, broker).take, sock=listener, limit=_BLOCK_BYTES
                )
            except OSError as problem:
                raise TransportError(f"cannot open a local port for a link's proxy: {problem}") from None
            await stack.enter_async_context(server)
            ports.append(listener.getsockname()[1])
        on_ready(ports)
        await asyncio.get_running_loop().create_future()


class _Proxy:
    """One agent's link, shared by all its connections."""

    def __init__(self, link: Link, broker: tuple[str, int]) -> None:
        self._link = link
        self._broker = broker
        self._clock = asyncio.get_running_loop().time
        self._began_at = self._clock()
        self._busy_until_s: dict[Direction, float] = {"up": 0.0, "down": 0.0}

    async def take(self, agent: asyncio.StreamReader, to_agent: asyncio.StreamWriter) -> None:
        """Serve one connection of the agent until either side ends it."""
        try:
            broker, to_broker = await asyncio.open_connection(*self._broker, limit=_BLOCK_BYTES)
        except OSError:
            to_agent.close()  # as if the broker had refused the connection
            return
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass(agent, to_broker, "up"), self._pass(broker, to_agent, "down"))
        for writer in (to_broker, to_agent):
            writer.close()

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: Direction
    ) -> None:
        in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.create_task(self._deliver(in_flight, sink))
        data = b"-"
        try:
            while data and not delivery.done():
                data = await source.read(_BLOCK_BYTES)
                leaves_s = self._book(len(data), direction)
                in_flight.put_nowait((leaves_s + self._link.delay_s, data))  # no data: the connection ended
                await self._sleep_until(leaves_s - _QUEUE_S)
            await delivery
        finally:
            delivery.cancel()

    def _book(self, num_bytes: int, direction: Direction) -> float:
        """Reserve the link for `num_bytes`; return when they have been sent, in seconds since the proxy's
        start.
        """
        start_s = max(self._clock() - self._began_at, self._busy_until_s[direction])
        leaves_s = self._link.finish_s(start_s, num_bytes, direction) - self._link.delay_s
        self._busy_until_s[direction] = leaves_s
        return leaves_s

    async def _deliver(
        self, in_flight: "asyncio.Queue[tuple[float, bytes]]", sink: asyncio.StreamWriter
    ) -> None:
        while True:
            arrives_s, data = await in_flight.get()
            await self._sleep_until(arrives_s)
            if not data:
                sink.write_eof()
                return
            sink.write(data)
            await sink.drain()

    async def _sleep_until(self, time_s: float) -> None:
        if (wait_s := self._began_at + time_s - self._clock()) > 0:
            await asyncio.sleep(wait_s)
