"""A broker of one's own: a fleet trains under the rules of `broker-config`, and a missing right is named."""

import queue
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from tests.helpers.fleet_processes import Fleet, assert_equal, expected, run_toml
from tests.helpers.own_mosquitto import mosquitto_at, needs_mosquitto
from tests.helpers.ports import free_port
from tests.protocols.wire.test_transport import is_connected, wait_for
from typer.testing import CliRunner

from fleetune.coordinator.broker.own_broker import PASSWORDS, OwnBroker
from fleetune.coordinator.cli import app
from fleetune.edge_agent.doctor import broker as doctor
from fleetune.edge_agent.probes.channel_rights import find_channel_rights
from fleetune.edge_agent.probes.link_speed import measure_link
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport import Received
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport

pytestmark = [pytest.mark.fleet, needs_mosquitto]

TOML = run_toml()
DEVICES = ["device-0", "device-1", "device-2"]
CHANNELS = ("state", "up", "update", "down", "task", "probe")


class RuledFleet(Fleet):
    """A fleet at a mosquitto with the rules of `edge-coordinator broker-config`.

    Args:
        more: users beside the devices'.
        rules: made of the content of the rules.
    """

    def __init__(self, folder, toml, *, more=(), rules=lambda text: text):
        super().__init__(folder, toml)
        self._users, self._rules = [topics.COORDINATOR_USER, *self.shares, *more], rules

    def __enter__(self):
        own, self.port = self.folder / "own", free_port()
        command = ["broker-config", "--fleet", self.name, "--out", str(own), "--port", str(self.port)]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        for user in self._users:
            words = [
                *([] if (own / PASSWORDS).exists() else ["-c"]),
                "-b",
                own / PASSWORDS,
                user,
                f"pw {user}",
            ]
            subprocess.run(["mosquitto_passwd", *words], check=True, capture_output=True)
        (own / OwnBroker.rules_file).write_text(self._rules((own / OwnBroker.rules_file).read_text()))
        self._running = ExitStack()
        self._running.enter_context(mosquitto_at(own / OwnBroker.configuration_file, self.port))
        return self

    def __exit__(self, *raised):
        with self._running:
            for child in self._children:
                child.kill()
        if raised[1] is not None:
            self._show_logs()

    def url(self, user):
        return f"mqtt://{user}:pw%20{user}@127.0.0.1:{self.port}"

    def where(self, user):
        return Broker("127.0.0.1", self.port, user, f"pw {user}")

    def serve(self, **environment):
        return self.start_coordinator("--broker", self.url(topics.COORDINATOR_USER), **environment)

    def join(self, device, *options, share=None):
        data = f"npz:{self.shares[share or device]}"
        options = ("--broker", self.url(device), *options)
        return self.start_agent(device, data=data, options=options)


def test_a_fleet_trains_under_the_rules_and_a_device_reaches_its_own_topics_only(tmp_path, tmp_path_factory):
    wanted = expected(TOML, tmp_path_factory.mktemp("simulated"))
    with RuledFleet(tmp_path, TOML, more=["mallory"]) as fleet:
        fleet.serve().wait_for("begins")
        overhears(fleet, "mallory", other="device-0")
        fleet.join("device-0", "--leave-after-run")
        fleet.agents["device-0"].wait_for("joined run")
        assert not fleet.agents["device-0"].lines("speed of the link to the broker is unknown")
        rights = find_channel_rights(fleet.where("device-1"), fleet.name, "device-1")
        assert (rights.problem, rights.has_coordinator, rights.echo) == (None, True, True)
        found = {one.what: one for one in doctor.examine(fleet.where("device-1"), fleet.name, "device-1")}
        assert {one.verdict for one in found.values()} == {"ok"}
        assert all(one in found["access rights"].found for one in (*topics.FROM_DEVICE, *topics.TO_DEVICE))
        for device in DEVICES[1:]:
            fleet.join(device, "--leave-after-run")
        fleet.wait_finished()
        assert_equal(fleet.outcome(), wanted)
        assert not fleet.coordinator.lines("mallory")
        assert fleet.summary()["refused"] == {}


