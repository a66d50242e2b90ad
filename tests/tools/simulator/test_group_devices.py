"""Data of natural users: one device a user unless run.toml says otherwise, and a column says who is who."""

import logging

import numpy as np
import pytest
from rich.console import Console

import fleetune
from fleetune.coordinator.reports.page import Page, write_page
from fleetune.coordinator.reports.tables import device_table
from fleetune.coordinator.run.changed_settings import going_on
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import simulated_keys
from fleetune.protocols.settings.run_toml import parse_run, settings_of

USERS = [f"user-{number}" for number in (3, 1, 2)]
RUN = {
    "run": {"name": "users", "rounds": 1},
    "data": {"partition": {"kind": "group"}},
    "model": {"name": "mlp"},
    "method": {"name": "fedavg"},
}


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x, y = rng.random((60, 1, 4, 4), dtype=np.float32), np.arange(60) % 2
    return {"x": x, "y": y, "group": np.repeat(USERS, 20)}


def shown(table):
    console = Console(width=150)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_each_group_is_a_device_and_a_column_says_which(data, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        result = fleetune.simulate(RUN, tmp_path, data=data, report=False)
    assert not caplog.records
    assert list(result.devices["group"]) == sorted(USERS)
    assert list(result.devices["num_samples"]) == [14, 14, 14]
    assert result.settings.fleet.devices == 3
    for text in (shown(device_table(result.summary)), write_page(Page("users", result.summary)).decode()):
        assert "group" in text
        assert all(user in text for user in USERS)
    again = fleetune.simulate(RUN, tmp_path, data=data, report=False)
    assert again.summary == result.summary
    side = fleetune.compare(RUN, ["fedavg"], data=data, runs=tmp_path)
    assert list(side.devices["group"]) == sorted(USERS)


def test_fewer_devices_than_groups_are_said_in_one_line(data, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        result = fleetune.simulate(RUN, tmp_path, data=data, set={"fleet.devices": 2}, report=False)
    assert [record.getMessage() for record in caplog.records] == [
        "3 groups share fleet.devices = 2, several to a device; leave it out for one device a group"
    ]
    groups = [one.split(", ") for one in result.devices["group"]]
    assert sorted(user for group in groups for user in group) == sorted(USERS)


def test_a_run_of_an_older_version_keeps_its_number_of_devices():
    before = parse_run({**RUN, "fleet": {"devices": 10}})
    assert going_on(before, parse_run(RUN)) == before


def test_other_kinds_have_as_many_devices_as_before():
    plain = parse_run({**RUN, "data": {"partition": {"kind": "iid"}}})
    assert plain.fleet.devices == 10
    assert "fleet.devices" not in simulated_keys(parse_run(RUN))
    with pytest.raises(SettingError, match=r"fleet.devices: expected `int` >= 1"):
        settings_of(plain, {"fleet.devices": 0})


def test_data_without_groups_is_refused(tmp_path):
    with pytest.raises(SettingError, match="`group` needs a source with a `group` column"):
        fleetune.simulate(RUN, tmp_path, set={"data.source": "digits"})
