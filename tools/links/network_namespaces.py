"""Emulates links with one network namespace for the hub and one for each agent.

Each agent's namespace is joined to the hub's namespace by the agent's link. Every part of a network carries
the network's name: the namespaces NAME-hub, NAME-0, NAME-1, ..., and the folder /run/fleetune-link.NAME. The
folder is created first and removed last. So `down` can also remove a network whose `up` failed halfway. The
host's own network does not change.

    with Network([Constant(2e6, 10e6, 0.04)] * 6) as network:
        subprocess.run(network.command(network.agents[0], "ping", HUB_ADDRESS))

Needs Linux, root, and iproute2.
"""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct

from fleetune.protocols.errors import SettingError
from fleetune.protocols.files import write_atomically
from fleetune.tools.links import helper_process, shaping
from fleetune.tools.links.link import Constant, Trace
from fleetune.tools.links.shaping import Kind

RUN, PREFIX = Path("/run"), "fleetune-link."  # like the namespaces, /run does not survive a reboot
HUB_ADDRESS = "10.213.0.1"
MAX_AGENTS = 1000
# congestion control as on a board, independent of the host's; the first that works is used
CONGESTION_CONTROL = "cubic", "reno"
DEVICE = "uplink"  # device name of an agent's end of its link
PLAN = "plan.json"
REPLAY = "replay"  # exists once the traces are replayed; the process that replays them holds its lock
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


class Plan(Struct, frozen=True):
    """The description of a network that `up` creates or has created.

    Attributes:
        links: one link for each agent.
        kinds: how each link is implemented, see `shaping`.
        started_s: start of the traces, on the monotonic clock.
    """

    links: tuple[Constant | Trace, ...]
    kinds: tuple[Kind, ...]
    started_s: float


def obstacle() -> str | None:
    """Return why this machine cannot create network namespaces; None if it can."""
    if not sys.platform.startswith("linux") or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        return "needs Linux with the commands ip, tc (iproute2) and unshare (util-linux)"
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    try:
        shaping.run("unshare", "--net", "true")
    except SettingError as problem:
        return f"network namespaces are not permitted here: {problem}"
    return None


class Network:
    """A hub and agents behind links; call `up` and `down`, or use it as a context.

    Args:
        links: one link for each agent.
        name: name of the network; None chooses an unused one.
        traces_wait: True keeps the first rates of each trace until `start_traces`.

    Attributes:
        hub, agents: names of the namespaces.

    Raises:
        SettingError: an impossible name or number of links.
    """

    def __init__(
        self, links: Sequence[Constant | Trace], name: str | None = None, *, traces_wait: bool = False
    ) -> None:
        self.name = check_name(name or f"fleetune-{secrets.token_hex(4)}")
        if not 1 <= len(links) <= MAX_AGENTS:
            raise SettingError(f"{len(links)} links were given, but a network has 1 to {MAX_AGENTS}")
        self.links = tuple(links)
        self.hub = f"{self.name}-hub"
        self.agents = [f"{self.name}-{index}" for index in range(len(links))]
        self.folder = folder_of(self.name)
        self._traces_wait = traces_wait

    def command(self, namespace: str, *words: str) -> list[str]:
        """Return a command line that runs `words` in `namespace`."""
        return ["ip", "netns", "exec", namespace, *words]

    def up(self) -> Plan:
        """Create the whole network; on failure remove everything again.

        Raises:
            SettingError: a network of that name exists, or a part of it cannot be created.
        """
        if problem := obstacle():
            raise SettingError(problem)
        netem = shaping.kernel_has_netem()
        kinds = tuple(shaping.kind_of(link.delay_s, link.loss, netem=netem) for link in self.links)
        self._claim()
        try:
            return self._make(kinds)
        except BaseException:
            down(self.name)
            raise

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        down(self.name)

    def _claim(self) -> None:
        if strangers := namespaces(self.name):
            hint = "`edge-sim link down` removes them" if self.folder.exists() else "use another --name"
            raise SettingError(f"network namespaces {', '.join(strangers[:3])} already exist; {hint}")
        try:
            self.folder.mkdir()
        except FileExistsError:
            raise SettingError(f"{self.folder} exists already; `edge-sim link down` removes it") from None
        except OSError as problem:
            raise SettingError(f"cannot create {self.folder}: {problem.strerror}") from None

    def _make(self, kinds: tuple[Kind, ...]) -> Plan:
        plan = Plan(self.links, kinds, time.monotonic())
        write_atomically(self.folder / PLAN, msgspec.json.encode(plan), durable=False)
        (self.folder / helper_process.ALIVE).touch()
        _add_namespace(self.hub)
        for index, (link, kind) in enumerate(zip(self.links, kinds, strict=True)):
            _add_namespace(self.agents[index])
            self._connect(index, link, kind)
        if not self._traces_wait:
            self._replay()
        return plan

    def start_traces(self) -> None:
        """Start the traces of a network that was created with `traces_wait`.

        Raises:
            SettingError: the network is not up.
        """
        plan = msgspec.structs.replace(plan_of(self.name), started_s=time.monotonic())
        write_atomically(self.folder / PLAN, msgspec.json.encode(plan), durable=False)
        self._replay()

    def _replay(self) -> None:
        if any(isinstance(link, Trace) for link in self.links):
            (self.folder / REPLAY).touch()
            shaping.run(sys.executable, "-P", "-m", "fleetune.tools.links.trace_replay", self.name)

    def _connect(self, index: int, link: Constant | Trace, kind: Kind) -> None:
        both = ends(self.name, index)
        shaping.join(kind, both, link.delay_s, link.loss, self.folder / helper_process.ALIVE)
        addresses = HUB_ADDRESS, agent_address(index)
        for (namespace, device), address, peer in zip(both, addresses, reversed(addresses), strict=True):
            shaping.run(*f"ip -n {namespace} address add {address} peer {peer} dev {device}".split())
            shaping.run(*f"ip -n {namespace} link set {device} up".split())
        set_rates(self.name, index, link, kind, (link.rate_bps(0, "up"), link.rate_bps(0, "down")))


