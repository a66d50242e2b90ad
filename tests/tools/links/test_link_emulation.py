"""Emulated links: real traffic through network namespaces, and nothing left of them, whatever happened."""

import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.helpers.places import ROOT

from fleetune.protocols.errors import SettingError
from fleetune.protocols.randomness import Key
from fleetune.tools.links import network_namespaces, shaping
from fleetune.tools.links.link import Constant, Trace
from fleetune.tools.links.network_namespaces import HUB_ADDRESS, Network, down, namespaces, plan_of
from fleetune.tools.links.verify import verify

OBSTACLE = network_namespaces.obstacle()
pytestmark = pytest.mark.skipif(OBSTACLE is not None, reason=f"emulated links: {OBSTACLE}")
MOSQUITTO = shutil.which("mosquitto", path=f"{os.environ.get('PATH')}:/usr/sbin:/usr/local/sbin")
PAYLOAD_BYTES = 400_000
EDGE_SIM = [sys.executable, "-m", "fleetune.tools.cli", "link"]


@pytest.fixture
def name():
    """Of a network that is taken down even if a test fails."""
    made = f"test-{secrets.token_hex(4)}"
    yield made
    down(made)


def our_devices():
    """Network devices of the host that look like a link's."""
    devices = [device.name for device in Path("/sys/class/net").iterdir()]
    return [device for device in devices if device.startswith(("ft", "agent-", "uplink"))]


def helpers_of(name):
    """The helper processes of a network, in /proc."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "fleetune.tools.links.tun_relay" in words or "fleetune.tools.links.trace_replay" in words:
            yield from [process] if any(name in word for word in words) else []


def traces_of(name):
    """Everything on this machine that a network of that name has made."""
    folder = [network_namespaces.folder_of(name)] if network_namespaces.folder_of(name).exists() else []
    return [*namespaces(name), *our_devices(), *helpers_of(name), *folder]


def wait_until(happened):
    give_up_at = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def traffic(net, namespace, *words):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = net.command(
        namespace, sys.executable, str(ROOT / "tests" / "helpers" / "link_traffic.py"), *words
    )
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.skipif(MOSQUITTO is None, reason="needs mosquitto")
def test_agents_get_their_payloads_through_and_never_faster_than_their_links(name, tmp_path):
    """Three agents at once through one broker. Lower bounds only: a busy machine makes everything later."""
    links = [Constant(2e6, 8e6), Constant(4e6, 2e6, 0.02), Constant(1e6, 6e6, 0.03, 0.002)]
    with Network(links, name) as net:
        with traffic(net, net.hub, "hub", str(tmp_path), "3") as hub:
            assert hub.stdout.readline() == "ready\n"
            agents = [
                traffic(net, namespace, "agent", HUB_ADDRESS, f"agent-{index}", str(PAYLOAD_BYTES))
                for index, namespace in enumerate(net.agents)
            ]
            outcomes = [json.loads(agent.communicate(timeout=200)[0]) for agent in agents]
            arrived = json.loads(hub.stdout.read())
        for index, (link, outcome) in enumerate(zip(links, outcomes, strict=True)):
            payload = Key.of(f"agent-{index}").generator().bytes(PAYLOAD_BYTES)
            digest = hashlib.sha256(payload).hexdigest()
            assert arrived[f"agent-{index}"] == outcome["digest"] == digest
            burst_bytes = 40_000  # TBF's and the first packets
            least_s = (PAYLOAD_BYTES - burst_bytes) * 8 / link.uplink_bps + 2 * link.delay_s
            assert outcome["up_s"] >= least_s
            slower_bps = min(link.uplink_bps, link.downlink_bps)
            assert outcome["both_s"] >= (PAYLOAD_BYTES - burst_bytes) * 8 / slower_bps + 2 * link.delay_s
    assert traces_of(name) == []


@pytest.mark.nightly
def test_a_measurement_finds_what_was_asked_for(name):
    links = [Constant(2e6, 4e6), Constant(1e6, 3e6, 0.05)]
    with Network(links, name):
        verdicts = list(verify(name, seconds=1.5))
    for link, verdict in zip(links, verdicts, strict=True):
        assert verdict.expected_bps == (pytest.approx(link.uplink_bps), pytest.approx(link.downlink_bps))
        assert 0.5 * link.uplink_bps < verdict.measured.up.bps < 1.05 * link.uplink_bps
        assert 0.5 * link.downlink_bps < verdict.measured.down.bps < 1.05 * link.downlink_bps
        assert verdict.measured.round_trip_s >= 2 * link.delay_s
        assert verdict.measured.lost == 0


def test_half_of_the_packets_are_lost_each_way(name):
    with Network([Constant(10e6, 10e6, loss=0.5)], name) as net:
        program = "import sys; from fleetune.tools.links.measure_link import ping;"
        program += "print(len(ping(sys.argv[1], int(sys.argv[2]))))"
        served = net.command(
            net.hub, sys.executable, "-m", "fleetune.tools.links.measure_link", "serve", HUB_ADDRESS
        )
        with subprocess.Popen(served, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            port = server.stdout.readline().strip()
            asked = net.command(net.agents[0], sys.executable, "-c", program, HUB_ADDRESS, port)
            came_back = int(
                subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT).stdout
            )
            server.stdin.close()
    assert 20 <= came_back <= 85  # 200 pings, a quarter: 50 +- 6


def outages(name):
    """Whether the first agent's link carries nothing up, and nothing down."""
    shown = [
        subprocess.run(
            ["tc", "-n", where, "qdisc", "show", "dev", device], capture_output=True, text=True, check=True
        ).stdout
        for where, device in reversed(network_namespaces.ends(name, 0))
    ]
    return tuple("blackhole" in one for one in shown)


