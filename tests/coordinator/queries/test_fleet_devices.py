"""The devices of a fleet, from its registry and its run, with and without a coordinator."""

import time
from contextlib import closing

import msgspec
import pytest
from rich.console import Console
from tests.coordinator.fleet.test_registry import device as registered
from tests.helpers.played_run import PlayedRun
from typer.testing import CliRunner

from fleetune.coordinator.cli import app
from fleetune.coordinator.fleet.authority import Authority
from fleetune.coordinator.fleet.fleet_address import FleetAddress
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.registry import Registry
from fleetune.coordinator.fleet.rotation import rotate
from fleetune.coordinator.queries.fleet_devices import fleet_devices
from fleetune.coordinator.queries.run_status import DeviceStatus
from fleetune.coordinator.reports.tables import registry_table
from fleetune.protocols.errors import SettingError

NOW = time.time()


@pytest.fixture
def runs(tmp_path):
    """A fleet with a run of devices a to d; a is registered with a certificate, e waits, f was revoked."""
    with closing(PlayedRun(tmp_path, "fedavg", "synchronous")) as played:
        played.play(0, 9)
    with Registry.open(FleetFolder.of("played", tmp_path).registry) as registry:
        registry.put(
            registered("a", name="hall", ends_at=NOW + 9e6, last_seen=NOW - 90, agent="fleetune 0.2.0")
        )
        registry.put(registered("e", state="pending", tags=("green", "new")))
        registry.put(registered("f", state="revoked", kind="secret"))
    return tmp_path


def by_id(found):
    return {one.device: one for one in found.devices}


@pytest.mark.parametrize("asked", [None, "played", "run", "folder"])
def test_registry_and_run_are_joined(runs, asked):
    found = fleet_devices(str(runs / "run") if asked == "folder" else asked, runs)
    assert (found.fleet, found.run, found.running) == ("played", str(runs / "run"), False)
    devices = by_id(found)
    assert sorted(devices) == ["a", "b", "c", "d", "e", "f"]
    hall = devices["a"]
    assert (hall.name, hall.state, hall.known_by, hall.agent) == (
        "hall",
        "accepted",
        "certificate",
        "fleetune 0.2.0",
    )
    assert (hall.last_seen, hall.certificate_ends_at) == (NOW - 90, NOW + 9e6)
    assert hall.ratio == 1.0
    assert (devices["e"].state, devices["e"].tags, devices["e"].doing) == (
        "pending",
        ("green", "new"),
        "away",
    )
    assert (devices["f"].state, devices["f"].known_by) == ("revoked", "secret")
    assert (devices["b"].state, devices["b"].known_by, devices["b"].last_seen) == ("", "claim", 9.0)


def test_a_fleet_without_a_run_is_listed(tmp_path):
    with Registry.open(FleetFolder.of("new", tmp_path).registry) as registry:
        registry.put(registered("e", state="pending"))
    found = fleet_devices(None, tmp_path)
    assert (found.fleet, found.run) == ("new", None)
    assert by_id(found)["e"].state == "pending"
    shown = CliRunner().invoke(app, ["devices", "--runs", str(tmp_path), "--json"])
    assert msgspec.json.decode(shown.output, type=tuple[DeviceStatus, ...]) == found.devices


def test_no_device_is_shown_as_working_without_a_coordinator(runs):
    for one in fleet_devices(None, runs).devices:
        assert (one.doing, one.part, one.ready, one.connected) == ("away", "idle", False, None), one


def test_a_served_run_says_who_is_connected(runs, monkeypatch):
    for module in ("queries", "fleet_devices"):
        monkeypatch.setattr(f"fleetune.coordinator.queries.{module}.is_claimed", lambda _: True)
    with Registry.open(FleetFolder.of("played", runs).registry) as registry:
        registry.put(registered("b", state="revoked"))
    devices = by_id(fleet_devices(None, runs))
    assert {name: one.connected for name, one in devices.items()} == {
        "a": True,
        "b": False,  # revoked
        "c": True,
        "d": True,
        "e": False,  # waits for approval
        "f": False,
    }
    assert (devices["b"].ready, devices["b"].doing) == (False, "away")


def test_a_mistake_names_the_fleets(runs, tmp_path):
    with pytest.raises(SettingError, match=r"plaid is no fleet in .*did you mean 'played'"):
        fleet_devices("plaid", runs)
    with pytest.raises(SettingError, match="has no fleets; name another with --runs"):
        fleet_devices(None, tmp_path / "nowhere")
    with Registry.open(FleetFolder.of("other", runs).registry):
        pass
    with pytest.raises(SettingError, match="has 2 fleets; name one of them: other, played"):
        fleet_devices(None, runs)


def test_the_table_fits_80_columns():
    devices = [
        DeviceStatus(
            "pi-kitchen-0001",
            "ready",
            connected=True,
            name="Kitchen, 2nd floor",
            agent="fleetune 0.2.0.dev1234",
            state="accepted",
            known_by="certificate",
            tags=("greenhouse", "north"),
            last_seen=NOW,
            certificate_ends_at=1.8e9,
            old_authority=True,
        ),
        DeviceStatus("pi-old", "away", state="ended"),
        DeviceStatus("pi-hall", "away", state="revoked", last_seen=NOW - 7200),
        DeviceStatus("pi-new", "away", state="pending"),
    ]
    console = Console(width=80, record=True)
    console.print(registry_table(devices, NOW, 80))
    text = console.export_text()
    for part in (
        "Kitchen",
        "accepted",
        "now",
        "2 h ago",
        "revoked",
        "0.2.0.dev1234",
        "(pi-kitchen-0001)",
        "north",
    ):
        assert part in text, text
    assert "rejoin" in text
    assert "still need the authority that is being replaced: 1 (Kitchen" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_who_must_join_again_or_needs_the_old_authority_is_shown(tmp_path):
    files = FleetFolder.of("f", tmp_path)
    authority = Authority.open(files, NOW)
    with Registry.open(files.registry) as registry:
        for name in ("a", "b"):
            registry.put(registered(name, ends_at=NOW + 9e6, bundle=authority.bundle_id))
        FleetAddress(("127.0.0.1",), 1, 2, 3).write(files)
        rotate(authority, registry, NOW, at_once=False)
        new = authority.fingerprint, authority.bundle_id
        registry.put(registered("a", ends_at=NOW + 9e6, authority=new[0], bundle=new[1]))
        assert [one.old_authority for one in fleet_devices(None, tmp_path).devices] == [False, True]
        rotate(authority, registry, NOW, at_once=True)
    shown = fleet_devices(None, tmp_path).devices
    assert [(one.state, one.old_authority) for one in shown] == [("ended", False), ("ended", False)]