def set_rates(
    name: str, index: int, link: Constant | Trace, kind: Kind, rates_bps: tuple[float, float]
) -> None:
    """Set the rates of an agent's link, up and down, in bits a second.

    Raises:
        SettingError: the kernel refuses.
    """
    for end, rate_bps in zip(reversed(ends(name, index)), rates_bps, strict=True):
        shaping.limit(kind, end, rate_bps, link.delay_s, link.loss)


def down(name: str) -> dict[str, list[int]]:
    """Remove everything that `up` created under that name, complete or not; do nothing if nothing exists.

    Returns:
        The ids of other programs' processes by namespace; these processes have lost their network.

    Raises:
        SettingError: a part cannot be removed.
    """
    folder = folder_of(check_name(name))
    if not folder.exists():
        return {}
    try:
        helper_process.end_helpers(folder / helper_process.ALIVE)
    except TimeoutError as problem:
        remedy = "find it with `pgrep -f fleetune.tools.links`, end it, and run `edge-sim link down` again"
        raise SettingError(f"{problem}; {remedy}") from None
    left = {}
    for namespace in namespaces(name):
        if pids := [int(pid) for pid in _try("ip", "netns", "pids", namespace).split()]:
            left[namespace] = pids
        for line in _try("ip", "-n", namespace, "-o", "link", "show", "type", "veth").splitlines():
            device = line.split(": ")[1].split("@")[0]  # a process in the namespace would keep it alive
            _try("ip", "-n", namespace, "link", "delete", device)
        shaping.run("ip", "netns", "delete", namespace)
    shutil.rmtree(folder, ignore_errors=True)
    return left


def networks() -> list[str]:
    """Return the names of all networks that are up or only partly created."""
    return sorted(folder.name.removeprefix(PREFIX) for folder in RUN.glob(PREFIX + "*"))


def folder_of(name: str) -> Path:
    """Return the folder with a network's plan and the files of its helper processes."""
    return RUN / (PREFIX + name)


def plan_of(name: str) -> Plan:
    """Read the plan of a network.

    Raises:
        SettingError: the network does not exist, or `up` did not finish.
    """
    if not folder_of(check_name(name)).exists():
        raise SettingError(f"no network {name!r} is up; existing networks: {', '.join(networks()) or 'none'}")
    try:
        return msgspec.json.decode((folder_of(name) / PLAN).read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError) as problem:
        raise SettingError(
            f"network {name!r} is incomplete ({problem}); remove it with `edge-sim link down`"
        ) from None


def namespaces(name: str) -> list[str]:
    """Return the existing namespaces of a network."""
    listed = [line.split()[0] for line in shaping.run("ip", "netns", "list").splitlines() if line]
    return [one for one in listed if re.fullmatch(re.escape(name) + r"-(hub|\d+)", one)]


def ends(name: str, index: int) -> list[tuple[str, str]]:
    """Return the two ends of an agent's link as (namespace, device): the hub's end, then the agent's."""
    return [(f"{name}-hub", f"agent-{index}"), (f"{name}-{index}", DEVICE)]


def agent_address(index: int) -> str:
    """Return the IP address of an agent."""
    return f"10.213.{(index + 2) // 256}.{(index + 2) % 256}"


def check_name(name: str) -> str:
    """Return `name` if it is a valid name of a network.

    Raises:
        SettingError: the name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise SettingError(
            f"{name!r} is not a valid name of a network: use at most 32 letters, digits, - and _"
        )
    return name


def _add_namespace(namespace: str) -> None:
    shaping.run("ip", "netns", "add", namespace)
    shaping.run(*f"ip -n {namespace} link set lo up".split())
    for algorithm in CONGESTION_CONTROL:  # some hosts do not allow CUBIC in other namespaces
        setting = f"sysctl -q -w net.ipv4.tcp_congestion_control={algorithm}"
        with contextlib.suppress(SettingError):
            shaping.run(*f"ip netns exec {namespace} {setting}".split())
            break


def _try(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout
