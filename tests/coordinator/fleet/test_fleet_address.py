"""Where devices reach a fleet."""

import ipaddress

import pytest

from fleetune.coordinator.fleet.fleet_address import FleetAddress, names_of_this_machine
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.protocols.errors import StoreError


def test_an_address_is_read_as_written(tmp_path):
    folder, address = FleetFolder.of("lab", tmp_path), FleetAddress(("192.168.1.5", "pi"), 8883, 8884, 8885)
    with pytest.raises(StoreError, match="fleet lab: no coordinator has opened it to the network; start"):
        FleetAddress.read(folder)
    address.write(folder)
    assert FleetAddress.read(folder) == address
    folder.address.write_text("{")
    with pytest.raises(StoreError, match="damaged; start"):
        FleetAddress.read(folder)


def test_the_names_of_this_machine_have_its_addresses():
    names = names_of_this_machine()
    assert "127.0.0.1" in names
    assert len([one for one in names if one[0].isdigit() and ipaddress.ip_address(one)]) >= 1