def overhears(fleet, user, other):
    """A user may neither read another's topics nor write there, whatever client id it takes."""
    below = f"{topics.ROOT}/{fleet.name}"
    filters = [f"{below}/#", f"{below}/{other}/#", f"{below}/+/down", f"{below}/{user}/probe"]
    heard = queue.SimpleQueue()
    thief = MqttTransport(fleet.where(user), f"{fleet.name}-{other}", subscriptions=filters, events=heard)
    thief.connect()
    wait_for(heard, is_connected)
    for channel in CHANNELS:
        thief.publish(topics.topic(fleet.name, other, channel), b"forged", qos=1)
    owner = find_channel_rights(fleet.where(other), fleet.name, other)  # makes the coordinator speak
    assert owner.problem is None
    thief.publish(topics.topic(fleet.name, user, "probe"), b"end", qos=1)
    seen = []
    while not seen or seen[-1].data != b"end":
        seen.append(wait_for(heard, lambda event: isinstance(event, Received)))
    thief.close()
    assert [one.topic for one in seen] == [topics.topic(fleet.name, user, "probe")]


LACKING = {**{f"no-{channel}": (channel,) for channel in CHANNELS}, "no-read": ("down", "task", "probe")}
ALLOWED = {"no-read": "write", "no-write": "read"}  # what they may do on `probe` all the same
WRITTEN, READ = (*topics.FROM_DEVICE, "probe"), (*topics.TO_DEVICE, "probe")
LACKING["no-write"] = ("state", "up", "update", "probe")


def lacking_rules(text):
    """Rules of fleet `fleet` by which each user of `LACKING` may not use some channels."""
    lines = [text.partition("pattern")[0]]
    for user, lacks in LACKING.items():
        lines.append(f"user {user}")
        lines += [
            f"topic {access} {topics.ROOT}/fleet/{user}/{channel}"
            for channel in CHANNELS
            for access, channels in (("write", WRITTEN), ("read", READ))
            if channel in channels and (channel not in lacks or access == ALLOWED.get(user))
        ]
    return "\n".join(lines) + "\n"


@pytest.mark.nightly
def test_what_a_user_may_not_do_is_said_by_doctor_and_by_run(tmp_path):
    toml = run_toml(rounds=2, start_with=1)
    with RuledFleet(tmp_path, toml, more=LACKING, rules=lacking_rules) as fleet:
        alone = find_channel_rights(fleet.where("no-update"), fleet.name, "no-update")
        assert alone.unwritable == [topics.topic("fleet", "no-update", "update")], "MQTT 5 tells it"
        fleet.join("no-probe", share="device-0").wait_for(
            "no answer from a coordinator of fleet fleet for 10 s.*'no-probe' may not .*no-probe/probe"
        )
        fleet.agents["no-probe"].kill()
        fleet.serve().wait_for("begins")
        with ThreadPoolExecutor() as threads:
            found = threads.map(lambda user: find_channel_rights(fleet.where(user), "fleet", user), LACKING)
            found = dict(zip(LACKING, found, strict=True))
        for user, rights in found.items():
            forbidden = {topics.topic("fleet", user, channel) for channel in LACKING[user]}
            assert {*rights.unwritable, *rights.unreadable} == forbidden, (user, rights)
            assert f"user '{user}' may not" in rights.problem
            assert "edge-coordinator broker-config --fleet fleet" in rights.remedy
        said = ("no-read", "no-up", "no-update")
        agents = {user: fleet.join(user, share="device-0") for user in said}
        for user, agent in agents.items():
            agent.wait_for(f"no answer from a coordinator of fleet fleet for 10 s: user '{user}' may not")
            for channel in LACKING[user]:
                assert agent.lines(f"may not.*fleet/{user}/{channel}\\b"), agent.text()


def test_a_link_that_cannot_be_measured_costs_seconds(tmp_path, monkeypatch):
    """It was a minute of silence: nothing comes back on a topic that may not be read."""
    with RuledFleet(tmp_path, TOML, more=LACKING, rules=lacking_rules) as fleet:
        found = measure_link(fleet.where("no-probe"), "fleet", "no-probe", patience_s=1e9)
    assert found.round_trip_s is not None
    assert "fleetune/v1/fleet/no-probe/probe does not come back" in found.unknown
