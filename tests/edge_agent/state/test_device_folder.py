"""The id of a device is fixed at its first start; its name may change."""

import pytest
from tests.helpers.errors import raises

from fleetune.edge_agent.run.device import Device, DeviceSettings
from fleetune.edge_agent.state import state_folder
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.state_folder import device_folder, label, mark
from fleetune.protocols.errors import SettingError


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(state_folder, "HOST", "board")


@pytest.mark.parametrize(
    ("device", "name", "expected"),
    [
        (None, None, "board"),
        ("pi-3", None, "pi-3"),
        (None, "kitchen", "kitchen"),
        ("pi-3", "kitchen", "pi-3"),
    ],
)
def test_the_first_start_fixes_the_id(tmp_path, device, name, expected):
    assert device_folder(tmp_path, "f", device, name) == tmp_path / "f" / expected


def test_later_starts_find_the_id_whatever_the_machine_and_the_device_are_called(tmp_path):
    mark(device_folder(tmp_path, "f", name="kitchen"))
    for name in (None, "cellar"):
        assert device_folder(tmp_path, "f", name=name).name == "kitchen"
    assert AgentStore.of(tmp_path, "f").device == "kitchen"
    assert device_folder(tmp_path, "other").name == "board"


def test_several_devices_with_one_state_folder_are_told_apart_by_their_id(tmp_path):
    for device in ("a", "b"):
        mark(device_folder(tmp_path, "f", device))
    with raises(SettingError, "a, b", str(tmp_path / "f"), remedy="--device"):
        device_folder(tmp_path, "f")
    mark(device_folder(tmp_path, "f", "board"))
    assert device_folder(tmp_path, "f").name == "board"


def test_one_of_several_devices_is_found_by_its_name(tmp_path):
    for device in ("a", "b", "board"):
        mark(tmp_path / "f" / device)
    label(tmp_path / "f" / "b", "Küche")
    assert device_folder(tmp_path, "f", name="a").name == "a"
    assert device_folder(tmp_path, "f", name="Küche").name == "b"
    with raises(SettingError, "a, b, board", remedy="--device"):
        device_folder(tmp_path, "f", name="cellar")
    label(tmp_path / "f" / "a", "Küche")
    with raises(SettingError, "a, b, board", remedy="--device"):
        device_folder(tmp_path, "f", name="Küche")


def test_an_id_that_no_topic_can_hold_is_refused(tmp_path):
    with raises(SettingError, "--name 'Küche'", remedy="--device K-che --name Küche"):
        device_folder(tmp_path, "f", name="Küche")
    with raises(SettingError, remedy="--device Kitchen-2nd-floor --name 'Kitchen, 2nd floor'"):
        device_folder(tmp_path, "f", name="Kitchen, 2nd floor")
    with raises(SettingError, remedy="--device device-1 --name 厨房"):
        device_folder(tmp_path, "f", name="厨房")
    assert device_folder(tmp_path, "f", "K-che", "Küche").name == "K-che"
    with raises(SettingError, "../x"):
        device_folder(tmp_path, "f", "../x")


def test_the_name_is_stored_and_may_change(tmp_path):
    folder = device_folder(tmp_path, "f", "pi-3")
    mark(folder)
    assert label(folder) == "pi-3"
    assert label(folder, "Küche") == label(folder) == "Küche"
    assert label(folder, "pi-3") == label(folder) == "pi-3"
    mark(folder)  # the marker is still of this format


def test_a_device_opens_with_its_stored_name(tmp_path):
    settings = DeviceSettings(fleet="f", device="pi-3", data="digits", state=tmp_path)
    for name in ("Küche", None):
        device = Device.opened(
            settings if name is None else DeviceSettings("f", "pi-3", "digits", tmp_path, name=name)
        )
        assert str(device.settings.identity) == "Küche (pi-3)"
        device.close()
