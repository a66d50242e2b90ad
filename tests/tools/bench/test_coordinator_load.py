"""The load benchmark of a coordinator: its figures, its devices, and its errors."""

import pytest

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker
from fleetune.protocols.errors import SettingError
from fleetune.tools.bench import coordinator_load
from fleetune.tools.bench.coordinator_load import FleetReport, Sample, exponent, measure
from fleetune.tools.bench.light_devices import packet


def report(devices, round_s):
    return FleetReport(devices, devices, 1.0, 1.0, 1.0, 1.0, round_s)


def test_the_exponent_is_the_power_that_made_the_figures():
    reports = [report(devices, 0.003 * devices**1.5) for devices in (100, 500, 2000)]
    assert exponent(reports) == pytest.approx(1.5)
    assert exponent(reports[:1]) is None


def test_the_first_round_is_not_counted():
    figures = [(10.0, 5.0, 1_000_000, 9.0), (12.0, 5.5, 1_040_000, 10.0), (14.0, 6.0, 1_080_000, 11.0)]
    samples = [Sample(*one) for one in figures]
    found = coordinator_load._report(20, 10, samples)
    assert found.all_cpu_ms == 100.0
    assert (found.updates_per_s, found.cpu_ms, found.written_bytes, found.round_s) == (5.0, 50.0, 4000.0, 2.0)


@pytest.mark.parametrize(("size", "length"), [(127, b"\x7f"), (128, b"\x80\x01"), (16384, b"\x80\x80\x01")])
def test_the_length_of_a_packet_is_written_as_mqtt_has_it(size, length):
    assert packet(0x30, bytes(size)) == b"\x30" + length + bytes(size)


@pytest.mark.nightly
@pytest.mark.fleet
@pytest.mark.parametrize(("participants", "updates"), [(None, 4), (2, 2)])
def test_light_devices_complete_the_rounds_of_a_real_coordinator(participants, updates):
    found = measure(4, participants, 2, "auto")
    assert (found.devices, found.participants) == (4, updates)
    assert found.updates_per_s > 0
    assert found.written_bytes > 0


def test_too_few_open_files_are_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr(coordinator_load.resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(EmbeddedBroker, "start", None)
    with pytest.raises(SettingError, match="10200 open files are needed, but 1024"):
        measure(10_000, None, 2, "auto")
