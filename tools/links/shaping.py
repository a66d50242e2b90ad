"""Sets a link's rate, delay and loss in the kernel, with `tc` and `ip` in the link's two namespaces.

TBF limits the rate. If the kernel has netem, netem above TBF adds delay and loss. Otherwise a relay between
two TUN devices (`tools.links.tun_relay`) adds them, with TBF on both. A link without delay and loss is a veth
pair.
"""

import subprocess
import sys
from pathlib import Path
from typing import Literal

from fleetune.protocols.errors import SettingError
from fleetune.tools.links.link import SEGMENT_BYTES

Kind = Literal["plain", "netem", "relay"]
SMALLEST_DELAY_S = 0.5e-3  # a shorter delay is dominated by the kernel's own processing
SLOWEST_BPS = 1000.0
_FRAME_BYTES = {"plain": 1514, "netem": 1514, "relay": 1500}  # bytes of a full packet as TBF counts them
_BURST_S, _BURST_BYTES = 0.01, 2 * 1514  # a kernel may read its clock only every 10 ms
_QUEUE_S = 0.05
_NETEM_PACKETS = 100_000  # maximum number of packets in flight; high, so that only TBF's queue fills


def run(*words: str) -> str:
    """Run a command and return its output.

    Raises:
        SettingError: the command fails; the message has the command and its error output.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise SettingError(f"`{' '.join(words)}`: {complaint[-1]}")
    return done.stdout


def kernel_has_netem() -> bool:
    """True if the kernel has netem. This is tried in a temporary namespace."""
    try:
        run("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except SettingError:
        return False
    return True


def kind_of(delay_s: float, loss: float, *, netem: bool) -> Kind:
    """Return how to implement a link with that delay and loss.

    Raises:
        SettingError: the kernel has neither netem nor TUN devices.
    """
    if delay_s < SMALLEST_DELAY_S and not loss:
        return "plain"
    if netem:
        return "netem"
    if not Path("/dev/net/tun").exists():
        raise SettingError("this kernel has neither netem nor /dev/net/tun: leave out delay and loss")
    return "relay"


def join(kind: Kind, ends: list[tuple[str, str]], delay_s: float, loss: float, alive: Path) -> None:
    """Join two namespaces by a link without a rate limit.

    Args:
        kind: result of `kind_of`.
        ends: (namespace, device) of both ends.
        delay_s: delay that a relay adds; other kinds ignore it.
        loss: loss that a relay adds; other kinds ignore it.
        alive: the network's file ALIVE, see `tools.links.helper_process`.

    Raises:
        SettingError: the link cannot be created.
    """
    (here, here_name), (there, there_name) = ends
    if kind == "relay":
        words = [here, here_name, there, there_name, str(delay_s), str(loss)]
        run(
            "ip",
            "netns",
            "exec",
            here,
            sys.executable,
            "-P",
            "-m",
            "fleetune.tools.links.tun_relay",
            str(alive),
            *words,
        )
    else:
        run(*f"ip link add {here_name} netns {here} type veth peer {there_name} netns {there}".split())
    if kind == "netem":  # otherwise TBF would drop whole bundles of packets
        for namespace, device in ends:
            run(*f"ip -n {namespace} link set {device} gso_max_segs 1".split())


def limit(kind: Kind, end: tuple[str, str], rate_bps: float, delay_s: float, loss: float) -> None:
    """Set the rate at which one end of a link sends; may be called repeatedly.

    Args:
        kind: implementation of the link.
        end: (namespace, device) of the sending end.
        rate_bps: rate of TCP payload; below `SLOWEST_BPS` it is an outage, in which all packets are lost.
        delay_s: delay of the link; a relay adds it itself.
        loss: packet loss of the link; a relay adds it itself.

    Raises:
        SettingError: the kernel rejects the settings.
    """
    namespace, device = end
    root = f"qdisc replace dev {device} root"
    if rate_bps < SLOWEST_BPS:
        lines = [f"{root} blackhole"]
    elif kind == "netem":
        shape = f"delay {round(delay_s * 1e6)}us loss {loss * 100:.6f}% limit {_NETEM_PACKETS}"
        lines = [
            f"{root} handle 1: netem {shape}",
            f"qdisc replace dev {device} parent 1:1 handle 2: {_tbf(kind, rate_bps, delay_s)}",
        ]
    else:
        lines = [f"{root} {_tbf(kind, rate_bps, delay_s)}"]
    for line in lines:
        run("tc", "-n", namespace, *line.split())


def _tbf(kind: Kind, rate_bps: float, delay_s: float) -> str:
    """Return the arguments of TBF (token bucket filter).

    Its queue holds half a round trip plus 50 ms, enough for CUBIC to keep the link busy.
    """
    wire_bps = rate_bps * _FRAME_BYTES[kind] / SEGMENT_BYTES
    burst = max(round(wire_bps / 8 * _BURST_S), _BURST_BYTES)
    return f"tbf rate {round(wire_bps)}bit burst {burst}b latency {round((_QUEUE_S + delay_s) * 1e3)}ms"
