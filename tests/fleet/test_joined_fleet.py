"""A fleet beyond the loopback, with devices in another network namespace: from an empty folder to a round."""

import json
import re
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from tests.helpers.fleet_processes import Fleet, run_toml, wait_until
from tests.helpers.own_mosquitto import needs_mosquitto
from tests.helpers.places import ROOT

from fleetune.tools.links.link import Constant
from fleetune.tools.links.network_namespaces import HUB_ADDRESS, Network, obstacle

pytestmark = [pytest.mark.fleet, needs_mosquitto]

PORT = 8883
SCAN = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
def is_open(port):
    with socket.socket() as one:
        one.settimeout(10)
        return one.connect_ex((sys.argv[1], port)) == 0
ports = range(1, 65536)
with ThreadPoolExecutor(100) as pool:
    print(*(port for port, found in zip(ports, pool.map(is_open, ports)) if found))
"""
SPEAK = """
import socket, ssl, sys
for port in map(int, sys.argv[2:]):
    with socket.create_connection((sys.argv[1], port), timeout=5) as one:
        one.sendall(bytes.fromhex(sys.stdin.readline()))
        try:
            print(port, "plain", one.recv(100).hex())
        except OSError as problem:
            print(port, "plain", "")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((sys.argv[1], port), timeout=5) as one, context.wrap_socket(one) as safe:
        print(port, "tls", safe.version())
"""
CONNECT = "100d00044d5154540402003c000178"  # MQTT 3.1.1, client id "x"


class JoinedFleet(Fleet):
    """A fleet whose coordinator and agents are in different network namespaces."""

    def __init__(self, folder, toml):
        super().__init__(folder, toml, embedded=True)
        self._stack = ExitStack()

    def __enter__(self):
        self.network = self._stack.enter_context(Network([Constant(1e8, 1e8, 0.001)] * len(self.shares)))
        return self

    def __exit__(self, *raised):
        with self._stack:
            super().__exit__(*raised)

    def serve(self):
        command = ["serve", str(self.run_file), "--runs", str(self.folder / "runs"), "--bind", HUB_ADDRESS]
        prefix = self.network.command(self.network.hub)
        self.coordinator = self._start("coordinator", ["fleetune.coordinator.cli", *command], prefix)
        self.coordinator.wait_for("to let a device join")

    def command(self, *words):
        """Run a command of the coordinator's; its output."""
        words = ["fleetune.coordinator.cli", *words, "--runs", str(self.folder / "runs")]
        return self.call(self.network.hub, "-m", *words)

    def devices(self):
        """What `devices` of the run shows, by ascending id."""
        run = str(self.folder / "runs" / self.name)
        return json.loads(
            self.call(self.network.hub, "-m", "fleetune.coordinator.cli", "devices", run, "--json")
        )

    def invite(self, *options):
        return json.loads(self.command("invite", self.name, "--json", *options))["line"]

    def call(self, namespace, *words, text=None):
        command = self.network.command(namespace, sys.executable, *words)
        done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def state(self, device):
        return str(self.folder / "state" / device)

    def join(self, device, line, *, log=None):
        words = ["fleetune.edge_agent.cli", "join", "--device", device, "--state", self.state(log or device)]
        child = self._start(log or f"join-{device}", words, self.prefix(device), FLEETUNE_JOIN=line)
        child.wait()
        return child

    def run_agent(self, device):
        words = ["run", "--trainer", "torch", "--state", self.state(device)]
        words += ["--data", f"npz:{self.shares[device]}"]
        agent = self._start(device, ["fleetune.edge_agent.cli", *words], self.prefix(device))
        self.agents[device] = agent
        return agent

    def prefix(self, device):
        return self.network.command(self.network.agents[list(self.shares).index(device)])


@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_from_an_empty_folder_to_a_round_and_a_revoked_device_is_gone(tmp_path):
    toml = run_toml(name="greens", devices=2, start_with=2, rounds=100_000, deadline_s=20)
    with JoinedFleet(tmp_path, toml) as fleet:
        fleet.serve()
        open_ports = fleet.call(fleet.network.agents[0], "-c", SCAN, HUB_ADDRESS).split()
        assert open_ports == [str(PORT), str(PORT + 1), str(PORT + 2)]
        words = ("-c", SPEAK, HUB_ADDRESS, *open_ports)
        said = fleet.call(fleet.network.agents[0], *words, text=f"{CONNECT}\n" * 3)
        for port in open_ports:
            assert re.search(rf"{port} tls TLSv1.[23]", said)
            assert not re.search(rf"{port} plain 20", said)  # 20: the answer to CONNECT

        first, second = fleet.shares
        line = fleet.invite("--devices", "2")
        for device in fleet.shares:
            joined = fleet.join(device, line)
            assert joined.lines(f"joined fleet greens as device {device}")
            fleet.run_agent(device)
        fleet.coordinator.wait_for(r"\bround +2\b")

        used = fleet.join(second, line, log="replay")  # the code is used up
        assert used.lines("edge-agent: .*")
        assert not used.lines("joined fleet")

        began = time.monotonic()
        fleet.command("revoke", first)
        fleet.coordinator.wait_for(rf"{first}\)? may no longer connect")
        fleet.agents[first].wait_for("(?i)revoked|certificate")
        print(f"revoked and disconnected after {time.monotonic() - began:.1f} s, with the command's start")
        fleet.coordinator.wait_for("the broker refused .*: its certificate is expired, revoked")
        wait_until(lambda: fleet.devices()[0]["connected"] is False, "it is away")
        assert {one["known_by"] for one in fleet.devices()} == {"certificate"}