def test_traces_that_wait_begin_when_they_are_told(name):
    trace = Trace((0, 1), (1e6, 0), (0, 3e6), period_s=1000)
    with Network([trace], name, traces_wait=True) as net:
        time.sleep(2)
        assert outages(name) == (False, True), "as at time 0, however long ago it was made"
        net.start_traces()
        wait_until(lambda: outages(name) == (True, False))
    assert traces_of(name) == []


def test_a_trace_is_followed_through_its_outages(name):
    trace = Trace((0, 2), (1e6, 0), (0, 3e6), period_s=4)
    with Network([trace], name):

        def limits():
            return outages(name)

        assert network_namespaces.plan_of(name).kinds == ("plain",)
        seen = []
        for _ in range(2):
            for expected in ((False, True), (True, False)):
                wait_until(lambda expected=expected: limits() == expected)
                seen.append(limits())
    assert traces_of(name) == []


@pytest.mark.parametrize("num_namespaces", [0, 1, 3, 5])
def test_down_after_up_was_killed_leaves_nothing(name, num_namespaces):
    """`up` is killed with no chance to clean up, as soon as so many of its seven namespaces are there."""
    options = f"--up 2 --down 8 --delay 20 --agents 6 --name {name}".split()
    with subprocess.Popen([*EDGE_SIM, "up", *options], cwd=ROOT, stdout=subprocess.DEVNULL) as up:
        folder = network_namespaces.folder_of(name)
        wait_until(lambda: folder.exists() and len(namespaces(name)) >= num_namespaces)
        up.kill()
    subprocess.run([*EDGE_SIM, "down", "--name", name], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    wait_until(lambda: traces_of(name) == [])


def test_the_commands_from_up_to_down(name, tmp_path):
    def edge_sim(*words, code=0):
        command = [*EDGE_SIM, *words, "--name", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done

    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,uplink_bps,downlink_bps\n0,2e6,8e6\n600,0,8e6\n")
    made = edge_sim("up", "--trace", str(trace), "--delay", "20", "--agents", "2")
    assert f"ip netns exec {name}-hub" in made.stdout
    assert f"ip netns exec {name}-1" in made.stdout
    assert "already" in edge_sim("up", "--up", "1", "--down", "1", code=2).stderr
    helpers = {
        int(process.name): (process / "cmdline").read_text().split("\0") for process in helpers_of(name)
    }
    assert len(helpers) == (1 if shaping.kernel_has_netem() else 3), "two relays, and one for all traces"
    (replay,) = (pid for pid, words in helpers.items() if "fleetune.tools.links.trace_replay" in words)
    os.kill(replay, signal.SIGKILL)
    gone = "link 1: the process that replays its trace is gone"
    assert gone in edge_sim("status", "--seconds", "0.5", code=1).stdout, "relays may hold the network's lock"
    for relay in helpers.keys() - {replay}:
        os.kill(relay, signal.SIGKILL)
    if not shaping.kernel_has_netem():
        said = edge_sim("status", "--seconds", "0.5", code=1).stdout
        assert f"{gone}, the agent cannot reach the hub" in said
    assert "removed" in edge_sim("down").stdout
    assert "nothing is up" in edge_sim("down").stdout
    assert "no network" in edge_sim("status", code=2).stderr
    assert traces_of(name) == []


def test_what_fails_half_way_leaves_nothing(name, monkeypatch):
    real, calls = shaping.limit, []

    def limit(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise SettingError("the kernel refuses")
        real(*arguments)

    monkeypatch.setattr(shaping, "limit", limit)
    with (
        pytest.raises(SettingError, match="the kernel refuses"),
        Network([Constant(1e6, 1e6, 0.01)] * 3, name),
    ):
        pytest.fail("came up")
    assert traces_of(name) == []


def test_a_strangers_namespace_is_left_alone(name):
    subprocess.run(["ip", "netns", "add", f"{name}-1"], check=True)
    try:
        with pytest.raises(SettingError, match="already exist; use another --name"):
            Network([Constant(1e6, 1e6)] * 2, name).up()
        assert down(name) == {}
        assert namespaces(name) == [f"{name}-1"]
    finally:
        subprocess.run(["ip", "netns", "delete", f"{name}-1"], check=True)


def test_processes_of_the_users_are_named_but_not_killed(name):
    net = Network([Constant(1e6, 1e6)], name)
    net.up()
    places = [net.hub, net.agents[0]]
    sleepers = [subprocess.Popen(net.command(place, "sleep", "600")) for place in places]
    try:
        for place in places:
            asked = ["ip", "netns", "pids", place]
            wait_until(lambda asked=asked: subprocess.run(asked, capture_output=True, check=True).stdout)
        assert down(name) == {place: [one.pid] for place, one in zip(places, sleepers, strict=True)}
        assert traces_of(name) == []
        for sleeper in sleepers:  # they keep their namespaces alive, but there is no link in them any more
            inside = ["nsenter", "--net", f"--target={sleeper.pid}", "ip", "-o", "link", "show"]
            links = subprocess.run(inside, capture_output=True, text=True, check=True).stdout
            assert [line.split()[1] for line in links.splitlines()] == ["lo:"]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_two_networks_do_not_meet(name):
    with Network([Constant(1e6, 1e6)], name), Network([Constant(2e6, 2e6)]) as other:
        assert {name, other.name} <= set(network_namespaces.networks())
        down(other.name)
        assert plan_of(name).links == (Constant(1e6, 1e6),)
        assert len(namespaces(name)) == 2
        with pytest.raises(SettingError, match="no network"):
            plan_of(other.name)


def test_a_half_made_network_says_so(name):
    network_namespaces.folder_of(name).mkdir()
    with pytest.raises(SettingError, match="incomplete"):
        plan_of(name)
    with pytest.raises(SettingError, match="edge-sim link down"):
        Network([Constant(1e6, 1e6)], name).up()
    (network_namespaces.folder_of(name) / "plan.json").write_text("{}")
    with pytest.raises(SettingError, match="incomplete"):
        plan_of(name)
    down(name)
    assert traces_of(name) == []


def test_the_host_is_not_reached_from_an_agent(name):
    """Nothing of the host's own network is touched, and an agent's only way out is its link."""
    with socket.create_server(("0.0.0.0", 0)) as listener, Network([Constant(1e6, 1e6)], name) as net:
        port = str(listener.getsockname()[1])
        program = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)"
        for host in ("127.0.0.1", HUB_ADDRESS):
            tried = net.command(net.agents[0], sys.executable, "-c", program, host, port)
            assert "refused" in subprocess.run(tried, capture_output=True, text=True, check=False).stderr
        assert our_devices() == []
